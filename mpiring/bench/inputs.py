"""Inputs whose result is exact, so that the check is ==: small integers, no rounding in any order of summation.

A vector repeats a base pattern whose length is a prime, so that a chunk in the wrong place does not look right by chance.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from mpiring.runtime import ops

PERIOD = 10007


def pattern(op: str, dtype: np.dtype, rank: int, size: int) -> np.ndarray:
    """Return one period of a rank's input for an op."""
    place = np.arange(PERIOD)
    if op == "PROD":
        values = 1 + (place % (size + 1) == rank)
    elif op in ("SUM", "AVERAGE"):
        values = (place // (rank + 1) + rank) % (max(1, min(7, _exact(dtype) // size)) + 1)
    else:
        values = (place // (rank + 1) + rank) % 4
    if dtype.kind == "b":
        return (place // (rank + 1)) % 2 == 0
    return values.astype(dtype)


def _exact(dtype: np.dtype) -> int:
    """Return up to which integer a dtype is exact."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    if ops.kind(dtype) == "f" and dtype.itemsize <= 2:
        return 2048 if dtype == np.float16 else 256
    return 1 << 24


def reduced(op: str, dtype: np.dtype, size: int) -> np.ndarray:
    """Return one period of the result over all ranks, by NumPy."""
    operation = ops.find(ops.NAMES[op], dtype)
    combine = getattr(np, operation.ufunc)
    result = reduce(lambda a, b: combine(a, b).astype(dtype), (pattern(op, dtype, rank, size) for rank in range(size)))
    if operation.average and size > 1:
        ops.divide(np, dtype, size)(result)
    return result


def fill(array: np.ndarray, base: np.ndarray, start: int = 0) -> None:
    """Write the repeated pattern into an array that holds the vector from position `start` on."""
    for low in range(0, array.size, 64 * PERIOD):
        part = array[low:low + 64 * PERIOD]
        part[:] = np.resize(np.roll(base, -((start + low) % PERIOD)), part.size)


def wrong(array: np.ndarray, base: np.ndarray, start: int = 0) -> tuple[int, int]:
    """Count the elements that differ from the repeated pattern; return that and the first place (-1: none)."""
    count, first = 0, -1
    for low in range(0, array.size, 64 * PERIOD):
        part = array[low:low + 64 * PERIOD]
        bad = np.flatnonzero(part != np.resize(np.roll(base, -((start + low) % PERIOD)), part.size))
        if bad.size and first < 0:
            first = low + int(bad[0])
        count += bad.size
    return count, first
