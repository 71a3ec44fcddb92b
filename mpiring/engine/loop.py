"""One process set's operations on their way: submitted by callers, agreed among the ranks round by round, exchanged, handed back.

A round is a generator that yields MPI requests. The set's own thread drives it, and waits: spinning first, then asleep for longer
and longer. Where MPI is not for several threads, the caller's thread drives it from poll and synchronize instead.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import counts as balanced
from mpiring.engine.bursts import Burst, Member, pack, put, settle, take, unpack
from mpiring.engine.movers import Plans, Requests
from mpiring.engine.negotiation import JOIN, NO_NEWS, SEAL, SHUTDOWN, Agreed, Negotiation, News
from mpiring.engine.operation import Description, Operation
from mpiring.engine.requests import Known
from mpiring.engine.schedule import Batch, Part, batches, dtype_of, parts_of
from mpiring.engine.settings import Settings
from mpiring.engine.stall import Watch
from mpiring.errors import ShutdownError
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space
from mpiring.runtime.channel import Cache

SPIN = 2e-4
"""Seconds for which a thread that waits for others gives its core away between looks before it sleeps."""

PATIENCE, NAP, LONG_NAP = 16, 1e-3, 5e-3
"""A sleep between looks takes a PATIENCEth of the time waited so far, but no longer than a NAP, after a second a LONG_NAP."""

LINGER = 3.0
"""Seconds that a rank which shuts down waits for the others to take part."""

UNNAMED = 256
"""Operations without a name that are on their way at most; later ones are held back until there is room."""

PLACES = 1 << 16
"""Places in bursts whose views are kept."""

JOINING = Description("join")

Round = Generator[MPI.Request, None, None]


class _Abandoned(Exception):
    """The others do not come any more."""


class Loop:
    """The machinery of one process set on one rank."""

    def __init__(self, comm: MPI.Comm, labels: Sequence[int], settings: Settings, threaded: bool):
        """comm: for this alone; freed at the end. labels: the numbers by which messages name ranks."""
        self.comm, self.settings, self.labels, self.threaded = comm, settings, labels, threaded
        self.mover: Plans | Requests = Plans(comm) if threaded else Requests(comm)
        self.negotiation = Negotiation(comm.rank, labels)
        self.lock = threading.Lock()
        self.work, self.finished = threading.Condition(self.lock), threading.Condition(self.lock)
        self.queue: list[Operation] = []                 # submitted, and not in a round yet
        self.queued = 0                                  # bytes of these
        self.flight: dict[Hashable, Operation] = {}      # all that are on their way, by name
        self.held: deque[Operation] = deque()            # unnamed, and no room
        self.recent: dict[str, Known] = {}               # what was checked last under a name
        self.unnamed = self.waiters = 0
        self.news: News = []
        self.asleep = self.leaving = self.ended = False
        self.closed: BaseException | None = None         # why nothing can be submitted any more
        self.deadline = float("inf")
        self.empty_since: float | None = None
        self.rooms: dict[Space, Any] = {}
        self.bursts = Cache(PLACES)
        self.parts: dict[int, list[Part]] = {}
        self.device: Space = HOST
        self.members: list[tuple[Agreed, int]] = []
        self.unsealed: list[Hashable] = []               # with fixed groups, on rank 0: submitted since the last seal
        self.unsealed_bytes = 0
        self.seals: list[tuple] = []
        self.ripe: dict[Hashable, Agreed] = {}           # with fixed groups: ready, and waiting for its seal
        self.sealed: list[tuple] = []
        self.timeline: Any = None
        self.counts: Counter[str] = Counter()
        self.watch = Watch(self)
        self.running: Round | None = None
        self.request: MPI.Request | None = None
        self.thread: threading.Thread | None = None
        if threaded:
            self.thread = threading.Thread(target=self._run, name="mpiring-engine", daemon=True)
            self.thread.start()

    # What callers do

    def submit(self, operation: Operation) -> Operation:
        """Send an operation on its way; ValueError where its name is on its way already."""
        operation.loop = self
        with self.lock:
            self.check_open()
            if operation.key is None:
                operation.key = self.unnamed % UNNAMED
                self.unnamed += 1
                if self.held or operation.key in self.flight:
                    self.held.append(operation)
                    return operation
            elif operation.key in self.flight:
                other = self.flight[operation.key]
                why = "was given up, but other ranks may still come for it" if other.given_up else "is on its way already"
                raise ValueError(f"an operation with the name {operation.key!r} {why}: synchronize it first, or use another name")
            self._enqueue(operation)
        return operation

    def check_open(self) -> None:
        """Raise where nothing can be submitted any more."""
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))

    def _enqueue(self, operation: Operation) -> None:
        self.flight[operation.key] = operation
        self.queue.append(operation)
        self.queued += operation.nbytes
        if self.settings.deterministic and self.comm.rank == 0:
            self._group(operation)
        if self.asleep:
            self.asleep = False
            self.work.notify()

    def join(self) -> Operation:
        """Send word that this rank has no more data."""
        operation = Operation(JOINING, None, [], HOST, JOIN)
        operation.loop = self
        with self.lock:
            self.check_open()
            if JOIN in self.flight:
                raise ValueError("this rank has joined already")
            self._seal()
            self.flight[JOIN] = operation
            self.news.append((JOIN, self.unnamed))
            self._wake()
        return operation

    def under_way(self) -> list[Operation]:
        """Return the operations that callers wait for, those aside that have joined."""
        with self.lock:
            return [operation for key, operation in self.flight.items() if key != JOIN and not operation.done]

    def wait(self, operation: Operation) -> None:
        """Wait until an operation is done."""
        with self.lock:
            self._seal()
            self.waiters += 1
            self._wake()
            try:
                while not operation.done:
                    self.finished.wait()
            finally:
                self.waiters -= 1

    def seal(self) -> None:
        """Let what was submitted so far be a group, where groups are fixed."""
        if self.unsealed:
            with self.lock:
                self._seal()
                self._wake()

    def leave(self, linger: float = LINGER) -> None:
        """Begin to shut down; the others learn of it."""
        with self.lock:
            if not self.leaving and not self.ended:
                self._seal()
                self.leaving = True
                self.closed = self.closed or ShutdownError("the engine has been shut down")
                self.deadline = perf_counter() + linger
                self.news.append((SHUTDOWN, None))
                self._wake()

    def _wake(self) -> None:
        self.asleep = False
        self.work.notify()

    def _group(self, operation: Operation) -> None:
        """Note what belongs to a fixed group: rank 0's program says what, by the order in which it submits."""
        groups = {part.group for part in parts_of(operation.description, self.settings.fusion_threshold)}
        if operation.description.kind == "allreduce" and groups != {None}:
            self.unsealed.append(operation.key)
            self.unsealed_bytes += operation.nbytes
            if self.unsealed_bytes >= self.settings.fusion_threshold:
                self._seal()

    def _seal(self) -> None:
        if self.unsealed:
            self.seals.append((SEAL, *self.unsealed))
            self.unsealed, self.unsealed_bytes = [], 0

    # What drives a round

    def _run(self) -> None:
        """Be the set's thread."""
        try:
            with np.errstate(all="ignore"):
                while self._await_work():
                    for request in self._round():
                        self._wait(request)
        except _Abandoned:
            self._end(ShutdownError("the engine has been shut down"))
        except BaseException as error:
            self._end(error, broken=True)

    def _await_work(self) -> bool:
        """Sleep while there is nothing to do; False when there never will be."""
        with self.lock:
            while not (self.ended or self.queue or self.news or self.seals):
                pause = self._pause()
                if pause == 0:
                    break
                self.asleep = True
                if not self.work.wait(pause):
                    break
            if self.ended:
                return False
            if self.queue and not (self.waiters or self.leaving or self.news):
                self._gather_more()
            self.asleep = False
        self.watch.look()
        return True

    def _pause(self) -> float | None:
        """Return the seconds until the next round with nothing new; None: until there is something."""
        if not self.negotiation.waiting:
            return None
        if self.empty_since is None:
            return 0
        return nap(perf_counter() - self.empty_since)

    def _gather_more(self) -> None:
        """Let more operations join the first one, for a cycle's time; unless somebody waits, or there is a burst already."""
        until = self.queue[0].submitted + self.settings.cycle_time
        while not self.waiters and self.queued < self.settings.fusion_threshold:
            left = until - perf_counter()
            if left <= 0 or not self.work.wait(left):
                return

    def _wait(self, request: MPI.Request) -> None:
        begun = perf_counter()
        while not request.Test():
            waited = perf_counter() - begun
            if waited < SPIN:
                give_way()
            else:
                time.sleep(nap(waited))
                self._check_deadline(request)
                self.watch.look()

    def _check_deadline(self, request: MPI.Request) -> None:
        if perf_counter() > self.deadline:
            _LEFT_BEHIND.append(request)                 # MPI may write into its buffers as long as the process lives
            raise _Abandoned

    def advance(self) -> None:
        """Do what can be done without waiting, in the caller's thread."""
        try:
            with np.errstate(all="ignore"):
                while self._has_request():
                    if not self.request.Test():
                        self._check_deadline(self.request)
                        break
                    self.request = None
            self.watch.look()
        except _Abandoned:
            self._end(ShutdownError("the engine has been shut down"))
        except BaseException as error:
            self._end(error, broken=True)
            if not isinstance(error, Exception):
                raise

    def _has_request(self) -> bool:
        """Go on with the round until it needs MPI; begin one if there is something to do."""
        while self.request is None:
            if self.running is None:
                pause = self._pause()
                due = pause is not None and (pause == 0 or perf_counter() - self.rested >= pause)
                if self.ended or not (self.queue or self.news or self.seals or due):
                    return False
                self.running = self._round()
            self.request = next(self.running, None)
            if self.request is None:
                self.running, self.rested = None, perf_counter()
        return True

    rested = 0.0

    # A round

    def _round(self) -> Round:
        begun = perf_counter()
        with self.lock:
            fresh, seals, news = self.queue, self.seals, self.news
            self.queue, self.seals, self.news, self.queued = [], [], [], 0
        words, told = self.negotiation.compose(fresh, seals, news)
        total = np.empty_like(words)
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
        if self.timeline:
            self.timeline.span("", "negotiate", begun, now, ready=len(outcome.ready))
        if outcome.ready or outcome.leaving or outcome.last is not None:
            self.empty_since = None
        elif self.empty_since is None:
            self.empty_since = now
        yield from self._perform(self._admitted(outcome.ready, now))
        if outcome.last is not None:
            self._all_joined(outcome.last, outcome.met)
        if outcome.leaving:
            self._end(ShutdownError(f"{self.negotiation.named(outcome.leaving)} shut the engine down"))
        if self.timeline:
            self.timeline.flush()

    def _tell(self, told: News) -> Generator[MPI.Request, None, list[News]]:
        """Gather the news of all ranks."""
        mine = np.frombuffer(pickle.dumps(told) if told else b"", np.uint8)
        sizes = np.empty(self.comm.size, np.int64)
        yield self.comm.Iallgather(np.array([mine.size], np.int64), sizes)
        everyone = np.empty(int(sizes.sum()), np.uint8)
        yield self.comm.Iallgatherv([mine, MPI.BYTE], [everyone, sizes.tolist(), MPI.BYTE])
        parts = np.split(everyone, np.cumsum(sizes)[:-1])
        found = [pickle.loads(part.tobytes()) if part.size else [] for part in parts]
        found[self.comm.rank] = told                     # so that what was said last is known by identity
        return found

    def _admitted(self, ready: list[Agreed], now: float) -> list[Agreed]:
        """Return what is to be exchanged: without what ranks are at odds about; with fixed groups, only those that are complete."""
        good = []
        for entry in ready:
            operation = entry.operation
            if operation is not None:
                operation.agreed = now
            if entry.error is not None:
                self._finish([operation] if operation else [], entry.error)
            elif entry.description.kind == SEAL:
                self.sealed.append(entry.key[1:])
            elif self._is_grouped(entry):
                self.ripe[entry.key] = entry
            else:
                good.append(entry)
        for keys in [keys for keys in self.sealed if all(key in self.ripe for key in keys)]:
            self.sealed.remove(keys)
            good += [self.ripe.pop(key) for key in keys]
        return good

    def _is_grouped(self, entry: Agreed) -> bool:
        """Tell whether an operation waits for its fixed group, which rank 0 must be there to name."""
        return (self.settings.deterministic and entry.description.kind == "allreduce" and 0 not in self.negotiation.joined
                and any(part.group for part in self._parts(entry)))

    def _parts(self, entry: Agreed) -> list[Part]:
        found = self.parts.get(entry.signature)
        if found is None:
            if len(self.parts) > 2 * self.negotiation.capacity:
                self.parts.clear()
            found = self.parts[entry.signature] = parts_of(entry.description, self.settings.fusion_threshold)
        return found

    # Exchanges

    def _perform(self, ready: list[Agreed]) -> Round:
        """Exchange what is ready."""
        rows = None
        if varying := [entry for entry in ready if entry.description.kind in ("allgather", "alltoall")]:
            rows = yield from self._rows(varying)
        for batch in batches(ready, self._parts, self.settings.fusion_threshold):
            operations = [entry.operation for entry, _ in batch.members if entry.operation is not None]
            try:
                if batch.direct:
                    yield from _KINDS[batch.members[0][0].description.kind](self, batch.members[0][0], batch.members[0][1], rows)
                else:
                    yield from self._fused(batch)
                error = None
            except Exception as caught:
                error = caught
            self._finish(operations, error)

    def _rows(self, varying: list[Agreed]) -> Generator[MPI.Request, None, dict[int, np.ndarray]]:
        """Return the rows that each rank brings (allgather), or sends to each rank (alltoall), by slot."""
        mine = np.array([row for entry in varying for row in entry.operation.rows], np.int64)
        everyone = np.empty((self.comm.size, mine.size), np.int64)
        yield self.comm.Iallgather(mine, everyone)
        edges = np.cumsum([len(entry.operation.rows) for entry in varying])[:-1]
        return dict(zip((entry.slot for entry in varying), np.split(everyone, edges, axis=1)))

    def _fused(self, batch: Batch) -> Round:
        """Exchange many arrays at once."""
        begun = perf_counter()
        first = batch.members[0][0].description
        burst = self._burst(batch, first)
        members = [Member(entry.operation, index) for entry, index in batch.members]
        plain = all(member.operation is not None and member.operation.space is HOST and member.operation.description[5:7] == (1, 1)
                    for member in members)
        broadcast = first.kind == "broadcast"
        if not broadcast or self.comm.rank == first.root:
            pack(burst, members, plain)
            settle(members)
        packed = perf_counter()
        if broadcast:
            label = yield from self.mover.broadcast(burst.whole, first.root)
        else:
            op = ops.NAMES[first.op]
            label = yield from self.mover.allreduce(burst.whole, burst.whole, op)
        moved = perf_counter()
        if broadcast and self.comm.rank == first.root:
            members = [member for member in members if member.operation and member.out is not member.array]
            for member in members:
                put(member.out, member.array, member.operation)
        else:
            unpack(burst, members, plain)
        settle(members)
        self._account(batch, burst.nbytes, label, begun, packed, moved)

    def _burst(self, batch: Batch, first: Any) -> Burst:
        key = (first.kind, first.device, *[entry.signature << 16 | index for entry, index in batch.members])
        burst = self.bursts.get(key)
        if burst is None:
            dtypes = [dtype_of(entry.description.dtypes[index]) for entry, index in batch.members]
            shapes = [entry.description.shapes[index] for entry, index in batch.members]
            whole, grain = (dtypes[0], dtypes[0].itemsize) if first.kind == "allreduce" else (np.dtype(np.uint8), 16)
            space = next((entry.operation.space for entry, _ in batch.members if entry.operation), self.device)
            nbytes = sum(-(-np.prod(shape, dtype=int) * dtype.itemsize // grain) * grain for shape, dtype in zip(shapes, dtypes))
            burst = Burst(self._room(space, int(nbytes)), dtypes, shapes, grain, whole)
            self.bursts.put(key, burst)
        return burst

    def _room(self, space: Space, nbytes: int) -> Any:
        """Return the buffer for bursts; made once, for the largest."""
        if space is not HOST:
            self.device = space
        room = self.rooms.get(space)
        if room is None or room.nbytes < nbytes:
            room = self.rooms[space] = self.mover.room(space, max(nbytes, self.settings.fusion_threshold))
        return room

    def _direct_allreduce(self, entry: Agreed, index: int, rows: Any) -> Round:
        """Reduce one array from where it is to where it goes."""
        begun = perf_counter()
        description, operation = entry.description, entry.operation
        if operation is None:
            array = out = self.device.xp.zeros(description.shapes[index], dtype_of(description.dtypes[index]))
            op = ops.NAMES[description.op]
        else:
            (array, out), op = operation.parts[index], operation.op
            if description.prescale != 1:
                put(out, array, operation, description.prescale)
                array = out
        packed = perf_counter()
        label = yield from self._moved(operation, lambda: self.mover.allreduce(array, out, op))
        moved = perf_counter()
        if operation is not None and description.postscale != 1:
            take(out, out, operation, description.postscale)
            settle([Member(operation, index)])
        self._account(Batch([(entry, index)], True), array.nbytes, label, begun, packed, moved)

    def _moved(self, operation: Operation | None, move: Callable[[], Any]) -> Generator[MPI.Request, None, str]:
        """Exchange in the order of the caller's stream, if the array is on a GPU."""
        if operation is None or operation.space is HOST or not self.threaded:
            return (yield from move())
        with operation.space.on(operation.stream):       # plans yield nothing, so no other code runs in this context
            return (yield from move())

    def _direct_broadcast(self, entry: Agreed, index: int, rows: Any) -> Round:
        begun = perf_counter()
        operation, root = entry.operation, entry.description.root
        array, out = operation.parts[index]
        if self.comm.rank == root and out is not array:
            put(out, array, operation)
        packed = perf_counter()
        label = yield from self._moved(operation, lambda: self.mover.broadcast(out, root))
        self._account(Batch([(entry, index)], True), out.nbytes, label, begun, packed, perf_counter())

    def _reduce_scatter(self, entry: Agreed, index: int, rows: Any) -> Round:
        begun = perf_counter()
        description, operation = entry.description, entry.operation
        array, out = operation.parts[0]
        if description.prescale != 1:
            scaled = operation.space.xp.empty(array.shape, array.dtype)
            put(scaled, array, operation, description.prescale)
            array = scaled
        row = array.size // max(1, array.shape[0])
        counts = [rows * row for rows in balanced(array.shape[0], self.comm.size)]
        packed = perf_counter()
        label = yield from self._moved(operation, lambda: self.mover.reduce_scatter(array, out, operation.op, counts))
        moved = perf_counter()
        if description.postscale != 1:
            take(out, out, operation, description.postscale)
            settle([Member(operation, 0)])
        self._account(Batch([(entry, 0)], True), array.nbytes, label, begun, packed, moved)

    def _allgather(self, entry: Agreed, index: int, rows: dict[int, np.ndarray]) -> Round:
        begun = perf_counter()
        operation = entry.operation
        array, every = operation.parts[0][0], rows[entry.slot][:, 0].tolist()
        rest = array.shape[1:]
        row = int(np.prod(rest, dtype=int))
        out = operation.space.xp.empty((sum(every), *rest), array.dtype)
        label = yield from self._moved(operation, lambda: self.mover.allgather(array, out, [count * row for count in every]))
        operation.result = out
        self._account(Batch([(entry, 0)], True), out.nbytes, label, begun, begun, perf_counter())

    def _alltoall(self, entry: Agreed, index: int, rows: dict[int, np.ndarray]) -> Round:
        begun = perf_counter()
        operation, table = entry.operation, rows[entry.slot]
        array, received = operation.parts[0][0], table[:, self.comm.rank]
        rest = array.shape[1:]
        row = int(np.prod(rest, dtype=int))
        out = operation.space.xp.empty((int(received.sum()), *rest), array.dtype)
        sent = array[:sum(operation.rows)]
        label = yield from self._moved(operation, lambda: self.mover.alltoall(sent, out, (table * row).tolist()))
        operation.result = out if operation.splits is None else (out, received.copy())
        self._account(Batch([(entry, 0)], True), out.nbytes, label, begun, begun, perf_counter())

    def _barrier(self, entry: Agreed, index: int, rows: Any) -> Round:
        """Nothing is left to do: all ranks have come."""
        yield from ()

    def _account(self, batch: Batch, nbytes: int, label: str, begun: float, packed: float, moved: float) -> None:
        """Add up what an exchange took, and draw it."""
        end, counts = perf_counter(), self.counts
        counts["bytes"] += nbytes
        counts["exchanges"] += 1
        counts["exchanged"] += len(batch.members)
        counts["seconds_pack"] += packed - begun
        counts["seconds_exchange"] += moved - packed
        counts["seconds_unpack"] += end - moved
        line = self.timeline
        if line:
            self._draw(line, "", begun, packed, moved, end, algorithm=label, bytes=nbytes, operations=len(batch.members))
            for operation in [entry.operation for entry, _ in batch.members if entry.operation]:
                line.span(str(operation.name), "negotiate", operation.submitted, operation.agreed,
                          operation=str(operation.description), bytes=operation.nbytes)
                line.span(str(operation.name), "queue", operation.agreed, begun)
                self._draw(line, str(operation.name), begun, packed, moved, end, algorithm=label)

    def _draw(self, line: Any, track: str, begun: float, packed: float, moved: float, end: float, **about: Any) -> None:
        for name, start, stop, args in (("pack", begun, packed, {}), ("exchange", packed, moved, about), ("unpack", moved, end, {})):
            if stop > start:
                line.span(track, name, start, stop, **args)

    # How operations end

    def _finish(self, operations: list[Operation], error: BaseException | None = None) -> None:
        """Hand operations back; a group only when all its arrays are through, or one has failed."""
        over = []
        for operation in operations:
            operation.left -= 1
            if error is not None and operation.error is None:
                operation.error = error
            if operation.left <= 0:
                operation.finish()
                over.append(operation)
        if not over:
            return
        self.counts["operations"] += len(over)
        self.counts["errors"] += len(over) if error is not None else 0
        with self.lock:
            for operation in over:
                del self.flight[operation.key]
                operation.done = True
            while self.held and self.held[0].key not in self.flight:
                self._enqueue(self.held.popleft())
            if self.waiters:
                self.finished.notify_all()

    def fail(self, operation: Operation, error: BaseException) -> None:
        """Let an operation's caller go with an error. Its data stay, for the ranks that may still come for it."""
        operation.give_up(error)
        with self.lock:
            operation.done = True
            self.counts["errors"] += 1
            self.finished.notify_all()

    def _all_joined(self, last: int, met: int) -> None:
        with self.lock:
            operation = self.flight.pop(JOIN)
            operation.result, operation.done = self.labels[last], True
            self.unnamed = met
            self.finished.notify_all()

    def _end(self, error: BaseException, broken: bool = False) -> None:
        """Let all that is on its way fail, and what is submitted from now on."""
        if broken:
            error = RuntimeError(f"the engine failed: {type(error).__name__}: {error}")
        with self.lock:
            self.ended = True
            self.closed = self.closed if self.leaving and not broken else error
            for operation in [*self.flight.values(), *self.held]:
                if not operation.done:
                    operation.error, operation.done = error, True
            self.flight.clear()
            self.held.clear()
            self.clean = not broken and perf_counter() <= self.deadline
            self.finished.notify_all()
            self.work.notify_all()

    clean = False

    def free(self) -> None:
        """Let go of what ranks share, once the round in which all learned of the end is over; collective."""
        if self.thread is not None:
            self.thread.join(max(0.0, self.deadline - perf_counter()) + 1)
        if self.clean:
            self.bursts.clear()
            self.rooms.clear()
            self.watch.free()
            self.comm.Free()


def nap(waited: float) -> float:
    """Return the seconds to sleep before the next look."""
    return min(max(waited / PATIENCE, 3e-5), NAP if waited < 1 else LONG_NAP)


give_way = ctypes.CDLL(None).sched_yield
"""Give the core to others, and, unlike os.sched_yield, the GIL as well."""

_LEFT_BEHIND: list[MPI.Request] = []

_KINDS = {"allreduce": Loop._direct_allreduce, "broadcast": Loop._direct_broadcast, "reduce_scatter": Loop._reduce_scatter,
          "allgather": Loop._allgather, "alltoall": Loop._alltoall, "barrier": Loop._barrier}
