"""Broadcast of a long vector: the root scatters its chunks over a binomial tree, then a ring gathers them everywhere.

After the scatter the head of a block of the tree holds the block's chunks, the root all of them; the ring does not bring those
again, so the root only sends.
Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005),
after M. Barnett, R. Littlefield, D. Payne and R. van de Geijn (1993).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms import ring
from mpiring.algorithms.step import IDLE, NONE, Step, ceil_log2


def broadcast(rank: int, size: int) -> Iterator[Step]:
    """Give rank 0's vector to all: ceil(log2 n) + n-1 steps; rank 0 sends 2(n-1)/n of the vector."""
    yield from scatter(rank, size)
    right = (rank + 1) % size
    for step in ring.allgather(rank, size):
        sends, receives = step.send[0] not in held(right, size), step.recv[0] not in held(rank, size)
        yield Step(right if sends else None, step.send if sends else NONE, step.recv_from if receives else None,
                   step.recv if receives else NONE)


def scatter(rank: int, size: int) -> Iterator[Step]:
    """Bring chunk `rank` from rank 0 to every rank, and with it the chunks of the ranks below it in the tree."""
    for level in reversed(range(ceil_log2(size))):
        reach = 1 << level
        if rank % (2 * reach) == reach:
            yield Step(recv_from=rank - reach, recv=held(rank, size))
        elif rank % (2 * reach) == 0 and rank + reach < size:
            yield Step(send_to=rank + reach, send=held(rank + reach, size))
        else:
            yield IDLE


def held(rank: int, size: int) -> range:
    """Return the chunks that a rank has after the scatter: those of its block of the tree."""
    return range(rank, min(size, rank + (rank & -rank or size)))
