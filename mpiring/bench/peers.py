"""What others do with the same data: mpi4py's comm without mpiring between, and PyTorch's gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import counts
from mpiring.algorithms.registry import COLLECTIVES
from mpiring.runtime import ops
from mpiring.runtime.channel import channel_of
from mpiring.runtime.native import LIMIT

if TYPE_CHECKING:
    from mpiring.bench.subjects import Buffers

GLOO = "gloo"

GLOO_DTYPES = ("float32", "float64", "int32", "int64")
"""What gloo is compared for; it sums them in full."""


def by_comm(buffers: Buffers) -> Callable[[], object]:
    """Return the call of a program with mpi4py alone. TypeError where MPI cannot do it, or leaves the result elsewhere."""
    comm, send, recv = buffers.comm, buffers.send, buffers.recv
    given, root = MPI.IN_PLACE if buffers.inplace else send, buffers.root
    op = _mpi_op(buffers)
    if buffers.collective == "allreduce":
        return partial(comm.Allreduce, given, recv, op)
    if buffers.collective == "reduce":
        return partial(comm.Reduce, given, recv, op, root) if comm.rank == root else partial(comm.Reduce, send, None, op, root)
    if buffers.collective == "broadcast":
        return partial(comm.Bcast, recv, root)
    shares = counts(buffers.count, comm.size)
    if buffers.collective == "reduce_scatter":
        if buffers.inplace:
            raise TypeError("MPI's Reduce_scatter in place leaves the chunk at the front of the vector, not in its place")
        return partial(comm.Reduce_scatter, send, recv, shares, op)
    if buffers.collective == "allgather":
        return partial(comm.Allgatherv, given, [recv, shares])
    return partial(comm.Alltoallv, given if buffers.inplace else [send, shares], [recv, shares])


def _mpi_op(buffers: Buffers) -> MPI.Op | None:
    """Return the op if there is one, tried on one local element; TypeError where the MPI library does not know it for the dtype."""
    if buffers.count > LIMIT:
        raise TypeError(f"one call of MPI takes up to {LIMIT} elements, not {buffers.count}")
    one = np.zeros(1, buffers.recv.dtype)
    if not COLLECTIVES[buffers.collective].reduces:
        ops.mpi_type(one.dtype)
        return None
    op = ops.NAMES[buffers.op]
    if not isinstance(op, MPI.Op):
        raise TypeError(f"MPI has no {buffers.op}")
    try:
        op.Reduce_local(one, one.copy())
    except (MPI.Exception, BufferError):
        raise TypeError(f"this MPI library has no {buffers.op} for dtype {one.dtype}") from None
    return op


@contextmanager
def gloo(comm: MPI.Comm) -> Iterator[None]:
    """Make PyTorch's process group of these ranks, and end it afterwards; collective."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = _store(comm)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
        comm.Barrier()      # rank 0 keeps the store until nobody needs it
    finally:
        distributed.destroy_process_group()


def _store(comm: MPI.Comm) -> Any:
    """Return the store through which gloo's ranks find each other: rank 0 serves it on a free port."""
    from torch.distributed import TCPStore

    several = len(set(channel_of(comm).nodes)) > 1
    host = os.environ.get("MASTER_ADDR") or (socket.gethostname() if several else "127.0.0.1")
    store = TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    host, port = comm.bcast((host, store and store.port))
    return store or TCPStore(host, port, comm.size, is_master=False)


def by_gloo(buffers: Buffers) -> Callable[[], object]:
    """Return the call that sums by gloo, which works in place."""
    import torch
    from torch import distributed

    tensor = torch.from_numpy(buffers.recv)
    if buffers.inplace:
        return partial(distributed.all_reduce, tensor)

    def run() -> None:
        np.copyto(buffers.recv, buffers.send)
        distributed.all_reduce(tensor)

    return run
