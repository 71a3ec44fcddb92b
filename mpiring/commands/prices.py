"""Predicted times of all that can run a collective on one machine: of schedules by the cost model, of the rest by closed forms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from mpiring.algorithms.registry import find, names
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import ceil_log2
from mpiring.analysis.cost import effort, setting_for, simulate
from mpiring.analysis.machines import Machine
from mpiring.select import NATIVE, SHARED

PATIENCE = 10
"""Seconds of work for a price."""


class Prices:
    """Microseconds by algorithm, collective and bytes, for some ranks on a machine; each is found once."""

    def __init__(self, machine: Machine, ranks: int):
        self.machine, self.ranks = machine, ranks
        self.layout = Setting(ranks, nodes=machine.nodes(ranks))
        self.of = lru_cache(maxsize=None)(self._of)

    def all(self, collective: str, nbytes: int, algorithms: Iterable[str]) -> dict[str, float]:
        """Return the prices of some algorithms, without those that take long to find out."""
        priced = {name: self.of(name, collective, nbytes) for name in algorithms}
        return {name: us for name, us in priced.items() if us is not None}

    def _of(self, name: str, collective: str, nbytes: int) -> float | None:
        if name == NATIVE:                               # its authors know these schedules too
            return min(self.all(collective, nbytes, names(collective)).values(), default=None)
        if name == SHARED:
            return 1e6 * self._shared(collective, nbytes)
        algorithm = find(name, collective)
        if effort(algorithm, setting_for(algorithm, nbytes, self.machine, self.ranks)) > PATIENCE:
            return None
        return 1e6 * simulate(algorithm, nbytes, self.machine, self.ranks).seconds

    def _shared(self, collective: str, nbytes: int) -> float:
        """Return the seconds of two barriers and of reading and writing each byte once; between nodes, also of a ring a lane."""
        inner, outer = self.machine.levels[0], self.machine.levels[-1]
        here, nodes = self.layout.largest, len(self.layout.members)
        gamma = self.machine.gamma["default"]
        took = 2 * ceil_log2(here) * inner.alpha + 2 * nbytes * gamma
        if nodes == 1:
            return took
        steps = (nodes - 1) * (2 if collective == "allreduce" else 1)
        part = nbytes / nodes / self.layout.lanes * min(self.layout.lanes, outer.ranks_per_port)
        return took + steps * (outer.alpha + part * outer.beta / outer.links)
