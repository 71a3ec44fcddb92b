"""Bruck's algorithms: for any number of ranks in ceil(log2 n) rounds, over distances 1, 2, 4, ...

All-gather, seven ranks; rank 0 (the others alike, moved round):

    has 0      gets 1 from rank 1      gets 2 3 from rank 2      gets 4 5 6 from rank 4

Backwards, with sums for copies, it is a reduce-scatter; both one after the other are an allreduce with the fewest bytes in
2 ceil(log2 n) rounds, whatever n is. All-to-all: a block that must go d places further does so in the rounds of d's set bits.
The longest messages go furthest, so the order of ranks does not follow nodes here, as it does for the ring: on two nodes of four
ranks each node would send 5.25 vectors for an allreduce, where ranks that are dealt to the nodes in turn send one.
Sources: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE TPDS 8 (1997). J. L. Traeff, "Optimal, non-pipelined reduce-scatter and allreduce
algorithms", arXiv:2410.14234 (2024), for the way back.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.step import Step, around, ceil_log2


def allgather(rank: int, size: int) -> Iterator[Step]:
    """Give every rank's chunk to all: ceil(log2 n) steps, each rank sends (n-1)/n of the vector."""
    for level in range(ceil_log2(size)):
        reach = 1 << level
        count = min(reach, size - reach)
        yield Step((rank - reach) % size, around(rank, count, size), (rank + reach) % size, around(rank + reach, count, size))


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Reduce chunk `rank` onto every rank: the all-gather backwards, with the same cost."""
    for send_to, send, recv_from, recv, _ in reversed(list(allgather(rank, size))):
        yield Step(recv_from, recv, send_to, send, reduce=True)


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: 2 ceil(log2 n) steps, each rank sends 2(n-1)/n of the vector."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def alltoall(rank: int, size: int) -> Iterator[Step]:
    """Bring chunk src * n + dst from src to dst: ceil(log2 n) steps, each rank sends about log2(n)/2 times its n chunks."""
    for level in range(ceil_log2(size)):
        right, left = (rank + (1 << level)) % size, (rank - (1 << level)) % size
        yield Step(right, _on_their_way(rank, size, level), left, _on_their_way(left, size, level))


def _on_their_way(rank: int, size: int, level: int) -> tuple[int, ...]:
    """Return the blocks that a rank passes on in a round: those whose whole way has this bit, after its lower bits."""
    found = []
    for way in range(1, size):
        if way >> level & 1:
            source = (rank - way % (1 << level)) % size
            found.append(source * size + (source + way) % size)
    return tuple(found)
