"""The calls: allreduce with its two named algorithms, reduce_scatter, allgather, broadcast, reduce and alltoall."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.registry import Algorithm
from mpiring.arguments import Arguments, parse, rank_of, result_of
from mpiring.planning import plan_for
from mpiring.runtime.arrays import HOST
from mpiring.runtime.channel import channel_key


def ring_allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD) -> Any:
    """Reduce a vector onto all ranks by the bandwidth-optimal ring; see allreduce."""
    return _run("allreduce", "ring", sendbuf, recvbuf, op, comm)


def tree_allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD) -> Any:
    """Reduce a vector onto all ranks by a binomial tree, the baseline; see allreduce."""
    return _run("allreduce", "tree", sendbuf, recvbuf, op, comm)


def allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
              algorithm: str | Algorithm = "auto") -> Any:
    """Reduce the arrays of all ranks element by element, and give every rank the result. All ranks of `comm` must call it.

    sendbuf: a NumPy or CuPy array of any numeric dtype, shape and strides, or anything whose memory NumPy can wrap.
    recvbuf: where the result goes: same shape and dtype. Left out (or MPI.IN_PLACE on either side), the result replaces the
        input. An array must not overlap the other in part.
    op: an MPI built-in that has a meaning for the dtype, mpiring.AVERAGE, or an op made with MPI.Op.Create; one that is not
        commutative only with an algorithm that keeps the order of the ranks.
    comm: any intra-communicator.
    algorithm: "auto", what the comm's table names for these bytes (python -m mpiring select shows it); a name ("ring", "tree", ...;
        "shared" goes through memory that ranks of a node share, "native" is the MPI library's own); or an Algorithm of your own.

    Returns the array that holds the result: recvbuf, or sendbuf where there is none. All ranks get the same bits, and get them
    again when they call again with the same values.

    Raises, before anything is sent: TypeError or ValueError, naming rank and argument. MismatchError where ranks disagree about
    count, dtype or op (with "native" that is up to the MPI library); PeerError where another rank failed while it ran. After
    either, recvbuf is undefined.
    """
    return _run("allreduce", algorithm, sendbuf, recvbuf, op, comm)


def reduce_scatter(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
                   counts: Sequence[int] | None = None, algorithm: str | Algorithm = "auto") -> Any:
    """Reduce the arrays of all ranks element by element, and leave each rank its own chunk of the result.

    sendbuf: the whole vector, in C order if it has more than one dimension. It is not changed unless it takes the result.
    recvbuf: an array for this rank's chunk, of any shape with as many elements. Left out, the chunk's place in sendbuf (which
        must be contiguous) takes the result; the rest of sendbuf stays as it is.
    counts: the elements of each rank's chunk, the same list on all ranks; left out, the vector is cut as evenly as can be, larger
        chunks first.

    Returns the array that holds the chunk. Otherwise as allreduce.
    """
    return _run("reduce_scatter", algorithm, sendbuf, recvbuf, op, comm, counts)


def allgather(sendbuf: Any, recvbuf: Any = None, *, comm: MPI.Comm = MPI.COMM_WORLD, counts: Sequence[int] | None = None,
              algorithm: str | Algorithm = "auto") -> Any:
    """Gather every rank's chunk into the whole vector, on all ranks.

    sendbuf: this rank's chunk; or, where recvbuf is left out, the whole vector with this rank's chunk in its place.
    recvbuf: the whole vector, in C order if it has more than one dimension.
    counts: the elements of each rank's chunk, the same list on all ranks; left out, the vector is cut as evenly as can be, larger
        chunks first.

    Returns the array that holds the vector. Otherwise as allreduce.
    """
    return _run("allgather", algorithm, sendbuf, recvbuf, None, comm, counts)


def broadcast(buf: Any, *, root: int = 0, comm: MPI.Comm = MPI.COMM_WORLD, algorithm: str | Algorithm = "auto") -> Any:
    """Give the root's vector to all ranks.

    buf: what the root sends, and where the others receive it: as many elements of one dtype everywhere, matched in C order. The
        root's may be read-only.
    root: the same on all ranks.

    Returns buf. Otherwise as allreduce.
    """
    return _run("broadcast", algorithm, buf, None, None, comm, root=root)


def reduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, root: int = 0, comm: MPI.Comm = MPI.COMM_WORLD,
           algorithm: str | Algorithm = "auto") -> Any:
    """Reduce the arrays of all ranks element by element, and give the root the result.

    sendbuf: the same number of elements on all ranks. On ranks other than the root it is only read.
    recvbuf: where the root's result goes; left out, the result replaces the root's sendbuf. Other ranks' is not looked at.
    root: the same on all ranks.

    Returns the array that holds the result on the root, None on the others. Otherwise as allreduce.
    """
    return _run("reduce", algorithm, sendbuf, recvbuf, op, comm, root=root)


def alltoall(sendbuf: Any, recvbuf: Any = None, *, comm: MPI.Comm = MPI.COMM_WORLD,
             counts: Sequence[Sequence[int]] | None = None, algorithm: str | Algorithm = "auto") -> Any:
    """Send a block of sendbuf to every rank, and receive a block from each.

    sendbuf: a block for rank 0, one for rank 1, and so on.
    recvbuf: takes the block of rank 0, that of rank 1, and so on. Left out, they replace the blocks of sendbuf, which then must
        be as long as those that come.
    counts: counts[i][j] elements go from rank i to rank j, the same matrix on all ranks (comm.allgather(row) makes one of rows);
        left out, all have sendbufs of one length, cut as evenly as can be, longer blocks first.

    Returns the array that holds the blocks received. Otherwise as allreduce.
    """
    return _run("alltoall", algorithm, sendbuf, recvbuf, None, comm, counts)


def plan_of(collective: str, sendbuf: Any, recvbuf: Any = None, *, op: Any = None, comm: MPI.Comm = MPI.COMM_WORLD,
            counts: Any = None, root: Any = 0, algorithm: str | Algorithm = "auto") -> Any:
    """Return the plan of such a call, which has run before: `algorithm` is the name of what runs, `path` which way it takes."""
    return plan_for(parse(collective, algorithm, sendbuf, recvbuf, op, comm, counts, root))


_RECENT: dict[int, tuple] = {}
"""The last call with each sendbuf, by its id, while the array lives: to find its plan here takes a microsecond less than by the
arguments. An entry is made by _remember.
"""


def _run(collective: str, algorithm: str | Algorithm, sendbuf: Any, recvbuf: Any, op: Any, comm: MPI.Comm, counts: Any = None,
         root: Any = 0) -> Any:
    """Run the plan for these arguments; make it first if this comm has none yet."""
    recent = _RECENT.get(id(sendbuf))
    if recent is not None:
        call, dtypes, recv, plan, gives, _ = recent
        result, plan = sendbuf if recv is None else recvbuf, plan()
        # NumPy leaves an array where it is while there are views of it, but lets dtype and strides be set: then all is checked.
        if (counts is None and root.__class__ is int and call == (collective, algorithm, op, comm, root)
                and (recvbuf is None if recv is None else recv() is recvbuf)
                and sendbuf.dtype is dtypes[0] and sendbuf.flags.c_contiguous
                and (recv is None or (result.dtype is dtypes[1] and result.flags.c_contiguous))
                and result.flags.writeable and plan is not None and not plan.gone):
            plan()
            return result if gives else None
    try:
        arguments = parse(collective, algorithm, sendbuf, recvbuf, op, comm, counts, root)
        channel = comm.Get_attr(channel_key()) if isinstance(comm, MPI.Comm) and comm else None
        plan = channel and channel.plans.get(arguments.key)
        if plan is None or plan.gone:
            plan = plan_for(arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{collective} on rank {rank_of(comm)}: {error}") from None
    if arguments.space is HOST:
        plan()
    else:
        with arguments.space.here():
            plan()
    return _result(arguments, plan, sendbuf, recvbuf)


def _result(arguments: Arguments, plan: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Return what the call returns; remember it, if the next such call can be told from its arguments at a glance."""
    in_place = arguments.in_place
    if plan.own is not None and in_place:
        return arguments.recv.reshape(-1)[plan.own]
    gives = arguments.collective != "reduce" or plan.channel.rank == arguments.root
    if (type(sendbuf) is np.ndarray and (recvbuf is None or (type(recvbuf) is np.ndarray and not in_place)) and sendbuf.size
            and arguments.send.flags.c_contiguous and arguments.recv.flags.c_contiguous and arguments.recv.size
            and arguments.counts is None and getattr(arguments.op, "is_predefined", True)):
        _remember(arguments, plan, sendbuf, recvbuf, gives)
    return result_of(arguments, sendbuf, recvbuf) if gives else None


def _remember(arguments: Arguments, plan: Any, sendbuf: np.ndarray, recvbuf: np.ndarray | None, gives: bool) -> None:
    key, known = id(sendbuf), _RECENT
    recv = None if recvbuf is None else weakref.ref(recvbuf)
    dtypes = sendbuf.dtype, sendbuf.dtype if recvbuf is None else recvbuf.dtype
    call = arguments.collective, arguments.algorithm, arguments.op, arguments.comm, arguments.root
    known[key] = call, dtypes, recv, weakref.ref(plan), gives, weakref.ref(sendbuf, lambda _: known.pop(key, None))
