"""Two rings in opposite directions, with half the vector each: both directions of every link are in use.

Source: as for the ring; the two directions are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from mpiring.algorithms import ring
from mpiring.algorithms.step import Step, one
from mpiring.algorithms.weave import among, beside, on_chunks


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: 4(n-1) steps, in pairs that do not wait for each other; each rank sends 2(n-1)/n of it."""
    mirrored = _mirrored(size)
    return beside(ring.allreduce(rank, size),
                  on_chunks(lambda chunk: one(size + mirrored[chunk.start]), among(mirrored, ring.allreduce(mirrored[rank], size))))


@lru_cache(maxsize=64)
def _mirrored(size: int) -> tuple[int, ...]:
    return tuple(-place % size for place in range(size))
