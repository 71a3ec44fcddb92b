"""From the arguments of a call on tensors to an operation of the engine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

import mpiring
from mpiring.engine.operation import Operation
from mpiring.runtime import ops
from mpiring.torch.basics import Basics
from mpiring.torch.exceptions import translated
from mpiring.torch.process_sets import ProcessSet, engine, within
from mpiring.torch.tensors import array_of, stream_of

_OPS: dict[int, Callable[[], Any]] = {
    Basics.Average: lambda: mpiring.AVERAGE, Basics.Sum: lambda: MPI.SUM, Basics.Adasum: lambda: mpiring.ADASUM,
    Basics.Min: lambda: MPI.MIN, Basics.Max: lambda: MPI.MAX, Basics.Product: lambda: MPI.PROD}


def engine_op(op: int) -> Any:
    """Return what the engine calls an op; ValueError for one that is not known."""
    try:
        return _OPS[op]()
    except (KeyError, TypeError):
        raise ValueError(f"op is {op!r}, not hvd.Average, Sum, Adasum, Min, Max or Product") from None


def allreduce(tensors: Sequence[torch.Tensor], name: str | None, op: int, prescale: float, postscale: float,
              process_set: ProcessSet, in_place: bool, grouped: bool = True) -> Operation:
    """Submit a reduction of a group of tensors, or of one alone; its result is a list, or one array."""
    call = "grouped_allreduce" if grouped else "allreduce"
    options = {"process_set": within(process_set, call), "name": named(call, name), "op": engine_op(op),
               "prescale": prescale, "postscale": postscale}
    arrays = [array_of(tensor, in_place) for tensor in listed(tensors, call)]
    outs = arrays if in_place else [None] * len(arrays)
    if grouped:
        return _submitted(tensors, arrays, options, lambda: engine().grouped_allreduce_async(arrays, outs, **options))
    return _submitted(tensors, arrays, options, lambda: engine().allreduce_async(arrays[0], outs[0], **options))


def allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet, call: str = "allgather") -> Operation:
    """Submit a gathering of rows."""
    options = {"process_set": within(process_set, call), "name": named(call, name)}
    array = array_of(tensor)
    return _submitted([tensor], [array], options, lambda: engine().allgather_async(array, **options))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool) -> Operation:
    """Submit a broadcast."""
    options = {"process_set": within(process_set, "broadcast"), "name": named("broadcast", name)}
    array = array_of(tensor, in_place)
    return _submitted([tensor], [array], options,
                      lambda: engine().broadcast_async(array, root_rank, array if in_place else None, **options))


def alltoall(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None,
             process_set: ProcessSet) -> Operation:
    """Submit an exchange of rows. Its result is a pair, also where no splits are given: rows, and how many came from each rank."""
    inner = within(process_set, "alltoall")
    options = {"process_set": inner, "name": named("alltoall", name)}
    array, rows = array_of(tensor), _rows(splits)
    if rows is None and array.ndim and array.shape[0] % inner.size == 0:       # else the engine says what is wrong
        rows = [array.shape[0] // inner.size] * inner.size
    return _submitted([tensor], [array], options, lambda: engine().alltoall_async(array, rows, **options))


def reducescatter(tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float,
                  call: str = "reducescatter") -> Operation:
    """Submit a reduction of which each rank gets its rows."""
    options = {"process_set": within(process_set, call), "name": named(call, name), "op": engine_op(op),
               "prescale": prescale, "postscale": postscale}
    array = array_of(tensor)
    return _submitted([tensor], [array], options, lambda: engine().reduce_scatter_async(array, **options))


def group(tensors: Sequence[torch.Tensor], name: str | None, call: str,
          submit: Callable[[torch.Tensor, str | None], Operation]) -> list[Operation]:
    """Submit an operation for each tensor of a group; none, if one of them is wrong.

    The engine has no such groups. What can be wrong with a tensor is looked at first, the name when the first one is submitted.
    """
    arrays = [array_of(tensor) for tensor in listed(tensors, call)]
    if any(array.ndim == 0 for array in arrays):
        raise ValueError(f"{call}: a tensor has no dimensions, so it has no rows: pass tensor.reshape(1)")
    return [submit(tensor, name if name is None else f"{name}.{place}") for place, tensor in enumerate(tensors)]


def listed(tensors: Any, call: str) -> Sequence[torch.Tensor]:
    """Return the tensors of a group; TypeError for what is no list of tensors, ValueError for an empty one."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{call}: tensors is of type {type(tensors).__name__}, not a list of tensors")
    if not tensors:
        raise ValueError(f"{call}: tensors is empty: a group has one tensor at least")
    return tensors


def named(call: str, name: str | None) -> str | None:
    """Return the engine's name for an operation: one name may serve for two kinds of calls. None: paired by order."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{call}: name is of type {type(name).__name__}, not a str")
    return f"{call}.{name}" if name else None


def _rows(splits: Any) -> list[int] | None:
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.ndim != 1:
            raise ValueError(f"splits is a tensor of {splits.dtype} with {splits.ndim} dimensions, not of torch.int32 with one")
        return splits.tolist()
    try:
        return None if splits is None else [operator.index(rows) for rows in splits]
    except TypeError:
        raise ValueError(f"splits is neither a tensor of torch.int32 nor a list of whole numbers: {splits!r}") from None


def _submitted(tensors: Sequence[torch.Tensor], arrays: Sequence[Any], options: dict[str, Any],
               submit: Callable[[], Operation]) -> Operation:
    """Submit; ValueError, as in Horovod, for tensors of a dtype that is not for this operation."""
    try:
        with stream_of(tensors[0]), translated():
            return submit()
    except TypeError as error:
        if _supported(options.get("op"), arrays):
            raise
        raise ValueError(str(error)) from None


def _supported(op: Any, arrays: Sequence[Any]) -> bool:
    try:
        return all(ops.kind(array.dtype) and (op is None or ops.find(op, array.dtype)) for array in arrays)
    except TypeError:
        return False
