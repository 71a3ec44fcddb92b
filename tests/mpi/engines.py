"""What the tests of the engine share: engines on comms of their own, what NumPy makes of all ranks' arrays, every operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.runtime import halves, ops

from cases import COMM, RANK, SIZE, bits, values

EVERYONE = tuple(range(SIZE))

SETS = list(dict.fromkeys([EVERYONE[::2], EVERYONE[SIZE // 2:], EVERYONE[-1:]]))
"""Ranks of process sets that overlap, without the last rank and with it alone."""


@contextmanager
def started(comm: MPI.Comm = COMM, **options: object) -> Iterator[mpiring.Engine]:
    """Give an engine on a duplicate of a comm. What waits for ever is an error within a test's time."""
    own = comm.Dup()
    with mpiring.Engine(own, **{"timeout": 30, **options}) as engine:
        yield engine
    own.Free()


def means_something(op: object, dtype: np.dtype) -> bool:
    """Tell whether an op is for a dtype."""
    try:
        ops.find(op, dtype)
    except TypeError:
        return False
    return True


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
    """Return an array times a factor: integers in float64, truncated toward zero, 16-bit floats in float32."""
    wide = np.float64 if array.dtype.kind in "iu" else np.float32 if halves.is_narrow(array.dtype) else array.dtype
    return array if factor == 1 else (array.astype(wide) * factor).astype(array.dtype)


def reduced(op: object, arrays: Sequence[np.ndarray], prescale: float = 1.0, postscale: float = 1.0) -> np.ndarray:
    """Return what NumPy makes of the arrays of some ranks."""
    dtype = arrays[0].dtype
    operation = ops.find(op, dtype)
    combine = getattr(np, operation.ufunc)
    with np.errstate(all="ignore"):
        out = reduce(lambda a, b: combine(a, b).astype(dtype), [scaled(array, prescale) for array in arrays])
    if operation.average:
        wide = np.float64 if dtype.kind in "iu" else np.float32 if halves.is_narrow(dtype) else dtype
        out = (out.astype(wide) / len(arrays)).astype(dtype)        # astype truncates toward zero
    return scaled(out, postscale)


def everyones(count: int, dtype: object, ranks: Sequence[int] = EVERYONE) -> list[np.ndarray]:
    """Return the values of some ranks."""
    return [values(rank, count, np.dtype(dtype)) for rank in ranks]


def block(sender: int, receiver: int) -> np.ndarray:
    """Return the rows that one rank sends another in an alltoall: from none to three, which tell both."""
    return np.full(((sender + 2 * receiver) % 4, 2), 100 * sender + receiver, np.int32)


def operations(engine: mpiring.Engine) -> dict[str, tuple[Callable[[], int], Callable[[object], bool]]]:
    """Return one of every operation that has a handle: by its name, how to submit it, and whether a result is right."""
    mine = values(RANK, 5 * SIZE + 2, np.dtype(np.float32)).reshape(-1, 1)
    all_ = [array.reshape(-1, 1) for array in everyones(len(mine), np.float32)]
    whole = reduced(MPI.SUM, all_)
    blocks = [block(RANK, peer) for peer in EVERYONE]
    inbox = [block(peer, RANK) for peer in EVERYONE]
    return {
        "sum": (lambda: engine.allreduce_async(mine, name="sum"), lambda got: np.array_equal(got, whole)),
        "mean": (lambda: engine.allreduce_async(mine, name="mean", op=mpiring.AVERAGE),
                 lambda got: np.array_equal(got, reduced(mpiring.AVERAGE, all_))),
        "group": (lambda: engine.grouped_allreduce_async([mine, mine[0]], name="group", op=MPI.MAX),
                  lambda got: np.array_equal(got[0], reduced(MPI.MAX, all_)) and np.array_equal(got[1], got[0][0])),
        "gather": (lambda: engine.allgather_async(mine[:RANK], name="gather"),
                   lambda got: np.array_equal(got, np.concatenate([array[:rank] for rank, array in enumerate(all_)]))),
        "broadcast": (lambda: engine.broadcast_async(mine, SIZE - 1, name="broadcast"), lambda got: np.array_equal(got, all_[-1])),
        "alltoall": (lambda: engine.alltoall_async(np.concatenate(blocks), [len(rows) for rows in blocks], name="alltoall"),
                     lambda got: np.array_equal(got[0], np.concatenate(inbox)) and list(got[1]) == [len(rows) for rows in inbox]),
        "scatter": (lambda: engine.reduce_scatter_async(mine, name="scatter"),
                    lambda got: np.array_equal(got, np.array_split(whole, SIZE)[RANK])),
    }


def use_every_operation(engine: mpiring.Engine, seed: int = 0) -> None:
    """Submit one of every operation in an order of this rank's own, wait in another, and check the results."""
    chance = random.Random(seed * SIZE + RANK)
    known = operations(engine)
    names = list(known)
    chance.shuffle(names)
    handles = {name: known[name][0]() for name in names}
    chance.shuffle(names)
    for name in names:
        assert known[name][1](engine.synchronize(handles[name])), name
    engine.barrier()
    assert engine.broadcast_object({"rank": RANK}, SIZE - 1) == {"rank": SIZE - 1}
    assert engine.allgather_object(RANK) == [*EVERYONE]


def assert_usable(engine: mpiring.Engine) -> None:
    """See that an engine still works, for names that are new and for one that went wrong before."""
    for _ in range(2):
        assert (engine.allreduce(np.ones(4), name="x") == SIZE).all()
        assert (engine.allreduce(np.ones(4)) == SIZE).all()
    use_every_operation(engine)


def assert_same(got: object, expected: np.ndarray) -> None:
    """See that an array is another one, with its shape, dtype and bits."""
    assert isinstance(got, np.ndarray)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert bits(got) == bits(expected), (got, expected)
