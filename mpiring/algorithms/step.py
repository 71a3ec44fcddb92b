"""What an algorithm is made of: steps over chunks, and nothing else."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Chunks = range | tuple[int, ...]
"""Chunk ids in the order in which they travel: a range, or a tuple where they do not follow one another."""

NONE = range(0)


class Step(NamedTuple):
    """One send and one receive of a rank, at the same time; either may be missing.

    A receive combines with what the rank holds (`reduce`) or overwrites it. Where it combines, the operand of the lower rank
    stands on the left, so two ranks that combine the same values get the same bits.
    No device, tag, segment or tuning knob belongs here: those are for the interpreters of a schedule.
    """

    send_to: int | None = None
    send: Chunks = NONE
    recv_from: int | None = None
    recv: Chunks = NONE
    reduce: bool = False


IDLE = Step()
"""A rank's step in a round in which it takes no part: every rank has a step in every round."""


@lru_cache(maxsize=1 << 16)
def one(chunk: int) -> range:
    """The range that holds only `chunk`."""
    return range(chunk, chunk + 1)


def around(start: int, count: int, size: int) -> Chunks:
    """Return `count` of the chunks 0 to size-1, from `start` on, going on at 0 behind the last."""
    start %= size
    if start + count <= size:
        return range(start, start + count)
    return (*range(start, size), *range(start + count - size))


def floor_log2(number: int) -> int:
    """Return the exponent of the largest power of two that is not above `number` (0 for 1)."""
    return number.bit_length() - 1


def ceil_log2(number: int) -> int:
    """Return the exponent of the smallest power of two that is not below `number`."""
    return (number - 1).bit_length()
