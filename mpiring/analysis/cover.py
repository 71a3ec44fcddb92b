"""How long each rank is busy: the length of the union of its busy times."""

from __future__ import annotations

import numpy as np


class Cover:
    """The length of the union of each rank's busy times, which come in about the order of time.

    Kept are the end of what is covered, and the gaps that the latest rounds left: a busy time can begin before the one noted
    ahead of it, but not before everything older than the steps that may overlap is over, so older gaps stay.
    """

    def __init__(self, size: int, slots: int):
        self.total, self.until = np.zeros(size), np.zeros(size)
        self.since = np.zeros(size)                      # where the piece that ends at `until` begins
        self.left, self.right = np.zeros((slots, size)), np.zeros((slots, size))
        self.first = self.slot = 0

    def next_round(self) -> None:
        """Go on to the slots of the next round: three each."""
        self.first = self.slot = (self.first + 3) % len(self.left)
        self.left[self.slot:self.slot + 3] = self.right[self.slot:self.slot + 3] = 0

    def add(self, who: np.ndarray | slice, start: np.ndarray, end: np.ndarray) -> None:
        """Note busy times of some ranks, one each."""
        until, since = self.until[who], self.since[who]
        from_, early = np.maximum(start, until), start < since
        self.left[self.slot, who], self.right[self.slot, who] = until, from_
        self.since[who] = np.where(start > until, start, since)
        self.total[who] += np.maximum(end - from_, 0)
        self.until[who] = np.maximum(until, end)
        if early.any():
            self._fill(np.arange(len(self.until))[who][early], start[early], end[early])
        self.slot += 1

    def _fill(self, ranks: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Fill the gaps in which busy times lie; one inside a gap leaves two, the second in the slot of this round."""
        for slot in range(len(self.left)):
            if slot == self.slot:
                continue
            left, right = self.left[slot, ranks], self.right[slot, ranks]
            filled = np.minimum(end, right) - np.maximum(start, left)
            inside = filled > 0
            if inside.any():
                self.total[ranks] += np.where(inside, filled, 0)
                both = inside & (start > left) & (end < right)
                self.left[self.slot, ranks[both]], self.right[self.slot, ranks[both]] = end[both], right[both]
                self.right[slot, ranks] = np.where(inside & (start > left), start, right)
                self.left[slot, ranks] = np.where(inside & (start <= left), end, left)
