"""The binomial tree: reduce to one rank, or broadcast from it. Few steps, but every one carries the whole vector.

Eight ranks; in round k of the reduction the heads of two neighbouring blocks of 2^k ranks meet, the broadcast runs backwards:

    0 <- 1     2 <- 3     4 <- 5     6 <- 7      round 0
    0 <------- 2          4 <------- 6           round 1
    0 <------------------ 4                      round 2

The head of a block is its first rank, or the root where the block holds it; so sums stay in the order of the ranks for any root.
Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.step import IDLE, Step, ceil_log2, one

WHOLE = one(0)


def reduce(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Reduce the vector onto the root: ceil(log2 n) steps, every other rank sends it once."""
    for level in range(ceil_log2(size)):
        sender, receiver = _meeting(rank, size, root, level)
        if rank == sender:
            yield Step(send_to=receiver, send=WHOLE)
        elif rank == receiver:
            yield Step(recv_from=sender, recv=WHOLE, reduce=True)
        else:
            yield IDLE


def broadcast(rank: int, size: int, root: int = 0) -> Iterator[Step]:
    """Give the root's vector to all: ceil(log2 n) steps; the root sends it in each."""
    for level in reversed(range(ceil_log2(size))):
        receiver, sender = _meeting(rank, size, root, level)
        if rank == sender:
            yield Step(send_to=receiver, send=WHOLE)
        elif rank == receiver:
            yield Step(recv_from=sender, recv=WHOLE)
        else:
            yield IDLE


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: 2 ceil(log2 n) steps; rank 0 sends the vector ceil(log2 n) times, the others fewer."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def _meeting(rank: int, size: int, root: int, level: int) -> tuple[int | None, int | None]:
    """Return who sends to whom (in the reduction) where this rank's block of 2^level ranks meets its neighbour, if it has one."""
    mine = rank >> level
    if (mine ^ 1) << level >= size:
        return None, None
    heads = _head(mine, level, root), _head(mine ^ 1, level, root)
    receiver = _head(mine >> 1, level + 1, root)
    return next(head for head in heads if head != receiver), receiver


def _head(block: int, level: int, root: int) -> int:
    return root if root >> level == block else block << level
