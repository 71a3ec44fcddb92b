"""Ranks that reach each other's memory: no messages between them, but jobs, each done by one rank.

Four ranks reduce a vector onto all: rank 1 reads its quarter from everybody, and writes the sum into everybody's vector.

    rank 0   [  |##|  |  ]      \\                 /   [  |=>|  |  ]
    rank 1   [  |##|  |  ]       >  rank 1: sum  <     [  |=>|  |  ]
    rank 2   [  |##|  |  ]      /                 \\   [  |=>|  |  ]
    rank 3   [  |##|  |  ]     /                   \\  [  |=>|  |  ]

So every rank's vector is read once and written once, which no allreduce can do without. Jobs do not depend on each other: all can
start when all vectors are complete, and the result is there when all jobs are done. Positions count elements of the whole vector
(alltoall: of the rank's own buffer), also where a buffer holds a chunk of it only. Nothing here knows how memory is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.cuts import offsets

GRAIN = 64
"""Elements that stay together when a vector is cut, so that no two ranks write into one cache line."""

Place = tuple[int, int]
"""A rank of the node, and a position in its vector."""


class Job(NamedTuple):
    """Reduce `length` elements from all `sources`, in their order, and write the result to all `targets`.

    A job without sources, or without targets, is half of one that ranks on several nodes do together.
    """

    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    length: int


class Work(NamedTuple):
    """A collective call among the ranks of one node; all of it is equal on these ranks.

    shares: elements of each chunk, as the calls have them: [count], one for each rank, or one for each pair of ranks.
    root: its place on this node; None where it is on another one.
    lanes: how many ranks (the first ones) work together with those of other nodes; 0: this node is alone.
    """

    collective: str
    size: int
    shares: Sequence[int]
    root: int | None = None
    lanes: int = 0


def jobs(work: Work, rank: int) -> list[Job]:
    """Return what one rank does."""
    return [job for job in _JOBS[work.collective](work, rank) if job.length]


def part(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and length of one of the even parts of a vector, in whole grains but for the last.

    >>> [part(200, 2, index) for index in range(2)]
    [(0, 128), (128, 72)]
    """
    edges = offsets(balanced(-(-count // GRAIN), parts))
    start, stop = (min(GRAIN * edge, count) for edge in edges[index:index + 2])
    return start, stop - start


def _allreduce(work: Work, rank: int) -> list[Job]:
    return _on_part(work, rank, range(work.size), range(work.size))


def _reduce(work: Work, rank: int) -> list[Job]:
    return _on_part(work, rank, range(work.size), _root(work))


def _broadcast(work: Work, rank: int) -> list[Job]:
    others = [peer for peer in range(work.size) if peer != work.root]
    if work.lanes:
        return _on_part(work, rank, _root(work), others)
    return [Job(((work.root, 0),), ((rank, 0),), work.shares[0])] if rank in others else []


def _on_part(work: Work, rank: int, sources: Sequence[int], targets: Sequence[int]) -> list[Job]:
    workers = work.lanes or work.size
    if rank >= workers:
        return []
    start, length = part(work.shares[0], workers, rank)
    return [Job(tuple((peer, start) for peer in sources), tuple((peer, start) for peer in targets), length)]


def _root(work: Work) -> list[int]:
    return [] if work.root is None else [work.root]


def _reduce_scatter(work: Work, rank: int) -> list[Job]:
    start = sum(work.shares[:rank])
    return [Job(tuple((peer, start) for peer in range(work.size)), ((rank, start),), work.shares[rank])]


def _allgather(work: Work, rank: int) -> list[Job]:
    edges = offsets(work.shares)
    return [Job(((peer, edges[peer]),), ((rank, edges[peer]),), work.shares[peer]) for peer in _from(rank, work.size)]


def _alltoall(work: Work, rank: int) -> list[Job]:
    rows = [work.shares[peer * work.size:(peer + 1) * work.size] for peer in range(work.size)]
    places = offsets([row[rank] for row in rows])
    return [Job(((peer, sum(rows[peer][:rank])),), ((rank, places[peer]),), rows[peer][rank]) for peer in _from(rank, work.size)]


def _from(rank: int, size: int) -> list[int]:
    """Return all ranks from one's own on, so that they do not all read from the same one at once."""
    return [(rank + turn) % size for turn in range(size)]


_JOBS: dict[str, Callable[[Work, int], list[Job]]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "alltoall": _alltoall,
}
