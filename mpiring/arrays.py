"""Arrays that all ranks of a node reach: collectives on them copy nothing, but read and write them where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.errors import MismatchError
from mpiring.runtime import memory, ops
from mpiring.runtime.channel import channel_of, check_comm


def empty(shape: Any, dtype: Any = float, comm: MPI.Comm = MPI.COMM_WORLD) -> np.ndarray:
    """Make a NumPy array in memory that the ranks of a node share. All ranks of `comm` must call, for the same number of bytes.

    shape, dtype: as for numpy.empty; a numeric dtype. comm: any intra-communicator; the array serves calls on others as well.

    Every rank gets an array of its own, to use like any other (slice it, view it, torch.from_numpy it). Where all ranks pass the
    same part of such an array, a call takes the fastest path. Meant for few large arrays, to cut smaller ones from: each takes
    whole pages. Its memory is given back by free(), or when the last view of it has gone on all ranks; a rank that is killed leaves
    nothing behind. Where no memory can be shared, a RuntimeWarning says so and the array is an ordinary one.

    Raises TypeError or ValueError for wrong arguments, MismatchError where ranks disagree about the bytes, MemoryError.
    """
    return _make(shape, dtype, comm)


def _make(shape: Any, dtype: Any, comm: MPI.Comm) -> np.ndarray:
    check_comm(comm)
    dtype = np.dtype(dtype)
    if not ops.kind(dtype):
        raise TypeError(f"empty on rank {comm.rank}: dtype {dtype} is not numeric")
    try:
        nbytes = np.broadcast_to(np.empty((), dtype), shape).nbytes      # NumPy checks the shape
    except (TypeError, ValueError) as error:
        raise type(error)(f"empty on rank {comm.rank}: shape {shape!r}: {error}") from None
    channel = channel_of(comm)
    found = channel.comm.allgather(nbytes)
    if len(set(found)) > 1:
        odd = next(rank for rank, other in enumerate(found) if other != found[0])
        raise MismatchError(f"empty on rank {comm.rank}: ranks disagree: rank 0 asked for {found[0]} bytes, rank {odd} for "
                            f"{found[odd]}")
    array, region = memory.allocate(channel.node and channel.node.comm, shape, dtype)
    channel.regions.add(region)
    if not channel.shares:                               # which says what "auto" chooses: no rank may keep a plan from before
        channel.shares = True
        channel.plans.clear()
    return array


def zeros(shape: Any, dtype: Any = float, comm: MPI.Comm = MPI.COMM_WORLD) -> np.ndarray:
    """Make a shared array of zeros; see empty, whose memory is fresh from the system and zero as well."""
    return _make(shape, dtype, comm)


def empty_like(prototype: Any, dtype: Any = None, comm: MPI.Comm = MPI.COMM_WORLD) -> np.ndarray:
    """Make a shared array of another array's shape and dtype, in C order; see empty."""
    return _make(np.shape(prototype), np.asarray(prototype).dtype if dtype is None else dtype, comm)


def free(array: np.ndarray) -> None:
    """Give the memory of a shared array back to the system. All ranks that made it should call, after their last call with it.

    Local: nothing is sent. The array, and all views of it, read as zeros afterwards, and calls refuse them. Freeing again does
    nothing.

    Raises ValueError for an array that is not shared.
    """
    region = memory.find(array.ctypes.data) if isinstance(array, np.ndarray) else None
    if region is None and (not isinstance(array, np.ndarray) or array.size):
        raise ValueError("array is not in memory made by mpiring.empty")
    if region is not None:
        region.release()
