"""Measure which algorithm is fastest here, for algorithm="auto": mpirun -np 8 python -m mpiring tune."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring import select
from mpiring.algorithms.registry import COLLECTIVES, names
from mpiring.bench.subjects import Buffers, bind
from mpiring.bench.timing import interleaved
from mpiring.bench.values import a_size
from mpiring.commands import options as shared
from mpiring.commands.select import SIZES, listed
from mpiring.runtime.channel import channel_of
from mpiring.runtime.launcher import wrong_launcher
from mpiring.select import NATIVE, SHARED, Row, Span, Table
from mpiring.units import binary, count, seconds

EPILOG = """For each collective, kind of array and size the algorithms are timed in turn, iteration by iteration (float32, SUM), and
the medians of the slowest rank's times count. One that is 3 times slower than the fastest at two sizes in a row is not tried at
larger ones. The table is written where the calls find it, for this MPI library, these ranks on their nodes, and this processor;
python -m mpiring select shows it. Remove the file to be without it.

examples:
  mpirun -np 8 python -m mpiring tune
  mpirun -np 8 python -m mpiring tune --collectives allreduce -e 16M --seconds 30 --out table.json"""

SLOW, OFTEN = 3.0, 2
"""How many times slower than the fastest, at how many sizes in a row, rules an algorithm out for larger ones."""

MOST = 60
"""Iterations of one size; medians of more differ by less than what is noise here."""

LOOKS, FEW = 2, 4
"""Iterations after which only those go on that are not much slower than the fastest, and below which a median is mostly noise."""

WARMUP = 6
"""Iterations that do not count: MPICH takes another path after 5 collectives on a comm."""

WAIT = 20
"""Seconds that a rank waits for the others once a call has failed on it."""


class Parser(shared.Parser):
    """A parser that one rank only lets speak."""

    quiet = False

    def _print_message(self, message: str, file: Any = None) -> None:
        if not self.quiet:
            super()._print_message(message, file)


def parser(quiet: bool = False) -> Parser:
    """Return the command line."""
    made = Parser("tune", "Measure which algorithm is fastest on these ranks, at which size, and keep the table for "
                  "algorithm=\"auto\". Runs under MPI.", EPILOG)
    made.quiet = quiet
    made.add_argument("--collectives", type=shared.a_list, default=list(COLLECTIVES), metavar="LIST",
                      help=f"{', '.join(COLLECTIVES)} (default: all)")
    made.add_argument("-b", "--minbytes", type=a_size, default=SIZES[0], metavar="SIZE", help="smallest vector (default 256)")
    made.add_argument("-e", "--maxbytes", type=a_size, default=SIZES[-1], metavar="SIZE", help="largest vector (default 64M)")
    made.add_argument("--seconds", type=shared.a_number, default=100, metavar="N", help="time for all of it (default 100)")
    made.add_argument("--out", metavar="FILE", help=f"write the table there, for {select.TABLE}=FILE (default: where calls look)")
    return made


def main(argv: Sequence[str] | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> int:
    """Measure and keep a table; return the exit status. An exception on one rank ends all."""
    try:
        return _main(argv, comm)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
        raise


def _main(argv: Sequence[str] | None, comm: MPI.Comm) -> int:
    if problem := wrong_launcher(comm):
        return _wrong(problem, comm)
    try:
        options = parser(quiet=comm.rank != 0).parse_args(argv)
        for collective in options.collectives:
            shared.a_collective(collective)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except argparse.ArgumentTypeError as error:
        return _wrong(f"argument --collectives: {error}", comm)
    if comm.size == 1:
        return _wrong("on one rank there is nothing to choose: mpirun -np 8 python -m mpiring tune", comm)
    if options.maxbytes < options.minbytes:
        return _wrong(f"argument -e: {options.maxbytes} is less than -b {options.minbytes}", comm)
    try:
        key = select.key_for(MPI.get_vendor(), channel_of(comm).nodes)
    except ValueError as error:                          # of all ranks: the table that is there is broken, or the override wrong
        return _wrong(str(error), comm)
    path, problem = comm.bcast(_place(options.out, key) if comm.rank == 0 else None)
    if problem:
        return _wrong(problem, comm)
    say = _said if comm.rank == 0 else _nothing
    say(f"# {key.library} {key.version}, {count(comm.size, 'rank')} on {count(key.nodes, 'node')} ({key.layout}), {key.processor}")
    rows = list(measure(options, comm, say))
    if not comm.bcast(bool(rows)):
        return _wrong("no size was measured often enough to say anything: --seconds gives more time", comm)
    if comm.rank == 0:
        about = f"measured by mpiring {mpiring.__version__} on {key.library} {key.version}, {key.layout} ranks, {key.processor}"
        select.store(Table(tuple(rows), str(path), about), path)
        use = f"; {select.TABLE}={path} lets calls use it" if options.out else ""
        print(f"\n{listed(rows)}\n\nwrote {path}{use}", flush=True)
    return 0


def _place(out: str | None, key: select.Key) -> tuple[Path | None, str]:
    """Return the file to write, or what is wrong with it: better known before measuring."""
    try:
        path = Path(out) if out else select.cache_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return None, f"{error.filename}: cannot be written: {error.strerror}"
    except ValueError as error:
        return None, f"{error}: --out FILE says where to write"
    return path, ""


def measure(options: argparse.Namespace, comm: MPI.Comm, say: Callable) -> Iterator[Row]:
    """Yield the rows of all collectives and kinds of array; each gets its part of the time that is left."""
    end = perf_counter() + options.seconds
    jobs = [(collective, kind) for collective in options.collectives for kind in ("ordinary", "shared")]
    together = Counter(channel_of(comm).nodes)
    place = {"nodes": Span(len(together), len(together)), "ranks": Span(comm.size, comm.size)}
    for number, (collective, kind) in enumerate(jobs):
        weights = [2 if name == "allreduce" else 1 for name, _ in jobs[number:]]
        now = perf_counter()
        times = Sweep(collective, kind, comm, now + (end - now) * weights[0] / sum(weights), say).run(sizes(options))
        yield from select.rows_from(times, True, collective=collective, kind=kind, **place)


def sizes(options: argparse.Namespace) -> list[int]:
    """Return the bytes to measure: from the smallest on by factors of 4, and the largest."""
    found, nbytes = [], max(4, options.minbytes)
    while nbytes < options.maxbytes:
        found.append(nbytes)
        nbytes *= 4
    return [*found, max(4, options.maxbytes)]


class Sweep:
    """One collective on one kind of array, from small to large vectors, until a time. Rank 0 decides, for all see other clocks."""

    def __init__(self, collective: str, kind: str, comm: MPI.Comm, until: float, say: Callable):
        self.collective, self.kind, self.until, self.say = collective, kind, until, say
        self.comm = comm.Dup()                           # plans, and the arrays that they hold, go with it
        sharing = select.can_share(collective, comm.size, len(set(channel_of(comm).nodes)))
        self.names = [NATIVE, *([SHARED] if sharing else []), *names(collective)]
        self.slow: Counter[str] = Counter()

    def run(self, every: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the microseconds by bytes and algorithm, of those sizes that there was time to measure well."""
        times: dict[int, dict[str, float]] = {}
        needed = 0.0
        try:
            for number, nbytes in enumerate(every):
                begin, left = perf_counter(), self._left()
                if left < needed:
                    self.say(f"# {self.collective}, {self.kind}: no time for {binary(nbytes)} and more")
                    break
                weights = [max(1, size >> 22) ** 0.5 for size in every[number:]]
                found, iterations = self._time(nbytes, left * weights[0] / sum(weights))
                self._tell(nbytes, found, iterations)
                if iterations >= FEW:
                    times[nbytes] = found
                growth = every[number + 1] / nbytes if number + 1 < len(every) else 1
                needed = growth * min(perf_counter() - begin, (LOOKS + 2) * 1e-6 * sum(found.values()))     # plans, and a look
                self._drop(found)
        finally:
            self.comm.Free()
        return times

    def _left(self) -> float:
        """Return the seconds left, as rank 0 sees it."""
        return self.comm.bcast(self.until - perf_counter())

    def _time(self, nbytes: int, allotted: float) -> tuple[dict[str, float], int]:
        """Return the median microseconds of each algorithm, and the iterations of the fast ones: as many as time allows after a
        look at all.
        """
        begin, buffers = perf_counter(), self._buffers(nbytes)
        calls = self._calls(buffers)
        looks = interleaved(list(calls.values()), _nothing, 1, LOOKS, 1, self.comm)
        samples = dict(zip(calls, looks))
        least = {name: times.min() for name, times in samples.items()}
        good = self.comm.bcast([name for name in calls if least[name] <= SLOW * min(least.values())])
        left = allotted - (perf_counter() - begin)
        more = self.comm.bcast(max(0, min(MOST, int(left / max(sum(least[name] for name in good), 1e-9)))))
        warmup = min(WARMUP, more // 4)
        if more > warmup:
            times = interleaved([calls[name] for name in good], _nothing, warmup, more - warmup, 1, self.comm)
            samples.update({name: np.append(samples[name], row) for name, row in zip(good, times)})
        found = self.comm.bcast({name: 1e6 * float(np.median(times)) for name, times in samples.items()})
        buffers.free()
        return found, LOOKS + more - warmup

    def _tell(self, nbytes: int, found: dict[str, float], iterations: int) -> None:
        """Say what was found at a size, and how well it is known."""
        best = ", ".join(f"{name} {seconds(found[name] / 1e6)}" for name in sorted(found, key=found.get)[:3])
        few = ": too few, not kept" if iterations < FEW else ""
        self.say(f"{self.collective}, {self.kind}, {binary(nbytes)}: {best} ({count(iterations, 'iteration')}{few})")

    def _buffers(self, nbytes: int) -> Buffers:
        elements = max(1, nbytes // 4)
        if self.collective == "alltoall":                # whole blocks, one for each rank
            elements = max(1, elements // self.comm.size) * self.comm.size
        return Buffers(self.collective, "SUM", np.dtype(np.float32), elements, self.comm, False, buffers=self.kind)

    def _calls(self, buffers: Buffers) -> dict[str, Callable[[], object]]:
        """Return the calls, each run once so that its plan is made; leave out what cannot run on these ranks, and say so."""
        calls = {}
        for name in list(self.names):
            call = bind(name, buffers)
            if refused := self._refused(name, call):
                self.names.remove(name)
                self.say(f"# {self.collective}, {self.kind}: {name} left out: {refused}")
            else:
                calls[name] = call
        return calls

    def _refused(self, name: str, call: Callable[[], object]) -> str:
        """Run a call; return why shared cannot run here, where all ranks say so. Everything else is an error."""
        problem = ""
        try:
            call()
        except (TypeError, ValueError) as error:
            if name != SHARED:
                raise
            problem = str(error)
        meet(self.comm, problem)
        told = self.comm.allgather(problem)
        if any(told) and not all(told):
            raise RuntimeError(f"{name} on rank {self.comm.rank}: {problem or 'ran here, but not on all ranks'}")
        return told[0]

    def _drop(self, found: dict[str, float]) -> None:
        """Rule out what has been slow for long enough."""
        best = min(found.values())
        for name, us in found.items():
            self.slow[name] = self.slow[name] + 1 if us > SLOW * best else 0
        self.names = [name for name in self.names if self.slow[name] < OFTEN]


def meet(comm: MPI.Comm, problem: str) -> None:
    """Wait for all ranks; one on which a call has failed does not wait for ever, for the others may be in that call."""
    request, end = comm.Ibarrier(), perf_counter() + WAIT
    while problem and not request.Test():
        if perf_counter() > end:
            raise RuntimeError(f"rank {comm.rank}: {problem}; other ranks did not fail")
        sleep(0.001)
    request.Wait()


def _wrong(problem: str, comm: MPI.Comm) -> int:
    """Say once what is wrong; return the exit status of wrong use."""
    if comm.rank == 0:
        print(f"error: {problem}", file=sys.stderr)
    return 2


def _said(text: str) -> None:
    print(text, flush=True)


def _nothing(*_: object) -> None:
    """Say nothing, reset nothing: sendbufs are not written, and a broadcast writes what is there."""
