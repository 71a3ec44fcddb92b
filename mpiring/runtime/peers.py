"""Read and write the private memory of other processes: Linux's process_vm_readv and process_vm_writev, through ctypes.

One copy by the kernel, with no help from the peer. Whether it is permitted is tried: Yama, seccomp and namespaces can forbid it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _function(name: str):
    function = getattr(_LIBC, name, None)
    if function is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        function.argtypes, function.restype = (ctypes.c_int, pointer, number, pointer, number, number), ctypes.c_ssize_t
    return function


_READ, _WRITE = _function("process_vm_readv"), _function("process_vm_writev")


class Transfer:
    """One copy between this process's memory and places in a peer's, bound once."""

    def __init__(self, write: bool, pid: int, here: np.ndarray, there: int | Sequence[tuple[int, int]]):
        """there: an address, or the address and the bytes of each place."""
        spans = [(there, here.nbytes)] if isinstance(there, int) else there
        self.here, self.pid, self.nbytes = here, pid, here.nbytes
        self.iovecs = (_Iovec * (1 + len(spans)))((here.ctypes.data, here.nbytes), *spans)
        first = ctypes.addressof(self.iovecs)
        self.function = _WRITE if write else _READ
        self.arguments = pid, first, 1, first + ctypes.sizeof(_Iovec), len(spans), 0

    def __call__(self) -> None:
        """Copy; OSError where the kernel refuses or the peer's memory is not there."""
        done = self.function(*self.arguments)
        if done != self.nbytes:
            number = ctypes.get_errno()
            raise OSError(number, f"{done} of {self.nbytes} bytes copied from or to process {self.pid}: {os.strerror(number)}")


def reachable(comm: MPI.Comm) -> bool:
    """Tell whether all ranks of `comm`, on one node, can read and write each other's memory: each tries with all. Collective."""
    mark = np.array([comm.rank, os.getpid()], np.int64)
    peers = comm.allgather((os.getpid(), mark.ctypes.data))
    works = _READ is not None and _WRITE is not None and all(_try(pid, address, rank) for rank, (pid, address) in enumerate(peers))
    return comm.allreduce(works, MPI.LAND)               # until then `mark` is there for the others


def _try(pid: int, address: int, rank: int) -> bool:
    seen = np.zeros(2, np.int64)
    try:
        Transfer(False, pid, seen, address)()
        right = seen.tolist() == [rank, pid]
        if right:
            Transfer(True, pid, seen, address)()
    except OSError:
        return False
    return right
