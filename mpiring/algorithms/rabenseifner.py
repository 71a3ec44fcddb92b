"""Rabenseifner's algorithm: halve the vector with every exchange while it is summed, then double it back. Few steps, few bytes.

Four ranks, chunks 0 to 3. Each pair exchanges halves of what is left to it: its own half of the sum comes in, the other goes out.

    round 0   0 <-> 1, 2 <-> 3    even ranks keep chunks 0 1, odd ones 2 3
    round 1   0 <-> 2, 1 <-> 3    rank 0 keeps chunk 0, rank 2 chunk 1, rank 1 chunk 2, rank 3 chunk 3
    round 2   0 <-> 2, 1 <-> 3    the same ways back, with finished sums
    round 3   0 <-> 1, 2 <-> 3

The longest messages go between neighbours, which are on one node more often than not, and sums stay in the order of the ranks.
Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.fold import folded
from mpiring.algorithms.step import Step, floor_log2


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: 2 log2 p steps, each rank sends 2(p-1)/p of it; 2 steps and all of it more if n is not p."""
    return folded(rank, size, range(1 << floor_log2(size)), _halve_and_double)


def _halve_and_double(rank: int, size: int) -> Iterator[Step]:
    held, way = range(size), []
    for level in range(floor_log2(size)):
        peer, half = rank ^ 1 << level, len(held) // 2
        keep, give = (held[half:], held[:half]) if rank >> level & 1 else (held[:half], held[half:])
        yield Step(peer, give, peer, keep, reduce=True)
        held = keep
        way.append((peer, keep, give))
    for peer, keep, give in reversed(way):
        yield Step(peer, keep, peer, give)
