"""What an algorithm is made of: steps over chunks, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

NONE = range(0)


class Step(NamedTuple):
    """One send and one receive of a rank, at the same time; either may be missing.

    `send` and `recv` are ranges of chunk ids. A receive combines with what the rank holds (`reduce`) or overwrites it.
    No device, tag, segment or tuning knob belongs here: those are for the interpreters of a schedule.
    """

    send_to: int | None = None
    send: range = NONE
    recv_from: int | None = None
    recv: range = NONE
    reduce: bool = False


IDLE = Step()
"""A rank's step in a round in which it takes no part: every rank has a step in every round."""


def one(chunk: int) -> range:
    """The range that holds only `chunk`."""
    return range(chunk, chunk + 1)
