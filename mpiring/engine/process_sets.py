"""Subsets of an engine's ranks, on which operations go their own way."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from mpiring.engine.loop import Loop


class ProcessSet:
    """Some ranks of an engine, in ascending order; made by Engine(process_sets=...) or Engine.add_process_set.

    ranks: their numbers in the engine. size: how many. rank: this rank's place among them, None if it is not one. included: whether
    it is.
    """

    def __init__(self, ranks: tuple[int, ...], mine: int, loop: Loop | None):
        self.ranks, self.size = ranks, len(ranks)
        self.rank = ranks.index(mine) if mine in ranks else None
        self.loop = loop                                 # None on a rank that is not part of it, and when it was removed

    @property
    def included(self) -> bool:
        """Whether this rank is part of it."""
        return self.rank is not None

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={list(self.ranks)})"


def checked(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """Return the ranks of a set in ascending order; ValueError for none, for one twice or one that does not exist."""
    try:
        found = sorted(map(operator.index, ranks))
    except TypeError:
        raise TypeError(f"ranks is not a list of ranks: {ranks!r}") from None
    if not found or len(set(found)) < len(found) or not 0 <= found[0] <= found[-1] < size:
        raise ValueError(f"ranks {found} are not different ones of {size} ranks, one at least")
    return tuple(found)
