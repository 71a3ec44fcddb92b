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
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mpiring.algorithms.registry import Algorithm, find
from mpiring.algorithms.setting import Setting
from mpiring.analysis.cover import Cover
from mpiring.analysis.links import Links, Way
from mpiring.analysis.machines import Machine, find_machine
from mpiring.analysis.rounds import Round, Span, Who, rounds_of

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
    busiest_link_bytes: the most bytes on one link, bus or pair. idle: for every rank, the share of the time in which it does
    nothing.
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
    for moved in rounds_of(algorithm, setting, nbytes * (setting.size if algorithm.collective.name == "alltoall" else 1)):
        clock.advance(moved)
    return clock.estimate(algorithm.name)


def setting_for(algorithm: Algorithm, nbytes: int, machine: Machine, ranks: int) -> Setting:
    """Return the setting for an algorithm on a machine: its nodes and rings, root 0, and the best number of pieces."""
    pieces = algorithm.pieces(ranks, nbytes, max(machine.latency_bytes(ranks), LEAST)) if algorithm.pieces and ranks > 0 else 1
    return Setting(ranks, pieces=pieces, nodes=machine.nodes(ranks), rings=machine.rings_for(ranks))


def effort(algorithm: Algorithm, setting: Setting) -> float:
    """Return about how many seconds it takes to price a schedule here, to warn of hours: 1 us a step, fewer if it turns."""
    steps = float(algorithm.rounds(setting)) * setting.size
    return 1e-6 * steps / (15 if algorithm.turns(setting) else 1)


class _Clock:
    """The state of all ranks and links: when the steps of each are over, up to the round taken last."""

    def __init__(self, machine: Machine, size: int, ahead: int, gamma: float, trace: bool):
        self.size, self.ahead, self.gamma, self.trace = size, ahead, gamma, trace
        self.links = Links(machine, size)
        self.ways: dict[int, tuple[Who, Way]] = {}
        self.nothing = np.zeros(size)
        self.past = np.zeros(size)                       # when everything before the last `ahead` steps is over
        self.last: deque[tuple[Span, np.ndarray, Span, np.ndarray]] = deque()
        self.busy = np.zeros(self.links.count)
        self.load = np.zeros(self.links.count)
        self.computing = np.zeros(size)
        self.cover = Cover(size, 3 * (ahead + 1))
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
