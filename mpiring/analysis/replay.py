"""Replay a schedule on all ranks without data: which message meets which receive, and whether any rank waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.step import Step
from mpiring.errors import ScheduleError


class Message(NamedTuple):
    """A send that has met its receive: the step of each side, and what happens to the chunks at the receiver."""

    sender: int
    send_step: int
    receiver: int
    recv_step: int
    chunks: range
    reduce: bool


def schedules(algorithm: Algorithm, size: int) -> list[list[Step]]:
    """Return the schedule of every rank."""
    return [list(algorithm.schedule(rank, size)) for rank in range(size)]


def replay(steps: list[list[Step]]) -> Iterator[Message]:
    """Yield every message in an order in which it can happen; ScheduleError where ranks would wait for ever or do not fit.

    Sends are taken as rendezvous: a step is over when its send has met a receive and its receive has met a send. A schedule
    that gets through needs no buffering by MPI.
    """
    _check_shape(steps)
    size = len(steps)
    at = [0] * size
    sent, received = [False] * size, [False] * size
    ready = deque(range(size))
    while ready:
        rank = ready.popleft()
        if at[rank] == len(steps[rank]):
            continue
        step = steps[rank][at[rank]]
        for sender, receiver in ((rank, step.send_to), (step.recv_from, rank)):
            if _meet(steps, at, sent, received, sender, receiver):
                send, recv = steps[sender][at[sender]], steps[receiver][at[receiver]]
                if send.send != recv.recv:
                    raise ScheduleError(f"receives {_ids(recv.recv)} from rank {sender}, which sends {_ids(send.send)}",
                                        receiver, at[receiver], next(iter(recv.recv), None))
                sent[sender] = received[receiver] = True
                yield Message(sender, at[sender], receiver, at[receiver], send.send, recv.reduce)
                ready.append(receiver if sender == rank else sender)
        if (step.send_to is None or sent[rank]) and (step.recv_from is None or received[rank]):
            at[rank] += 1
            sent[rank] = received[rank] = False
            ready.append(rank)
    _check_end(steps, at, sent)


def _meet(steps, at, sent, received, sender: int | None, receiver: int | None) -> bool:
    """Tell whether the sender's current send and the receiver's current receive are each other's and still open."""
    if sender is None or receiver is None or at[sender] == len(steps[sender]) or at[receiver] == len(steps[receiver]):
        return False
    return (steps[sender][at[sender]].send_to == receiver and steps[receiver][at[receiver]].recv_from == sender
            and not sent[sender] and not received[receiver])


def _check_shape(steps: list[list[Step]]) -> None:
    size, rounds = len(steps), len(steps[0])
    for rank, schedule in enumerate(steps):
        if len(schedule) != rounds:
            raise ScheduleError(f"has {len(schedule)} rounds where rank 0 has {rounds}", rank, min(len(schedule), rounds))
        for index, step in enumerate(schedule):
            for word, peer, chunks in (("sends to", step.send_to, step.send), ("receives from", step.recv_from, step.recv)):
                if peer is not None and (peer == rank or not 0 <= peer < size):
                    raise ScheduleError(f"{word} rank {peer}, not a peer among {size} ranks", rank, index, next(iter(chunks), None))


def _check_end(steps: list[list[Step]], at: list[int], sent: list[bool]) -> None:
    """Name the rank that is furthest behind of those that are stuck, and what it waits for."""
    for rank, index in sorted(enumerate(at), key=lambda place: place[1]):
        if index < len(steps[rank]):
            step = steps[rank][index]
            send = step.send_to is not None and not sent[rank]
            verb, peer, chunks = ("send", step.send_to, step.send) if send else ("receive", step.recv_from, step.recv)
            word = "to" if send else "from"
            raise ScheduleError(f"waits for ever to {verb} {_ids(chunks)} {word} rank {peer}, which is {_doing(steps, at, peer)}",
                                rank, index, next(iter(chunks), None))


def _doing(steps: list[list[Step]], at: list[int], rank: int) -> str:
    if at[rank] == len(steps[rank]):
        return "done"
    step = steps[rank][at[rank]]
    return f"in step {at[rank]} (sends to {step.send_to}, receives from {step.recv_from})"


def _ids(chunks: range) -> str:
    return f"chunk {chunks[0]}" if len(chunks) == 1 else f"chunks {chunks.start} to {chunks.stop - 1}" if chunks else "no chunk"
