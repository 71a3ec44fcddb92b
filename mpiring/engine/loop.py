"""One process set's operations on their way: submitted by callers, agreed among the ranks round by round, exchanged, handed back.

A round is a generator that yields MPI requests, so whichever thread drives it can leave it there, and another one go on.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import Counter, deque
from collections.abc import Generator, Hashable, Sequence
from contextlib import suppress
from time import perf_counter

import numpy as np
from mpi4py import MPI

from mpiring.engine.board import ROOM, Ballot, board_for
from mpiring.engine.driver import Driver, nap
from mpiring.engine.exchanges import Exchanges
from mpiring.engine.movers import gather_rows
from mpiring.engine.negotiation import JOIN, NO_NEWS, SHUTDOWN, Negotiation, News, Slot
from mpiring.engine.operation import SEAL, Description, Operation
from mpiring.engine.requests import Known
from mpiring.engine.schedule import parts_of
from mpiring.engine.settings import Settings
from mpiring.engine.stall import Watch
from mpiring.errors import ShutdownError

LINGER = 3.0
"""Seconds that a rank which shuts down waits for the others to take part."""

RECENT = 1 << 15
"""Names of which is remembered what was checked last."""

UNNAMED = 256
"""Operations without a name that are on their way at most; later ones are held back until there is room."""

JOINING = Description("join")

Round = Generator[MPI.Request | Ballot, None, None]


class _Abandoned(Exception):
    """The others do not come any more."""


class Loop:
    """The machinery of one process set on one rank."""

    def __init__(self, comm: MPI.Comm, labels: Sequence[int], settings: Settings, threaded: bool):
        """comm: for this alone; freed at the end. labels: the numbers by which messages name ranks."""
        self.comm, self.settings, self.labels = comm, settings, labels
        self.board = board_for(comm)
        self.negotiation = Negotiation(comm.rank, labels)
        self.lock = threading.RLock()
        self.queue: deque[Operation] = deque()           # submitted, and not in a round yet
        self.flight: dict[Hashable, Operation] = {}      # all that are on their way, by name
        self.held: deque[Operation] = deque()            # unnamed, and no room
        self.recent: dict[str, Known | None] = {}        # what was checked last under a name
        self.alike: dict[Description, Known] = {}        # one for all names of which the same is known: it stays in the cache
        self.unnamed = self.moved = 0
        self.news: News = []
        self.leaving = self.ended = self.clean = False
        self.closed: BaseException | None = None         # why nothing can be submitted any more
        self.deadline = float("inf")
        self.empty_since: float | None = None            # when rounds began to bring nothing
        self.rested = 0.0
        self.groups = settings.deterministic and comm.rank == 0      # whether this rank's program says what is fused
        self.unsealed: dict[Hashable, None] = {}         # then: submitted since the last seal
        self.unsealed_bytes = 0
        self.seals: list[tuple] = []
        self.ripe: dict[Hashable, Slot | None] = {}      # with fixed groups: ready, and waiting for its seal
        self.sealed: list[tuple] = []
        self.counts: Counter[str] = Counter()
        self.exchanges = Exchanges(comm, threaded, settings, self.counts)
        self.watch = Watch(self)
        self.running: Round | None = None
        self.request: MPI.Request | Ballot | None = None
        self.crowd = max(1.0, self.exchanges.mover.neighbours / len(os.sched_getaffinity(0)))        # ranks for each core
        self.driver = Driver(self, threaded)
        if self.driver.thread is not None:
            self.driver.thread.start()

    # What callers do

    def submit(self, call: str, operation: Operation) -> Operation:
        """Send an operation on its way; ValueError where its name is on its way already.

        No lock is taken for one with a name: a dict and a deque are safe to add to. Who takes things out looks again afterwards.
        """
        operation.loop, key = self, operation.key
        if key is None:
            self._submit_unnamed(operation)
        elif (before := self.flight.setdefault(key, operation)) is not operation:
            why = ("was given up, but others may still come for it: use another name" if before.given_up else
                   "is on its way already: synchronize it first, or use another name")
            raise ValueError(f"{call} on rank {self.labels[self.comm.rank]}: an operation with the name {key!r} {why}")
        else:
            if self.groups:
                self._group(operation)
            self._enqueue(operation)
        if self.closed is not None:
            self._refuse(operation)
        return operation

    def _submit_unnamed(self, operation: Operation) -> None:
        with self.lock:
            operation.key = key = self.unnamed % UNNAMED
            self.unnamed += 1
            if self.groups:
                self._group(operation)
            if self.held or key in self.flight:
                self.held.append(operation)
            else:
                self.flight[key] = operation
                self._enqueue(operation)

    def _enqueue(self, operation: Operation) -> None:
        self.queue.append(operation)
        if self.driver.asleep:                           # the thread sets that before it looks at the queue for the last time
            self.driver.wake()

    def _refuse(self, operation: Operation) -> None:
        """Raise for an operation that came while the engine ended, unless it has failed with all that was on its way."""
        with self.lock:
            if operation.done:
                return
            operation.given_up = operation.done = True   # it may be in a round already
            if self.ended:
                self.flight.pop(operation.key, None)
        self.check_open()

    def check_open(self) -> None:
        """Raise where nothing can be submitted any more."""
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))

    def remember(self, name: str, known: Known | None) -> None:
        """Keep what was checked under a name, so that the next such operation need not be."""
        if len(self.recent) >= RECENT:
            self.recent.clear()
            self.alike.clear()
        if known is not None:
            found = self.alike.setdefault(known.description, known)
            known = found if found == known else known
        self.recent[name] = known

    def join(self) -> Operation:
        """Send word that this rank has no more data."""
        operation = Operation(JOINING, None, [], [], None, 0)
        operation.key = JOIN
        operation.loop = self
        with self.lock:
            self.check_open()
            if JOIN in self.flight:                      # as after an interrupt
                return self.flight[JOIN]
            self._seal()
            self.flight[JOIN] = operation
            self.news.append((JOIN, self.unnamed))
            self.driver.wake()
        return operation

    def under_way(self) -> list[Operation]:
        """Return the operations that callers wait for, those aside that have joined."""
        with self.lock:                                  # the copy is made at one stroke: callers add to it without a lock
            found = [*self.flight.copy().values(), *self.held]
        return [operation for operation in found if operation.key != JOIN and not operation.done]

    def seal(self) -> None:
        """Let what was submitted so far be a group, where groups are fixed."""
        if self.unsealed:
            with self.lock:
                self._seal()
            self.driver.wake()

    def leave(self, linger: float = LINGER) -> None:
        """Begin to shut down; the others learn of it."""
        with self.lock:
            if not self.leaving and not self.ended:
                self._seal()
                self.leaving = True
                self.closed = self.closed or ShutdownError("the engine has been shut down")
                self.deadline = perf_counter() + linger
                self.news.append((SHUTDOWN, None))
                self.driver.wake()

    def _group(self, operation: Operation) -> None:
        """Note what belongs to a fixed group: rank 0's program says what, by the order in which it submits."""
        description, threshold = operation.description, self.settings.fusion_threshold
        if description.kind == "allreduce" and any(part.group for part in parts_of(description, threshold)):
            with self.lock:
                if operation.key in self.unsealed:       # one without a name, held back until the other one is through
                    self._seal()
                self.unsealed[operation.key] = None
                self.unsealed_bytes += operation.nbytes
                if self.unsealed_bytes >= threshold:
                    self._seal()

    def _seal(self) -> None:
        if self.unsealed:
            self.seals.append((SEAL, *self.unsealed))
            self.unsealed, self.unsealed_bytes = {}, 0

    # What moves on

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.flight or self.news or self.seals or self.running)

    def advance(self) -> int:
        """Do what can be done without waiting; return a number that changes when something has come about."""
        try:
            while self._has_request():
                if not self.request.Test():
                    self._check_deadline()
                    break
                self.request = None
        except _Abandoned:
            self.end(ShutdownError("the engine has been shut down"))
        except BaseException as error:
            self.break_down(error)
            if not isinstance(error, Exception):
                raise
        return self.moved

    def _check_deadline(self) -> None:
        if perf_counter() > self.deadline:
            self.watch.leave()
            raise _Abandoned

    def _has_request(self) -> bool:
        """Go on with the round until it needs MPI; begin one if there is something to do."""
        while self.request is None:
            if self.running is None:
                pause = self._pause()
                due = pause is not None and perf_counter() - self.rested >= pause
                if self.ended or not (self.queue or self.news or self.seals or due):
                    return False
                self.running = self._round()
            self.request = next(self.running, None)
            if self.request is None:
                self.running, self.rested = None, perf_counter()
        return True

    def _pause(self) -> float | None:
        """Return the seconds until the next round with nothing new; None: until there is something."""
        if not (self.negotiation.waiting or self.ripe):
            return None
        if self.empty_since is None:
            return 0
        return nap(perf_counter() - self.empty_since)

    # A round

    def _round(self) -> Round:
        begun = perf_counter()
        with self.lock:
            fresh = [self.queue.popleft() for _ in range(len(self.queue))]
            seals, news = self.seals, self.news
            self.seals, self.news = [], []
        words, told = self.negotiation.compose(fresh, seals, news)
        if self.board is not None and len(words) <= ROOM:
            ballot = self.board.give(words)
            yield ballot
            total = ballot.total()
        else:
            total = bytearray(len(words))
            yield self.comm.Iallreduce([words, MPI.BYTE], [total, MPI.BYTE], MPI.BAND)
        everyone: Sequence[News] = ()
        if total[0] != NO_NEWS:
            everyone = yield from self._tell(told)
        outcome = self.negotiation.agree(total, everyone)
        now = perf_counter()
        counts = self.counts
        counts["rounds"] += 1
        counts["declared"] += len(told) - len(news)
        counts["known"] += len(fresh) + len(news) - len(told)
        counts["seconds_negotiate"] += now - begun
        line = self.exchanges.timeline
        if line is not None:
            line.span("", "negotiate", begun, now, ready=len(outcome.ready))
        if outcome.ready or outcome.leaving or outcome.last is not None:
            self.empty_since = None
            self.moved += 1
        elif self.empty_since is None:
            self.empty_since = now
        for ready in self._admitted(outcome.ready, now):
            yield from self.exchanges.perform(ready, self._finish)
        if outcome.last is not None:
            self._all_joined(outcome.last, outcome.met)
        if outcome.leaving:
            self.end(ShutdownError(f"{self.negotiation.named(outcome.leaving)} shut the engine down"))
        if line is not None:
            line.flush()

    def _tell(self, told: News) -> Generator[MPI.Request, None, list[News]]:
        """Gather the news of all ranks."""
        mine = np.frombuffer(pickle.dumps(told) if told else b"", np.uint8)
        sizes = np.empty(self.comm.size, np.int64)
        yield self.comm.Iallgather(np.array([mine.size], np.int64), sizes)
        rows = yield from gather_rows(self.comm, mine, sizes.tolist())
        found = [pickle.loads(row.tobytes()) if row.size else [] for row in rows]
        found[self.comm.rank] = told                     # so that what was said last is known by identity
        return found

    def _admitted(self, ready: list[Slot], now: float) -> list[list[Slot]]:
        """Return what is to be exchanged together: without what ranks are at odds about; each fixed group, when it is complete."""
        if self.exchanges.timeline is not None:
            for slot in ready:
                if slot.operation is not None:
                    slot.operation.agreed = now
        if not self.settings.deterministic and not any([slot.error for slot in ready]):
            return [ready]
        good = []
        for slot in ready:
            if slot.error is not None:
                self._refuse_slot(slot)
            elif slot.description.kind == SEAL:
                self.sealed.append(slot.key[1:])
            elif self._is_grouped(slot, slot.description):
                self.ripe[slot.key] = slot
            else:
                good.append(slot)
        return [good, *self._complete_groups()] if self.sealed else [good]

    def _refuse_slot(self, slot: Slot) -> None:
        """Let an operation fail that ranks are at odds about; its fixed group need not wait for it."""
        if self._is_grouped(slot, slot.of[0]):
            self.ripe[slot.key] = None
        if slot.operation is not None:
            slot.operation.left = 1                      # none of a group's arrays will be exchanged
            self._finish([slot.operation], slot.error)
        slot.operation = slot.error = None

    def _complete_groups(self) -> list[list[Slot]]:
        """Return the fixed groups that are complete. One waits for an earlier one with the same name, for that comes first."""
        found, waiting = [], []
        claimed: set[Hashable] = set()
        for keys in self.sealed:
            if claimed.isdisjoint(keys) and all(key in self.ripe for key in keys):
                found.append([slot for slot in [self.ripe.pop(key) for key in keys] if slot is not None])
            else:
                waiting.append(keys)
                claimed.update(keys)
        self.sealed = waiting
        return found

    def _is_grouped(self, slot: Slot, description: Description) -> bool:
        """Tell whether an operation belongs to a fixed group: rank 0 must be there to name it, and found it fit to be fused."""
        return (self.settings.deterministic and slot.led and description.kind == "allreduce"
                and any(part.group for part in parts_of(description, self.settings.fusion_threshold)))

    # How operations end

    def _finish(self, operations: list[Operation], error: BaseException | None = None) -> None:
        """Hand operations back; a group only when all its arrays are through, or have failed."""
        if error is not None:
            for operation in operations:
                operation.error = operation.error or error
        with self.lock:
            flight, over = self.flight, 0
            for operation in operations:
                if operation.left > 1:
                    operation.left -= 1
                else:
                    del flight[operation.key]
                    operation.done = True
                    over += 1
            while self.held and self.held[0].key not in flight:
                operation = self.held.popleft()
                flight[operation.key] = operation
                self._enqueue(operation)
            self.driver.free.notify_all()
        self.counts["operations"] += over
        self.counts["errors"] += over if error is not None else 0

    def fail(self, operation: Operation, error: BaseException) -> None:
        """Let an operation's caller go with an error. Its data stay, for the ranks that may still come for it."""
        operation.give_up(error)
        with self.lock:
            operation.done = True
            self.counts["errors"] += 1
            self.driver.free.notify_all()

    def _all_joined(self, last: int, met: int) -> None:
        with self.lock:
            operation = self.flight.pop(JOIN)
            operation.result, operation.done = self.labels[last], True
            self.unnamed = met
            self.driver.free.notify_all()

    def break_down(self, error: BaseException) -> None:
        """End because this rank cannot go on, and tell the others, who would wait for what it has to say."""
        why = f"the engine failed: {type(error).__name__}: {error}"
        self.end(RuntimeError(why), broken=True)
        with suppress(Exception):                        # it may be MPI that fails
            self.watch.leave(why)

    def end(self, error: BaseException, broken: bool = False) -> None:
        """Let all that is on its way fail, and what is submitted from now on. broken: not by a shutdown."""
        if self.request is not None:
            _LEFT_BEHIND.append((self.request, self.running))
        with self.lock:
            self.ended = True
            self.closed = self.closed if self.leaving and not broken else error
            for operation in [*self.flight.copy().values(), *self.held]:
                if not operation.done:
                    operation.error, operation.done = error, True
            self.flight.clear()
            self.held.clear()
            self.clean = not broken and perf_counter() <= self.deadline
            self.driver.free.notify_all()
            self.driver.work.notify_all()

    def free(self) -> None:
        """Let go of what ranks share, once the round in which all learned of the end is over; collective."""
        if self.driver.thread is not None:
            self.driver.thread.join(LINGER + 1)
        if self.clean:
            self.exchanges.free()
            self.watch.free()
            if self.board is not None:
                self.board.free()
            self.comm.Free()


_LEFT_BEHIND: list[tuple[MPI.Request | Ballot, Round | None]] = []
"""What never came to an end, with the arrays that MPI may write into as long as the process lives."""
