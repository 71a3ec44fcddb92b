"""Adasum: gradients are added as far as they point different ways, and averaged as far as they point the same way.

Vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: of orthogonal ones that is the sum, of equal ones the mean, of
a vector and zero the vector. More than two are combined in pairs, neighbours first; where their number is no power of two, the
first ranks fold in pairs before that: of five it is (((0, 1), 2), (3, 4)). Each round halves the part that a rank has to do:

    place 0  |-----------|   give 1 the right half    |-----|         give 2 the right    |--|
    place 1  |-----------|   give 0 the left half           |-----|   give 3                    |--|
    place 2  |-----------|   give 3 the right half    |-----|         give 0 the left        |--|
    place 3  |-----------|   give 2 the left half           |-----|   give 1                       |--|

It gives its peer one half, gets the peer's of the other, and combines them, when the ranks that have parts of the same two vectors
have added up their dot products. Then the parts go back the same way. So each element is combined by one rank, and all ranks have
the same bits. All is done in float64, and rounded at each combination.

Steps, with p = 2^k the power of two in n: k (k + 5) / 2, in which a rank sends 2 (p - 1) / p of the vector, and k (k + 1) / 2 times
the dot products; where n is no power of two, 2 steps and the vector more.

Source: S. Maleki et al., "Scaling distributed training with adaptive summation" (Adasum), arXiv:2006.02924, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.step import floor_log2
from mpiring.runtime.native import LIMIT

BLOCK = 8192
"""Elements that are widened to float64 at a time: they stay in cache, and are fewer than BLAS would share out among threads."""

KEPT = 32 << 20
"""Bytes of scratch that are kept for the next exchange, at most."""


class Transfers:
    """Messages that are under way together; tested like one request of MPI's."""

    def __init__(self, requests: list[MPI.Request]):
        self.requests = requests

    def Test(self) -> bool:
        """Tell whether all are complete."""
        return MPI.Request.Testall(self.requests)


Moves = Generator[Transfers, None, Any]


class Piece(NamedTuple):
    """Some elements of one array, in a part of the line that begins before them."""

    array: int
    start: int
    stop: int


class Adasum:
    """Combines vectors of all ranks of a comm. Its generators yield what MPI has to complete before they go on."""

    def __init__(self, comm: MPI.Comm):
        self.comm, self.rank = comm, comm.rank
        self.levels = floor_log2(comm.size)
        self.folded = 2 * (comm.size - (1 << self.levels))
        # The ranks that combine, in order: the even one of each pair that folds, and all behind these.
        self.ranks = [*range(0, self.folded, 2), *range(self.folded, comm.size)]
        self.scratch = np.empty(0, np.uint8)
        self.wide = np.empty((2, BLOCK))

    def repeated(self, line: np.ndarray, counts: Sequence[int]) -> Callable[[], Moves]:
        """Return what combines arrays that lie one behind the other in a line, over and over again."""
        return lambda: self.combine(line, counts)

    def combine(self, line: np.ndarray, counts: Sequence[int]) -> Moves:
        """Combine arrays of `counts` elements, each for itself, which lie one behind the other in a line, in place."""
        edges = [0, *accumulate(counts)]
        line = line[:edges[-1]]
        if line.size and self.rank < self.folded:
            yield from self._folded(line, edges)
        elif line.size:
            yield from self._halved(line, edges)
        if self.scratch.size > KEPT:
            self.scratch = np.empty(0, np.uint8)
        return "adasum"

    def _folded(self, line: np.ndarray, edges: list[int]) -> Moves:
        """Let the even rank of a pair stand for both."""
        if self.rank % 2:
            yield self._transfers(self.rank - 1, line, None)
            yield self._transfers(self.rank - 1, None, line)
            return
        other = self._room(line)
        yield self._transfers(self.rank + 1, None, other)
        pieces = pieces_of(edges, 0, line.size)
        self._join(line, line, other, pieces, self._products(line, other, pieces, len(edges) - 1))
        yield from self._halved(line, edges)
        yield self._transfers(self.rank + 1, line, None)

    def _halved(self, line: np.ndarray, edges: list[int]) -> Moves:
        """Combine among a power of two of the ranks: this rank half of its part each time; then collect the others' parts."""
        place, low, high, path = self.ranks.index(self.rank), 0, line.size, []
        for level in range(self.levels):
            peer, middle = self.ranks[place ^ 1 << level], (low + high) // 2
            path.append((peer, low, high))
            if place >> level & 1:
                given, low = line[low:middle], middle
            else:
                given, high = line[middle:high], middle
            mine = line[low:high]
            other = self._room(mine)
            yield self._transfers(peer, given, other)
            first, second = (other, mine) if place >> level & 1 else (mine, other)
            pieces = pieces_of(edges, low, high)
            products = self._products(first, second, pieces, len(edges) - 1)
            yield from self._added(products, place, level + 1)
            self._join(mine, first, second, pieces, products)
        for peer, start, stop in reversed(path):
            yield self._transfers(peer, line[low:high], line[start:low] if start < low else line[high:stop])
            low, high = start, stop

    def _products(self, first: np.ndarray, second: np.ndarray, pieces: Sequence[Piece], arrays: int) -> np.ndarray:
        """Return a.b, a.a and b.b of each array, as far as it lies in this part of the line."""
        found = np.zeros((arrays, 3))
        for array, start, stop in pieces:
            a, b = self._widened(first[start:stop], second[start:stop])
            found[array] += a.dot(b), a.dot(a), b.dot(b)
        return found

    def _added(self, products: np.ndarray, place: int, levels: int) -> Moves:
        """Add up the products of the ranks that have parts of the same vectors, in the same order on all of them."""
        other = np.empty_like(products)
        for level in range(levels):
            yield self._transfers(self.ranks[place ^ 1 << level], products, other)
            products += other

    def _join(self, target: np.ndarray, first: np.ndarray, second: np.ndarray, pieces: Sequence[Piece],
              products: np.ndarray) -> None:
        """Write the combination of two parts of the line where one of them is."""
        of_first, of_second = factors(products)
        for array, start, stop in pieces:
            a, b = self._widened(first[start:stop], second[start:stop])
            a *= of_first[array]
            b *= of_second[array]
            a += b
            np.copyto(target[start:stop], a, "unsafe")

    def _widened(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return two pieces in float64, in scratch."""
        wide = self.wide[:, :first.size]
        wide[0], wide[1] = first, second
        return wide

    def _room(self, like: np.ndarray) -> np.ndarray:
        """Return scratch for an array."""
        if self.scratch.size < like.nbytes:
            self.scratch = np.empty(like.nbytes, np.uint8)
        return self.scratch[:like.nbytes].view(like.dtype)

    def _transfers(self, peer: int, given: np.ndarray | None, taken: np.ndarray | None) -> Transfers:
        """Send an array, take another one, or both."""
        return Transfers([self.comm.Irecv(part, peer) for part in _messages(taken)]
                         + [self.comm.Isend(part, peer) for part in _messages(given)])


def factors(products: np.ndarray) -> np.ndarray:
    """Return what the first and the second vector of each array are multiplied by, from a.b, a.a and b.b; 1 for one of zeros.

    >>> factors(np.array([[4.0, 4.0, 4.0], [0.0, 9.0, 1.0], [0.0, 0.0, 1.0]])).tolist()
    [[0.5, 1.0, 1.0], [0.5, 1.0, 1.0]]
    """
    both, squares = products[:, 0], products[:, 1:].T
    return 1 - np.divide(both, 2 * squares, out=np.zeros(squares.shape), where=squares != 0)


def pieces_of(edges: Sequence[int], low: int, high: int) -> list[Piece]:
    """Cut the arrays between these edges, as far as they lie between low and high, into pieces for a block; counted from low.

    >>> pieces_of([0, 2, 2, 10], 1, 6)
    [Piece(array=0, start=0, stop=1), Piece(array=2, start=1, stop=5)]
    """
    found = []
    for array, (start, stop) in enumerate(pairwise(edges)):
        begin, end = max(start, low) - low, min(stop, high) - low
        found += [Piece(array, at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK)]
    return found


def _messages(array: np.ndarray | None) -> list[list[Any]]:
    """Return an array as the buffers of messages, no longer than MPI can count."""
    if array is None:
        return []
    line = array.reshape(-1).view(np.uint8)
    return [[line[start:start + LIMIT], MPI.BYTE] for start in range(0, line.size, LIMIT)]
