"""From the arguments of a call to an operation: wrapped, checked, and described as the other ranks have to describe it."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpiring.algorithms.cuts import counts as balanced
from mpiring.engine.operation import Description, Operation
from mpiring.runtime import memory, ops
from mpiring.runtime.arrays import HOST, Space, bounds, shares_elements, wrap

USER_OP = "an op made with MPI.Op.Create"
"""How ranks describe ops of their own: whether these are the same cannot be seen."""


def allreduce(arrays: Sequence[Any], outs: Sequence[Any] | None, op: Any, prescale: Any, postscale: Any,
              single: bool) -> Operation:
    """Return an allreduce of one array, or of a group."""
    wrapped, space = _wrapped(arrays, "array" if single else "arrays")
    taken = _outs(wrapped, outs, space, single)
    pre, post = _factor("prescale", prescale), _factor("postscale", postscale)
    for array in wrapped:
        name = _named_op(op, array.dtype, space)
    description = Description("allreduce", *_layout(wrapped), name, None, pre, post, space is not HOST)
    return _operation(description, op, wrapped, taken, taken[0] if single else taken, space)


class Known(NamedTuple):
    """An allreduce of one array in host memory that was checked."""

    description: Description
    op: Any
    prescale: float
    postscale: float
    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int


def known(operation: Operation) -> Known | None:
    """Return what need not be checked again, for an allreduce of one array in host memory."""
    description, array = operation.description, operation.arrays[0]
    if operation.space is not HOST:
        return None
    return Known(description, operation.op, description.prescale, description.postscale, array.dtype, array.shape, array.nbytes)


def again(found: Known, name: str, array: Any, out: Any, op: Any, prescale: Any, postscale: Any) -> Operation | None:
    """Return an allreduce like one that was checked already, if it is for such an array; None where all must be checked anew."""
    description, before, pre, post, dtype, shape, nbytes = found
    if (type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape
            or (array.base is not None and memory.freed_anywhere()) or (before is not op and before != op)
            or (prescale is not pre and (type(prescale) is not float or prescale != pre))
            or (postscale is not post and (type(postscale) is not float or postscale != post))):
        return None
    arrays = (array,)
    if out is None:
        out = np.empty(shape, dtype)
        outs = (out,)
    elif out is array and array.flags.carray:            # which is to be written
        outs = arrays
    else:
        return None
    operation = object.__new__(Operation)                # to call the class makes a submission a quarter slower
    operation.description, operation.op, operation.arrays, operation.outs, operation.result = description, op, arrays, outs, out
    operation.nbytes, operation.left, operation.key, operation.error, operation.done = nbytes, 1, name, None, False
    operation.submitted = perf_counter()
    return operation


def broadcast(array: Any, root: Any, out: Any, ranks: Sequence[int], rank: int) -> Operation:
    """Return a broadcast; `root` is one of `ranks`, those of the process set."""
    root = _whole("root", root)
    if root not in ranks:
        raise ValueError(f"root {root} is not one of the ranks {_some(ranks)}")
    wrapped, space = _wrapped([array], "array")
    sends = ranks[rank] == root
    taken = [wrapped[0]] if out is not None and out is array and sends else _outs(wrapped, [out], space, True)
    _known(wrapped[0].dtype)
    description = Description("broadcast", *_layout(wrapped), "", ranks.index(root), device=space is not HOST)
    return _operation(description, None, wrapped, taken, taken[0], space)


def reduce_scatter(array: Any, op: Any, prescale: Any, postscale: Any, size: int, rank: int) -> Operation:
    """Return a reduction that leaves each rank its rows."""
    (array,), space = _wrapped([array], "array")
    _has_rows(array, "reduce_scatter")
    found = _op(op, array.dtype, space)
    pre, post = _factor("prescale", prescale), _factor("postscale", postscale)
    rows = balanced(array.shape[0], size)[rank]
    out = space.made((rows, *array.shape[1:]), array.dtype)
    description = Description("reduce_scatter", *_layout([array]), USER_OP if found.user else found.name, None, pre, post,
                              space is not HOST)
    return _operation(description, op, [array], [out], out, space)


def allgather(array: Any) -> Operation:
    """Return a gathering of rows."""
    (array,), space = _wrapped([array], "array")
    _has_rows(array, "allgather")
    _known(array.dtype)
    operation = _operation(_varying("allgather", array, space), None, [array], [None], None, space)
    operation.rows = [array.shape[0]]
    return operation


def alltoall(array: Any, splits: Any, size: int) -> Operation:
    """Return an exchange of rows."""
    (array,), space = _wrapped([array], "array")
    _has_rows(array, "alltoall")
    _known(array.dtype)
    rows = _splits(splits, array.shape[0], size)
    operation = _operation(_varying("alltoall", array, space), None, [array], [None], None, space)
    operation.rows, operation.splits = rows, splits is not None
    return operation


def barrier() -> Operation:
    """Return a meeting of all ranks."""
    return _operation(Description("barrier"), None, [], [], None, HOST)


def _operation(description: Description, op: Any, arrays: list[Any], outs: list[Any], result: Any, space: Space) -> Operation:
    operation = Operation(description, op, arrays, outs, result, sum(array.nbytes for array in arrays))
    if space is not HOST:
        operation.space, operation.stream = space, space.stream()
    return operation


def _splits(splits: Any, length: int, size: int) -> list[int]:
    if splits is None:
        if length % size:
            raise ValueError(f"array has {length} rows, which {size} ranks cannot share evenly: pass splits")
        return [length // size] * size
    try:
        rows = [operator.index(row) for row in (splits.tolist() if hasattr(splits, "tolist") else splits)]
    except TypeError:
        raise TypeError(f"splits is not a list of whole numbers: {splits!r}") from None
    if len(rows) != size or min(rows) < 0 or sum(rows) > length:
        raise ValueError(f"splits {rows} are not one for each of {size} ranks, none negative, with a sum of at most {length} rows")
    return rows


def _wrapped(arrays: Sequence[Any], argument: str) -> tuple[list[Any], Space]:
    if not isinstance(arrays, Sequence):
        raise TypeError(f"{argument} is of type {type(arrays).__name__}, not a list of arrays")
    found = [wrap(array, argument) for array in arrays]
    if not found:
        raise ValueError(f"{argument} is empty: a group has one array at least")
    spaces = {space for _, space in found}
    if len(spaces) > 1:
        raise ValueError(f"{argument} are not in one memory: some are on a GPU, or they are on two")
    for array, space in found:
        if space is HOST and array.base is not None and (region := memory.find(array.ctypes.data)) and region.freed:
            raise ValueError(f"{argument} is in shared memory that was freed {region.freed}")
    return [array for array, _ in found], found[0][1]


def _outs(arrays: Sequence[Any], outs: Sequence[Any] | None, space: Space, single: bool) -> list[Any]:
    """Return the arrays that take the results: new ones where the caller gave none."""
    outs = [None] * len(arrays) if outs is None else outs
    name = "out" if single else "outs"
    if not isinstance(outs, Sequence) or len(outs) != len(arrays):
        raise ValueError(f"{name} is {type(outs).__name__} of {len(outs)}, not a list of {len(arrays)} like arrays")
    found = [space.made(array.shape, array.dtype) if out is None else _out(array, out, space, name)
             for array, out in zip(arrays, outs)]
    if len(found) > 1 and any(out is not None for out in outs):
        _check_apart(arrays, found, space)
    return found


def _check_apart(arrays: Sequence[Any], outs: Sequence[Any], space: Space) -> None:
    """Refuse outs of a group that share an element with one another, or with another one's array."""
    placed = sorted((*bounds(out), place) for place, out in enumerate(outs) if out.size)
    for (_, end, one), (start, _, other) in pairwise(placed):
        if start < end and space.overlap(outs[one], outs[other]):
            raise ValueError(f"outs {min(one, other)} and {max(one, other)} share memory")
    for place, array in enumerate(arrays):
        low, high = bounds(array)
        first = max(0, bisect_left(placed, (low,)) - 1)
        for start, end, other in placed[first:bisect_left(placed, (high,))] if array.size else ():
            if other != place and start < high and low < end and space.overlap(outs[other], array):
                raise ValueError(f"out {other} shares memory with array {place}")


def _out(array: Any, out: Any, space: Space, name: str) -> Any:
    taken, where = wrap(out, name)
    if where is not space:
        raise ValueError(f"{name} is not in the same memory as the array: one is on a GPU, or they are on two")
    if taken.dtype != array.dtype:
        raise TypeError(f"{name} has dtype {taken.dtype}, but the array has {array.dtype}")
    if taken.shape != array.shape:
        raise ValueError(f"{name} has shape {taken.shape}, but the array has {array.shape}")
    if space is HOST and not taken.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if shares_elements(taken):
        raise ValueError(f"{name} has elements that share memory (strides {taken.strides})")
    if space.identity(taken) == space.identity(array):
        return array
    if taken.size and space.overlap(taken, array):
        raise ValueError(f"{name} overlaps the array; for a result in place pass the array itself")
    return taken


def _named_op(op: Any, dtype: np.dtype, space: Space) -> str:
    """Return how ranks describe the op of an allreduce, if it is for the array."""
    if op is not ops.ADASUM:
        found = _op(op, dtype, space)
        return USER_OP if found.user else found.name
    if dtype.name not in ops.ADASUM_DTYPES:
        raise TypeError(f"op ADASUM has no meaning for dtype {dtype} (it is for {', '.join(ops.ADASUM_DTYPES)})")
    return "ADASUM"


def _op(op: Any, dtype: np.dtype, space: Space) -> ops.Operation:
    _known(dtype)
    found = ops.find(op, dtype)
    if found.user and space is not HOST:
        raise TypeError("op is made with MPI.Op.Create: it is for host memory, not for arrays on a GPU")
    return found


def _known(dtype: np.dtype) -> None:
    if not ops.kind(dtype):
        raise TypeError(f"array has dtype {dtype}, which is not numeric")


def _has_rows(array: Any, kind: str) -> None:
    if array.ndim == 0:
        raise ValueError(f"array has no dimensions, so it has no rows for {kind}: pass array.reshape(1)")


def _factor(name: str, value: Any) -> float:
    if not isinstance(value, (Real, np.number)) or isinstance(value, np.complexfloating):
        raise TypeError(f"{name} is of type {type(value).__name__}, not a real number")
    try:
        factor = float(value)
    except OverflowError:
        factor = math.nan
    if math.isnan(factor):                               # which is not equal to that of the other ranks
        raise ValueError(f"{name} is {value!r:.40}: not a number that float64 holds")
    return factor


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is of type {type(value).__name__}, not a rank") from None


def _layout(arrays: Sequence[Any]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    return tuple(named(array.dtype) for array in arrays), tuple(array.shape for array in arrays)


def _varying(kind: str, array: Any, space: Space) -> Description:
    return Description(kind, (named(array.dtype),), ((None, *array.shape[1:]),), device=space is not HOST)


def named(dtype: np.dtype) -> str:
    """Return a dtype as ranks tell each other: with its byte order where that is not the machine's."""
    return dtype.name if dtype.isnative else dtype.str


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
