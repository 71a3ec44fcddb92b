r"""A binary tree through which the vector flows in pieces: while one piece moves up a level, the next one follows.

Places in the tree (rank 0 is the root; a place's level is its number of trailing zero bits; it stands between its children, so
sums stay in the order of the places):

    0---------------8
            _______/ \_______
           4                  12
         /   \              /    \
       2       6          10      14
      / \     / \        /  \    /  \
     1   3   5   7      9   11  13  15

A place can receive from one child in a round, so each piece takes two rounds a level, and a new one starts every second round.
Where two such trees run beside each other (double_tree.py), the round in which an edge is used has to be chosen with care: the
edges get a colour, 0 or 1, so that no rank sends, and none receives, along two edges of one colour.
Source: P. Sanders, J. Speck and J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35 (2009). The tree's shape is NCCL's, src/graph/trees.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from mpiring.algorithms.step import IDLE, NONE, Step, floor_log2, one


class Edge(NamedTuple):
    """A link from a rank to its parent in a tree, and the round in which it carries the first piece of a reduction."""

    child: int
    parent: int
    tree: int
    first: int


def reduce(rank: int, size: int, pieces: int, trees: int = 1) -> Iterator[Step]:
    """Reduce the vector onto the root of each tree: 2(h + k) steps of 1/k of the vector, h = floor(log2(n-1)), k pieces."""
    yield from (_step(up, down, turn, pieces, True) for up, down, turn in _flow(rank, size, pieces, trees))


def broadcast(rank: int, size: int, pieces: int, trees: int = 1) -> Iterator[Step]:
    """Give the vector of each tree's root to all: the reduction backwards, with the same cost."""
    for up, down, turn in reversed(list(_flow(rank, size, pieces, trees))):
        yield _step(down, up, turn, pieces, False)


def allreduce(rank: int, size: int, pieces: int, trees: int = 1) -> Iterator[Step]:
    """Reduce the vector onto all: 4(h + k) steps of 1/k of the vector; a rank with two children sends it three times in all."""
    yield from reduce(rank, size, pieces, trees)
    yield from broadcast(rank, size, pieces, trees)


def best_pieces(size: int, nbytes: int, latency: float, trees: int = 1) -> int:
    """Return how many pieces make the flow of `nbytes` fastest where a message takes as long as `latency` bytes (alpha / beta).

    The least of (h + k)(latency + nbytes / (trees * k)), up to MOST.
    """
    return 1 if size < 3 else max(1, min(MOST, round(sqrt(floor_log2(size - 1) * nbytes / (trees * latency)))))


MOST = 128
"""Pieces at most: filling the pipeline takes log2(n) of them, so more gain little, and each is a step to keep."""


def _flow(rank: int, size: int, pieces: int, trees: int) -> Iterator[tuple]:
    """Yield for every round of a reduction the edge that the rank sends along and the one it receives along, if it does."""
    ups, downs = _edges(size, trees)[rank]
    for turn in range(2 * (floor_log2(size - 1) + pieces) if size > 1 else 0):
        yield _busy(ups, turn, pieces), _busy(downs, turn, pieces), turn


def _busy(edges: tuple[Edge, ...], turn: int, pieces: int) -> Edge | None:
    for edge in edges:
        if not (turn - edge.first) % 2 and 0 <= turn - edge.first < 2 * pieces:
            return edge
    return None


def _step(sends: Edge | None, receives: Edge | None, turn: int, pieces: int, up: bool) -> Step:
    if sends is receives is None:
        return IDLE
    send = one(sends.tree * pieces + (turn - sends.first) // 2) if sends else NONE
    recv = one(receives.tree * pieces + (turn - receives.first) // 2) if receives else NONE
    to = sends and (sends.parent if up else sends.child)
    source = receives and (receives.child if up else receives.parent)
    return Step(to, send, source, recv, up and receives is not None)


@lru_cache(maxsize=16)
def _edges(size: int, trees: int) -> list[tuple[tuple[Edge, ...], tuple[Edge, ...]]]:
    """Return every rank's edges to its parents and to its children, in all trees."""
    links = [(_rank(child, size, tree), _rank(_parent(child, size), size, tree), tree, (child & -child).bit_length() - 1)
             for tree in range(trees) for child in range(1, size)]
    ups: list[list[Edge]] = [[] for _ in range(size)]
    downs: list[list[Edge]] = [[] for _ in range(size)]
    for (child, parent, tree, level), colour in zip(links, _colours([link[:2] for link in links])):
        edge = Edge(child, parent, tree, 2 * level + colour)
        ups[child].append(edge)
        downs[parent].append(edge)
    return [(tuple(up), tuple(down)) for up, down in zip(ups, downs)]


def _parent(place: int, size: int) -> int:
    bit = place & -place
    above = (place ^ bit) | (bit << 1)
    return above if above < size else place ^ bit


def _rank(place: int, size: int, tree: int) -> int:
    """Return the rank at a place; the second tree is mirrored, or moved by one where the mirror has the same leaves."""
    if tree == 0:
        return place
    return size - 1 - place if size % 2 == 0 else (place + 1) % size


def _colours(links: list[tuple[int, int]]) -> list[int]:
    """Colour links 0 and 1 so that those with the same sender differ, and those with the same receiver.

    No rank has more than two of either, so the links form paths and rings of links that share an end by turns: colour along them.
    """
    ends: dict[tuple[int, int], list[int]] = {}
    for number, link in enumerate(links):
        for side in (0, 1):
            ends.setdefault((side, link[side]), []).append(number)
    colours = [-1] * len(links)
    single = [number for number, link in enumerate(links) if any(len(ends[side, link[side]]) == 1 for side in (0, 1))]
    for start in [*single, *range(len(links))]:          # paths first, from an end; what is left are rings
        if colours[start] >= 0:
            continue
        side = next((side for side in (0, 1) if len(ends[side, links[start][side]]) == 1), 0) ^ 1
        number, colour = start, 0
        while colours[number] < 0:
            colours[number] = colour
            number = next((other for other in ends[side, links[number][side]] if other != number), number)
            side, colour = side ^ 1, colour ^ 1
    return colours
