"""The fold: how an algorithm for powers of two serves other numbers of ranks.

Of n = p + r ranks (p a power of two) the first 2r pair up: the odd one of a pair hands its vector to the even one before, and
gets the result from it afterwards. Neighbours stay neighbours, so an algorithm that keeps the order of its ranks still does.

    ranks    0 <- 1    2 <- 3    4 <- 5    6          n = 7, p = 4, r = 3
    places   0         1         2         3

Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from mpiring.algorithms.step import IDLE, Step, floor_log2
from mpiring.algorithms.weave import among, padded


def folded(rank: int, size: int, whole: range, core: Callable[[int, int], Iterable[Step]]) -> Iterator[Step]:
    """Run `core(place, power)` among a power of two of the ranks; all chunks are `whole`."""
    power = 1 << floor_log2(size)
    rest = size - power
    paired = rank < 2 * rest
    if paired and rank % 2:
        yield Step(send_to=rank - 1, send=whole)
        yield from padded(sum(1 for _ in core(0, power)), ())
        yield Step(recv_from=rank - 1, recv=whole)
        return
    if rest:
        yield Step(recv_from=rank + 1, recv=whole, reduce=True) if paired else IDLE
    yield from among(_at_work(size, rest), core(rank // 2 if paired else rank - rest, power))
    if rest:
        yield Step(send_to=rank + 1, send=whole) if paired else IDLE


@lru_cache(maxsize=64)
def _at_work(size: int, rest: int) -> tuple[int, ...]:
    """Return the ranks that take part, in the order of their places."""
    return *range(0, 2 * rest, 2), *range(2 * rest, size)
