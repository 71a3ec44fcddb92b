"""How a vector is cut: into chunks, and chunks into segments."""

from __future__ import annotations

from itertools import accumulate


def counts(count: int, parts: int) -> list[int]:
    """Split `count` elements into `parts` shares that differ by one at most, larger ones first."""
    share, rest = divmod(count, parts)
    return [share + 1] * rest + [share] * (parts - rest)


def offsets(shares: list[int]) -> list[int]:
    """Return where each share begins, and after them where the last one ends."""
    return [0, *accumulate(shares)]


def cuts(count: int, parts: int) -> list[slice]:
    """Cut `count` elements into `parts` consecutive slices that differ by one element at most.

    >>> cuts(10, 4)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    edges = offsets(counts(count, parts))
    return [slice(start, stop) for start, stop in zip(edges, edges[1:])]
