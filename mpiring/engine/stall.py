"""Operations for which other ranks do not come: found, reported through logging, and given up in the end.

Only who waits looks. It asks the others which of the operations they have; who waits as well answers, and who does not answer has
submitted nothing at all. So ranks that have nothing to do are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpiring.engine.operation import Operation, shown
from mpiring.errors import PeerError, ShutdownError, StallError

if TYPE_CHECKING:
    from mpiring.engine.loop import Loop

LOG = logging.getLogger("mpiring")

QUESTION, ANSWER, LEFT = 1, 2, 3
"""Tags of messages between those who wait, and of a rank's that has shut down alone, or failed."""

BETWEEN = 0.05
"""Seconds between looks."""

GRACE = 1.0
"""Seconds that others have to answer."""

SHOWN = 6
"""Operations that a message names."""


class Watch:
    """What one rank knows of those that it waits for."""

    def __init__(self, loop: Loop):
        self.loop, self.comm = loop, loop.comm.Dup()
        self.looked = 0.0
        self.asked: float | None = None                  # when, if the answers are not all here yet
        self.answers: dict[int, set[Hashable]] = {}
        self.sent: list[MPI.Request] = []

    def look(self) -> None:
        """See, now and then, whether others ask, and whether anything has waited for too long."""
        now = perf_counter()
        if now - self.looked < BETWEEN:
            return
        self.looked = now
        self._answer()
        settings = self.loop.settings
        late = [operation for operation in self.loop.under_way()
                if _over(now - max(operation.submitted, operation.reported), settings.stall_seconds)
                or _over(now - operation.submitted, settings.timeout)]
        if not late:
            return
        if self.asked is None:
            self._ask(now)
        elif len(self.answers) == self.comm.size - 1 or now - self.asked > GRACE:
            self.asked = None
            self._judge(late, now)

    def leave(self, why: str | None = None) -> None:
        """Tell the others, whenever they come to wait for this rank, that it does not come any more. why: None for a shutdown."""
        self._send(range(self.comm.size), LEFT, why)

    def _ask(self, now: float) -> None:
        self.asked, self.answers = now, {}
        self._send(range(self.comm.size), QUESTION, None)

    def _send(self, ranks: Any, tag: int, what: Any) -> None:
        self.sent = [request for request in self.sent if not request.Test()]
        self.sent += [self.comm.isend(what, rank, tag) for rank in ranks if rank != self.comm.rank]

    def _answer(self) -> None:
        """Tell who asks what this rank has submitted; hear what others answer."""
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            what = self.comm.recv(source=status.source, tag=status.tag)
            if status.tag == LEFT:
                self._left(self.loop.negotiation.named([status.source]), what)
            elif status.tag == QUESTION:
                self._send([status.source], ANSWER, {operation.key for operation in self.loop.under_way()})
            elif self.asked is not None:
                self.answers[status.source] = what

    def _left(self, who: str, why: str | None) -> None:
        if why is None:
            self.loop.end(ShutdownError(f"{who} shut the engine down"))
        else:
            self.loop.end(PeerError(f"{who}: {why}"), broken=True)

    def _judge(self, late: list[Operation], now: float) -> None:
        """Report what has waited for long, and give up what has for too long."""
        timeout = self.loop.settings.timeout
        expired = [operation for operation in late if _over(now - operation.submitted, timeout)]
        if fresh := [operation for operation in late if operation not in expired]:
            self.loop.counts["stalls"] += 1
            LOG.warning("rank %s waits for others: %s", self.loop.negotiation.labels[self.comm.rank], self._text(fresh, now))
            for operation in fresh:
                operation.reported = now
        for operation in expired:
            self.loop.fail(operation, StallError(f"rank {self.loop.negotiation.labels[self.comm.rank]} has waited for longer than "
                                                 f"{timeout:g} s (MPIRING_TIMEOUT): {self._text([operation], now)}"))

    def _text(self, operations: list[Operation], now: float) -> str:
        lines = [f"{operation.description.kind} {shown(operation.key)} for {now - operation.submitted:.1f} s, "
                 f"{self._missing(operation)}" for operation in operations[:SHOWN]]
        more = len(operations) - SHOWN
        return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")

    def _missing(self, operation: Operation) -> str:
        missing = [rank for rank in range(self.comm.size) if rank != self.comm.rank
                   and operation.key not in self.answers.get(rank, ())]
        if not missing:
            return self._missing_members(operation)
        silent = [rank for rank in missing if rank not in self.answers]
        named = self.loop.negotiation.named
        return f"which {named(missing)} {'has' if len(missing) == 1 else 'have'} not submitted" + (
            f" ({named(silent)}: nothing at all)" if silent and silent != missing else "")

    def _missing_members(self, operation: Operation) -> str:
        """Say what an operation waits for that all ranks have submitted: in a fixed group, for the others."""
        for keys in self.loop.sealed:
            if operation.key in keys and (others := [key for key in keys if key not in self.loop.ripe]):
                return f"which is in a group with {', '.join(map(shown, others[:SHOWN]))}, not submitted by all ranks"
        return "which all ranks have submitted by now"

    def free(self) -> None:
        """Let go of the comm; collective."""
        while self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG):
            self.comm.recv()
        self.comm.Free()


def _over(seconds: float, limit: float) -> bool:
    return 0 < limit <= seconds
