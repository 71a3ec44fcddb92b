"""Random programs: every rank submits the same operations in an order and at a pace of its own; results are NumPy's.

MPIRING_RANDOM_SECONDS says for how long (30). Rank 0 draws the programs; orders and delays follow from their seeds and the rank.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import mpiring
from mpiring.runtime import ops

from cases import DTYPES, RANK, SIZE, bits, values
from engines import EVERYONE, SETS, means_something, reduced
from spmd import WORLD, drawn

SECONDS = float(os.environ.get("MPIRING_RANDOM_SECONDS", "30"))

OPTIONS = ({}, {"deterministic": True}, {"fusion_threshold": 0}, {"cycle_time": 0}, {"fusion_threshold": 300, "cycle_time": 0.003})
"""Settings of the engines that run the programs, in turn."""

MEMBERS = [EVERYONE, *SETS]

PAIRS = [(number, name) for number, dtype in enumerate(DTYPES) for name, op in ops.NAMES.items() if means_something(op, dtype)]


class Call(NamedTuple):
    """One operation of a program; not every kind uses all of it. where: the place of its ranks in MEMBERS."""

    kind: str
    named: bool
    where: int
    pair: tuple[int, str]
    count: int
    members: int
    scales: tuple[float, float]
    inplace: bool
    salt: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return MEMBERS[self.where]

    @property
    def ordered(self) -> bool:
        """Whether all ranks must submit it in one order: it has no name, or the caller waits in it."""
        return not self.named or self.kind in ("barrier", "object", "objects")


class Program(NamedTuple):
    """What all ranks do. steps: how often, under the same names; uneven: further batches of each rank before it joins, if any."""

    calls: list[Call]
    steps: int
    seed: int
    uneven: list[int] | None


KINDS = ["allreduce"] * 5 + ["group", "allgather", "broadcast", "alltoall", "reduce_scatter"] * 2 + ["barrier", "object", "objects"]

CALLS = st.builds(Call, st.sampled_from(KINDS), st.integers(0, 3).map(bool), st.sampled_from([0, 0, *range(len(MEMBERS))]),
                  st.sampled_from(PAIRS), st.sampled_from([0, 1, 2, SIZE, 17, 100, 1003, 1003, 20_011]), st.integers(1, 4),
                  st.sampled_from([(1.0, 1.0)] * 3 + [(0.5, 1.0), (1.0, 0.25), (2.0, 0.5)]), st.booleans(), st.integers(0, 6))

PROGRAMS = st.builds(Program, st.lists(CALLS, max_size=40), st.integers(1, 3), st.integers(0, 1 << 30),
                     st.none() | st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE))


class Run:
    """One call of a program in one step, on this rank: submitted, and compared with what it should bring."""

    def __init__(self, engine: mpiring.Engine, sets: list, call: Call, name: str | None, step: int):
        self.engine, self.call, self.step = engine, call, step
        self.options = {"name": name, "process_set": sets[call.where]}
        self.dtype = DTYPES[call.pair[0]]
        self.place = call.ranks.index(RANK)
        self.got: Any = None
        self.handle: Any = None

    def part(self, rank: int, count: int, index: int = 0) -> np.ndarray:
        """Return what a rank gives."""
        return values(rank + self.step + self.call.salt + index, count, self.dtype)

    def parts(self, count: int, index: int = 0) -> list[np.ndarray]:
        """Return what all ranks give."""
        return [self.part(rank, count, index) for rank in self.call.ranks]

    def rows(self, rank: int) -> int:
        """Return how many rows a rank gathers."""
        return self.call.count * ((rank + self.call.salt) % 3)

    def splits(self, rank: int) -> list[int]:
        """Return how many rows a rank sends to each."""
        return [min(self.call.count, (rank * 3 + peer + self.call.salt) % 5) for peer in self.call.ranks]

    def submit(self) -> None:
        """Start it; where there is no handle, the result is there."""
        getattr(self, f"_start_{self.call.kind}")()

    def _start_allreduce(self) -> None:
        mine = self.part(RANK, self.call.count)
        self.handle = self.engine.allreduce_async(mine, mine if self.call.inplace else None, **self.reduction(), **self.options)

    def _start_group(self) -> None:
        mine = [self.part(RANK, self.call.count + index, index) for index in range(self.call.members)]
        outs = mine if self.call.inplace else None
        self.handle = self.engine.grouped_allreduce_async(mine, outs, **self.reduction(), **self.options)

    def _start_reduce_scatter(self) -> None:
        self.handle = self.engine.reduce_scatter_async(self.part(RANK, self.call.count), **self.reduction(), **self.options)

    def _start_allgather(self) -> None:
        self.handle = self.engine.allgather_async(self.part(RANK, 2 * self.rows(RANK)).reshape(-1, 2), **self.options)

    def _start_broadcast(self) -> None:
        mine = self.part(RANK, self.call.count)
        self.handle = self.engine.broadcast_async(mine, self.root, mine if self.call.inplace else None, **self.options)

    def _start_alltoall(self) -> None:
        if self.call.inplace:
            self.handle = self.engine.alltoall_async(self.part(RANK, self.call.count * len(self.call.ranks)), **self.options)
        else:
            splits = self.splits(RANK)
            self.handle = self.engine.alltoall_async(self.part(RANK, sum(splits)), splits, **self.options)

    def _start_barrier(self) -> None:
        self.engine.barrier(process_set=self.options["process_set"])

    def _start_object(self) -> None:
        self.got = self.engine.broadcast_object(self.thing(RANK), self.root, **self.options)

    def _start_objects(self) -> None:
        self.got = self.engine.allgather_object(self.thing(RANK), **self.options)

    def thing(self, rank: int) -> Any:
        """Return an object of a rank; most are small."""
        return None if (rank + self.call.salt) % 4 == 0 else {"rank": rank, "text": "x" * (self.call.count * (rank + 1) % 3001)}

    def reduction(self) -> dict[str, Any]:
        """Return the op and scales."""
        scales = (1.0, 1.0) if self.dtype.kind == "b" else self.call.scales
        return {"op": ops.NAMES[self.call.pair[1]], "prescale": scales[0], "postscale": scales[1]}

    @property
    def root(self) -> int:
        """The rank that broadcasts."""
        return self.call.ranks[self.call.salt % len(self.call.ranks)]

    def check(self) -> None:
        """Wait, and compare."""
        if self.handle is not None:
            self.got = self.engine.synchronize(self.handle)
        expected = getattr(self, f"_{self.call.kind}")()
        if self.call.kind in ("object", "objects"):
            assert self.got == expected, self.call
        for got, want in zip(self.got, expected) if isinstance(expected, list) else [(self.got, expected)]:
            if isinstance(want, np.ndarray):
                assert (got.shape, got.dtype, bits(got)) == (want.shape, want.dtype, bits(want)), (self.call, self.step)

    def _reduced(self, count: int, index: int = 0) -> np.ndarray:
        return reduced(arrays=self.parts(count, index), **self.reduction())

    def _allreduce(self) -> np.ndarray:
        return self._reduced(self.call.count)

    def _group(self) -> list[np.ndarray]:
        return [self._reduced(self.call.count + index, index) for index in range(self.call.members)]

    def _reduce_scatter(self) -> np.ndarray:
        return np.array_split(self._reduced(self.call.count), len(self.call.ranks))[self.place]

    def _allgather(self) -> np.ndarray:
        return self._joined([self.part(rank, 2 * self.rows(rank)).reshape(-1, 2) for rank in self.call.ranks])

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts).astype(self.dtype)          # concatenate alone does not keep the byte order

    def _broadcast(self) -> np.ndarray:
        return self.part(self.root, self.call.count)

    def _alltoall(self) -> Any:
        count, size = self.call.count, len(self.call.ranks)
        if self.call.inplace:
            return self._joined([part[self.place * count:][:count] for part in self.parts(count * size)])
        cut = {rank: np.cumsum([0, *self.splits(rank)]) for rank in self.call.ranks}
        inbox = [self.part(rank, edges[-1])[edges[self.place]:edges[self.place + 1]] for rank, edges in cut.items()]
        assert list(self.got[1]) == [len(rows) for rows in inbox], self.call
        return [self._joined(inbox)]

    def _barrier(self) -> None:
        return None

    def _object(self) -> Any:
        return self.thing(self.root)

    def _objects(self) -> list:
        return [self.thing(rank) for rank in self.call.ranks]


def order(calls: list[tuple[str, Call]], chance: random.Random) -> list[tuple[str, Call]]:
    """Return this rank's order: any, but what is ordered keeps its own."""
    mixed = chance.sample(calls, len(calls))
    fixed = iter([pair for pair in calls if pair[1].ordered])
    return [next(fixed) if pair[1].ordered else pair for pair in mixed]


def step_through(engine: mpiring.Engine, sets: list, program: Program, step: int, chance: random.Random) -> None:
    """Submit everything once, and check it in another order."""
    mine = [(str(number), call) for number, call in enumerate(program.calls) if RANK in call.ranks]
    pace, runs = chance.choice((0, 0, 0.05, 0.3)), []
    for name, call in order(mine, chance):
        if chance.random() < pace:
            time.sleep(chance.random() * 2e-3)
        runs.append(Run(engine, sets, call, name if call.named else None, step))
        runs[-1].submit()
        if runs[-1].handle is not None and chance.random() < 0.1:
            engine.poll(runs[-1].handle)
    for run in chance.sample(runs, len(runs)):
        run.check()


def join_after(engine: mpiring.Engine, batches: list[int]) -> None:
    """Go through this rank's batches, then join."""
    for step in range(batches[RANK]):
        here = sum(step < count for count in batches)
        assert (engine.allreduce(np.full(5, 2.0), name="uneven") == 2 * here).all()
    last = engine.join()
    assert batches[last] == max(batches)


class Engines:
    """The engine that programs run on, with its process sets; a new one after a program that failed, whatever state it left."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self._start()

    def _start(self) -> None:
        self.engine = mpiring.Engine(WORLD, timeout=5, **self.options)
        self.sets = [None, *map(self.engine.add_process_set, SETS)]

    def execute(self, program: Program) -> None:
        """Run a program. No rank joins before all are through with the steps: a join has no end where one of them has failed."""
        chance, failure = random.Random(program.seed * SIZE + RANK), None
        try:
            for step in range(program.steps):
                step_through(self.engine, self.sets, program, step, chance)
            assert self.engine.metrics()["errors"] == 0
        except Exception as error:
            failure = error
        if any(WORLD.allgather(failure is not None)):    # mpi4py's allreduce of objects would hold the GIL when it is called first
            self.engine.shutdown()
            self._start()
        elif program.uneven:
            join_after(self.engine, program.uneven)
        if failure is not None:
            raise failure


@pytest.mark.deadline(SECONDS + 360)        # Hypothesis takes up to 300 seconds to simplify a program that fails
def test_random_programs():
    end, turn = time.monotonic() + SECONDS, 0
    while WORLD.bcast(time.monotonic() < end):
        engines = Engines(OPTIONS[turn % len(OPTIONS)])
        drawn(PROGRAMS, examples=10)(engines.execute)()
        engines.engine.shutdown()
        turn += 1
