"""Pairwise exchange: in every round each rank swaps blocks with one other, as players meet in a tournament.

Round k joins ranks a and b with a + b = k mod m, where m is n for an odd n; an even n lets the last rank play whoever would meet
himself. A block leaves the place where its answer lands, so it also works in place.
Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005);
the pairing is the circle method of round-robin tournaments.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms.step import IDLE, Step, one


def alltoall(rank: int, size: int) -> Iterator[Step]:
    """Bring chunk src * n + dst from src to dst: n-1 steps (n if odd), each rank sends every other's block once: (n-1)/n."""
    players = size - 1 + size % 2
    for turn in range(players if size > 1 else 0):
        peer = _partner(rank, size, players, turn)
        yield IDLE if peer == rank else Step(peer, one(rank * size + peer), peer, one(peer * size + rank))


def _partner(rank: int, size: int, players: int, turn: int) -> int:
    if rank == players:                                    # the last of an even number: whoever would meet himself
        return turn * (players + 1) // 2 % players         # the one rank with 2 * rank = turn mod players
    peer = (turn - rank) % players
    return players if peer == rank and players < size else peer
