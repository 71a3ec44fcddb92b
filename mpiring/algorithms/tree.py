"""The binomial tree: reduce to rank 0, then broadcast. Few steps, but every one carries the whole vector.

Eight ranks; in round k of the reduction a rank whose lowest set bit is k sends to its parent, the broadcast runs backwards:

    0 <- 1     2 <- 3     4 <- 5     6 <- 7      round 0
    0 <------- 2          4 <------- 6           round 1
    0 <------------------ 4                      round 2

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.step import IDLE, Step, one

WHOLE = one(0)


def allreduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce the vector onto all: 2 ceil(log2 n) steps; rank 0 sends the vector ceil(log2 n) times, the others fewer."""
    levels = (size - 1).bit_length()
    for level in range(levels):
        yield _up(rank, size, 1 << level)
    for level in reversed(range(levels)):
        yield _down(rank, size, 1 << level)


def _up(rank: int, size: int, reach: int) -> Step:
    if rank % (2 * reach) == reach:
        return Step(send_to=rank - reach, send=WHOLE)
    if rank % (2 * reach) == 0 and rank + reach < size:
        return Step(recv_from=rank + reach, recv=WHOLE, reduce=True)
    return IDLE


def _down(rank: int, size: int, reach: int) -> Step:
    if rank % (2 * reach) == reach:
        return Step(recv_from=rank - reach, recv=WHOLE)
    if rank % (2 * reach) == 0 and rank + reach < size:
        return Step(send_to=rank + reach, send=WHOLE)
    return IDLE
