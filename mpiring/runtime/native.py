"""The MPI library's own collectives, with the same call as a plan: what every algorithm here is measured against.

Here MPI reduces, so its datatypes and its results count, not NumPy's: what the library cannot do is refused before anything is
sent. Arrays that MPI cannot read as they are (strided, or on a GPU that it does not reach) go through a packed copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import cuts
from mpiring.errors import MismatchError
from mpiring.runtime import ops
from mpiring.runtime.arrays import Space
from mpiring.runtime.channel import Channel
from mpiring.runtime.plan import Call

LIMIT = 1 << 30
"""Elements of one MPI call: an MPI-3 library counts in a C int."""


class NativePlan:
    """One of MPI's collectives bound to its buffers."""

    algorithm, length = "native", 1

    def __init__(self, channel: Channel, call: Call, operation: ops.Operation | None, space: Space, sendbuf: Any, recvbuf: Any,
                 shares: list[int]):
        self.channel, self.call, self.space, self.shares = channel, call, space, shares
        self.datatype = ops.mpi_type(recvbuf.dtype)
        self.op = operation and _mpi_op(operation)
        self.divide = operation and operation.average and channel.size > 1 and ops.divide(np, recvbuf.dtype, channel.size)
        in_place, scatters = sendbuf is recvbuf, call.collective == "reduce_scatter"
        if in_place and scatters:
            start = sum(shares[:channel.rank])
            recvbuf = recvbuf.reshape(-1)[start:start + shares[channel.rank]]
        self.sendbuf, self.recvbuf = space.alias(sendbuf), space.alias(recvbuf)
        self.recv = self._readable(self.recvbuf)
        if in_place and not scatters:
            self.send = None
            self.pulls = [(self.recv, self.recvbuf)] if self.recv is not self.recvbuf else []
        else:
            self.send = self._readable(self.sendbuf, separate=in_place)
            self.pulls = [(self.send, self.sendbuf)] if self.send is not self.sendbuf else []

    def _readable(self, array: Any, separate: bool = False) -> Any:
        """Return the array itself if MPI can use it as it is, else room for a packed copy in host memory."""
        direct = array.flags.c_contiguous and self.space.reachable and not separate
        return array if direct else np.empty(array.shape, array.dtype)

    def __call__(self) -> None:
        """Run."""
        for host, array in self.pulls:
            self.space.pull(host, array)
        if self.space.settle:
            self.space.settle()
        try:
            getattr(self, f"_{self.call.collective}")(self.channel.comm)
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise MismatchError(f"{self.call} on rank {self.channel.rank}: ranks disagree: {error}") from None
            raise
        if self.divide:
            self.divide(self.recv)
        if self.recv is not self.recvbuf:
            self.space.push(self.recvbuf, self.recv)

    def _allreduce(self, comm: MPI.Comm) -> None:
        recv = self.recv.reshape(-1)
        send = None if self.send is None else self.send.reshape(-1)
        for part in cuts(recv.size, max(1, -(-recv.size // LIMIT))):
            comm.Allreduce(MPI.IN_PLACE if send is None else self._message(send[part]), self._message(recv[part]), self.op)

    def _reduce_scatter(self, comm: MPI.Comm) -> None:
        comm.Reduce_scatter(self._message(self.send), self._message(self.recv), self.shares, self.op)

    def _allgather(self, comm: MPI.Comm) -> None:
        source = MPI.IN_PLACE if self.send is None else self._message(self.send)
        comm.Allgatherv(source, [self.recv, self.shares, self.datatype])

    def _message(self, array: Any) -> list:
        return [array, array.size, self.datatype]


def check_native(call: Call, operation: ops.Operation | None, dtype: np.dtype) -> None:
    """Raise TypeError or ValueError where the MPI library cannot do it: whether it knows the op is tried on one local element."""
    datatype = ops.mpi_type(dtype)
    if call.collective != "allreduce" and call.count > LIMIT:
        raise ValueError(f"algorithm 'native' takes up to {LIMIT} elements in a {call.collective}, not {call.count}")
    if operation and not operation.user:
        one = np.zeros(dtype.itemsize, np.uint8)
        try:
            _mpi_op(operation).Reduce_local([one, 1, datatype], [one.copy(), 1, datatype])
        except MPI.Exception:
            raise TypeError(f"algorithm 'native': this MPI library has no {operation.name} for dtype {dtype}") from None


def _mpi_op(operation: ops.Operation) -> MPI.Op:
    return operation.user or (MPI.SUM if operation.average else getattr(MPI, operation.name))
