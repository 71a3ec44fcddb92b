"""Three stages: reduce-scatter in every node, a ring between nodes for every lane, all-gather in every node.

Two nodes of three ranks; lane l is the ranks with place l on their nodes, and works on a third of the vector:

    node 0   0 1 2   reduce-scatter    0     1     2                        0 1 2   all-gather
                                       |     |     |   ring in every lane
    node 1   3 4 5   reduce-scatter    3     4     5                        3 4 5   all-gather

So the links between nodes carry 2(H-1)/H of the vector once for each node, not once for each rank. There are as many lanes as
the smallest node has ranks; further ranks of larger nodes take part inside their node only.
Source: X. Jia et al., "Highly scalable deep learning training system with mixed-precision", arXiv:1807.11205 (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mpiring.algorithms import ring
from mpiring.algorithms.step import NONE, Step
from mpiring.algorithms.weave import among, on_chunks, padded, spread


def allreduce(rank: int, size: int, members: Sequence[Sequence[int]], places: Sequence[tuple[int, int]], lanes: int,
              longest: int) -> Iterator[Step]:
    """Reduce the vector onto all: 2(M-1) + 2(H-1) steps on H nodes of up to M ranks."""
    hosts = len(members)
    node, place = places[rank]
    ranks, count = members[node], len(members[node])
    yield from padded(longest - 1, on_chunks(_lane(lanes, hosts), among(ranks, ring.reduce_scatter(place, count))))
    lane = [ranks[place] for ranks in members] if place < lanes else []
    between = on_chunks(spread(place * hosts), among(lane, ring.allreduce(node, hosts))) if lane else ()
    yield from padded(2 * (hosts - 1), between)
    yield from padded(longest - 1, on_chunks(_lane(lanes, hosts), among(ranks, ring.allgather(place, count))))


def _lane(lanes: int, hosts: int) -> Callable[[range], range]:
    """Return the function from a chunk of the ring in a node to its lane's chunks; a chunk without a lane is empty."""
    return lambda chunk: spread(0, hosts)(chunk) if chunk.start < lanes else NONE
