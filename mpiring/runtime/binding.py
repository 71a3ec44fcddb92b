"""Turn the jobs of a node's ranks into tasks on views: one of three ways to the vectors of peers.

- one pass: they lie in memory that all have mapped (mpiring.empty). Jobs read them and write into them where they are.
- process_vm: they are private, and the kernel copies blocks of them: for long vectors, where it permits that.
- staged: every rank packs what others need into shared memory, segment by segment, and unpacks what they have reduced for it. This
  goes for any layout.

Whichever it is, a block is summed while it is in the core's cache, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.shared import GRAIN, Job, Work
from mpiring.runtime import halves, memory, ops
from mpiring.runtime.arrays import HOST, Vector
from mpiring.runtime.copying import copy
from mpiring.runtime.memory import PAGE
from mpiring.runtime.node import BLOCK, STAGE
from mpiring.runtime.peers import Transfer
from mpiring.runtime.plan import Task

if TYPE_CHECKING:
    from mpiring.runtime.shared import Meeting, SharedPlan

ONE_PASS, PROCESS_VM, STAGED = "one pass", "process_vm", "staged"

UNREACHABLE, PRIVATE = -1, 0
"""What stands on the board instead of a region's number: peers cannot reach the buffer as a line of bytes; it is private memory."""

KERNEL_BLOCK = 256 * 1024
"""Bytes that the kernel copies at once. Measured at 64 MiB with 2 to 8 ranks: 64 KiB takes 40 % longer."""

LAG = 1
"""Segments that the messages between nodes may be behind the node's own work."""


class Side(NamedTuple):
    """Where the vector of a buffer begins, as peers get at it: the region, the place in this rank's row of it, the address."""

    region: int
    offset: int = 0
    address: int = 0


class Buffer:
    """One of the caller's buffers: the part of the vector that begins at `origin`."""

    def __init__(self, array: np.ndarray, origin: int = 0):
        self.vector, self.origin, self.flat, self.dtype = Vector(HOST.alias(array)), origin, array.flags.c_contiguous, array.dtype
        self.address = array.ctypes.data - origin * self.dtype.itemsize
        self.region = memory.find(array.ctypes.data) if self.flat and array.size else None

    def side(self) -> Side:
        """Return what goes on the board."""
        if not self.flat:
            return Side(UNREACHABLE)
        return Side(self.region.number, self.address - self.region.start, self.address) if self.region else \
            Side(PRIVATE, 0, self.address)

    def pieces(self, start: int, length: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yield views that hold a part of the vector, with their places in it."""
        return self.vector.pieces(start - self.origin, start - self.origin + length)

    def view(self, start: int, length: int) -> np.ndarray:
        """Return the one view of a part of a flat buffer."""
        return next(self.pieces(start, length))[0]


class Layout:
    """How jobs are cut into segments, and where every rank stages what others read: equal on all ranks of a node."""

    def __init__(self, work: Work, jobs: list[list[Job]], itemsize: int):
        starts: dict[int, set[int]] = {}
        for job in (job for found in jobs for job in found):
            for peer, start in job.sources:
                starts.setdefault(peer, set()).add(start)
        self.places = {peer: {start: place for place, start in enumerate(sorted(found))} for peer, found in starts.items()}
        parts = work.lanes or max([work.size, *map(len, starts.values())])       # between nodes, the same on all of them
        room = STAGE // parts // itemsize
        self.segment = room // GRAIN * GRAIN or max(1, room)
        # Between nodes there is one at least: by it, ranks notice that they disagree, also those that have nothing to do.
        self.rounds = max(min(1, work.lanes), *map(self.segments, jobs))

    def segments(self, jobs: list[Job]) -> int:
        """Return how many segments the longest of some jobs has."""
        return -(-max((job.length for job in jobs), default=0) // self.segment)

    def cut(self, job: Job, index: int) -> tuple[int, int]:
        """Return where a segment of a job begins, and its length (0 behind the job's end)."""
        start = index * self.segment
        return start, max(0, min(self.segment, job.length - start))


class Binder:
    """Makes the tasks of one rank's plan, for what its ranks bring."""

    def __init__(self, plan: SharedPlan, meeting: Meeting | None):
        self.jobs, self.layout, self.node, self.relay = plan.jobs, plan.layout, plan.node, plan.relay
        self.lanes = plan.work.lanes
        self.send, self.recv, self.dtype, self.meeting = plan.send, plan.recv, plan.dtype, meeting
        self.rank, self.itemsize = self.node.rank, plan.dtype.itemsize
        self.staged = meeting is None or meeting.path == STAGED
        operation = plan.operation
        self.size = plan.channel.size if operation and operation.average and plan.channel.size > 1 else None
        self.combine = operation and operation.combine(np, self.dtype)
        self.divide = self.size and ops.divide(np, self.dtype, self.size)
        whole = meeting is not None and meeting.path == PROCESS_VM
        self.block = max(GRAIN, (min(KERNEL_BLOCK, STAGE // self.node.size) if whole else BLOCK) // self.itemsize)
        self.wide = operation and halves.accumulator(operation, self.dtype, min(self.block, sum(plan.work.shares)))

    def phases(self) -> tuple[list[list[Task]], list[Task]]:
        """Return the tasks before each of the barriers but the first, and those after the last."""
        rounds, lag = self.layout.rounds, LAG if self.lanes else 0
        if not self.staged:
            return [[task for index in range(rounds + lag) for task in self._round(index, lag)]], []
        late = not all(self.meeting.early[peer] for peer in self.layout.places)
        phases = [[] if self.meeting.early[self.rank] else self.pack(0)] if late else []
        tail: list[Task] = []
        for index in range(rounds + lag):
            if index:
                phases.append([*tail, *self.pack(index)])
            phases.append([*self._round(index, lag)])
            tail = [*self._unpack(index - lag)]
        return phases or [[]], tail

    def pack(self, index: int) -> list[Task]:
        """Copy this rank's parts of a segment to where others read them."""
        tasks, done = [], set()
        for rank, job in self._all():
            start, length = self.layout.cut(job, index)
            for peer, place in job.sources if length else ():
                if peer == self.rank and place not in done and not (rank == peer and self.send.flat):
                    done.add(place)
                    line = self._staged(peer, place, length)
                    tasks += [copy(line[a:b].reshape(view.shape), view) for view, a, b in self.send.pieces(place + start, length)]
        return tasks

    def relayed(self, index: int) -> np.ndarray | None:
        """Return the buffer in which a lane reduces a segment of this rank's part: as many take turns as are on their way at once.

        The first one is there even if it is empty.
        """
        length = sum(self.layout.cut(job, index)[1] for job in self.jobs[self.rank])
        if not self.relay or not (length or index == 0):
            return None
        room = self.node.scratch(f"relay {index % (LAG + 1)}", self.layout.segment * self.itemsize)
        return room[:length * self.itemsize].view(self.dtype)

    def _round(self, index: int, lag: int) -> Iterator[Task]:
        """Yield the work on a segment: reduce it, hand it to the lane, and deliver the one that is back."""
        for job in self.jobs[self.rank]:
            start, length = self.layout.cut(job, index)
            for low in range(start, start + length, self.block):
                yield from self._reduce(job, index, low, min(self.block, start + length - low))
        if (buffer := self.relayed(index)) is not None:
            yield self.relay.submit(buffer)
        if index >= lag and (buffer := self.relayed(index - lag)) is not None:
            yield self.relay.wait()
            for job in self.jobs[self.rank]:
                yield from self._deliver(job, index - lag, buffer)

    def _reduce(self, job: Job, index: int, low: int, length: int) -> Iterator[Task]:
        """Yield the tasks that reduce a block of a job, and write the result to its targets unless a lane has to see it first."""
        if not job.sources:
            return
        sources = []
        for place, (peer, start) in enumerate(job.sources):
            view, fetch = self._source(place, peer, start, low, length)
            sources.append(view)
            yield from fetch
        if self.relay:
            start = index * self.layout.segment
            yield from self._sum(sources, [self.relayed(index)[low - start:low - start + length]], None)
            return
        if len(sources) == 1 and not self.recv.flat:
            yield from self._scatter(sources[0], job.targets[0][1] + low)
            return
        views, addresses = self._targets(job, index, low, length)
        yield from self._sum(sources, views, self.size)
        yield from self._write(views[0], addresses)

    def _deliver(self, job: Job, index: int, result: np.ndarray) -> Iterator[Task]:
        """Yield the tasks that write what a lane has reduced to a job's targets, block by block."""
        for low in range(0, result.size if job.targets else 0, self.block):
            part = result[low:low + self.block]
            if self.divide:
                yield self.divide, (part,)
            views, addresses = self._targets(job, index, index * self.layout.segment + low, part.size)
            yield from (copy(view, part) for view in views)
            yield from self._write(part, addresses)

    def _source(self, place: int, peer: int, start: int, low: int, length: int) -> tuple[np.ndarray, list[Task]]:
        """Return a view of a block of a peer's vector, and the tasks that bring it there."""
        if peer == self.rank and self.send.flat:
            return self.send.view(start + low, length), []
        if self.staged:
            low %= self.layout.segment
            return self._staged(peer, start, low + length)[low:], []
        side = self.meeting.sends[peer]
        if self.meeting.path == ONE_PASS:
            return self._mapped(peer, side, start + low, length), []
        address = side.address + (start + low) * self.itemsize
        room = self.node.scratch(f"peer {place}", self.block * self.itemsize + PAGE)
        skip = address % PAGE                            # copies are fastest between equal places in pages
        view = room[skip:skip + length * self.itemsize].view(self.dtype)
        return view, [(Transfer(False, self.node.pids[peer], view, address), ())]

    def _targets(self, job: Job, index: int, low: int, length: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        """Return the views that a block's result is written to, one at least, and where else: processes and addresses."""
        home = [self.recv.view(start + low, length) for peer, start in job.targets if peer == self.rank and self.recv.flat]
        others = [(peer, start + low) for peer, start in job.targets if peer != self.rank]
        if self.staged:
            return home + ([self._slot(self.rank, index, low, length)] if others or not home else []), []
        if self.meeting.path == ONE_PASS:
            return home + [self._mapped(peer, self.meeting.recvs[peer], place, length) for peer, place in others], []
        addresses = [(self.node.pids[peer], self.meeting.recvs[peer].address + place * self.itemsize) for peer, place in others]
        return home or [self._scratch("result", length)], addresses

    def _write(self, result: np.ndarray, addresses: list[tuple[int, int]]) -> Iterator[Task]:
        """Yield the tasks that write a result into other processes' memory."""
        return ((Transfer(True, pid, result, address), ()) for pid, address in addresses)

    def _sum(self, sources: list[np.ndarray], targets: list[np.ndarray], divide_by: int | None) -> Iterator[Task]:
        """Yield the tasks that reduce some views into one, in their order, and copy that to the others."""
        first, *rest = targets
        if self.wide and len(sources) > 1:
            yield self.wide.bind(sources, targets, divide_by), ()
            return
        if len(sources) == 1:
            rest = [target for target in targets if target.ctypes.data != sources[0].ctypes.data]
            first = sources[0]
        else:
            held = sources[0]
            for source in sources[1:]:
                into = first if source is sources[-1] else self._scratch("sum", first.size)
                yield self.combine, (held, source, into)
                held = into
            if divide_by:
                yield self.divide, (first,)
        yield from (copy(target, first) for target in rest)

    def _unpack(self, index: int) -> Iterator[Task]:
        """Yield the copies of what others have reduced for this rank, out of their slots."""
        for rank, job in self._all():
            start, length = self.layout.cut(job, index) if index >= 0 else (0, 0)
            for peer, place in job.targets if length else ():
                if peer == self.rank and (rank != peer or not self.recv.flat) and (self.lanes or len(job.sources) > 1):
                    yield from self._scatter(self._slot(rank, index, start, length), place + start)

    def _scatter(self, line: np.ndarray, start: int) -> Iterator[Task]:
        """Yield the copies of a line into this rank's recvbuf, whatever its layout."""
        return (copy(view, line[a:b].reshape(view.shape)) for view, a, b in self.recv.pieces(start, line.size))

    def _all(self) -> Iterator[tuple[int, Job]]:
        return ((rank, job) for rank, found in enumerate(self.jobs) for job in found)

    def _staged(self, peer: int, place: int, length: int) -> np.ndarray:
        """Return where a rank stages a segment of the part that begins at `place`."""
        start = self.layout.places[peer][place] * self.layout.segment
        return self._typed(self.node.stage[peer], start, length)

    def _slot(self, rank: int, index: int, low: int, length: int) -> np.ndarray:
        """Return where a rank leaves a block of its result for the others."""
        return self._typed(self.node.results, rank * self.layout.segment + low - index * self.layout.segment, length)

    def _typed(self, room: np.ndarray, start: int, length: int) -> np.ndarray:
        return room[start * self.itemsize:(start + length) * self.itemsize].view(self.dtype)

    def _scratch(self, name: str, length: int) -> np.ndarray:
        return self.node.scratch(name, self.block * self.itemsize)[:length * self.itemsize].view(self.dtype)

    def _mapped(self, peer: int, side: Side, start: int, length: int) -> np.ndarray:
        """Return a view of a peer's vector in a region."""
        region = next(buffer.region for buffer in (self.send, self.recv) if buffer.region and buffer.region.number == side.region)
        address = region.base + region.rows[self.node.pids[peer]] * region.stride + side.offset + start * self.itemsize
        return np.ndarray((length,), self.dtype, MPI.buffer.fromaddress(address, length * self.itemsize))
