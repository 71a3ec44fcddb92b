"""The MPI library's own collectives, with the same call as a plan: what every algorithm here is measured against.

Here MPI reduces, so its datatypes and its results count, not NumPy's: what the library cannot do is refused before anything is
sent. Arrays that MPI cannot read as they are go through a packed copy: in host memory where it does not reach the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import cuts
from mpiring.errors import MismatchError
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space
from mpiring.runtime.channel import Channel
from mpiring.runtime.plan import Call, Task

LIMIT = 1 << 30
"""Elements of one MPI call: an MPI-3 library counts in a C int."""


OVERWRITTEN = {"Intel MPI": 16 << 10}
"""Bytes of a Bcast, by library, above which a Reduce or Allreduce that follows on the same comm may overwrite what slow ranks have
yet to copy out of shared memory: a Barrier has to come between. Found with Intel MPI 2021.18 from 5 ranks of a node on, with up to
4 KiB to reduce; no other pair of its collectives did so, nor any of Open MPI and MPICH.
"""


class NativePlan:
    """One of MPI's collectives bound to its buffers: a list of calls."""

    algorithm, path, gone = "native", "native", ""

    def __init__(self, channel: Channel, call: Call, operation: ops.Operation | None, space: Space, sendbuf: Any, recvbuf: Any,
                 shares: list[int]):
        self.channel, self.call, self.space = channel, call, space
        self.datatype = ops.mpi_type(recvbuf.dtype)
        in_place, scatters = sendbuf is recvbuf, call.collective == "reduce_scatter"
        if in_place and scatters:
            start = sum(shares[:channel.rank])
            recvbuf = recvbuf.reshape(-1)[start:start + shares[channel.rank]]
        sendbuf, recvbuf = space.alias(sendbuf), space.alias(recvbuf)
        self.length = 1     # what keeping the plan costs, in transfers: its packed copies count
        recv = self._readable(recvbuf)
        send = None if in_place and not scatters else self._readable(sendbuf, separate=in_place)
        packed, source = (recv, recvbuf) if send is None else (send, sendbuf)
        xp, pull, push = (space.xp, space.copy, space.copy) if space.reachable else (np, space.pull, space.push)
        settle: list[Task] = [(space.settle, ())] if space.settle else []
        self.packed = send, recv                         # MPI is given addresses: packed copies must stay alive
        self.before: list[Task] = [(pull, (packed, source))] if packed is not source else []
        self.before += settle
        self.calls = self._calls(send, recv, shares, operation)
        self.after: list[Task] = []
        if call.root in (None, channel.rank) or call.collective == "broadcast":
            if operation and operation.average and channel.size > 1:
                self.after.append((ops.divide(xp, recv.dtype, channel.size), (recv,)))
            if recv is not recvbuf and not (call.collective == "broadcast" and call.root == channel.rank):
                self.after.append((push, (recvbuf, recv)))
        self.after += settle
        self.tasks = self.before + self.calls + self.after

    def retire(self, how: str) -> None:
        """Take note that the comm was freed."""
        self.gone = how

    def __call__(self) -> None:
        """Run."""
        try:
            for task, args in self.tasks:
                task(*args)
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise MismatchError(f"{self.call} on rank {self.channel.rank}: ranks disagree: {error}") from None
            raise

    def start(self) -> Callable[[], None]:
        """Begin a run by the library's call that does not block; return the function that waits for its end."""
        for task, args in self.before:
            task(*args)
        requests = [getattr(self.channel.comm, f"I{task.__name__.lower()}")(*args) for task, args in self.calls]

        def finish() -> None:
            for request in requests:
                request.Wait()
            for task, args in self.after:
                task(*args)

        return finish

    def _readable(self, array: Any, separate: bool = False) -> Any:
        """Return the array itself if MPI can use it as it is, else room for a packed copy."""
        if array.flags.c_contiguous and self.space.reachable and not separate:
            return array
        self.length += array.nbytes // 2048
        make = self.space.scratch if self.space.reachable else self.space.host_scratch
        return make(array.nbytes).view(array.dtype).reshape(array.shape)

    def _calls(self, send: Any, recv: Any, shares: list[int], operation: ops.Operation | None) -> list[Task]:
        """Return the calls of MPI; `send` None: in place."""
        comm, op = self.channel.comm, operation and _mpi_op(operation)
        source = MPI.IN_PLACE if send is None else self._message(send)
        collective, root, rank = self.call.collective, self.call.root, comm.rank
        if collective == "reduce_scatter":
            return [(comm.Reduce_scatter, (source, self._message(recv), shares, op))]
        if collective == "allgather":
            return [(comm.Allgatherv, (source, (recv, shares, self.datatype)))]
        if collective == "alltoall":
            row, column = shares[rank * comm.size:(rank + 1) * comm.size], shares[rank::comm.size]
            return [(comm.Alltoallv, (source if send is None else (send, row, self.datatype), (recv, column, self.datatype)))]
        calls: list[Task] = []
        for part in cuts(recv.size, max(1, -(-recv.size // LIMIT))):
            into = self._message(recv.reshape(-1)[part])
            given = source if send is None else self._message(send.reshape(-1)[part])
            if collective == "broadcast":
                calls.append((comm.Bcast, (into, root)))
            elif collective == "reduce":
                calls.append((comm.Reduce, (given, into, op, root) if rank == root else (into, None, op, root)))
            else:
                calls.append((comm.Allreduce, (given, into, op)))
        if collective == "broadcast" and recv.nbytes > OVERWRITTEN.get(MPI.get_vendor()[0], recv.nbytes):
            calls.append((comm.Barrier, ()))
        return calls

    def _message(self, array: Any) -> list:
        """Return an array as MPI takes it; a plain buffer is read in a quarter of a microsecond less than an array of NumPy."""
        plain = self.space is HOST and array.size
        return [MPI.buffer.fromaddress(array.ctypes.data, array.nbytes) if plain else array, array.size, self.datatype]


def check_native(call: Call, operation: ops.Operation | None, dtype: np.dtype) -> None:
    """Raise TypeError or ValueError where the MPI library cannot do it: whether it knows the op is tried on one local element."""
    datatype = ops.mpi_type(dtype)
    if call.counts is not None and call.count > LIMIT:
        raise ValueError(f"algorithm 'native' takes up to {LIMIT} elements in a {call.collective}, not {call.count}")
    if operation and not operation.user:
        one = np.zeros(dtype.itemsize, np.uint8)
        try:
            _mpi_op(operation).Reduce_local([one, 1, datatype], [one.copy(), 1, datatype])
        except MPI.Exception:
            raise TypeError(f"algorithm 'native': this MPI library has no {operation.name} for dtype {dtype}") from None


def _mpi_op(operation: ops.Operation) -> MPI.Op:
    return operation.user or (MPI.SUM if operation.average else getattr(MPI, operation.name))
