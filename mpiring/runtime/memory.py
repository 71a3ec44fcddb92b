"""Memory that the ranks of a node share: anonymous files that nothing has to clean up, and the arrays that callers keep in them.

A memfd has no name: its pages go when the last process that maps it unmaps it or dies, however it dies, and no limit of /dev/shm
applies. Peers open it through /proc/PID/fd. Where that is forbidden an MPI window is the second choice.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import warnings
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import count
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

PAGE = mmap.PAGESIZE

SKEW = 3 * PAGE
"""Bytes between the rows of a region, beside whole pages: equal places of rows a power of two apart would meet in one cache set."""

HUGE = 2 << 20
"""Bytes from which on a row asks for huge pages, where the system grants them to shared memory."""

NEAR = 64 << 10
"""Bytes between arrays up to which they are brought into huge pages together."""

COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h, which Python's mmap does not name."""

SPARE = 16 << 20
"""Bytes of /dev/shm that a window must leave free, for the MPI library: a full one kills with SIGBUS who touches the next page."""

ALONE = 0
"""The number of every region whose memory is private."""

_MADVISE = ctypes.CDLL(None).madvise
_MADVISE.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Mapping:
    """Zeroed memory that all ranks of a node have mapped; an MPI window may stand behind it."""

    def __init__(self, memory: np.ndarray, win: MPI.Win | None = None):
        self.memory, self.win = memory, win

    def free(self) -> None:
        """Let go of it; collective, for what is left of a window is."""
        self.memory = None
        if self.win is not None:
            self.win.Free()


def share(comm: MPI.Comm, nbytes: int) -> Mapping | None:
    """Map memory that the ranks of `comm`, on one node, share; None, on all of them, where that is impossible. Collective."""
    for attempt in (_by_memfd, _by_window):
        mapping = attempt(comm, nbytes)
        if mapping is not None:
            return mapping
    return None


def _by_memfd(comm: MPI.Comm, nbytes: int) -> Mapping | None:
    fd, offer, token = -1, None, secrets.token_bytes(16)
    if comm.rank == 0:
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create("mpiring", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            os.pwrite(fd, token, 0)
            offer = os.getpid(), fd, token
    offer = comm.bcast(offer)
    memory = None
    if offer is not None:
        with contextlib.suppress(OSError, ValueError):
            memory = _map(*offer, nbytes)
    everybody = comm.allreduce(memory is not None, MPI.LAND)     # after it, all have opened the file and seen the token
    if fd >= 0:
        os.close(fd)
        if memory is not None:
            memory[:16] = 0
    comm.Barrier()
    return Mapping(memory) if everybody else None


def _map(pid: int, fd: int, token: bytes, nbytes: int) -> np.ndarray:
    """Map a peer's file. The token tells it from another process's, where ranks do not see the same process numbers."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(own, 16, 0) != token:
            raise ValueError("not the file that was offered")
        pages = mmap.mmap(own, nbytes)
    finally:
        os.close(own)
    return np.frombuffer(pages, np.uint8)


def _by_window(comm: MPI.Comm, nbytes: int) -> Mapping | None:
    free = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    roomy = free is not None and free.f_bavail * free.f_frsize >= nbytes + SPARE
    if not comm.allreduce(roomy, MPI.LAND):
        return None
    try:
        win = MPI.Win.Allocate_shared(nbytes if comm.rank == 0 else 0, 1, comm=comm)
    except MPI.Exception:
        win = None
    if not comm.allreduce(win is not None, MPI.LAND):
        return None
    memory = np.frombuffer(win.Shared_query(0)[0], np.uint8)
    if comm.allreduce(comm.rank > 0 or _fill(memory), MPI.LAND):
        return Mapping(memory, win)
    win.Free()
    return None


def _fill(memory: np.ndarray) -> bool:
    """Let the kernel zero every page. Where another window has taken the room meanwhile, it says so; a store of ours would kill."""
    rest = memoryview(memory)
    with contextlib.suppress(OSError), open("/dev/zero", "rb", 0) as zeros:
        while rest:
            rest = rest[zeros.readinto(rest):]
    return not rest


class Region:
    """One allocation by all ranks of a node: a row for each, of which a rank's own holds its array.

    `number` is the same on all its ranks, and no other region's on this node; `rows` gives each process its row.
    """

    def __init__(self, number: int, memory: np.ndarray, stride: int, pids: Sequence[int], nbytes: int):
        self.number, self.stride, self.nbytes = number, stride, nbytes
        self.base = memory.ctypes.data
        self.rows = {pid: row for row, pid in enumerate(pids)}
        self.freed, self.pid = "", os.getpid()
        self.start = self.base + self.rows[self.pid] * stride
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()     # the plans that reach into this memory
        self.memory = weakref.ref(memory)

    def release(self) -> None:
        """Give this rank's pages back at once, though arrays still map them: what is left reads as zeros."""
        memory = self.memory() if self.pid == os.getpid() else None      # a forked child's pages are its parent's
        if memory is not None and not self.give_back():
            memory[self.start - self.base:][:self.nbytes] = 0
        self.retire("with free()")

    def give_back(self) -> bool:
        """Let the system have the pages of this rank's row, which must still be mapped; False where it does not take them."""
        return _advise(self.start, self.nbytes, mmap.MADV_DONTNEED if self.number == ALONE else mmap.MADV_REMOVE)

    def retire(self, how: str) -> None:
        """Let no call use it any more."""
        self.freed = self.freed or how
        for plan in list(self.users):
            plan.retire(self.freed)


_REGIONS: list[tuple[int, Region]] = []
"""The regions whose memory this process maps, by the address of its own row."""

_NUMBERS = count(1)


def shared_anywhere() -> bool:
    """Tell whether any array of this process is in memory that ranks share."""
    return bool(_REGIONS)


def freed_anywhere() -> bool:
    """Tell whether an array that is still there may be in memory that was given back."""
    return any([region.freed for _, region in _REGIONS])


def find(address: int) -> Region | None:
    """Return the region whose row of this rank holds an address."""
    index = bisect_right(_REGIONS, address, key=lambda entry: entry[0]) - 1
    if index < 0:
        return None
    start, region = _REGIONS[index]
    return region if address < start + region.nbytes else None


def allocate(comm: MPI.Comm | None, shape: Any, dtype: np.dtype) -> tuple[np.ndarray, Region]:
    """Make an array in memory that the ranks of `comm`, on one node, share; collective.

    Alone, or where nothing can be shared (with a warning; comm None: as the caller knows), it is private memory, freed alike.
    """
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    nbytes = max(1, prod(shape) * dtype.itemsize)
    stride = -(-nbytes // PAGE) * PAGE + SKEW
    mapping = share(comm, stride * comm.size) if comm is not None and comm.size > 1 else None
    if mapping is None and (comm is None or comm.size > 1):
        warnings.warn("the ranks of this node cannot share memory (memfd through /proc, MPI window): the array is an ordinary one",
                      RuntimeWarning, stacklevel=4)
    if mapping is None:
        memory = _private(stride)
        region = Region(ALONE, memory, stride, [os.getpid()], nbytes)
    else:
        memory, pids = mapping.memory, comm.allgather(os.getpid())
        region = Region(comm.bcast(pids[0] << 32 | next(_NUMBERS)), memory, stride, pids, nbytes)
    if nbytes >= HUGE:
        _advise(region.base, memory.nbytes, mmap.MADV_HUGEPAGE)
    entry = region.start, region
    insort(_REGIONS, entry, key=lambda known: known[0])
    weakref.finalize(memory, _unmapped, entry, mapping and mapping.win).atexit = False
    return np.ndarray(shape, dtype, memory, region.start - region.base), region


def _private(nbytes: int) -> np.ndarray:
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error.strerror}") from None


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Tell the system about whole pages, of a file or a window alike; False where it refuses."""
    return _MADVISE(address, -(-nbytes // PAGE) * PAGE, advice) == 0


def collapse(spans: Iterable[tuple[int, int]]) -> None:
    """Ask the system to bring memory into huge pages now: other processes copy from and to these twice as fast.

    spans: address and bytes of arrays; those that lie near each other go together. A hint, of no effect where the system does not
    know it (Linux has it from 6.1 on) or has no huge pages left.
    """
    joined: list[list[int]] = []
    for address, nbytes in sorted(spans):
        start, end = address // PAGE * PAGE, address + nbytes
        if joined and start - joined[-1][1] < NEAR:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    for start, end in joined:
        if end - start >= HUGE:
            _advise(start, end - start, COLLAPSE)


def _unmapped(entry: tuple[int, Region], win: MPI.Win | None) -> None:
    """Forget a region when the last array in it has gone: another may come to lie at its addresses.

    A window stays mapped, for to free it is collective; only its pages go.
    """
    entry[1].retire("when its last array went")
    if win is not None and entry[1].pid == os.getpid() and not MPI.Is_finalized():
        entry[1].give_back()
    _REGIONS.remove(entry)
