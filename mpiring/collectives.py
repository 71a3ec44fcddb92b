"""The calls: allreduce with its two named algorithms, reduce_scatter, allgather, broadcast, reduce and alltoall."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms import registry
from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.registry import COLLECTIVES, Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space, shares_elements, wrap
from mpiring.runtime.channel import Channel, channel_key, channel_of
from mpiring.runtime.native import NativePlan, check_native
from mpiring.runtime.plan import Call, Plan
from mpiring.runtime.program import LEAD, WINDOW, Memory, Program, compile_program

NATIVE = "native"
"""The algorithm that stands for the MPI library's own collective."""

LATENCY = 64 * 1024
"""Bytes that travel in the time that a message takes before its first byte arrives (alpha / beta): 10 us at 6.5 GB/s on a node,
520 us at 1 Gbit/s. A pipeline's pieces are chosen by it; where it is a factor of two off, that costs a tenth at most.
"""


def ring_allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD) -> Any:
    """Reduce a vector onto all ranks by the bandwidth-optimal ring; see allreduce."""
    return _run("allreduce", "ring", sendbuf, recvbuf, op, comm)


def tree_allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD) -> Any:
    """Reduce a vector onto all ranks by a binomial tree, the baseline; see allreduce."""
    return _run("allreduce", "tree", sendbuf, recvbuf, op, comm)


def allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
              algorithm: str | Algorithm = "ring") -> Any:
    """Reduce the arrays of all ranks element by element, and give every rank the result. All ranks of `comm` must call it.

    sendbuf: a NumPy or CuPy array of any numeric dtype, shape and strides, or anything whose memory NumPy can wrap.
    recvbuf: where the result goes: same shape and dtype. Left out (or MPI.IN_PLACE on either side), the result replaces the
        input. An array must not overlap the other in part.
    op: an MPI built-in that has a meaning for the dtype, mpiring.AVERAGE, or an op made with MPI.Op.Create; one that is not
        commutative only with an algorithm that keeps the order of the ranks.
    comm: any intra-communicator.
    algorithm: a name ("ring", "tree", "recursive_doubling", ...; "native" is the MPI library's own), or an Algorithm of your own.

    Returns the array that holds the result: recvbuf, or sendbuf where there is none. All ranks get the same bits, and get them
    again when they call again with the same values.

    Raises, before anything is sent: TypeError or ValueError, naming rank and argument. MismatchError where ranks disagree about
    count, dtype or op (with "native" that is up to the MPI library); PeerError where another rank failed while it ran. After
    either, recvbuf is undefined.
    """
    return _run("allreduce", algorithm, sendbuf, recvbuf, op, comm)


def reduce_scatter(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
                   counts: Sequence[int] | None = None, algorithm: str | Algorithm = "ring") -> Any:
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
              algorithm: str | Algorithm = "ring") -> Any:
    """Gather every rank's chunk into the whole vector, on all ranks.

    sendbuf: this rank's chunk; or, where recvbuf is left out, the whole vector with this rank's chunk in its place.
    recvbuf: the whole vector, in C order if it has more than one dimension.
    counts: the elements of each rank's chunk, the same list on all ranks; left out, the vector is cut as evenly as can be, larger
        chunks first.

    Returns the array that holds the vector. Otherwise as allreduce.
    """
    return _run("allgather", algorithm, sendbuf, recvbuf, None, comm, counts)


def broadcast(buf: Any, *, root: int = 0, comm: MPI.Comm = MPI.COMM_WORLD, algorithm: str | Algorithm = "tree") -> Any:
    """Give the root's vector to all ranks.

    buf: what the root sends, and where the others receive it: as many elements of one dtype everywhere, matched in C order. The
        root's may be read-only.
    root: the same on all ranks.

    Returns buf. Otherwise as allreduce.
    """
    return _run("broadcast", algorithm, buf, None, None, comm, root=root)


def reduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, root: int = 0, comm: MPI.Comm = MPI.COMM_WORLD,
           algorithm: str | Algorithm = "tree") -> Any:
    """Reduce the arrays of all ranks element by element, and give the root the result.

    sendbuf: the same number of elements on all ranks. On ranks other than the root it is only read.
    recvbuf: where the root's result goes; left out, the result replaces the root's sendbuf. Other ranks' is not looked at.
    root: the same on all ranks.

    Returns the array that holds the result on the root, None on the others. Otherwise as allreduce.
    """
    return _run("reduce", algorithm, sendbuf, recvbuf, op, comm, root=root)


def alltoall(sendbuf: Any, recvbuf: Any = None, *, comm: MPI.Comm = MPI.COMM_WORLD,
             counts: Sequence[Sequence[int]] | None = None, algorithm: str | Algorithm = "pairwise") -> Any:
    """Send a block of sendbuf to every rank, and receive a block from each.

    sendbuf: a block for rank 0, one for rank 1, and so on.
    recvbuf: takes the block of rank 0, that of rank 1, and so on. Left out, they replace the blocks of sendbuf, which then must
        be as long as those that come.
    counts: counts[i][j] elements go from rank i to rank j, the same matrix on all ranks (comm.allgather(row) makes one of rows);
        left out, all have sendbufs of one length, cut as evenly as can be, longer blocks first.

    Returns the array that holds the blocks received. Otherwise as allreduce.
    """
    return _run("alltoall", algorithm, sendbuf, recvbuf, None, comm, counts)


@dataclass(frozen=True)
class _Request:
    """The arguments of one call, wrapped but not checked yet."""

    collective: str
    algorithm: str | Algorithm
    send: Any
    recv: Any
    space: Space
    recv_space: Space
    op: Any
    comm: MPI.Comm
    counts: tuple | None
    root: int

    @property
    def writes(self) -> bool:
        """Whether this rank's recvbuf is written."""
        at_root = self.root == self.comm.rank
        return not at_root if self.collective == "broadcast" else at_root or self.collective != "reduce"

    @property
    def in_place(self) -> bool:
        return self.send is self.recv


def _run(collective: str, algorithm: str | Algorithm, sendbuf: Any, recvbuf: Any, op: Any, comm: MPI.Comm, counts: Any = None,
         root: Any = 0) -> Any:
    """Run the plan for these arguments; make it first if this comm has none yet."""
    if recvbuf is None or recvbuf is MPI.IN_PLACE:
        recvbuf = sendbuf
    elif sendbuf is MPI.IN_PLACE:
        sendbuf = recvbuf
    try:
        if counts is not None:
            counts = _whole_rows(counts) if collective == "alltoall" else _whole(counts)
        if root.__class__ is not int:
            root = _whole_root(root)
        if collective == "reduce" and recvbuf is not sendbuf and _rank(comm) != root:
            recvbuf = sendbuf
        send, space = recv, recv_space = wrap(sendbuf, "buf" if collective == "broadcast" else "sendbuf")
        mine, theirs = space.identity(send), None
        if recvbuf is not sendbuf:
            recv, recv_space = wrap(recvbuf, "recvbuf")
            theirs = recv_space.identity(recv)
            if theirs == mine:
                recv, theirs = send, None
        key = collective, algorithm, mine, theirs, id(op), getattr(op, "handle", 0), counts, root
        channel = comm.Get_attr(channel_key()) if isinstance(comm, MPI.Comm) and comm else None
        plan = channel and channel.plans.get(key)
        if plan is None:
            plan = _plan(_Request(collective, algorithm, send, recv, space, recv_space, op, comm, counts, root), key)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{collective} on rank {_rank(comm)}: {error}") from None
    if space is HOST:
        plan()
    else:
        with space.here():
            plan()
    if plan.own is not None and recv is send:
        return recv.reshape(-1)[plan.own]
    if collective == "reduce" and plan.channel.rank != root:
        return None
    return recvbuf if type(recvbuf) is type(recv) or isinstance(recvbuf, np.ndarray) else recv


def _whole(counts: Any) -> tuple[int, ...]:
    """Return counts as plain integers, for equal counts must be equal in a plan's key and in its signature."""
    try:
        return tuple(map(operator.index, counts))
    except TypeError:
        raise TypeError(f"counts is not a list of whole numbers: {counts!r}") from None


def _whole_rows(counts: Any) -> tuple[tuple[int, ...], ...]:
    """As _whole, for a matrix."""
    try:
        return tuple(tuple(map(operator.index, row)) for row in counts)
    except TypeError:
        raise TypeError(f"counts is not a matrix of whole numbers, a row for each sender: {counts!r}") from None


def _whole_root(root: Any) -> int:
    try:
        return operator.index(root)
    except TypeError:
        raise TypeError(f"root is of type {type(root).__name__}, not a rank") from None


def _rank(comm: Any) -> int:
    return comm.rank if isinstance(comm, MPI.Comm) and comm else MPI.COMM_WORLD.rank


def _plan(request: _Request, key: tuple) -> Plan | NativePlan:
    """Check the arguments, then make the plan and keep it with the comm. Nothing is sent before all is checked."""
    comm, recv = request.comm, request.recv
    _check_comm(comm)
    algorithm = _algorithm(request.algorithm, request.collective)
    if not 0 <= request.root < comm.size:
        raise ValueError(f"root {request.root} is not one of {comm.size} ranks")
    _check_arrays(request)
    shares = _shares(request, comm.size, comm.rank)
    operation = ops.find(request.op, recv.dtype) if COLLECTIVES[request.collective].reduces else None
    if operation and operation.user and request.space is not HOST:
        raise TypeError("op is made with MPI.Op.Create: it is for host memory, not for arrays on a GPU")
    name = NATIVE if algorithm is None else algorithm.name
    call = Call(request.collective, name, sum(shares), str(recv.dtype), operation.name if operation else "",
                None if len(shares) == 1 else tuple(shares), request.root if COLLECTIVES[request.collective].rooted else None)
    if algorithm is None:
        check_native(call, operation, recv.dtype)
    channel = channel_of(comm)
    if algorithm is None:
        plan = NativePlan(channel, call, operation, request.space, request.send, recv, shares)
    else:
        setting = _setting(channel, algorithm, request, sum(shares) * recv.dtype.itemsize)
        if algorithm is request.algorithm:               # the caller's own: wrong sums in silence would be the alternative
            channel.proof(algorithm, setting)
        _check_order(channel, algorithm, setting, operation)
        program = _program(channel, algorithm, setting, shares, request, operation)
        plan = Plan(channel, call, program, operation, request.space, request.send, recv)
    plan.own = None
    if request.collective == "reduce_scatter":
        plan.own = slice(sum(shares[:channel.rank]), sum(shares[:channel.rank + 1]))
    plan.arguments = request.op, request.algorithm     # keeps what the key knows by id from being another's
    channel.plans.put(key, plan)
    return plan


def _setting(channel: Channel, algorithm: Algorithm, request: _Request, nbytes: int) -> Setting:
    """Return what the schedule is made for, from values that are equal on all ranks."""
    pieces = algorithm.pieces(channel.size, nbytes, LATENCY) if algorithm.pieces else 1
    return Setting(channel.size, request.root, pieces, tuple(channel.nodes))


def _check_order(channel: Channel, algorithm: Algorithm, setting: Setting, operation: ops.Operation | None) -> None:
    """Refuse an op that is not commutative where the algorithm, by its proof, does not keep the order of the ranks."""
    if operation is None or operation.commutes or channel.proof(algorithm, setting).ordered:
        return
    others = [registry.find(name, algorithm.collective.name) for name in registry.names(algorithm.collective.name)]
    keep = [other.name for other in others if channel.proof(other, setting).ordered]
    raise ValueError(f"op is not commutative, and algorithm {algorithm.name!r} reduces in another order than that of the "
                     f"{setting.size} ranks; use one that keeps it: {', '.join([*keep, NATIVE])}")


def _program(channel: Channel, algorithm: Algorithm, setting: Setting, shares: list[int], request: _Request,
             operation: ops.Operation | None) -> Program:
    """Compile the schedule for this rank, or take it from an earlier call of the same size and layout."""
    itemsize = request.recv.dtype.itemsize
    memory = Memory(request.in_place, request.send.flags.c_contiguous, request.recv.flags.c_contiguous, not request.space.reachable)
    average = bool(operation and operation.average)
    if len(shares) == 1:
        shares = balanced(shares[0], algorithm.chunks(setting))
    key = (algorithm, setting, tuple(shares), itemsize, memory, average)
    program = channel.programs.get(key)
    if program is None:
        # On one node a processor moves the bytes, so there is nothing to run ahead of.
        window, lead = (WINDOW, LEAD) if channel.spread or memory.staged else (0, 0)
        program = compile_program(algorithm, channel.rank, setting, shares, channel.segment // itemsize, memory, average,
                                  window, lead)
        channel.programs.put(key, program)
    return program


def _algorithm(algorithm: str | Algorithm, collective: str) -> Algorithm | None:
    """Return the algorithm by name, or as it is; None stands for the MPI library's own."""
    if isinstance(algorithm, Algorithm):
        if algorithm.collective.name != collective:
            raise ValueError(f"algorithm {algorithm.name!r} is one for {algorithm.collective.name}")
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm is of type {type(algorithm).__name__}, not a name or an Algorithm")
    if algorithm == NATIVE:
        return None
    if algorithm not in registry.names(collective):
        raise ValueError(registry.unknown("algorithm", algorithm, [*registry.names(collective), NATIVE], f" for {collective}"))
    return registry.find(algorithm, collective)


def _check_comm(comm: Any) -> None:
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm is of type {type(comm).__name__}, not an MPI communicator")
    if not comm:
        raise ValueError("comm is MPI.COMM_NULL: was it freed, or is this rank not part of it?")
    if comm.Is_inter():
        raise ValueError("comm is an inter-communicator; use one of its groups, or its Merge()")


def _check_arrays(request: _Request) -> None:
    send, recv, collective = request.send, request.recv, request.collective
    single = "buf" if collective == "broadcast" else "sendbuf"
    result = "recvbuf"
    if request.in_place:
        result = single if collective == "broadcast" else "sendbuf (which takes the result, for there is no recvbuf)"
    if not ops.kind(recv.dtype):
        raise TypeError(f"{single if request.in_place else 'recvbuf'} has dtype {recv.dtype}, which is not numeric")
    if request.space is not request.recv_space:
        raise ValueError("sendbuf and recvbuf are not in the same memory: one is on a GPU, or they are on two")
    if send.dtype != recv.dtype:
        raise TypeError(f"recvbuf has dtype {recv.dtype}, but sendbuf has {send.dtype}")
    if collective in ("allreduce", "reduce") and send.shape != recv.shape:
        raise ValueError(f"recvbuf has shape {recv.shape}, but sendbuf has {send.shape}")
    if request.writes and request.space is HOST and not recv.flags.writeable:
        raise ValueError(f"{result} is read-only")
    if request.writes and shares_elements(recv):
        raise ValueError(f"{result} has elements that share memory (strides {recv.strides})")
    if not request.in_place and send.size and recv.size and request.space.overlap(send, recv):
        raise ValueError("sendbuf and recvbuf overlap; for a result in place of the input leave recvbuf out")
    if collective == "reduce_scatter" and request.in_place and not send.flags.c_contiguous:
        raise ValueError("sendbuf is not contiguous, so no view of it can be the result: pass a recvbuf")


def _shares(request: _Request, size: int, rank: int) -> list[int]:
    """Return the elements of each chunk that the counts name, and see that the buffers hold as many: one chunk where none do."""
    if request.collective == "alltoall":
        return _blocks(request, size, rank)
    if request.collective not in ("reduce_scatter", "allgather"):
        return [request.recv.size]
    whole, own = (request.send, request.recv) if request.collective == "reduce_scatter" else (request.recv, request.send)
    name = "recvbuf" if request.collective == "reduce_scatter" else "sendbuf"
    if request.counts is None:
        shares = balanced(whole.size, size)
    else:
        shares = list(request.counts)
        if len(shares) != size or min(shares) < 0 or sum(shares) != whole.size:
            raise ValueError(f"counts {shares} are not one for each of {size} ranks, none negative, with the sum {whole.size}")
    if not request.in_place and own.size != shares[rank]:
        raise ValueError(f"{name} has {own.size} elements, but this rank's chunk has {shares[rank]} of {whole.size}")
    return shares


def _blocks(request: _Request, size: int, rank: int) -> list[int]:
    """Return the elements of every block of an alltoall, sender by sender."""
    rows = [balanced(request.send.size, size)] * size if request.counts is None else request.counts
    if len(rows) != size or any(len(row) != size or min(row) < 0 for row in rows):
        raise ValueError(f"counts is not a matrix of {size} rows of {size} numbers, none negative: {[list(row) for row in rows]}")
    column = [row[rank] for row in rows]
    if request.send.size != sum(rows[rank]):
        raise ValueError(f"sendbuf has {request.send.size} elements, but row {rank} of counts has the sum {sum(rows[rank])}")
    if not request.in_place and request.recv.size != sum(column):
        raise ValueError(f"recvbuf has {request.recv.size} elements, but this rank receives {sum(column)}")
    odd = [(i, j) for i in range(size) for j in range(i) if rows[i][j] != rows[j][i]] if request.in_place else []
    if odd:                                              # seen on all ranks, so that none is left waiting
        i, j = odd[0]
        raise ValueError(f"sendbuf takes the result, for there is no recvbuf, but ranks {j} and {i} send each other blocks of "
                         f"{rows[j][i]} and {rows[i][j]} elements")
    return [count for row in rows for count in row]
