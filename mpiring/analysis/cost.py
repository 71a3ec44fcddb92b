"""The price of a schedule on a machine: one clock a message, on the same rounds that the proof replays.

The rules, for message sizes in bytes and times in seconds. Chunks are `cuts.counts(nbytes, chunks)` bytes long. Rounds are taken in
order. Two sets of chunks meet where the intervals from their least to their greatest id do. For round j and rank r:

1. The send is ready when those of the last `ahead` steps of r whose receive meets what it sends are over (with their reduction),
   and all of r's earlier steps. The receive is ready when those of the last `ahead` steps whose receive or send meets what it
   receives are over, and all earlier steps. So steps that do not depend on each other overlap, as in the runtime.
2. A message uses the links at the innermost level that joins its ranks: the out-link of the sender's port and the in-link of the
   receiver's, or the wire; with half duplex a port's, or a wire's, two ways are one link; and the bus, and the link of the pair of
   ports, if there are such. It starts when send and receive are ready and no message of an earlier round is on any of its links.
3. Messages of one round on one link share it: each ends alpha + the longest, over its links, of (all bytes of the round on the
   link) * beta / links after its start. A message of 0 bytes costs alpha all the same.
4. Where the receive reduces, that starts when the message has ended, the rank's reductions of earlier rounds are over and, if the
   rank sends in the same round chunks that meet the received ones, that send has ended too. It takes gamma * bytes; where gamma is
   0, reductions do not wait for each other.

A rank is idle while it neither sends nor receives nor reduces. Messages are not cut into segments, and nothing else uses the links.
Source: R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (1994), for alpha
and beta; links that messages share are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpiring.algorithms.cuts import counts
from mpiring.algorithms.registry import ALGORITHMS, Algorithm, find
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import Chunks
from mpiring.analysis.machines import Level, Machine, find_machine
from mpiring.analysis.replay import replay

NOBODY = -1
LEAST = 1e-9
"""Bytes that stand for a latency of none, so that a pipeline's best number of pieces stays finite."""


class Message(NamedTuple):
    """One message of a trace: in round `step`, times in seconds; `over` is when its reduction is (or else it itself)."""

    step: int
    sender: int
    receiver: int
    nbytes: int
    start: float
    end: float
    over: float


@dataclass
class Estimate:
    """What an algorithm costs on a machine.

    seconds: from the start to the end of the last message or reduction. steps: rounds.
    busiest_link_bytes: the most bytes on one link, bus or pair. idle: for every rank, the share of the time in which it does nothing.
    messages: all of them, where a trace was asked for.
    """

    algorithm: str
    seconds: float
    steps: int
    busiest_link_bytes: int
    idle: np.ndarray
    messages: list[Message] = field(default_factory=list)


def simulate(algorithm: Algorithm | str, nbytes: int, machine: Machine | str, ranks: int | None = None, *,
             collective: str = "allreduce", dtype: str = "float32", setting: Setting | None = None, ahead: int = 3,
             trace: bool = False) -> Estimate:
    """Price an algorithm for a vector of `nbytes` bytes (alltoall: each rank's buffer) on a machine, by the rules above.

    algorithm: an Algorithm, or a name of the registry, looked up for `collective`. machine: a Machine, or what find_machine takes.
    ranks: left out, the machine's. setting: left out, made for the machine; a pipeline gets its best number of pieces.
    dtype: for gamma, which is the machine's "default" for a dtype that it does not name. ahead: steps that may overlap, 0: none.

    Raises ValueError for an unknown name, an impossible setting, or ranks that the machine does not join.
    """
    algorithm = find(algorithm, collective) if isinstance(algorithm, str) else algorithm
    machine = find_machine(machine) if isinstance(machine, str) else machine
    if nbytes < 0 or ahead < 0:
        raise ValueError(f"nbytes {nbytes} or ahead {ahead} is below 0")
    if setting is None:
        setting = setting_for(algorithm, nbytes, machine, machine.ranks if ranks is None else ranks)
    elif ranks not in (None, setting.size):
        raise ValueError(f"ranks is {ranks}, but the setting is for {setting.size}")
    machine.check(setting.size)
    clock = _Clock(machine, setting.size, ahead, machine.gamma.get(dtype, machine.gamma["default"]), trace)
    for moved in _rounds(algorithm, setting, nbytes * (setting.size if algorithm.collective.name == "alltoall" else 1)):
        clock.advance(moved)
    return clock.estimate(algorithm.name)


def setting_for(algorithm: Algorithm, nbytes: int, machine: Machine, ranks: int) -> Setting:
    """Return the setting for an algorithm on a machine: its nodes and rings, root 0, and the best number of pieces."""
    pieces = algorithm.pieces(ranks, nbytes, max(machine.latency_bytes(ranks), LEAST)) if algorithm.pieces and ranks > 0 else 1
    return Setting(ranks, pieces=pieces, nodes=machine.nodes(ranks), rings=machine.rings_for(ranks))


class Span(NamedTuple):
    """The least and the greatest chunk of each rank's message (0 and -1: none).

    only: rank 0's chunk, where each rank has one, and rank r's is rank 0's moved by r.
    """

    low: np.ndarray
    high: np.ndarray
    only: int | None = None


class Who(NamedTuple):
    """Who sends to whom, and who receives from whom; NOBODY for no one. Of one object for rounds that do not differ in it."""

    to: np.ndarray
    source: np.ndarray


class Round(NamedTuple):
    """What all ranks do in a round. An entry for every rank."""

    who: Who
    send: Span
    recv: Span
    nbytes: np.ndarray
    reduce: np.ndarray | bool


def _rounds(algorithm: Algorithm, setting: Setting, total: int) -> Iterator[Round]:
    """Yield the rounds of a vector of `total` bytes, from as little of the schedule as they can be made of."""
    if setting.size == 1:
        return
    sizes = np.array(counts(total, algorithm.chunks(setting)))
    if algorithm.cyclic and not setting.root:
        yield from _turned(algorithm, setting, sizes)
        return
    known = ALGORITHMS.get((algorithm.collective.name, algorithm.name)) is algorithm
    edges = np.array([0, *np.cumsum(sizes)])
    for who, send, recv, reduce, odd in _flow(algorithm, setting) if known and algorithm.pieces else _plain(algorithm, setting):
        nbytes = edges[send.high + 1] - edges[send.low]
        for rank, chunks in odd:
            nbytes[rank] = sizes[list(chunks)].sum()
        yield Round(who, send, recv, nbytes, reduce)


# ---- rounds of a cyclic schedule: rank 0's, turned

def _turned(algorithm: Algorithm, setting: Setting, sizes: np.ndarray) -> Iterator[Round]:
    """Yield rounds made of rank 0's steps alone: rank r's are those with r added to every rank and chunk."""
    size = setting.size
    turn = _Turn(size, sizes)
    ways: dict[tuple[int, int], Who] = {}
    nobody = Who(*np.full((2, size), NOBODY))
    none = Span(np.zeros(size, int), np.full(size, -1))
    for to, send, source, recv, reduce in algorithm.steps(0, setting):
        if to is None or source is None:                 # rank 0 does not send: nobody does, and nobody receives
            yield Round(nobody, none, none, none.low, False)
            continue
        if (to, source) not in ways:
            ways[to, source] = Who((to + np.arange(size)) % size, (source + np.arange(size)) % size)
        yield Round(ways[to, source], turn.span(send), turn.span(recv), turn.nbytes(send), reduce)


class _Turn:
    """Rank 0's chunks moved by every rank's number, inside their block of n."""

    def __init__(self, size: int, sizes: np.ndarray):
        self.size = size
        blocks = sizes.reshape(-1, size)
        self.ids = np.concatenate([np.arange(len(sizes)).reshape(-1, size)] * 2, axis=1)     # twice, so that a turn is a slice
        self.sizes = np.concatenate([blocks] * 2, axis=1)
        self.edges = np.concatenate([np.zeros((len(blocks), 1), int), np.cumsum(self.sizes, axis=1)], axis=1)

    def span(self, chunks: Chunks) -> Span:
        block, place, count = self._run(chunks)
        if not count:
            ids = self._all(chunks)
            return Span(ids.min(axis=0), ids.max(axis=0))
        low = self.ids[block, place:place + self.size]
        if count == 1:
            return Span(low, low, chunks[0])
        first, high = block * self.size, low + count - 1
        wraps = high >= first + self.size
        return Span(np.where(wraps, first, low), np.where(wraps, first + self.size - 1, high))

    def nbytes(self, chunks: Chunks) -> np.ndarray:
        block, place, count = self._run(chunks)
        if count == 1:
            return self.sizes[block, place:place + self.size]
        if count:
            return self.edges[block, place + count:place + count + self.size] - self.edges[block, place:place + self.size]
        return self.sizes.reshape(-1)[self._twice(self._all(chunks))].sum(axis=0)

    def _run(self, chunks: Chunks) -> tuple[int, int, int]:
        """Return the block, the first chunk's place in it and the number of chunks, or 0 where they do not follow one another."""
        block, place = divmod(chunks[0], self.size)
        for index, chunk in enumerate(chunks if len(chunks) > 1 else ()):
            if chunk // self.size != block or chunk % self.size != (place + index) % self.size:
                return block, place, 0
        return block, place, len(chunks)

    def _all(self, chunks: Chunks) -> np.ndarray:
        block, place = np.divmod(np.array(chunks)[:, None], self.size)
        return block * self.size + (place + np.arange(self.size)) % self.size

    def _twice(self, ids: np.ndarray) -> np.ndarray:
        return ids // self.size * 2 * self.size + ids % self.size


# ---- rounds of any schedule

Packed = tuple[Who, Span, Span, np.ndarray, list[tuple[int, Chunks]]]
"""A round without bytes; the last entry are ranks that send chunks which are not a range, and those chunks."""


def _plain(algorithm: Algorithm, setting: Setting) -> Iterator[Packed]:
    """Yield the rounds as arrays; those of few ranks are kept, for they are asked for again and again."""
    return iter(_kept(algorithm, setting)) if setting.size <= FEW else _packed(algorithm, setting)


FEW = 64


@lru_cache(maxsize=64)
def _kept(algorithm: Algorithm, setting: Setting) -> list[Packed]:
    return list(_packed(algorithm, setting))


def _packed(algorithm: Algorithm, setting: Setting) -> Iterator[Packed]:
    known: dict[bytes, Who] = {}
    for steps in replay(algorithm, setting):
        to, send, source, recv, reduce = zip(*steps)
        who = _who(known, *(np.array([NOBODY if peer is None else peer for peer in peers]) for peers in (to, source)))
        odd = [(rank, chunks) for rank, chunks in enumerate(send) if type(chunks) is not range or chunks.step != 1]
        yield who, _span(send), _span(recv), np.array(reduce), odd


def _who(known: dict[bytes, Who], to: np.ndarray, source: np.ndarray) -> Who:
    """Return the same object for the same ranks, so that their links are looked up once; forget all when there are many."""
    if len(known) > 32:
        known.clear()
    return known.setdefault(to.tobytes(), Who(to, source))


def _span(sets: tuple[Chunks, ...]) -> Span:
    return Span(np.array([min(chunks, default=0) if type(chunks) is tuple else chunks[0] if chunks else 0 for chunks in sets]),
                np.array([max(chunks, default=-1) if type(chunks) is tuple else chunks[-1] if chunks else -1 for chunks in sets]))


# ---- rounds of a pipeline: those of one piece, spread

def _flow(algorithm: Algorithm, setting: Setting) -> Iterator[Packed]:
    """Yield a pipeline's rounds, made of its schedule for one piece: further pieces follow two rounds behind each other.

    Sums count rounds from the start and copies from the end, for a broadcast is a reduction backwards. On very many ranks this
    is what makes the price affordable; the tests hold it against the schedules themselves.
    """
    pieces = setting.pieces
    single = list(_plain(algorithm, Setting(setting.size, setting.root, 1, setting.nodes, setting.rings)))
    length = int(algorithm.rounds(setting))
    sums = [_messages(who, send, reduce, True) for who, send, _, reduce, _ in single]
    copies = [_messages(who, send, reduce, False) for who, send, _, reduce, _ in reversed(single)]
    known: dict[bytes, Who] = {}
    for turn in range(length):
        parts = [*_under_way(sums, turn, pieces), *_under_way(copies, length - 1 - turn, pieces)]
        sender, receiver, chunk, adds = (np.concatenate(part) for part in zip(*parts)) if parts else [np.zeros(0, int)] * 4
        yield _scattered(known, setting.size, sender, receiver, chunk, adds.astype(bool))


Messages = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Senders, receivers, chunks, and whether they are summed."""


def _messages(who: Who, send: Span, reduce: np.ndarray, sums: bool) -> Messages:
    senders = np.flatnonzero((who.to != NOBODY) & (reduce[who.to] == sums))
    return senders, who.to[senders], send.low[senders], np.full(len(senders), sums)


def _under_way(single: list[Messages], turn: int, pieces: int) -> Iterator[Messages]:
    """Yield the messages of a round: those that the schedule for one piece has an even number of rounds before."""
    for first in range(turn % 2, min(turn + 1, len(single)), 2):
        piece = (turn - first) // 2
        senders, receivers, trees, sums = single[first]
        if piece < pieces and len(senders):
            yield senders, receivers, trees * pieces + piece, sums


def _scattered(known: dict[bytes, Who], size: int, sender: np.ndarray, receiver: np.ndarray, chunk: np.ndarray,
               sums: np.ndarray) -> Packed:
    to, source = np.full(size, NOBODY), np.full(size, NOBODY)
    sent, got = (Span(np.zeros(size, int), np.full(size, -1)) for _ in range(2))
    to[sender], source[receiver] = receiver, sender
    sent.low[sender] = sent.high[sender] = chunk
    got.low[receiver] = got.high[receiver] = chunk
    reduce = np.zeros(size, bool)
    reduce[receiver] = sums
    return _who(known, to, source), sent, got, reduce, []


# ---- links

class Way(NamedTuple):
    """The messages of a round and their links: up to four each, with s per byte; link 0 stands for none. cost: of the slowest."""

    sender: np.ndarray
    receiver: np.ndarray
    everybody: bool
    alpha: np.ndarray
    links: list[np.ndarray]
    costs: list[np.ndarray]
    cost: np.ndarray


class _Links:
    """The links of a machine, numbered from 1 on, and the way of every message."""

    def __init__(self, machine: Machine, size: int):
        self.machine, self.size, self.count = machine, size, 1
        self.places = [self._place(level) for level in machine.levels]
        self.pairs: dict[tuple[int, int], int] = {}
        self.own = all(level.ranks_per_port == 1 and level.duplex == "full" and level.bus is level.pair is None
                       for level in machine.levels)

    def _place(self, level: Level) -> tuple[int, int, int]:
        """Number a level's links; return the first that leads out, the first that leads in, and the first bus."""
        group = level.group or self.size
        ends = self.size // level.ranks_per_port + 1 if level.wires is None else (self.size // group + 1) * len(level.wires)
        out = self.count
        into = out + (ends if level.duplex == "full" else 0)
        bus = into + ends
        self.count = bus + self.size // group + 1
        return out, into, bus

    def way(self, who: Who) -> Way:
        """Find the links of the messages of a round."""
        sender = np.flatnonzero(who.to != NOBODY)
        receiver = who.to[sender]
        count = len(sender)
        alpha, links, costs = np.zeros(count), [np.zeros(count, int) for _ in range(4)], [np.zeros(count) for _ in range(4)]
        left = np.arange(count)
        for level, places in zip(self.machine.levels, self.places):
            found, ways, cost = self._joined(level, places, sender[left], receiver[left])
            here = left[found]
            alpha[here] = level.alpha
            for which, ids in enumerate(ways):
                links[which][here], costs[which][here] = ids, cost
            if level.bus is not None:
                links[2][here], costs[2][here] = places[2] + sender[here] // (level.group or self.size), level.bus
            if level.pair is not None:
                links[3][here], costs[3][here] = self._pairs(level, places[0], sender[here], receiver[here]), level.pair
            left = left[~found]
        for index in left[:1]:
            self.machine.path(int(sender[index]), int(receiver[index]))        # says what is wrong
        used = [which for which in range(4) if links[which].any()]
        return Way(sender, receiver, count == self.size, alpha, [links[which] for which in used], [costs[which] for which in used],
                   np.max(costs, axis=0))

    def _pairs(self, level: Level, out: int, a: np.ndarray, b: np.ndarray) -> list[int]:
        """Return the link of each pair of ports, numbered when it is first used: there are too many to number all."""
        found = []
        for ends in zip((out + a // level.ranks_per_port).tolist(), (out + b // level.ranks_per_port).tolist()):
            if (min(ends), max(ends)) not in self.pairs:
                self.pairs[min(ends), max(ends)] = self.count
                self.count += 1
            found.append(self.pairs[min(ends), max(ends)])
        return found

    def _joined(self, level: Level, places: tuple[int, int, int], a: np.ndarray, b: np.ndarray) -> tuple:
        """Return which of the messages a level carries, and for those the links (out and in, or the wire) and s per byte."""
        out, into, _ = places
        group = level.group or self.size
        found = a // group == b // group
        if level.wires is None:
            a, b = a[found], b[found]
            leads, enters = out + a // level.ranks_per_port, into + b // level.ranks_per_port
            return found, (leads, np.where(leads == enters, 0, enters)), np.full(len(a), level.beta / level.links)
        table, widths = np.full((group, group), -1), np.array(list(level.wires.values()))
        for number, (one, other) in enumerate(level.wires):
            table[one, other] = table[other, one] = number
        wire = table[a % group, b % group]
        found &= wire >= 0
        a, b, wire = a[found], b[found], wire[found]
        ids = np.where(a < b, out, into) + a // group * len(level.wires) + wire
        return found, (ids,), level.beta / widths[wire]


# ---- time

class _Clock:
    """The state of all ranks and links: when the steps of each are over, up to the round taken last."""

    def __init__(self, machine: Machine, size: int, ahead: int, gamma: float, trace: bool):
        self.size, self.ahead, self.gamma, self.trace = size, ahead, gamma, trace
        self.links = _Links(machine, size)
        self.ways: dict[int, tuple[Who, Way]] = {}
        self.nothing = np.zeros(size)
        self.past = np.zeros(size)                       # when everything before the last `ahead` steps is over
        self.last: deque[tuple[Span, np.ndarray, Span, np.ndarray]] = deque()
        self.busy = np.zeros(self.links.count)
        self.load = np.zeros(self.links.count)
        self.computing = np.zeros(size)
        self.cover = _Cover(size, 3 * (ahead + 1))
        self.steps = 0
        self.messages: list[Message] = []

    def advance(self, moved: Round) -> None:
        """Take a round."""
        way = self._way(moved.who)
        sent = over = self.nothing
        if len(way.sender):
            start, end = self._carry(way, moved)
            sent, got = self._by_rank(way, moved.who, end)
            self._note(way, moved.who, start, end)
            over = self._reduce(moved, sent, got)
            if self.trace:
                self._keep(way, moved.nbytes, start, end, over)
        self.cover.next_round()
        self.last.append((moved.recv, over, moved.send, sent))
        if len(self.last) > self.ahead:
            _, over, _, sent = self.last.popleft()
            np.maximum(self.past, over, out=self.past)
            np.maximum(self.past, sent, out=self.past)
        self.steps += 1

    def _way(self, who: Who) -> Way:
        """Return the way of a round's messages; the round's own object is kept with it, so that its id stays its own."""
        if id(who) not in self.ways:
            if len(self.ways) > 64:
                self.ways.clear()
            self.ways[id(who)] = who, self.links.way(who)
            if more := self.links.count - len(self.busy):
                self.busy, self.load = (np.append(values, np.zeros(more)) for values in (self.busy, self.load))
        return self.ways[id(who)][1]

    def _ready(self, moved: Round) -> tuple[np.ndarray, np.ndarray]:
        """Return when each rank's send, and its receive, can start, as far as its own steps go."""
        send, recv = self.past.copy(), self.past.copy()
        for got, over, sent, gone in self.last:
            _later(send, over, _meet(got, moved.send))
            _later(recv, over, _meet(got, moved.recv))
            _later(recv, gone, _meet(sent, moved.recv))
        return send, recv

    def _carry(self, way: Way, moved: Round) -> tuple[np.ndarray, np.ndarray]:
        """Return when each message starts and ends, and let its links be busy meanwhile."""
        send, recv = self._ready(moved)
        nbytes = moved.nbytes if way.everybody else moved.nbytes[way.sender]
        start = np.maximum(send if way.everybody else send[way.sender], recv[way.receiver])
        for ids in way.links:
            np.maximum(start, self.busy[ids], out=start)
        if self.links.own:
            end = start + (way.alpha + nbytes * way.cost)
            for ids in way.links:
                self.busy[ids] = end
                self.load[ids] += nbytes
            self.busy[0] = 0
            return start, end
        return start, self._share(way, nbytes, start)

    def _share(self, way: Way, nbytes: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return when messages end that share links with others of the round."""
        load = np.bincount(np.concatenate(way.links), np.concatenate([nbytes] * len(way.links)), self.links.count)
        load[0] = 0
        took = np.max([load[ids] * costs for ids, costs in zip(way.links, way.costs)], axis=0)
        end = start + (way.alpha + took)
        for ids in way.links:
            np.maximum.at(self.busy, ids, end)
        self.busy[0] = 0
        self.load += load
        return end

    def _by_rank(self, way: Way, who: Who, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when each rank's send, and its receive, have ended (0: it has none)."""
        if way.everybody:
            return end, end[who.source]
        sent, got = np.zeros(self.size), np.zeros(self.size)
        sent[way.sender], got[way.receiver] = end, end
        return sent, got

    def _reduce(self, moved: Round, sent: np.ndarray, got: np.ndarray) -> np.ndarray:
        """Return when each rank's receive is over, with its reduction."""
        if moved.reduce is False or not np.any(moved.reduce):
            return got
        begin = np.maximum(got, self.computing)
        _later(begin, sent, _meet(moved.send, moved.recv))
        if moved.reduce is True:
            which, over = slice(None), begin + self.gamma * moved.nbytes[moved.who.source]
        else:
            which, over = moved.reduce, np.where(moved.reduce, begin + self.gamma * moved.nbytes[moved.who.source], got)
        if self.gamma:
            self.cover.add(which, begin[which], over[which])
            self.computing[which] = over[which]
        return over

    def _note(self, way: Way, who: Who, start: np.ndarray, end: np.ndarray) -> None:
        """Note when ranks send and receive."""
        if way.everybody:
            begin, stop = start[who.source], end[who.source]
            first, last = np.minimum(start, begin), np.maximum(start, begin)
            if (last <= np.minimum(end, stop)).all():            # as a rule they overlap: one busy time
                self.cover.add(slice(None), first, np.maximum(end, stop))
            else:
                self.cover.add(slice(None), first, np.where(start <= begin, end, stop))
                self.cover.add(slice(None), last, np.where(start <= begin, stop, end))
        else:
            self.cover.add(way.sender, start, end)
            self.cover.add(way.receiver, start, end)

    def _keep(self, way: Way, nbytes: np.ndarray, start: np.ndarray, end: np.ndarray, over: np.ndarray) -> None:
        """Keep a round's messages."""
        columns = way.sender, way.receiver, nbytes[way.sender], start, end, over[way.receiver]
        self.messages += [Message(self.steps, *row) for row in zip(*(column.tolist() for column in columns))]

    def estimate(self, name: str) -> Estimate:
        """Return the price, once all rounds are taken."""
        seconds = float(max(self.past.max(), *(times.max() for _, over, _, sent in self.last for times in (over, sent)), 0))
        idle = np.clip(1 - self.cover.total / seconds, 0, 1) if seconds else np.zeros(self.size)
        return Estimate(name, seconds, self.steps, int(self.load[1:].max(initial=0)), idle, self.messages)


def _meet(one: Span, other: Span) -> np.ndarray | bool:
    """Tell for which ranks two spans meet; for turned single chunks one answer holds for all."""
    if one.only is not None and other.only is not None:
        return one.only == other.only
    return (one.low <= other.high) & (one.high >= other.low) & (one.high >= 0) & (other.high >= 0)


def _later(ready: np.ndarray, over: np.ndarray, which: np.ndarray | bool) -> None:
    """Put off what is ready until something else is over, for some ranks."""
    if which is not False:
        np.maximum(ready, over, out=ready, where=which)


class _Cover:
    """The length of the union of each rank's busy times, which come in about the order of time.

    Kept are the end of what is covered, and the gaps that the latest rounds left: a busy time can begin before the one noted
    ahead of it, but not before everything older than the steps that may overlap is over, so older gaps stay.
    """

    def __init__(self, size: int, slots: int):
        self.total, self.until = np.zeros(size), np.zeros(size)
        self.since = np.zeros(size)                      # where the piece that ends at `until` begins
        self.left, self.right = np.zeros((slots, size)), np.zeros((slots, size))
        self.first = self.slot = 0

    def next_round(self) -> None:
        """Go on to the slots of the next round: three each."""
        self.first = self.slot = (self.first + 3) % len(self.left)
        self.left[self.slot:self.slot + 3] = self.right[self.slot:self.slot + 3] = 0

    def add(self, who: np.ndarray | slice, start: np.ndarray, end: np.ndarray) -> None:
        """Note busy times of some ranks, one each."""
        until, since = self.until[who], self.since[who]
        from_, early = np.maximum(start, until), start < since
        self.left[self.slot, who], self.right[self.slot, who] = until, from_
        self.since[who] = np.where(start > until, start, since)
        self.total[who] += np.maximum(end - from_, 0)
        self.until[who] = np.maximum(until, end)
        if early.any():
            self._fill(np.arange(len(self.until))[who][early], start[early], end[early])
        self.slot += 1

    def _fill(self, ranks: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Fill the gaps in which busy times lie; one inside a gap leaves two, the second in the slot of this round."""
        for slot in range(len(self.left)):
            if slot == self.slot:
                continue
            left, right = self.left[slot, ranks], self.right[slot, ranks]
            filled = np.minimum(end, right) - np.maximum(start, left)
            inside = filled > 0
            if inside.any():
                self.total[ranks] += np.where(inside, filled, 0)
                both = inside & (start > left) & (end < right)
                self.left[self.slot, ranks[both]], self.right[self.slot, ranks[both]] = end[both], right[both]
                self.right[slot, ranks] = np.where(inside & (start > left), start, right)
                self.left[slot, ranks] = np.where(inside & (start <= left), end, left)
