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
    every result exactly once; no chunk is overwritten while it is being sent; nobody gets a finished sum twice; all ranks that
    get a chunk get the same bits: the same sums of the same terms, with the same operands on the left.

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
    given = algorithm.collective.given
    held: list[dict[int, Value]] = [dict.fromkeys(given(rank, setting, chunks), (1 << rank, rank, rank + 1, rank))
                                    for rank in range(setting.size)]
    finished = (1 << setting.size) - 1 if algorithm.collective.reduces else 0
    rounds, messages, sent = 0, 0, [0] * setting.size
    for steps in replay(algorithm, setting):
        for rank, chunk, value in _arrivals(rounds, steps, chunks, held, finished):
            held[rank][chunk] = value
        for rank, step in enumerate(steps):
            if step[0] is not None:
                messages += 1
                sent[rank] += len(step[1])
        rounds += 1
    ordered = _check_results(algorithm, setting, chunks, held)
    return Proof(rounds, messages, Fraction(max(sent), algorithm.collective.vector(setting, chunks)), ordered)


Value = tuple[int, float, float, "int | tuple"]
"""What a rank holds of a chunk: a sum, as

- the ranks whose contributions are in it: bit r for rank r,
- the first of them and the one after the last, if they are neighbours summed in their order; else NOWHERE twice, which nothing
  is next to,
- the sum itself: a rank, or a pair of sums. The ranks in it are all different, so it has as many leaves.
"""

NOWHERE = float("nan")


def _arrivals(index: int, steps: Round, chunks: int, held: list[dict[int, Value]], finished: int) -> list[tuple[int, int, Value]]:
    """Return what a round brings: rank, chunk and value. What a step sends is what the rank held when the step began.

    `finished`: the bits of all ranks, where sums are made. Who finishes a sum may have to divide it, and must know that it did.
    """
    found = []
    for rank, (send_to, send, peer, recv, reduce) in enumerate(steps):
        if peer is None:
            continue
        if len(recv) > 1 and len(set(recv)) < len(recv):
            raise ScheduleError("receives a chunk twice in one message", rank, index, max(recv, key=recv.count))
        if send_to is not None and (not reduce or tuple(send) != tuple(recv)) and (both := set(send).intersection(recv)):
            what = "sends a chunk and adds to it in one step, at another place of the message" if reduce else \
                "overwrites a chunk while it is being sent"
            raise ScheduleError(what, rank, index, min(both))
        there, here = held[peer], held[rank]
        for chunk in recv:
            if not 0 <= chunk < chunks:
                raise ScheduleError(f"there are {chunks} chunks", peer, index, chunk)
            value = there.get(chunk)
            if value is None:
                raise ScheduleError("sends a chunk that it does not have", peer, index, chunk)
            if reduce:
                own = here.get(chunk)
                if own is None:
                    raise ScheduleError("reduces into a chunk that it does not have", rank, index, chunk)
                value = _add(value, own) if peer < rank else _add(own, value)
                if value is None:
                    raise ScheduleError(f"adds the contribution of {_names(there[chunk][0] & own[0])} a second time", rank, index,
                                        chunk)
            elif finished and value[0] == finished == here.get(chunk, (0,))[0]:
                raise ScheduleError("gets a copy of a finished sum that it has already", rank, index, chunk)
            found.append((rank, chunk, value))
    return found


def _add(left: Value, right: Value) -> Value | None:
    """Return the sum of two values, or None where a contribution is in both."""
    if left[0] & right[0]:
        return None
    if left[2] == right[1]:
        return left[0] | right[0], left[1], right[2], (left[3], right[3])
    return left[0] | right[0], NOWHERE, NOWHERE, (left[3], right[3])


def _check_results(algorithm: Algorithm, setting: Setting, chunks: int, held: list[dict[int, Value]]) -> bool:
    """Check what every rank wants; tell whether all sums are in the order of the ranks."""
    givers = [0] * chunks
    for rank in range(setting.size):
        for chunk in algorithm.collective.given(rank, setting, chunks):
            givers[chunk] |= 1 << rank
    first: dict[int, tuple[int, Value]] = {}
    ordered = True
    for rank in range(setting.size):
        for chunk in algorithm.collective.wanted(rank, setting, chunks):
            value = held[rank].get(chunk)
            if value is None:
                raise ScheduleError("never gets the chunk", rank, None, chunk)
            if missing := givers[chunk] & ~value[0]:
                raise ScheduleError(f"ends without the contribution of {_names(missing)}", rank,
                                    _last_step(algorithm, setting, rank, chunk), chunk)
            owner, same = first.setdefault(chunk, (rank, value))
            if not _equal(same[3], value[3]):
                raise ScheduleError(f"sums in another order than rank {owner}: their bits can differ", rank,
                                    _last_step(algorithm, setting, rank, chunk), chunk)
            ordered = ordered and value[1] == value[1]
    return ordered


def _equal(one: int | tuple, other: int | tuple) -> bool:
    """Tell whether two sums are the same; not by recursion, for a chain of sums is as deep as there are ranks."""
    pairs = [(one, other)]
    while pairs:
        one, other = pairs.pop()
        if one is other:
            continue
        if isinstance(one, int) or isinstance(other, int):
            if one != other:
                return False
        else:
            pairs.extend(zip(one, other))
    return True


def _last_step(algorithm: Algorithm, setting: Setting, rank: int, chunk: int) -> int:
    """Return the step in which a rank last receives a chunk (0: never)."""
    return max((index for index, step in enumerate(algorithm.steps(rank, setting)) if chunk in step.recv), default=0)


def _names(mask: int) -> str:
    found = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found)}"
