"""Recursive doubling: exchange the whole vector with ranks 1, 2, 4, ... away. The fewest steps, each with the whole vector.

Eight ranks; after round k every rank has the sum of its 2^(k+1) neighbours:

    0 <-> 1    2 <-> 3    4 <-> 5    6 <-> 7     round 0
    0 <------> 2          4 <------> 6           round 1, 1 <-> 3 and 5 <-> 7 as well
    0 <-----------------> 4                      round 2, and so on

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.fold import folded
from mpiring.algorithms.step import Step, floor_log2, one

WHOLE = one(0)


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: log2 p steps (p: the power of two in n), 2 more where n is none; each carries the vector."""
    return folded(rank, size, WHOLE, _exchange)


def _exchange(rank: int, size: int) -> Iterator[Step]:
    for level in range(floor_log2(size)):
        peer = rank ^ 1 << level
        yield Step(peer, WHOLE, peer, WHOLE, reduce=True)
