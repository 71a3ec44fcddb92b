"""The links of a machine, and which of them every message of a round uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiring.analysis.machines import Level, Machine
from mpiring.analysis.rounds import NOBODY, Who


class Way(NamedTuple):
    """The messages of a round and their links: up to four each, with s per byte; link 0 stands for none. cost: of the slowest."""

    sender: np.ndarray
    receiver: np.ndarray
    everybody: bool
    alpha: np.ndarray
    links: list[np.ndarray]
    costs: list[np.ndarray]
    cost: np.ndarray


class Links:
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
