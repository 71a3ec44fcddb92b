"""Replay a schedule on all ranks without data, round by round: every message meets its receive, so no rank waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import Chunks, Step
from mpiring.errors import ScheduleError

Round = tuple[Step, ...]
KINDS = (range, tuple)
"""What chunk ids come in."""


def replay(algorithm: Algorithm, setting: Setting) -> Iterator[Round]:
    """Yield the rounds, one step of every rank each; ScheduleError where a send or a receive has no counterpart in its round.

    Sends are taken as rendezvous: a step is over when its send has met a receive and its receive has met a send. Where they
    meet in one round, that round ends once the one before it has, so a schedule that gets through needs no buffering by MPI.
    """
    schedules = [algorithm.steps(rank, setting) for rank in range(setting.size)]
    for index, steps in enumerate(zip_longest(*schedules)):
        if not _meet(steps):
            _explain(index, steps)
        yield steps


def _meet(steps: Round) -> bool:
    """Tell whether every receive has its send; if there are as many sends, they all have their receives as well."""
    sends = receives = 0
    try:
        for rank, (send_to, send, recv_from, recv, _) in enumerate(steps):
            if recv_from is not None:
                receives += 1
                peer = steps[recv_from]
                if peer[0] != rank or recv_from < 0 or recv_from == rank or type(recv) not in KINDS:
                    return False
                if peer[1] != recv and not _same(peer[1], recv):
                    return False
            elif recv:
                return False
            if send_to is not None:
                sends += 1
            elif send:
                return False
    except (TypeError, ValueError, IndexError):         # a rank that has no step here, what is no Step, a peer that is none
        return False
    return sends == receives


def _explain(index: int, steps: Round) -> None:
    """Raise ScheduleError for a round that does not fit."""
    for rank, step in enumerate(steps):
        if step is None:
            raise ScheduleError(f"has {index} rounds where other ranks have more", rank, index)
        if not isinstance(step, Step):
            raise ScheduleError(f"yields {step!r}, which is no Step", rank, index)
        for word, peer, chunks in (("sends to", step.send_to, step.send), ("receives from", step.recv_from, step.recv)):
            if peer is None and chunks:
                raise ScheduleError(f"{word} nobody {ids(chunks)}", rank, index, first(chunks))
            if peer is not None and type(chunks) not in KINDS:
                raise ScheduleError(f"{word} rank {peer} chunks {chunks!r}, neither a range nor a tuple of ids", rank, index)
            if peer is not None and (peer == rank or not 0 <= peer < len(steps)):
                raise ScheduleError(f"{word} rank {peer}, not a peer among {len(steps)} ranks", rank, index, first(chunks))
    for rank, step in enumerate(steps):
        if step.send_to is not None:
            peer = steps[step.send_to]
            if peer.recv_from != rank:
                raise ScheduleError(f"waits for ever to send {ids(step.send)} to rank {step.send_to}, which {_receives(peer)} in "
                                    "this round", rank, index, first(step.send))
            if not _same(peer.recv, step.send):
                raise ScheduleError(f"receives {ids(peer.recv)} from rank {rank}, which sends {ids(step.send)}", step.send_to,
                                    index, first(peer.recv))
        if step.recv_from is not None:
            peer = steps[step.recv_from]
            if peer.send_to != rank:
                raise ScheduleError(f"waits for ever to receive {ids(step.recv)} from rank {step.recv_from}, which {_sends(peer)} "
                                    "in this round", rank, index, first(step.recv))


def _same(some: Chunks, others: Chunks) -> bool:
    """Tell whether a range and a tuple, say, are of the same chunks."""
    return tuple(some) == tuple(others)


def _receives(step: Step) -> str:
    return "receives nothing" if step.recv_from is None else f"receives from rank {step.recv_from}"


def _sends(step: Step) -> str:
    return "sends nothing" if step.send_to is None else f"sends to rank {step.send_to}"


def first(chunks: Chunks) -> int | None:
    """Return the first of chunks, if there is one."""
    return next(iter(chunks), None)


def ids(chunks: Chunks) -> str:
    """Write chunk ids: chunk 3, chunks 3 to 5, chunks 1, 3, 5."""
    if not chunks:
        return "no chunk"
    if len(chunks) == 1:
        return f"chunk {chunks[0]}"
    if chunks[-1] - chunks[0] == len(chunks) - 1:
        return f"chunks {chunks[0]} to {chunks[-1]}"
    return f"chunks {', '.join(map(str, chunks))}"
