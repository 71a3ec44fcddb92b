"""Prove that a schedule does what its collective promises, from the schedule alone."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from mpiring.algorithms.registry import Algorithm, find
from mpiring.algorithms.setting import Ring, Setting
from mpiring.analysis.replay import Round, replay
from mpiring.errors import ScheduleError


class Proof(NamedTuple):
    """What the replay of a right schedule shows.

    Its rounds, its messages, the vectors that the busiest rank sends, and whether sums stay in the order of the ranks, so that an
    op need not be commutative (for collectives that do not reduce: True).
    """

    rounds: int
    messages: int
    sent: Fraction
    ordered: bool


def verify(algorithm: str | Algorithm, size: int, *, collective: str = "allreduce", root: int = 0, pieces: int = 1,
           nodes: Sequence[int] = (), rings: Sequence[Ring] = ()) -> Proof:
    """Prove an algorithm for `size` ranks, or raise ScheduleError with the rank, step and chunk at fault.

    Proven are: every message meets its receive; no rank waits for ever, even if MPI buffers nothing; every contribution is in
    every result exactly once; no chunk is overwritten while it is being sent; all ranks that get a chunk get the same bits: the
    same sums of the same terms, with the same operands on the left.

    algorithm: a name of the registry, looked up for `collective`, or an Algorithm.
    root, pieces, nodes, rings: for the algorithms that look at them; see Setting.

    Raises ValueError for an unknown name or an impossible setting.
    """
    if isinstance(algorithm, str):
        algorithm = find(algorithm, collective)
    return prove(algorithm, Setting(size, root, pieces, tuple(nodes), tuple(Ring(tuple(order), weight) for order, weight in rings)))


def prove(algorithm: Algorithm, setting: Setting) -> Proof:
    """As verify, for a Setting."""
    chunks = algorithm.chunks(setting)
    values = _Values()
    held = [{chunk: values.own(rank, chunk) for chunk in algorithm.collective.given(rank, setting, chunks)}
            for rank in range(setting.size)]
    written: list[dict[int, int]] = [{} for _ in range(setting.size)]
    rounds, messages, sent = 0, 0, [0] * setting.size
    for steps in replay(algorithm, setting):
        for rank, step in enumerate(steps):
            if step.send_to is not None:
                messages += 1
                sent[rank] += len(step.send)
        _deliver(rounds, steps, chunks, held, written, values)
        rounds += 1
    ordered = _check_results(algorithm, setting, chunks, held, written, values)
    return Proof(rounds, messages, Fraction(max(sent), algorithm.collective.vector(setting, chunks)), ordered)


class _Values:
    """All values that chunks take on the way, as numbers: two are equal where they are the same sum of the same terms.

    ranks: by value, bit r is set where the contribution of rank r is in it.
    spans: by value, the first rank and the one after the last where the terms are those of neighbouring ranks in their order;
        None where they are not.
    """

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.spans: list[tuple[int, int] | None] = []
        self.sums: dict[tuple[int, int], int] = {}

    def own(self, rank: int, chunk: int) -> int:
        """Return a new value: what a rank brings."""
        self.ranks.append(1 << rank)
        self.spans.append((rank, rank + 1))
        return len(self.ranks) - 1

    def add(self, left: int, right: int) -> int:
        """Return the value of left + right, whose contributions are known to differ."""
        found = self.sums.get((left, right))
        if found is None:
            found = self.sums[left, right] = len(self.ranks)
            self.ranks.append(self.ranks[left] | self.ranks[right])
            low, high = self.spans[left], self.spans[right]
            self.spans.append((low[0], high[1]) if low and high and low[1] == high[0] else None)
        return found


def _deliver(index: int, steps: Round, chunks: int, held: list[dict[int, int]], written: list[dict[int, int]], values: _Values) -> None:
    """Move the values of a round. What a step sends is what the rank held when the step began, whatever it receives meanwhile."""
    moved = []
    for rank, step in enumerate(steps):
        peer = step.recv_from
        if peer is None:
            continue
        if not step.reduce and step.send_to is not None and (both := set(step.send).intersection(step.recv)):
            raise ScheduleError("overwrites a chunk while it is being sent", rank, index, min(both))
        there, here = held[peer], held[rank]
        for chunk in step.recv:
            if not 0 <= chunk < chunks:
                raise ScheduleError(f"there are {chunks} chunks", peer, index, chunk)
            value = there.get(chunk)
            if value is None:
                raise ScheduleError("sends a chunk that it does not have", peer, index, chunk)
            if step.reduce:
                own = here.get(chunk)
                if own is None:
                    raise ScheduleError("reduces into a chunk that it does not have", rank, index, chunk)
                if twice := values.ranks[value] & values.ranks[own]:
                    raise ScheduleError(f"adds the contribution of {_names(twice)} a second time", rank, index, chunk)
                value = values.add(value, own) if peer < rank else values.add(own, value)
            moved.append((rank, chunk, value))
    for rank, chunk, value in moved:
        held[rank][chunk] = value
        written[rank][chunk] = index


def _check_results(algorithm: Algorithm, setting: Setting, chunks: int, held: list[dict[int, int]], written: list[dict[int, int]],
                   values: _Values) -> bool:
    """Check what every rank wants; tell whether all sums are in the order of the ranks."""
    givers = [0] * chunks
    for rank in range(setting.size):
        for chunk in algorithm.collective.given(rank, setting, chunks):
            givers[chunk] |= 1 << rank
    first: dict[int, tuple[int, int]] = {}
    ordered = True
    for rank in range(setting.size):
        for chunk in algorithm.collective.wanted(rank, setting, chunks):
            value, step = held[rank].get(chunk), written[rank].get(chunk, 0)
            if value is None:
                raise ScheduleError("never gets the chunk", rank, None, chunk)
            if missing := givers[chunk] & ~values.ranks[value]:
                raise ScheduleError(f"ends without the contribution of {_names(missing)}", rank, step, chunk)
            owner, same = first.setdefault(chunk, (rank, value))
            if same != value:
                raise ScheduleError(f"sums in another order than rank {owner}: their bits can differ", rank, step, chunk)
            ordered = ordered and values.spans[value] is not None
    return ordered


def _names(mask: int) -> str:
    found = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found)}"
