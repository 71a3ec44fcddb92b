"""The ring: bandwidth-optimal allreduce, and its two halves.

The journey of chunk c: it starts on rank c+1, goes right once round the ring and takes every rank's share on the way; on rank
c it is whole. Then it goes round once more and leaves a copy everywhere.

    reduce-scatter   c+1 -> c+2 -> ... -> c        each arrow adds the receiver's share
    all-gather       c -> c+1 -> ... -> c-1        each arrow overwrites

All chunks travel at once, each one place behind the next, so every link carries one chunk in every step. Rank means place here:
the registry lets the places follow the nodes (by_node), so in every step one chunk leaves each node, and one enters it.
Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.step import Step, one


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Reduce chunk `rank` onto every rank: n-1 steps, each rank sends (n-1)/n of the vector."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for back in range(1, size):
        yield Step(right, one((rank - back) % size), left, one((rank - back - 1) % size), reduce=True)


def allgather(rank: int, size: int) -> Iterator[Step]:
    """Give every rank's chunk to all: n-1 steps, each rank sends (n-1)/n of the vector."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for back in range(size - 1):
        yield Step(right, one((rank - back) % size), left, one((rank - back - 1) % size))


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: 2(n-1) steps, each rank sends 2(n-1)/n of the vector whatever n is."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)
