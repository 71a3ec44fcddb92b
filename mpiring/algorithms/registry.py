"""Every algorithm by collective and name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from mpiring.algorithms import ring, tree
from mpiring.algorithms.step import Step, one


@dataclass(frozen=True)
class Collective:
    """What a collective is: the chunks that a rank brings, and those that it is to have in the end.

    Both are functions (rank, chunks) -> range. Where several ranks bring the same chunk, its result is their reduction.
    """

    name: str
    given: Callable[[int, int], range]
    wanted: Callable[[int, int], range]
    reduces: bool


@dataclass(frozen=True)
class Algorithm:
    """A schedule for a collective, the number of chunks it works on, and its two cost lines.

    `rounds(size)` is the number of steps of every rank, `sent(size)` what the busiest rank sends, in vectors.
    """

    name: str
    collective: Collective
    schedule: Callable[[int, int], Iterable[Step]]
    chunks: Callable[[int], int]
    rounds: Callable[[int], int]
    sent: Callable[[int], Fraction]
    use: str


def _all(rank: int, chunks: int) -> range:
    return range(chunks)


def _own(rank: int, chunks: int) -> range:
    return one(rank)


def _per_rank(size: int) -> int:
    return size


def _levels(size: int) -> int:
    return (size - 1).bit_length()


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", given=_all, wanted=_all, reduces=True),
        Collective("reduce_scatter", given=_all, wanted=_own, reduces=True),
        Collective("allgather", given=_own, wanted=_all, reduces=False),
    )
}

ALGORITHMS = {
    (algorithm.collective.name, algorithm.name): algorithm
    for algorithm in (
        Algorithm("ring", COLLECTIVES["allreduce"], ring.allreduce, chunks=_per_rank, rounds=lambda n: 2 * (n - 1),
                  sent=lambda n: Fraction(2 * (n - 1), n), use="long vectors: the least that any rank can send"),
        Algorithm("tree", COLLECTIVES["allreduce"], tree.allreduce, chunks=lambda n: 1, rounds=lambda n: 2 * _levels(n),
                  sent=lambda n: Fraction(_levels(n)), use="short vectors on many ranks; the baseline"),
        Algorithm("ring", COLLECTIVES["reduce_scatter"], ring.reduce_scatter, chunks=_per_rank, rounds=lambda n: n - 1,
                  sent=lambda n: Fraction(n - 1, n), use="long vectors: the least that any rank can send"),
        Algorithm("ring", COLLECTIVES["allgather"], ring.allgather, chunks=_per_rank, rounds=lambda n: n - 1,
                  sent=lambda n: Fraction(n - 1, n), use="long vectors: the least that any rank can send"),
    )
}


def names(collective: str) -> list[str]:
    """List the algorithms that the registry has for a collective."""
    return [name for owner, name in ALGORITHMS if owner == collective]


def find(name: str, collective: str = "allreduce") -> Algorithm:
    """Return an algorithm by name; ValueError lists the known ones."""
    try:
        return ALGORITHMS[collective, name]
    except KeyError:
        if collective not in COLLECTIVES:
            raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}") from None
        raise ValueError(f"unknown algorithm {name!r} for {collective}; known: {', '.join(names(collective))}") from None
