"""Arrays fused into one buffer, so that one exchange serves many: laid out once, then filled and emptied through the same views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpiring.engine.scaling import scale
from mpiring.runtime.arrays import HOST, Space
from mpiring.runtime.copying import copy

LONG = 16 << 10
"""Bytes of an array from which on it matters how it is copied; see runtime/copying.py."""


class Burst:
    """Places for some arrays in a buffer: `views` of the arrays' own shapes, `whole` for the exchange."""

    def __init__(self, room: Callable[[int], Any], layout: Sequence[tuple[np.dtype, tuple[int, ...]]], grain: int,
                 dtype: np.dtype, host: bool, scaled: bool):
        """room: returns a buffer of some bytes. layout: each array's dtype and shape. grain: what places are multiples of, in
        bytes. dtype: of the elements to exchange. host: whether the arrays are in host memory. scaled: whether a factor is
        not 1.
        """
        sizes = [prod(shape) * each.itemsize for each, shape in layout]
        starts = [0, *accumulate(-(-size // grain) * grain for size in sizes)]
        count = padded(-(-starts[-1] // dtype.itemsize))
        buffer = room(count * dtype.itemsize)
        self.nbytes = starts[-1]
        self.views = [buffer[start:start + size].view(each).reshape(shape)
                      for start, size, (each, shape) in zip(starts, sizes, layout)]
        self.whole = buffer[:count * dtype.itemsize].view(dtype)
        self.move: Callable[[], Any] | None = None       # what exchanges it, once that is known
        self.host, self.plain = host, host and not scaled and max(sizes) < LONG
        self.line = self.whole[:self.nbytes // dtype.itemsize] if self.plain and grain == 1 else None        # without gaps


def padded(count: int) -> int:
    """Return the elements to exchange for some: one of eight numbers for each power of two, so that few plans serve all bursts.

    >>> [padded(count) for count in (5, 100, 1000, 1025)]
    [5, 104, 1024, 1152]
    """
    grain = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // grain) * grain


def pack(burst: Burst, owners: Sequence[Any], indexes: Sequence[int]) -> None:
    """Fill a burst: with the arrays of these operations, by their numbers there, times their factors.

    An operation is None on a rank that has joined, which adds zeros.
    """
    if burst.line is not None and None not in owners:
        np.concatenate([operation.arrays[index] for operation, index in zip(owners, indexes)], None, burst.line)
        return
    for view, operation, index in zip(burst.views, owners, indexes):
        if operation is None:
            view[...] = 0
        else:
            put(view, operation.arrays[index], operation, operation.description.prescale)


def unpack(burst: Burst, owners: Sequence[Any], indexes: Sequence[int]) -> None:
    """Empty a burst into the arrays that take the results, times their factors."""
    if burst.plain and None not in owners:
        for view, operation, index in zip(burst.views, owners, indexes):
            operation.outs[index][...] = view
        return
    for view, operation, index in zip(burst.views, owners, indexes):
        if operation is not None:
            take(operation.outs[index], view, operation, operation.description.postscale)


def put(view: Any, array: Any, operation: Any, factor: float = 1.0) -> None:
    """Copy an operation's array, times a factor, to where it is exchanged."""
    space: Space = operation.space
    if space is HOST:
        _copy(view, array, factor)
        return
    with space.on(operation.stream):
        if not isinstance(view, np.ndarray):
            scale(space.xp, view, array, factor) if factor != 1 else space.copy(view, array)
        else:
            space.pull(view, array)
            if factor != 1:
                scale(np, view, view, factor)


def take(out: Any, view: Any, operation: Any, factor: float = 1.0) -> None:
    """Copy a result, times a factor, to where the operation wants it."""
    space: Space = operation.space
    if space is HOST:
        _copy(out, view, factor)
        return
    with space.on(operation.stream):
        if not isinstance(view, np.ndarray):
            scale(space.xp, out, view, factor) if factor != 1 else space.copy(out, view)
        else:
            if factor != 1:
                scale(np, view, view, factor)
            space.push(out, view)


def _copy(target: np.ndarray, source: np.ndarray, factor: float) -> None:
    if factor != 1:
        scale(np, target, source, factor)
    elif target.nbytes >= LONG and target.flags.c_contiguous and source.flags.c_contiguous:
        function, args = copy(target.reshape(-1), source.reshape(-1))
        function(*args)
    else:
        np.copyto(target, source)


def settle(burst: Burst | None, operations: Sequence[Any]) -> None:
    """Wait for what was started on GPUs for some operations."""
    if burst is not None and burst.host:
        return
    for operation in {(id(each.space), id(each.stream)): each for each in operations if each and each.space is not HOST}.values():
        with operation.space.on(operation.stream):
            operation.space.settle()
