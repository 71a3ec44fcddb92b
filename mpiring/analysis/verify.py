"""Prove that a schedule does what its collective promises, from the schedule alone."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from mpiring.algorithms.registry import Algorithm, find
from mpiring.algorithms.step import Step
from mpiring.analysis.replay import Message, replay, schedules
from mpiring.errors import ScheduleError


class Proof(NamedTuple):
    """What the replay of a right schedule shows: its rounds, its messages, and the vectors that the busiest rank sends."""

    rounds: int
    messages: int
    sent: Fraction


class Value(NamedTuple):
    """What a rank holds of a chunk: whose contributions, summed in which shape, written in which step (-1: from the start)."""

    ranks: int       # bit r: the contribution of rank r is in it, once
    shape: int       # equal numbers: the same sums of the same terms, so the same bits
    step: int


def verify(algorithm: str | Algorithm, size: int, *, collective: str = "allreduce") -> Proof:
    """Prove an algorithm for `size` ranks, or raise ScheduleError with the rank, step and chunk at fault.

    Proven are: every message meets its receive; no rank waits for ever, even if MPI buffers nothing; every contribution is in
    every result exactly once; no chunk is overwritten while it is being sent; all ranks that get a chunk get the same bits
    (a + b and b + a count as the same, as they do in IEEE arithmetic).

    `algorithm` is a name of the registry, looked up for `collective`, or an Algorithm.
    """
    if size < 1:
        raise ValueError(f"size {size} is not a number of ranks")
    if isinstance(algorithm, str):
        algorithm = find(algorithm, collective)
    steps = schedules(algorithm, size)
    chunks = algorithm.chunks(size)
    _check_chunks(steps, chunks)
    shapes: dict[object, int] = {}
    held = [{chunk: Value(1 << rank, _intern(shapes, (rank, chunk)), -1) for chunk in algorithm.collective.given(rank, chunks)}
            for rank in range(size)]
    started: dict[tuple[int, int], dict[int, Value]] = {}
    messages, sent = 0, [0] * size
    for message in replay(steps):
        _deliver(message, steps, held, started, shapes)
        messages += 1
        sent[message.sender] += len(message.chunks)
    _check_results(algorithm, size, chunks, held)
    return Proof(len(steps[0]), messages, Fraction(max(sent), chunks))


def _deliver(message: Message, steps: list[list[Step]], held, started, shapes) -> None:
    """Move one message's values. What a step sends is what the rank held when the step began, whatever it receives meanwhile."""
    sender, receiver = message.sender, message.receiver
    reads = _snapshot(started, held, sender, message.send_step, steps)
    _snapshot(started, held, receiver, message.recv_step, steps)
    for chunk in message.chunks:
        if chunk not in reads:
            raise ScheduleError("sends a chunk that it does not have", sender, message.send_step, chunk)
        held[receiver][chunk] = _combine(message, chunk, reads[chunk], held[receiver].get(chunk), shapes)
    started.pop((sender, message.send_step), None)


def _snapshot(started, held, rank: int, index: int, steps: list[list[Step]]) -> dict[int, Value]:
    """Remember what a step sends before its receive changes it."""
    step = steps[rank][index]
    if step.send_to is None:
        return {}
    key = (rank, index)
    if key not in started:
        started[key] = {chunk: held[rank][chunk] for chunk in step.send if chunk in held[rank]}
    return started[key]


def _combine(message: Message, chunk: int, incoming: Value, own: Value | None, shapes) -> Value:
    rank, step = message.receiver, message.recv_step
    if not message.reduce:
        return Value(incoming.ranks, incoming.shape, step)
    if own is None:
        raise ScheduleError("reduces into a chunk that it does not have", rank, step, chunk)
    if twice := incoming.ranks & own.ranks:
        raise ScheduleError(f"adds the contribution of {_ranks(twice)} a second time", rank, step, chunk)
    shape = _intern(shapes, frozenset((incoming.shape, own.shape)))
    return Value(incoming.ranks | own.ranks, shape, step)


def _intern(shapes: dict[object, int], term: object) -> int:
    return shapes.setdefault(term, len(shapes))


def _check_chunks(steps: list[list[Step]], chunks: int) -> None:
    for rank, schedule in enumerate(steps):
        for index, step in enumerate(schedule):
            for chunk in (*step.send, *step.recv):
                if not 0 <= chunk < chunks:
                    raise ScheduleError(f"there are {chunks} chunks", rank, index, chunk)
            if not step.reduce and (both := set(step.send) & set(step.recv)):
                raise ScheduleError("overwrites a chunk while it is being sent", rank, index, min(both))


def _check_results(algorithm: Algorithm, size: int, chunks: int, held: list[dict[int, Value]]) -> None:
    givers = [0] * chunks
    for rank in range(size):
        for chunk in algorithm.collective.given(rank, chunks):
            givers[chunk] |= 1 << rank
    first: dict[int, tuple[int, int]] = {}
    for rank in range(size):
        for chunk in algorithm.collective.wanted(rank, chunks):
            value = held[rank].get(chunk)
            if value is None:
                raise ScheduleError("never gets the chunk", rank, None, chunk)
            if missing := givers[chunk] & ~value.ranks:
                raise ScheduleError(f"ends without the contribution of {_ranks(missing)}", rank, max(value.step, 0), chunk)
            owner, shape = first.setdefault(chunk, (rank, value.shape))
            if shape != value.shape:
                raise ScheduleError(f"sums in another order than rank {owner}: their bits can differ", rank, max(value.step, 0),
                                    chunk)


def _ranks(mask: int) -> str:
    found = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found)}"
