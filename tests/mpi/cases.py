"""What the MPI tests share: the comm, inputs with exact results, arrays of every kind and layout, and nodes that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import ml_dtypes
import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.runtime import ops
from mpiring.runtime.channel import channel_of

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

COUNTS = sorted({0, 1, SIZE - 1, SIZE, SIZE + 1, 1000, 10007})
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(char) for char in "?bhilqBHILQefdgFDG"] + [BFLOAT16, np.dtype(">f4"), np.dtype(">i8")]


def values(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return small integers that depend on rank and place; up to 16 ranks their sum is exact in every dtype but bool."""
    return ((np.arange(count) * 5 + 3 * rank) % 7).astype(dtype)


def result(op: object, count: int, dtype: np.dtype, size: int = SIZE) -> np.ndarray:
    """Return what NumPy makes of all ranks' values."""
    operation = ops.find(op, dtype)
    combine = getattr(np, operation.ufunc)
    with np.errstate(all="ignore"):
        out = reduce(lambda a, b: combine(a, b).astype(dtype), (values(rank, count, dtype) for rank in range(size)))
    if operation.average:
        wide = out.astype(np.float64 if dtype.kind in "iu" else np.float32 if dtype.itemsize == 2 else dtype)
        out = (wide / size).astype(dtype)        # astype truncates toward zero
    return out


def bits(array: np.ndarray) -> bytes:
    """Return an array's bytes, without the padding of x86's long double."""
    array = np.ascontiguousarray(array)
    if array.dtype.char in "gG" and np.finfo(array.dtype).nmant == 63:
        return array.reshape(-1).view(np.uint8).reshape(-1, np.dtype("g").itemsize)[:, :10].tobytes()
    return array.tobytes()


def same_bits(array: np.ndarray) -> bool:
    """Tell whether all ranks have the same bits."""
    mine = bits(array)
    return all(theirs == mine for theirs in COMM.allgather(mine))


LAYOUTS = {
    "C": lambda base: base.copy(),
    "Fortran": lambda base: np.asfortranarray(base),
    "strided": lambda base: _within(base, np.zeros((base.shape[0] * 2, base.shape[1] * 3), base.dtype)[::2, 1::3]),
    "reversed": lambda base: _within(base, np.zeros_like(base)[::-1, ::-1]),
    "transposed": lambda base: _within(base, np.zeros(base.shape[::-1], base.dtype).T),
    "column": lambda base: _within(base, np.zeros((*base.shape, 3), base.dtype)[..., 1]),
    "unaligned": lambda base: _within(base, np.zeros(base.nbytes + 1, np.uint8)[1:].view(base.dtype).reshape(base.shape)),
}
"""Ways to hold the same values: functions of a two-dimensional array."""


KINDS = {
    "ordinary": lambda flat: flat.copy(),
    "shared": lambda flat: _within(flat, mpiring.empty(flat.shape, flat.dtype)),
    "mixed": lambda flat: [KINDS["shared"](flat), KINDS["ordinary"](flat)][RANK % 2],
}
"""Where the same values can lie. Collective: shared arrays are made by all ranks."""


@contextmanager
def on_nodes(numbers: Sequence[int], segment: int | None = None) -> Iterator[MPI.Comm]:
    """Give a comm whose ranks take themselves for spread over nodes: those with one number are on the same one."""
    comm = COMM.Dup()
    channel = channel_of(comm)
    channel.segment = segment or channel.segment
    channel.nodes = [list(dict.fromkeys(numbers)).index(number) for number in numbers]       # as topology.nodes has them
    channel.spread = len(set(numbers)) > 1
    yield comm
    comm.Free()


def attempt(call: Callable[[], object]) -> tuple[type | None, str]:
    """Return the kind and text of the error on this rank, after all ranks are through."""
    try:
        call()
    except Exception as error:
        found = type(error), str(error)
    else:
        found = None, ""
    COMM.Barrier()
    return found


def _within(base: np.ndarray, view: np.ndarray) -> np.ndarray:
    view[...] = base
    return view
