"""Reduction of a long vector: a ring reduces each rank's chunk, then a binomial tree gathers the chunks at the root.

Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, with a ring for the halving.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms import ring
from mpiring.algorithms.scatter_allgather import scatter
from mpiring.algorithms.step import Step


def reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto rank 0: n-1 + ceil(log2 n) steps; the busiest rank sends (n-1)/n of it and half of it again."""
    yield from ring.reduce_scatter(rank, size)
    for send_to, send, recv_from, recv, _ in reversed(list(scatter(rank, size))):
        yield Step(recv_from, recv, send_to, send)
