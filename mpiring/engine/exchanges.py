"""What is agreed is exchanged: small arrays fused, large ones from where they are, each kind of operation in its own way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import counts as balanced
from mpiring.engine.bursts import Burst, Member, pack, put, settle, take, unpack
from mpiring.engine.movers import Plans, Requests
from mpiring.engine.negotiation import Agreed
from mpiring.engine.operation import Operation
from mpiring.engine.schedule import Batch, Part, batches, parts_of
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space
from mpiring.runtime.channel import Cache

PLACES = 1 << 16
"""Places in bursts whose views are kept."""

SIGNATURES = 1 << 15
"""Descriptions of which is kept how they may be fused."""

Rows = dict[int, np.ndarray]
"""By slot, the rows that each rank brings to an allgather, or sends to each rank in an alltoall."""

Exchange = Generator[MPI.Request, None, None]


class Exchanges:
    """The exchanges of one process set. Its generators yield the requests that MPI has to complete before they go on."""

    def __init__(self, comm: MPI.Comm, threaded: bool, threshold: int, counts: Counter[str]):
        self.comm, self.threaded, self.threshold, self.counts = comm, threaded, threshold, counts
        self.mover: Plans | Requests = Plans(comm) if threaded else Requests(comm)
        self.timeline: Any = None
        self.rooms: dict[Space, Any] = {}
        self.bursts = Cache(PLACES)
        self.parts: dict[int, list[Part]] = {}
        self.device: Space = HOST                        # the GPU whose arrays were exchanged last

    def perform(self, ready: Sequence[Agreed], finish: Callable[[list[Operation], Exception | None], None]) -> Exchange:
        """Exchange what is ready; hand every operation back as soon as its exchange is over, with what went wrong."""
        rows: Rows = {}
        if varying := [entry for entry in ready if entry.description.kind in ("allgather", "alltoall")]:
            rows = yield from self._rows(varying)
        for batch in batches(ready, self.parts_of, self.threshold):
            error = None
            try:
                yield from self._direct(batch, rows) if batch.direct else self._fused(batch)
            except Exception as caught:
                error = caught
            finish([entry.operation for entry, _ in batch.members if entry.operation is not None], error)

    def parts_of(self, entry: Agreed) -> list[Part]:
        """Return how an operation's arrays may be fused; worked out once for each description."""
        found = self.parts.get(entry.signature)
        if found is None:
            if len(self.parts) >= SIGNATURES:
                self.parts.clear()
            found = self.parts[entry.signature] = parts_of(entry.description, self.threshold)
        return found

    def free(self) -> None:
        """Let go of the buffers."""
        self.bursts.clear()
        self.rooms.clear()

    def _rows(self, varying: list[Agreed]) -> Generator[MPI.Request, None, Rows]:
        mine = np.array([row for entry in varying for row in entry.operation.rows], np.int64)
        everyone = np.empty((self.comm.size, mine.size), np.int64)
        yield self.comm.Iallgather(mine, everyone)
        edges = np.cumsum([len(entry.operation.rows) for entry in varying])[:-1]
        return dict(zip((entry.slot for entry in varying), np.split(everyone, edges, axis=1)))

    # Many arrays at once

    def _fused(self, batch: Batch) -> Exchange:
        begun = perf_counter()
        burst = self._burst(batch)
        members = [Member(entry.operation, index) for entry, index in batch.members]
        first = batch.members[0][0].description
        if first.kind == "broadcast":
            yield from self._fused_broadcast(batch, burst, members, first.root, begun)
            return
        plain = all(member.plain for member in members)
        pack(burst, members, plain)
        settle(members)
        packed = perf_counter()
        label = yield from self.mover.allreduce(burst.whole, burst.whole, ops.NAMES[first.op])
        moved = perf_counter()
        unpack(burst, members, plain)
        settle(members)
        self._account(batch, burst.nbytes, label, begun, packed, moved)

    def _fused_broadcast(self, batch: Batch, burst: Burst, members: list[Member], root: int, begun: float) -> Exchange:
        sends = self.comm.rank == root
        if sends:
            pack(burst, members, all(member.plain for member in members))
            settle(members)
        packed = perf_counter()
        label = yield from self.mover.broadcast(burst.whole, root)
        moved = perf_counter()
        for view, member in zip(burst.views, members):
            if not (sends and member.out is member.array):
                take(member.out, view, member.operation)
        settle(members)
        self._account(batch, burst.nbytes, label, begun, packed, moved)

    def _burst(self, batch: Batch) -> Burst:
        """Return the places of a batch's arrays; the same as last time for the same operations."""
        first = batch.members[0][0].description
        key = (first.kind, first.device, *[entry.signature << 16 | index for entry, index in batch.members])
        burst = self.bursts.get(key)
        if burst is None:
            layout = [(np.dtype(entry.description.dtypes[index]), entry.description.shapes[index])
                      for entry, index in batch.members]
            # The elements of a sum lie side by side; a broadcast carries bytes, so each array begins where its dtype wants it.
            dtype, grain = (layout[0][0], 1) if first.kind == "allreduce" else (np.dtype(np.uint8), 16)
            space = next((entry.operation.space for entry, _ in batch.members if entry.operation), self.device)
            burst = Burst(lambda nbytes: self._room(space, nbytes), layout, grain, dtype)
            self.bursts.put(key, burst)
        return burst

    def _room(self, space: Space, nbytes: int) -> Any:
        """Return the buffer for bursts; made once, for the largest."""
        if space is not HOST:
            self.device = space
        room = self.rooms.get(space)
        if room is None or room.nbytes < nbytes:
            room = self.rooms[space] = self.mover.room(space, max(nbytes, self.threshold))
        return room

    # One array

    def _direct(self, batch: Batch, rows: Rows) -> Exchange:
        (entry, index), = batch.members
        operation = entry.operation
        way = _WAYS[entry.description.kind]
        if operation is None or operation.space is HOST or not self.threaded:
            yield from way(self, batch, entry, index, rows)
            return
        with operation.space.on(operation.stream):       # plans yield nothing, so no other code runs in this context
            yield from way(self, batch, entry, index, rows)

    def _allreduce(self, batch: Batch, entry: Agreed, index: int, rows: Rows) -> Exchange:
        begun, description, operation = perf_counter(), entry.description, entry.operation
        if operation is None:                            # this rank has joined
            array = out = self.device.xp.zeros(description.shapes[index], np.dtype(description.dtypes[index]))
            op = ops.NAMES[description.op]
        else:
            (array, out), op = operation.parts[index], operation.op
            if description.prescale != 1:
                put(out, array, operation, description.prescale)
                array = out
        packed = perf_counter()
        label = yield from self.mover.allreduce(array, out, op)
        moved = perf_counter()
        if operation is not None and description.postscale != 1:
            take(out, out, operation, description.postscale)
            settle([Member(operation, index)])
        self._account(batch, array.nbytes, label, begun, packed, moved)

    def _broadcast(self, batch: Batch, entry: Agreed, index: int, rows: Rows) -> Exchange:
        begun, operation, root = perf_counter(), entry.operation, entry.description.root
        array, out = operation.parts[index]
        if self.comm.rank == root and out is not array:
            put(out, array, operation)
        packed = perf_counter()
        label = yield from self.mover.broadcast(out, root)
        self._account(batch, out.nbytes, label, begun, packed, perf_counter())

    def _reduce_scatter(self, batch: Batch, entry: Agreed, index: int, rows: Rows) -> Exchange:
        begun, description, operation = perf_counter(), entry.description, entry.operation
        array, out = operation.parts[0]
        if description.prescale != 1:
            scaled = operation.space.xp.empty(array.shape, array.dtype)
            put(scaled, array, operation, description.prescale)
            array = scaled
        row = prod(array.shape[1:])
        counts = [share * row for share in balanced(array.shape[0], self.comm.size)]
        packed = perf_counter()
        label = yield from self.mover.reduce_scatter(array, out, operation.op, counts)
        moved = perf_counter()
        if description.postscale != 1:
            take(out, out, operation, description.postscale)
            settle([Member(operation, 0)])
        self._account(batch, array.nbytes, label, begun, packed, moved)

    def _allgather(self, batch: Batch, entry: Agreed, index: int, rows: Rows) -> Exchange:
        begun, operation = perf_counter(), entry.operation
        array, every = operation.parts[0][0], rows[entry.slot][:, 0].tolist()
        rest = array.shape[1:]
        out = operation.space.made((sum(every), *rest), array.dtype)
        label = yield from self.mover.allgather(array, out, [count * prod(rest) for count in every])
        operation.result = out
        self._account(batch, out.nbytes, label, begun, begun, perf_counter())

    def _alltoall(self, batch: Batch, entry: Agreed, index: int, rows: Rows) -> Exchange:
        begun, operation, table = perf_counter(), entry.operation, rows[entry.slot]
        array, received = operation.parts[0][0], table[:, self.comm.rank]
        rest = array.shape[1:]
        out = operation.space.made((int(received.sum()), *rest), array.dtype)
        label = yield from self.mover.alltoall(array[:sum(operation.rows)], out, (table * prod(rest)).tolist())
        operation.result = out if operation.splits is None else (out, received.copy())
        self._account(batch, out.nbytes, label, begun, begun, perf_counter())

    def _barrier(self, batch: Batch, entry: Agreed, index: int, rows: Rows) -> Exchange:
        """Nothing is left to do: all ranks have come."""
        yield from ()

    # What it took

    def _account(self, batch: Batch, nbytes: int, label: str, begun: float, packed: float, moved: float) -> None:
        end, counts, line = perf_counter(), self.counts, self.timeline
        counts["bytes"] += nbytes
        counts["exchanges"] += 1
        counts["exchanged"] += len(batch.members)
        counts["seconds_pack"] += packed - begun
        counts["seconds_exchange"] += moved - packed
        counts["seconds_unpack"] += end - moved
        if line is None:
            return
        times = begun, packed, moved, end
        _draw(line, "", times, algorithm=label, bytes=nbytes, operations=len(batch.members))
        for operation in [entry.operation for entry, _ in batch.members if entry.operation is not None]:
            line.span(operation.name, "negotiate", operation.submitted, operation.agreed, operation=str(operation.description),
                      bytes=operation.nbytes)
            line.span(operation.name, "queue", operation.agreed, begun)
            _draw(line, operation.name, times, algorithm=label)


def _draw(line: Any, track: str, times: Sequence[float], **about: Any) -> None:
    for name, begin, end, args in zip(("pack", "exchange", "unpack"), times, times[1:], ({}, about, {})):
        if end > begin:
            line.span(track, name, begin, end, **args)


_WAYS = {"allreduce": Exchanges._allreduce, "broadcast": Exchanges._broadcast, "reduce_scatter": Exchanges._reduce_scatter,
         "allgather": Exchanges._allgather, "alltoall": Exchanges._alltoall, "barrier": Exchanges._barrier}
"""What is done about each kind of operation that is not fused."""
