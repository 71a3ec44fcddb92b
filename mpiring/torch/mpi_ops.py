"""Horovod's collectives for tensors: at once, by handle (`_async`), in place (`_`), and in groups.

Operations of one name belong together on all ranks, whatever the order of calls; those without a name pair by their order. Results
are new tensors on the device of the operands. Wrong arguments are ValueErrors (or TypeErrors) at once; what goes wrong later,
synchronize raises as HorovodInternalError, on every rank, after which other operations work. Autograd goes back through the
calls that neither are asynchronous nor work in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpiring.torch import submissions
from mpiring.torch.basics import (
    _basics,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from mpiring.torch.compression import Compression
from mpiring.torch.eager import eager
from mpiring.torch.exceptions import HorovodInternalError, translated
from mpiring.torch.gradients import LINEAR, Allgather, Allreduce, Alltoall, Broadcast, Reducescatter, exchanged
from mpiring.torch.handles import _handle_map, keep, poll, synchronize
from mpiring.torch.process_sets import (
    ProcessSet,
    add_process_set,
    engine,
    global_process_set,
    remove_process_set,
    within,
)
from mpiring.torch.submissions import engine_op
from mpiring.torch.tensors import tensor_of

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "_basics",
    "_handle_map",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "engine_op",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average, Sum, Adasum = _basics.Average, _basics.Sum, _basics.Adasum
Min, Max, Product = _basics.Min, _basics.Max, _basics.Product

Tensors = Sequence[torch.Tensor]


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the op that is meant by `op`, or by Horovod's older `average`; Average where both are left out."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("average and op are given, of which op has taken the other one's place: leave average out")
    warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


# Allreduce

@eager
def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
              op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Reduce a tensor element by element over the ranks of a process set, and return the result.

    average: deprecated. compression: what makes a smaller tensor to be sent. op: Average (default; integers are divided in
    float64 and truncated toward zero), Sum, Adasum, Min, Max, Product. prescale_factor, postscale_factor: for what goes in and
    what comes out.
    """
    op = handle_average_backwards_compatibility(op, average)
    small, context = compression.compress(tensor)
    result, = _reduced([small], name, op, prescale_factor, postscale_factor, process_set, False)
    return compression.decompress(result, context)


@eager
def grouped_allreduce(tensors: Tensors, average: bool | None = None, name: str | None = None,
                      compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Reduce tensors as one operation, all or none, and return the list of results; see allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    small, contexts = _compressed(tensors, compression, "grouped_allreduce")
    results = _reduced(small, name, op, prescale_factor, postscale_factor, process_set, True)
    return [compression.decompress(result, context) for result, context in zip(results, contexts)]


@eager
def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> int:
    """Start to reduce a tensor; return a handle for poll and synchronize. See allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    return keep(submissions.allreduce([tensor], name, op, prescale_factor, postscale_factor, process_set, False, False), tensor_of)


@eager
def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> int:
    """Start to reduce a tensor in place; return a handle for poll and synchronize. See allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    return keep(submissions.allreduce([tensor], name, op, prescale_factor, postscale_factor, process_set, True, False),
                lambda _: tensor)


@eager
def grouped_allreduce_async(tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
                            prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:
    """Start to reduce tensors as one operation; return a handle, whose result is a list. See allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    return keep(submissions.allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set, False), _tensors)


@eager
def grouped_allreduce_async_(tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
                             prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:
    """Start to reduce tensors as one operation, in place; return a handle, whose result is a list. See allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    return keep(submissions.allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set, True),
                lambda _: [*tensors])


@eager
def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Reduce a tensor in place, and return it. See allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    return synchronize(allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set))


@eager
def grouped_allreduce_(tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
                       prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Reduce tensors as one operation, in place, and return the list of them. See allreduce."""
    op = handle_average_backwards_compatibility(op, average)
    return synchronize(grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set))


@eager
def sparse_allreduce_async(tensor: torch.Tensor, name: str | None, op: int,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor | None]:
    """Start to reduce a sparse tensor; return a function that waits and returns the result, not coalesced.

    All ranks get the elements of all of them. op: Average or Sum.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError("sparse_allreduce_async is for tensors of layout torch.sparse_coo")
    if op not in (Average, Sum):
        raise ValueError(f"op is {op!r}: sparse_allreduce_async knows hvd.Average and hvd.Sum")
    parts = [tensor._indices().t(), tensor._values()]
    handle = grouped_allgather_async(parts, name and f"sparse.{name}", process_set)
    return lambda: _sparse(synchronize(handle), tensor.shape, process_set.size() if op == Average else 1)


def _sparse(parts: list[torch.Tensor] | None, shape: torch.Size, divisor: int) -> torch.Tensor | None:
    if parts is None:
        return None
    indices, values = parts
    if divisor > 1:
        exact = values.is_floating_point() or values.is_complex()
        values = values / divisor if exact else torch.div(values, divisor, rounding_mode="trunc")
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True)     # ranks' shapes may differ


def _reduced(tensors: Tensors, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet,
             grouped: bool) -> Sequence[torch.Tensor]:
    """Reduce. Where gradients go by elements, the factors are autograd's to go back through."""
    if op in LINEAR or prescale == postscale == 1 or not any(tensor.requires_grad for tensor in tensors):
        return Allreduce.apply(op, name, prescale, postscale, process_set, grouped, *tensors)
    results = Allreduce.apply(op, name, 1.0, 1.0, process_set, grouped, *(tensor * prescale for tensor in tensors))
    return [result * postscale for result in results]


def _compressed(tensors: Tensors, compression: Any, call: str) -> tuple[list[torch.Tensor], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in submissions.listed(tensors, call)]
    return [small for small, _ in pairs], [context for _, context in pairs]


def _tensors(arrays: list[Any]) -> list[torch.Tensor]:
    return [tensor_of(array) for array in arrays]


# What moves rows

@eager
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return the rows of all ranks, in the order of ranks; each may bring another number of them."""
    result, = Allgather.apply(name, process_set, "allgather", tensor)
    return result


@eager
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to gather the rows of all ranks; return a handle."""
    return keep(submissions.allgather(tensor, name, process_set), tensor_of)


@eager
def grouped_allgather(tensors: Tensors, name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Gather the rows of each of several tensors, and return the list of results."""
    return [*Allgather.apply(name, process_set, "grouped_allgather", *submissions.listed(tensors, "grouped_allgather"))]


@eager
def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to gather the rows of each of several tensors; return a handle, whose result is a list."""
    call = "grouped_allgather"
    return keep(submissions.group(tensors, name, call, lambda tensor, name: submissions.allgather(tensor, name, process_set, call)),
                _tensors)


@eager
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return the root's tensor, on all ranks. root_rank: among all ranks, also in a process set."""
    return Broadcast.apply(tensor, root_rank, name, process_set)


@eager
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> int:
    """Start to broadcast the root's tensor; return a handle."""
    return keep(submissions.broadcast(tensor, root_rank, name, process_set, False), tensor_of)


@eager
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Fill the tensor with the root's, on all ranks, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


@eager
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> int:
    """Start to fill the tensor with the root's; return a handle."""
    return keep(submissions.broadcast(tensor, root_rank, name, process_set, True), lambda _: tensor)


@eager
def alltoall(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to every rank, and return the rows received, in the order of ranks.

    splits: how many rows go to each rank; a tensor of torch.int32, or a list; left out, all ranks get as many. Where splits are
    given, the result is a pair: the rows, and a tensor of how many came from each rank.
    """
    return Alltoall.apply(tensor, splits, name, process_set)


@eager
def alltoall_async(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> int:
    """Start to send rows to every rank; return a handle, with the result of alltoall."""
    return keep(submissions.alltoall(tensor, splits, name, process_set),
                lambda result: exchanged(result)[0] if splits is None else exchanged(result))


@eager
def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> torch.Tensor:
    """Reduce a tensor, and return this rank's rows of the result: as even as can be, first ranks one row more. See allreduce."""
    small, context = compression.compress(tensor)
    result, = Reducescatter.apply(op, name, prescale_factor, postscale_factor, process_set, "reducescatter", small)
    return compression.decompress(result, context)


@eager
def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> int:
    """Start to reduce a tensor of which each rank gets its rows; return a handle. See reducescatter."""
    return keep(submissions.reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor), tensor_of)


@eager
def grouped_reducescatter(tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[torch.Tensor]:
    """Reduce several tensors, and return the list of this rank's rows of each result. See reducescatter."""
    call = "grouped_reducescatter"
    small, contexts = _compressed(tensors, compression, call)
    results = Reducescatter.apply(op, name, prescale_factor, postscale_factor, process_set, call, *small)
    return [compression.decompress(result, context) for result, context in zip(results, contexts)]


@eager
def grouped_reducescatter_async(tensors: Tensors, name: str | None = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> int:
    """Start to reduce several tensors of which each rank gets its rows; return a handle, whose result is a list."""
    call = "grouped_reducescatter"
    return keep(submissions.group(tensors, name, call, lambda tensor, name: submissions.reducescatter(
        tensor, name, op, process_set, prescale_factor, postscale_factor, call)), _tensors)


# Meetings

@eager
def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so; return the rank that was last.

    Until then it adds zeros to the others' allreduces (an Average divides by all ranks all the same); their other operations fail,
    on every rank that waits. device: for Horovod's scripts; the zeros take no memory on a GPU.
    """
    with translated():
        return engine().join()


@eager
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called this."""
    inner = within(process_set, "barrier")
    with translated():
        engine().barrier(process_set=inner)
