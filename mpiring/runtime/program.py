"""Turn a schedule into a program: which bytes move when, through which scratch, before any buffer is known.

Steps become transfers: a step's message is cut into segments, and a transfer is one segment sent and one received. The loop
that runs them (plan.py) works off one transfer after another, but posts receives and starts sends some transfers ahead, as far
as the data allow: how far is worked out here, from what every transfer reads and writes, and so is the life of every slot of
scratch. Nothing here knows MPI or NumPy; positions and lengths are in elements.

A message lands in place only if the peer has sent an earlier one, by which the plan has seen that they agree: with a peer that
disagrees it could be too long, and an MPI library may write past the buffer then (Open MPI 5.0 does). Slots have room for any.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from mpiring.algorithms.cuts import cuts, offsets
from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import Step

WINDOW, LEAST, IN_FLIGHT = 16, 4, 1 << 20
"""Receives that are posted before they are waited for, where nodes are apart: at most, at least, and bytes of them all. One send
less is started early, so that the link does not idle while a segment is reduced or a rank waits for its core.

Measured on links of 1 Gbit/s. Between 4 hosts, 64 MiB by segments of 512 KiB: 4 take 905 ms, 2 take 947, 8 gain nothing more.
Between 2 hosts by segments of 60 KiB, while each rank computes on the core that also drives its exchange: with 4 the link carries
53 MB/s, for it idles until the rank looks again, with 16 and more it carries 115. On one node any of them costs a tenth.
"""

GROUP = 4
"""Segments of a chunk that go through a reduce-scatter together: its partial sums need scratch for so many per chunk held."""


class Region:
    """Memory that transfers work on. `flat`: its elements lie one after another, so a part of it has one address."""

    def __init__(self, name: str, flat: bool = True):
        self.name, self.flat = name, flat

    def __repr__(self) -> str:
        return self.name


class Slot(Region):
    """A segment's worth of scratch, in use from iteration `first` to the end of iteration `last`."""

    def __init__(self, length: int, first: int, last: int, host: bool = False):
        super().__init__("slot")
        self.length, self.first, self.last, self.host = length, first, last, host
        self.index = -1


class Piece(NamedTuple):
    """Elements start to stop of a region."""

    region: Region
    start: int
    stop: int


class Copy(NamedTuple):
    """Overwrite `target` with `source`; one of them is flat."""

    target: Piece
    source: Piece


class Combine(NamedTuple):
    """Reduce what came in with what the rank held, into `target`; `first`: what came in is the left operand."""

    incoming: Piece
    held: Piece
    target: Piece
    first: bool = False


class Average(NamedTuple):
    """Divide a finished sum by the number of ranks."""

    target: Piece


Action = Copy | Combine | Average


@dataclass
class Transfer:
    """One segment out, one segment in. The iterations at which its receive is posted and its send packed and started."""

    send_to: int | None = None
    send: Piece | None = None
    send_last: bool = False
    pack: list[Action] = field(default_factory=list)
    recv_from: int | None = None
    recv: Piece | None = None
    recv_last: bool = False
    after: list[Action] = field(default_factory=list)
    post_at: int = 0
    pack_at: int = 0
    start_at: int = 0

    @cached_property
    def reads(self) -> list[Piece]:
        """What packing and sending read."""
        return [action.source for action in self.pack if isinstance(action, Copy)] + ([self.send] if self.send else [])

    @cached_property
    def writes(self) -> list[Piece]:
        """What the receive, and the work after it, write."""
        return [action.target for action in self.after] + ([self.recv] if self.recv else [])

    @cached_property
    def touches(self) -> list[Piece]:
        """All that is read or written."""
        used = [piece for action in self.after for piece in action[1:3] if not isinstance(action, Average)]
        return [*self.reads, *self.writes, *used]


@dataclass(frozen=True)
class Memory:
    """What the program may assume of the two buffers: in place (they are one), flat or not, and whether MPI can reach them.

    `staged`: MPI cannot read the array's memory (a GPU without CUDA-aware MPI), so every message passes through host slots.
    """

    in_place: bool = True
    send_flat: bool = True
    recv_flat: bool = True
    staged: bool = False


@dataclass(frozen=True)
class Program:
    """The transfers of one rank, and the slots that they need: lengths in elements, by index, in array and in host memory."""

    transfers: list[Transfer]
    slots: list[int]
    host_slots: list[int]
    send: Region
    recv: Region

    @property
    def length(self) -> int:
        """What keeping it costs: its transfers, and something for itself."""
        return 1 + len(self.transfers)


def compile_program(algorithm: Algorithm, rank: int, setting: Setting, shares: list[int], segment: int, memory: Memory = Memory(),
                    average: bool = False, window: int = WINDOW) -> Program:
    """Compile one rank's schedule over a vector cut into `shares` (elements of each chunk), in segments of `segment` elements."""
    return _Compiler(algorithm, rank, setting, shares, segment, memory, average, window).compile()


def window_of(nbytes: int) -> int:
    """Return how many receives to post ahead, of segments of so many bytes, where nodes are apart."""
    return min(WINDOW, max(LEAST, IN_FLIGHT // nbytes))


class _Where:
    """Where the current value of each part of the vector is: disjoint intervals of the vector, in order, each with its piece."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, Piece]] = []

    def put(self, start: int, stop: int, piece: Piece) -> None:
        """Set where start to stop is now."""
        if start == stop:
            return
        first, last = self._range(start, stop)
        new = [(start, stop, piece)]
        for low, high, old in self.entries[first:last]:
            if low < start:
                new.insert(0, (low, start, _slice(old, 0, start - low)))
            if high > stop:
                new.append((stop, high, _slice(old, stop - low, high - low)))
        self.entries[first:last] = new

    def get(self, start: int, stop: int) -> Iterator[tuple[int, int, Piece]]:
        """Yield what is known of start to stop, joining neighbours that lie one after the other."""
        first, last = self._range(start, stop)
        joined: tuple[int, int, Piece] | None = None
        for low, high, piece in self.entries[first:last]:
            a, b = max(low, start), min(high, stop)
            part = _slice(piece, a - low, b - low)
            if joined and joined[1] == a and joined[2].region is part.region and joined[2].stop == part.start:
                joined = (joined[0], b, Piece(part.region, joined[2].start, part.stop))
                continue
            if joined:
                yield joined
            joined = (a, b, part)
        if joined:
            yield joined

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indices of the entries that overlap start to stop."""
        return (bisect_right(self.entries, start, key=lambda entry: entry[1]),
                bisect_left(self.entries, stop, key=lambda entry: entry[0]))


def _slice(piece: Piece, start: int, stop: int) -> Piece:
    return Piece(piece.region, piece.start + start, piece.start + stop)


class _Buffer:
    """Where the chunks that a buffer holds lie in it: intervals of the vector, in order, each with its place in the buffer."""

    def __init__(self, region: Region, chunks: Iterable[int], edges: list[int], whole: bool):
        self.region = region
        self.parts: list[tuple[int, int, int]] = []
        at = 0
        for chunk in chunks:
            start, stop = edges[chunk], edges[chunk + 1]
            place = start if whole else at
            at += stop - start
            if self.parts and self.parts[-1][1] == start and self.parts[-1][2] + start - self.parts[-1][0] == place:
                self.parts[-1] = (self.parts[-1][0], stop, self.parts[-1][2])
            elif start < stop:
                self.parts.append((start, stop, place))

    def split(self, start: int, stop: int) -> Iterator[tuple[int, int, Piece | None]]:
        """Split an interval of the vector into the parts that have a place in the buffer, and those that have none."""
        for low, high, place in self.parts[bisect_right(self.parts, start, key=lambda part: part[1]):]:
            if low >= stop:
                break
            a, b = max(low, start), min(high, stop)
            if start < a:
                yield start, a, None
            yield a, b, Piece(self.region, place + a - low, place + b - low)
            start = b
        if start < stop:
            yield start, stop, None


class _Compiler:
    def __init__(self, algorithm: Algorithm, rank: int, setting: Setting, shares: list[int], segment: int, memory: Memory,
                 average: bool, window: int):
        self.rank, self.segment, self.memory, self.average = rank, max(1, segment), memory, average and setting.size > 1
        self.window, self.lead = window, max(window - 1, 0)
        self.edges = offsets(shares)
        collective, chunks = algorithm.collective, len(shares)
        self.rooted = collective.rooted
        self.given = collective.given(rank, setting, chunks)
        self.wanted = collective.wanted(rank, setting, chunks)
        self.steps = [step for step in algorithm.steps(rank, setting) if step.send_to is not None or step.recv_from is not None]
        self.recv = Region("recvbuf", memory.recv_flat)
        self.send = self.recv if memory.in_place else Region("sendbuf", memory.send_flat)
        # A buffer for both sides holds the whole vector, each chunk in its place; that of alltoall, what it gets where that lay
        # which it gives.
        whole = memory.in_place and chunks in (len(self.given), len(self.wanted))
        self.source = _Buffer(self.send, self.given, self.edges, whole)
        self.home = _Buffer(self.recv, self.wanted, self.edges, whole)
        self.replaced = {} if whole or not memory.in_place else self._last_sends()
        self.passes = self._count_passes(algorithm, setting, shares)
        self.transfers: list[Transfer] = []
        self.slots: list[Slot] = []
        self.first_from: dict[int, int] = {}

    def compile(self) -> Program:
        final = {chunk: index for index, step in enumerate(self.steps) if step.recv_from is not None for chunk in step.recv}
        for spans in self._spans():
            self.where = _Where()
            for chunk in self.given:
                for start, stop, piece in self.source.split(*spans[chunk]):
                    self.where.put(start, stop, piece)
            for index, step in enumerate(self.steps):
                done = [chunk for chunk in step.recv if final[chunk] == index and chunk in self.wanted]
                self._step(index, step, spans, {spans[chunk] for chunk in done} if self.average and self._divides(step) else set())
            for chunk in self.wanted:
                self._bring_home(*spans[chunk])
        self._mark_last()
        return Program(self.transfers, *self._allocate(), self.send, self.recv)

    def _divides(self, step: Step) -> bool:
        """Tell whether the last arrival of a chunk that this rank wants makes it a finished sum, still to be divided.

        Where all want a chunk, whoever finishes it divides, and the others get copies; in a reduction to one root only that does.
        """
        return step.reduce or self.rooted

    def _last_sends(self) -> dict[tuple[int, int], int]:
        """Return for what lies in a buffer that is both given and wanted, by place, the last step that sends it."""
        last = {chunk: index for index, step in enumerate(self.steps) if step.send_to is not None for chunk in step.send}
        return {(piece.start, piece.stop): last[chunk] for chunk in self.given if chunk in last
                for _, _, piece in self.source.split(self.edges[chunk], self.edges[chunk + 1])}

    def _count_passes(self, algorithm: Algorithm, setting: Setting, shares: list[int]) -> int:
        """Return in how many passes the vector goes through the schedule: one where every rank has a home for every chunk.

        Otherwise chunks on their way are in scratch: as many at a time as a message of the root has at most, which is a number that
        all ranks know. So many parts of GROUP segments are what a pass may take.
        """
        if all(len(algorithm.collective.wanted(rank, setting, len(shares))) == len(shares) for rank in range(setting.size)):
            return 1
        steps = algorithm.steps(setting.root, setting)
        width = max((len(chunks) for step in steps for chunks in (step.send, step.recv)), default=1)
        return max(1, -(-max(shares) * width // (GROUP * self.segment)))

    def _spans(self) -> Iterator[list[tuple[int, int]]]:
        """Yield for every pass the part of every chunk that goes through the schedule in it."""
        parts = [[slice(start + part.start, start + part.stop) for part in cuts(stop - start, self.passes)]
                 for start, stop in zip(self.edges, self.edges[1:])]
        for spans in zip(*parts):
            yield [(span.start, span.stop) for span in spans]

    def _segments(self, spans: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Cut a message into segments, each a list of intervals of the vector; an empty message is one empty segment."""
        merged: list[tuple[int, int]] = []
        for start, stop in spans:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif start < stop:
                merged.append((start, stop))
        total = sum(stop - start for start, stop in merged)
        return [list(_part(merged, piece.start, piece.stop)) for piece in cuts(total, max(1, -(-total // self.segment)))]

    def _step(self, index: int, step: Step, spans: list[tuple[int, int]], done: set[tuple[int, int]]) -> None:
        sends = self._segments(spans[chunk] for chunk in step.send) if step.send_to is not None else []
        recvs = self._segments(spans[chunk] for chunk in step.recv) if step.recv_from is not None else []
        self.gone: list[Piece] = []        # what of this step has been sent by the transfer at work
        for out, into in zip_longest(sends, recvs):
            transfer = Transfer()
            self.transfers.append(transfer)
            self._add_send(transfer, step.send_to, out)
            self._add_recv(transfer, index, into, done)

    def _add_send(self, transfer: Transfer, peer: int | None, spans: list[tuple[int, int]] | None) -> None:
        j = len(self.transfers) - 1
        transfer.start_at = transfer.pack_at = self.transfers[j - 1].start_at if j else 0
        if spans is None:
            return
        transfer.send_to = peer
        pieces = [piece for start, stop in spans for _, _, piece in self.where.get(start, stop)]
        self.gone += pieces
        length = sum(stop - start for start, stop in spans)
        assert sum(piece.stop - piece.start for piece in pieces) == length, "a schedule sends what the rank does not have"
        # An empty message waits for all that came before it: the news that a rank has given up travels along it as well.
        ready = self._earliest(j, self.lead + 1, lambda earlier: _overlap(earlier.writes, pieces) if length else bool(earlier.recv))
        transfer.start_at = max(transfer.start_at, j - self.lead, ready)
        transfer.pack_at = max(transfer.pack_at, j - self.lead - self.memory.staged, ready)
        for piece in pieces:
            if isinstance(piece.region, Slot):
                piece.region.last = max(piece.region.last, j)
        if not pieces:
            transfer.send = Piece(self.recv, 0, 0)
        elif len(pieces) == 1 and pieces[0].region.flat:
            transfer.send = pieces[0]
        else:
            transfer.send = self._gather(transfer.pack, pieces, transfer.pack_at, j)
        if self.memory.staged and pieces:
            staged = Piece(self._slot(length, transfer.pack_at, j, host=True), 0, length)
            transfer.pack.append(Copy(staged, transfer.send))
            transfer.send = staged

    def _gather(self, actions: list[Action], pieces: list[Piece], first: int, last: int) -> Piece:
        """Add the copies that bring pieces together in one slot."""
        length = sum(piece.stop - piece.start for piece in pieces)
        slot, at = self._slot(length, first, last), 0
        for piece in pieces:
            actions.append(Copy(Piece(slot, at, at := at + piece.stop - piece.start), piece))
        return Piece(slot, 0, length)

    def _add_recv(self, transfer: Transfer, index: int, spans: list[tuple[int, int]] | None, done: set[tuple[int, int]]) -> None:
        j, step = len(self.transfers) - 1, self.steps[index]
        transfer.post_at = self.transfers[j - 1].post_at if j else 0
        if spans is None:
            return
        transfer.recv_from = step.recv_from
        length = sum(stop - start for start, stop in spans)
        homes = [(a, b, home if self._free(home, index) else None) for start, stop in spans
                 for a, b, home in self.home.split(start, stop)]
        known = self.first_from.setdefault(step.recv_from, j) < j
        direct = (not step.reduce and len(homes) == 1 and homes[0][2] is not None and homes[0][2].region.flat
                  and not _overlap([homes[0][2]], self.gone))
        if direct and (known or self.memory.staged):
            landing = homes[0][2]
            if not self.memory.staged:
                hit = self._earliest(j, self.window, lambda earlier: _overlap(earlier.touches, [landing]))
                transfer.post_at = max(transfer.post_at, hit, self.first_from[step.recv_from] + 1)
            self._finish(transfer, *homes[0], done)
            self.where.put(*homes[0])
        else:
            landing = Piece(self._slot(length, j, j), 0, length)
            self._settle(transfer, step, homes, landing.region, done)
        transfer.post_at = max(transfer.post_at, j - self.window)
        if isinstance(landing.region, Slot):
            landing.region.first = transfer.post_at
        if self.memory.staged:
            arrived = Piece(self._slot(length, transfer.post_at, j, host=True), 0, length)
            transfer.after.insert(0, Copy(landing, arrived))
            landing = arrived
        transfer.recv = landing

    def _free(self, home: Piece | None, index: int) -> bool:
        """Tell whether nothing that lies at a home is still to be sent, in step `index` or later."""
        if home is None:
            return True
        for (start, stop), last in self.replaced.items():
            low, high = max(start, home.start), min(stop, home.stop)
            if low < high and last >= index and not (last == index and any(
                    piece.region is home.region and piece.start <= low and high <= piece.stop for piece in self.gone)):
                return False
        return True

    def _settle(self, transfer: Transfer, step: Step, homes, slot: Slot, done: set[tuple[int, int]]) -> None:
        """Add what is done with a segment that has come into a slot: reduce it or copy it, into its home where it has one."""
        first = step.recv_from < self.rank
        at = 0
        for start, stop, home in homes:
            base = at - start
            at += stop - start
            incoming = Piece(slot, start + base, stop + base)
            if step.reduce:
                for a, b, held in list(self.where.get(start, stop)):
                    part = Piece(slot, a + base, b + base)
                    into = Piece(home.region, home.start + a - start, home.start + b - start) if home else part
                    direct = held.region.flat and into.region.flat
                    transfer.after.append(Combine(part, held, into if direct else part, first))
                    if not direct and home:
                        transfer.after.append(Copy(into, part))
                    self._finish(transfer, a, b, into, done)
                    if isinstance(held.region, Slot):
                        held.region.last = max(held.region.last, len(self.transfers) - 1)
            elif home:
                transfer.after.append(Copy(home, incoming))
                self._finish(transfer, start, stop, home, done)
            self.where.put(start, stop, home or incoming)

    def _finish(self, transfer: Transfer, start: int, stop: int, target: Piece, done: set[tuple[int, int]]) -> None:
        for low, high in done:
            a, b = max(low, start), min(high, stop)
            if a < b:
                transfer.after.append(Average(Piece(target.region, target.start + a - start, target.start + b - start)))

    def _bring_home(self, start: int, stop: int) -> None:
        """Copy into recvbuf what is not there yet: a rank's own part, and what could not be put where something else lay."""
        for segment in self._segments([(start, stop)]):
            for span in segment:
                for low, high, home in self.home.split(*span):
                    for a, b, piece in list(self.where.get(low, high)):
                        self._copy_home(piece, Piece(home.region, home.start + a - low, home.start + b - low))

    def _copy_home(self, piece: Piece, home: Piece) -> None:
        if piece == home:
            return
        j, transfer = len(self.transfers), Transfer()
        self.transfers.append(transfer)
        transfer.post_at = transfer.start_at = transfer.pack_at = j
        if isinstance(piece.region, Slot):
            piece.region.last = j
        if not piece.region.flat and not home.region.flat:
            piece = self._gather(transfer.after, [piece], j, j)
        transfer.after.append(Copy(home, piece))

    def _earliest(self, j: int, reach: int, conflicts: Callable[[Transfer], bool]) -> int:
        """Return the first iteration at which transfer j may begin: the one after the last that conflicts, within reach."""
        for i in range(j - 1, max(-1, j - 1 - reach), -1):
            if conflicts(self.transfers[i]):
                return i + 1
        return 0

    def _slot(self, length: int, first: int, last: int, host: bool = False) -> Slot:
        slot = Slot(length, first, last, host)
        self.slots.append(slot)
        return slot

    def _mark_last(self) -> None:
        """Mark the last message to and from each peer: the end of that stream."""
        to, source = set(), set()
        for transfer in reversed(self.transfers):
            if transfer.send_to is not None and transfer.send_to not in to:
                to.add(transfer.send_to)
                transfer.send_last = True
            if transfer.recv_from is not None and transfer.recv_from not in source:
                source.add(transfer.recv_from)
                transfer.recv_last = True

    def _allocate(self) -> tuple[list[int], list[int]]:
        """Give every slot an index, so that slots in use at the same time have different ones; return the lengths needed."""
        lengths: dict[bool, list[int]] = {False: [], True: []}
        until: dict[bool, list[int]] = {False: [], True: []}
        for slot in sorted(self.slots, key=lambda slot: slot.first):
            ends, longest = until[slot.host], lengths[slot.host]
            slot.index = next((index for index, last in enumerate(ends) if last < slot.first), len(ends))
            if slot.index == len(ends):
                ends.append(slot.last)
                longest.append(slot.length)
            ends[slot.index] = slot.last
            longest[slot.index] = max(longest[slot.index], slot.length)
        return lengths[False], lengths[True]


def _part(spans: list[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals that hold elements start to stop of the spans laid end to end."""
    at = 0
    for low, high in spans:
        a, b = max(low, low + start - at), min(high, low + stop - at)
        if a < b:
            yield a, b
        at += high - low


def _overlap(some: Iterable[Piece], others: list[Piece]) -> bool:
    return any(a.region is b.region and a.start < b.stop and b.start < a.stop for a in some for b in others)
