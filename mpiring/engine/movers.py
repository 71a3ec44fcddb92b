"""Two ways to move arrays among the ranks of a process set: mpiring's plans, and MPI's collectives that do not block.

Plans are for a thread of the engine's own: a call returns when it is over. Where MPI is not for several threads the caller's
thread drives the engine, and must never wait inside a call for a rank that is elsewhere: there every step is a request of MPI's,
which the caller tests. Both are generators that yield the requests to wait for, and return what moved the bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.arguments import parse
from mpiring.planning import AUTO, plan_for
from mpiring.runtime import memory, ops
from mpiring.runtime.arrays import HOST, Space
from mpiring.runtime.channel import channel_of
from mpiring.runtime.native import LIMIT
from mpiring.runtime.plan import Call
from mpiring.runtime.vectored import VectoredPlan

Moves = Generator[MPI.Request, None, str]


VECTORS_FROM = 64 << 20
"""Bytes of all ranks together from which on a node's ranks read each other's arrays where they are. Measured with the gradients of
ResNet-50: 4 and 8 ranks take a quarter less than by bursts.
"""


class Plans:
    """Moves arrays by the plans of calls."""

    def __init__(self, comm: MPI.Comm):
        self.comm, self.channel = comm, channel_of(comm)
        self.channel.waits.both = self.channel.spread    # messages between nodes take long
        node = self.channel.node                         # made now, while all ranks are here
        self.channel.shares = True                       # before there is any plan, for it says what "auto" chooses
        self.neighbours = self.channel.nodes.count(self.channel.nodes[comm.rank])
        reaches = node is not None and node.private and node.size == comm.size > 1
        self.vectors_from = VECTORS_FROM // comm.size if reaches else None

    def patience(self, patient: bool) -> None:
        """Wait so that others can have the core, or for the least delay."""
        self.channel.waits.patient = patient and self.channel.waits.both

    def vector(self, op: str, dtype: np.dtype, counts: Sequence[int]) -> VectoredPlan:
        """Return the allreduce of arrays of these lengths as one vector."""
        call = Call("allreduce", "shared", sum(counts), str(dtype), op)
        plan = VectoredPlan(self.channel, call, ops.find(ops.NAMES[op], dtype), dtype, counts)
        self.channel.made.add(plan)
        return plan

    def room(self, space: Space, nbytes: int) -> Any:
        """Make the buffer that arrays are fused in: where the ranks of a node share it, if they can. Collective."""
        if space is not HOST:
            return space.scratch(nbytes)
        node = self.channel.node
        if node is None or node.size == 1:
            return np.empty(nbytes, np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)          # an ordinary buffer serves as well
            room, region = memory.allocate(node.comm, nbytes, np.dtype(np.uint8))
        self.channel.regions.add(region)
        return room

    def allreduce(self, send: Any, recv: Any, op: Any) -> Moves:
        """Reduce onto all ranks; the same array twice: in place."""
        return self._run("allreduce", send, recv, op)

    def reduce_scatter(self, send: Any, recv: Any, op: Any, counts: Sequence[int]) -> Moves:
        """Reduce, and leave each rank its chunk of `counts` elements."""
        return self._once("reduce_scatter", send, recv, op, counts)

    def allgather(self, send: Any, recv: Any, counts: Sequence[int]) -> Moves:
        """Gather chunks of `counts` elements."""
        return self._once("allgather", send, recv, None, counts)

    def alltoall(self, send: Any, recv: Any, counts: Sequence[Sequence[int]]) -> Moves:
        """Exchange blocks: counts[i][j] elements go from rank i to rank j."""
        return self._once("alltoall", send, recv, None, counts)

    def broadcast(self, array: Any, root: int) -> Moves:
        """Give all ranks the root's array."""
        return self._run("broadcast", array, array, None, None, root)

    def repeated(self, array: Any, op: Any, root: int | None) -> Callable[[], Moves]:
        """Return what moves an array in place, over and over again: a broadcast where there is a root, else an allreduce."""
        plan = self._plan("allreduce" if root is None else "broadcast", array, array, op, None, root or 0)
        return lambda: self._call(plan)

    def _run(self, *arguments: Any) -> Moves:
        return self._call(self._plan(*arguments))

    def _once(self, *arguments: Any) -> Moves:
        """As _run, for a result that is another array every time: the plan is not kept."""
        plan = self._plan(*arguments)
        label = yield from self._call(plan)
        self.channel.plans.drop(plan)
        return label

    def _plan(self, collective: str, send: Any, recv: Any, op: Any, counts: Any = None, root: int = 0) -> Any:
        arguments = parse(collective, AUTO, send, None if recv is send else recv, op, self.comm, counts, root)
        plan = self.channel.plans.get(arguments.key)
        return plan_for(arguments) if plan is None or plan.gone else plan

    def _call(self, plan: Any) -> Moves:
        plan()
        return plan.algorithm if plan.path in ("", "native", "messages") else f"{plan.algorithm} ({plan.path})"
        yield                                            # a generator, like its siblings below


class Requests:
    """Moves arrays in host memory by MPI's collectives that do not block; NumPy reduces where MPI would do it otherwise."""

    vectors_from, neighbours = None, 1

    def patience(self, patient: bool) -> None:
        """Nothing waits here."""

    def __init__(self, comm: MPI.Comm):
        self.comm = comm

    def room(self, space: Space, nbytes: int) -> np.ndarray:
        """Make the buffer that arrays are fused in."""
        return space.host_scratch(nbytes)

    def repeated(self, array: np.ndarray, op: Any, root: int | None) -> Callable[[], Moves]:
        """As Plans."""
        return (lambda: self.allreduce(array, array, op)) if root is None else (lambda: self.broadcast(array, root))

    def allreduce(self, send: np.ndarray, recv: np.ndarray, op: Any) -> Moves:
        """As Plans."""
        operation = ops.find(op, recv.dtype)
        packed = np.array(send).reshape(-1)              # MPI keeps its hands on it while the caller goes on
        size = self.comm.size
        if ops.native_agrees(operation, packed.dtype):
            kind = ops.mpi_type(packed.dtype)
            native = operation.user or (MPI.SUM if operation.average else getattr(MPI, operation.name))
            for start in range(0, packed.size, LIMIT):
                part = packed[start:start + LIMIT]
                yield self.comm.Iallreduce(MPI.IN_PLACE, [part, part.size, kind], native)
            label = "Iallreduce"
        else:
            rows = yield from gather_rows(self.comm, _bytes(packed), [packed.nbytes] * size)
            combine, values = operation.combine(np, packed.dtype), [row.view(packed.dtype) for row in rows]
            packed[...] = values[0]
            for row in values[1:]:
                combine(packed, row, packed)
            label = "Iallgather"
        if operation.average and size > 1:
            ops.divide(np, packed.dtype, size)(packed)
        recv[...] = packed.reshape(recv.shape)
        return label

    def reduce_scatter(self, send: np.ndarray, recv: np.ndarray, op: Any, counts: Sequence[int]) -> Moves:
        """As Plans."""
        whole = np.empty(send.size, send.dtype)
        label = yield from self.allreduce(send.reshape(-1), whole, op)
        start = sum(counts[:self.comm.rank])
        recv[...] = whole[start:start + counts[self.comm.rank]].reshape(recv.shape)
        return label

    def allgather(self, send: np.ndarray, recv: np.ndarray, counts: Sequence[int]) -> Moves:
        """As Plans."""
        sizes = [count * recv.itemsize for count in counts]
        rows = yield from gather_rows(self.comm, _bytes(np.ascontiguousarray(send)), sizes)
        np.concatenate(rows, out=_bytes(recv))
        return "Iallgather"

    def alltoall(self, send: np.ndarray, recv: np.ndarray, counts: Sequence[Sequence[int]]) -> Moves:
        """As Plans."""
        rank, itemsize = self.comm.rank, recv.itemsize
        given, taken = [count * itemsize for count in counts[rank]], [row[rank] * itemsize for row in counts]
        packed = np.ascontiguousarray(send)
        _check_length(max(sum(given), sum(taken)))
        yield self.comm.Ialltoallv([_bytes(packed), given, MPI.BYTE], [_bytes(recv), taken, MPI.BYTE])
        return "Ialltoallv"

    def broadcast(self, array: np.ndarray, root: int) -> Moves:
        """As Plans."""
        packed = array if array.flags.c_contiguous else array.copy()
        line = _bytes(packed)
        for start in range(0, line.size, LIMIT):
            yield self.comm.Ibcast([line[start:start + LIMIT], MPI.BYTE], root)
        if packed is not array and self.comm.rank != root:
            array[...] = packed
        return "Ibcast"


def gather_rows(comm: MPI.Comm, mine: np.ndarray, sizes: Sequence[int]) -> Generator[MPI.Request, None, list[np.ndarray]]:
    """Return each rank's bytes, which are as many as `sizes` say.

    All are sent at the length of the longest: Intel MPI 2021.18 cuts an Iallgatherv into pieces of the shortest, by thousands.
    """
    longest = max(sizes)
    _check_length(longest * comm.size)
    padded = np.zeros(longest, np.uint8)
    padded[:mine.size] = mine
    rows = np.empty((comm.size, longest), np.uint8)
    yield comm.Iallgather([padded, MPI.BYTE], [rows, MPI.BYTE])
    return [row[:size] for row, size in zip(rows, sizes)]


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _check_length(nbytes: int) -> None:
    """Refuse what MPI cannot count; the same on all ranks, or MPI's own error follows."""
    if nbytes >= 1 << 31:
        raise ValueError(f"{nbytes} bytes in one exchange: without MPI.THREAD_MULTIPLE the engine moves less than 2 GiB at once")
