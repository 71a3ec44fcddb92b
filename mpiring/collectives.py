"""The calls: allreduce with its two named algorithms, reduce_scatter and allgather."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms import registry
from mpiring.algorithms.cuts import counts as balanced
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space, shares_elements, wrap
from mpiring.runtime.channel import Channel, channel_key, channel_of
from mpiring.runtime.native import NativePlan, check_native
from mpiring.runtime.plan import Call, Plan
from mpiring.runtime.program import LEAD, WINDOW, Memory, Program, compile_program

NATIVE = "native"
"""The algorithm that stands for the MPI library's own collective."""


def ring_allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD) -> Any:
    """Reduce a vector onto all ranks by the bandwidth-optimal ring; see allreduce."""
    return _run("allreduce", "ring", sendbuf, recvbuf, op, comm)


def tree_allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD) -> Any:
    """Reduce a vector onto all ranks by a binomial tree, the baseline; see allreduce."""
    return _run("allreduce", "tree", sendbuf, recvbuf, op, comm)


def allreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
              algorithm: str = "ring") -> Any:
    """Reduce the arrays of all ranks element by element, and give every rank the result. All ranks of `comm` must call it.

    sendbuf: a NumPy or CuPy array of any numeric dtype, shape and strides, or anything whose memory NumPy can wrap.
    recvbuf: where the result goes: same shape and dtype. Left out (or MPI.IN_PLACE on either side), the result replaces the
        input. An array must not overlap the other in part.
    op: an MPI built-in that has a meaning for the dtype, mpiring.AVERAGE, or a commutative op made with MPI.Op.Create.
    comm: any intra-communicator.
    algorithm: "ring", "tree" or "native" (the MPI library's own).

    Returns the array that holds the result: recvbuf, or sendbuf where there is none. All ranks get the same bits, and get them
    again when they call again with the same values.

    Raises, before anything is sent: TypeError or ValueError, naming rank and argument. MismatchError where ranks disagree about
    count, dtype or op (with "native" that is up to the MPI library); PeerError where another rank failed while it ran. After
    either, recvbuf is undefined.
    """
    return _run("allreduce", algorithm, sendbuf, recvbuf, op, comm)


def reduce_scatter(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
                   counts: Sequence[int] | None = None, algorithm: str = "ring") -> Any:
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
              algorithm: str = "ring") -> Any:
    """Gather every rank's chunk into the whole vector, on all ranks.

    sendbuf: this rank's chunk; or, where recvbuf is left out, the whole vector with this rank's chunk in its place.
    recvbuf: the whole vector, in C order if it has more than one dimension.
    counts: the elements of each rank's chunk, the same list on all ranks; left out, the vector is cut as evenly as can be, larger
        chunks first.

    Returns the array that holds the vector. Otherwise as allreduce.
    """
    return _run("allgather", algorithm, sendbuf, recvbuf, None, comm, counts)


@dataclass(frozen=True)
class _Request:
    """The arguments of one call, wrapped but not checked yet."""

    collective: str
    algorithm: str
    send: Any
    recv: Any
    space: Space
    recv_space: Space
    op: Any
    comm: MPI.Comm
    counts: Sequence[int] | None

    @property
    def in_place(self) -> bool:
        return self.send is self.recv


def _run(collective: str, algorithm: str, sendbuf: Any, recvbuf: Any, op: Any, comm: MPI.Comm, counts: Any = None) -> Any:
    """Run the plan for these arguments; make it first if this comm has none yet."""
    if recvbuf is None or recvbuf is MPI.IN_PLACE:
        recvbuf = sendbuf
    elif sendbuf is MPI.IN_PLACE:
        sendbuf = recvbuf
    if counts is not None:
        counts = _whole(counts, collective, comm)
    try:
        send, space = recv, recv_space = wrap(sendbuf, "sendbuf")
        mine, theirs = space.identity(send), None
        if recvbuf is not sendbuf:
            recv, recv_space = wrap(recvbuf, "recvbuf")
            theirs = recv_space.identity(recv)
            if theirs == mine:
                recv, theirs = send, None
        key = collective, algorithm, mine, theirs, id(op), getattr(op, "handle", 0), counts
        channel = comm.Get_attr(channel_key()) if isinstance(comm, MPI.Comm) and comm else None
        plan = channel and channel.plans.get(key)
        if plan is None:
            plan = _plan(_Request(collective, algorithm, send, recv, space, recv_space, op, comm, counts), key)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{collective} on rank {_rank(comm)}: {error}") from None
    if space is HOST:
        plan()
    else:
        with space.here():
            plan()
    if collective == "reduce_scatter" and recv is send:
        return recv.reshape(-1)[plan.own]
    return recvbuf if type(recvbuf) is type(recv) or isinstance(recvbuf, np.ndarray) else recv


def _whole(counts: Any, collective: str, comm: Any) -> tuple[int, ...]:
    """Return counts as plain integers, for equal counts must be equal in a plan's key and in its signature."""
    try:
        return tuple(map(operator.index, counts))
    except TypeError:
        raise TypeError(f"{collective} on rank {_rank(comm)}: counts is not a list of whole numbers: {counts!r}") from None


def _rank(comm: Any) -> int:
    return comm.rank if isinstance(comm, MPI.Comm) and comm else MPI.COMM_WORLD.rank


def _plan(request: _Request, key: tuple) -> Plan | NativePlan:
    """Check the arguments, then make the plan and keep it with the comm. Nothing is sent before all is checked."""
    comm, recv = request.comm, request.recv
    _check_comm(comm)
    algorithm = _algorithm(request.algorithm, request.collective)
    _check_arrays(request)
    shares = _shares(request, comm.size, comm.rank)
    native = request.algorithm == NATIVE
    operation = ops.find(request.op, recv.dtype, any_order=not native) if request.collective != "allgather" else None
    if operation and operation.user and request.space is not HOST:
        raise TypeError("op is made with MPI.Op.Create: it is for host memory, not for arrays on a GPU")
    call = Call(request.collective, request.algorithm, sum(shares), str(recv.dtype), operation.name if operation else "",
                tuple(shares) if request.collective != "allreduce" else None)
    if native:
        check_native(call, operation, recv.dtype)
    channel = channel_of(comm)
    if native:
        plan = NativePlan(channel, call, operation, request.space, request.send, recv, shares)
    else:
        program = _program(channel, algorithm, shares, request, operation)
        plan = Plan(channel, call, program, operation, request.space, request.send, recv)
    plan.own = slice(sum(shares[:channel.rank]), sum(shares[:channel.rank + 1]))
    plan.op = request.op     # keeps its id from being another op's
    channel.plans.put(key, plan)
    return plan


def _program(channel: Channel, algorithm: registry.Algorithm, shares: list[int], request: _Request,
             operation: ops.Operation | None) -> Program:
    """Compile the schedule for this rank, or take it from an earlier call of the same size and layout."""
    itemsize = request.recv.dtype.itemsize
    memory = Memory(request.in_place, request.send.flags.c_contiguous, request.recv.flags.c_contiguous, not request.space.reachable)
    average = bool(operation and operation.average)
    vector = algorithm.chunks(channel.size)
    if vector != len(shares):
        shares = balanced(sum(shares), vector)
    key = (algorithm, tuple(shares), itemsize, memory, average)
    program = channel.programs.get(key)
    if program is None:
        # On one node a processor moves the bytes, so there is nothing to run ahead of.
        window, lead = (WINDOW, LEAD) if channel.spread or memory.staged else (0, 0)
        program = compile_program(algorithm, channel.rank, channel.size, shares, channel.segment // itemsize, memory, average,
                                  window, lead)
        channel.programs.put(key, program)
    return program


def _algorithm(name: str, collective: str) -> registry.Algorithm | None:
    if not isinstance(name, str):
        raise TypeError(f"algorithm is of type {type(name).__name__}, not a name")
    if name == NATIVE:
        return None
    known = [*registry.names(collective), NATIVE]
    if name not in known:
        raise ValueError(f"algorithm {name!r} is not known for {collective}; known: {', '.join(known)}")
    return registry.find(name, collective)


def _check_comm(comm: Any) -> None:
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm is of type {type(comm).__name__}, not an MPI communicator")
    if not comm:
        raise ValueError("comm is MPI.COMM_NULL: was it freed, or is this rank not part of it?")
    if comm.Is_inter():
        raise ValueError("comm is an inter-communicator; use one of its groups, or its Merge()")


def _check_arrays(request: _Request) -> None:
    send, recv = request.send, request.recv
    result = "sendbuf (which takes the result, for there is no recvbuf)" if request.in_place else "recvbuf"
    if not ops.kind(recv.dtype):
        raise TypeError(f"{'sendbuf' if request.in_place else 'recvbuf'} has dtype {recv.dtype}, which is not numeric")
    if request.space is not request.recv_space:
        raise ValueError("sendbuf and recvbuf are not in the same memory: one is on a GPU, or they are on two")
    if send.dtype != recv.dtype:
        raise TypeError(f"recvbuf has dtype {recv.dtype}, but sendbuf has {send.dtype}")
    if request.collective == "allreduce" and send.shape != recv.shape:
        raise ValueError(f"recvbuf has shape {recv.shape}, but sendbuf has {send.shape}")
    if request.space is HOST and not recv.flags.writeable:
        raise ValueError(f"{result} is read-only")
    if shares_elements(recv):
        raise ValueError(f"{result} has elements that share memory (strides {recv.strides})")
    if not request.in_place and send.size and recv.size and request.space.overlap(send, recv):
        raise ValueError("sendbuf and recvbuf overlap; for a result in place of the input leave recvbuf out")
    if request.collective == "reduce_scatter" and request.in_place and not send.flags.c_contiguous:
        raise ValueError("sendbuf is not contiguous, so no view of it can be the result: pass a recvbuf")


def _shares(request: _Request, size: int, rank: int) -> list[int]:
    """Return the elements of each rank's chunk, and see that the buffers hold as many."""
    whole, own = (request.send, request.recv) if request.collective == "reduce_scatter" else (request.recv, request.send)
    name = "recvbuf" if request.collective == "reduce_scatter" else "sendbuf"
    if request.counts is None:
        shares = balanced(whole.size, size)
    else:
        shares = list(request.counts)
        if len(shares) != size or min(shares) < 0 or sum(shares) != whole.size:
            raise ValueError(f"counts {shares} are not one for each of {size} ranks, none negative, with the sum {whole.size}")
    if request.collective != "allreduce" and not request.in_place and own.size != shares[rank]:
        raise ValueError(f"{name} has {own.size} elements, but this rank's chunk has {shares[rank]} of {whole.size}")
    return shares
