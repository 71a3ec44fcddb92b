"""Run the bench: python -m mpiring.bench --help."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib.metadata import version

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.registry import COLLECTIVES
from mpiring.bench import engine, environment, options, peers, report, training
from mpiring.bench.report import Result, time_of
from mpiring.bench.subjects import BOUND, BUS_FACTORS, COMM, Buffers, bind, what_ran
from mpiring.bench.timing import interleaved
from mpiring.runtime.launcher import wrong_launcher
from mpiring.select import NATIVE, SHARED

Table = engine.Table | report.Table | training.Table

Measured = tuple[engine.CaseResult | training.TrainingResult | Result, str]
"""A result, and the place of its first wrong element, if there is one."""


def main(argv: list[str] | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> int:
    """Measure what the command line asks for; return the exit status."""
    if problem := wrong_launcher(comm):
        print(f"mpiring.bench: {problem}", file=sys.stderr)
        return 2
    chosen = options.parse(argv, quiet=comm.rank != 0, size=comm.size)
    where = environment.describe(comm) | {"buffers": chosen.buffers, "inplace": chosen.inplace}
    where |= {"torch": version("torch")} if chosen.training else {}
    say = print if comm.rank == 0 else _nothing
    for line in environment.header(where):
        say(f"# {line}", flush=True)
    kind = training if chosen.training else engine if chosen.engine else report
    with peers.gloo(comm) if chosen.peers else nullcontext():
        results, places = _printed(*_asked_for(chosen, where, comm, say), say)
    found = kind.summary(results)
    for line in kind.summary_lines(found):
        say(f"# {line}", flush=True)
    if comm.rank == 0 and results:
        _write(chosen, where, results, found)
    for place in places:
        say(f"WRONG: {place}", file=sys.stderr)
    return 1 if places else 0


def _asked_for(chosen: argparse.Namespace, where: dict, comm: MPI.Comm, say: Callable) -> tuple[Table, Iterable[Measured]]:
    """Return a table, and what yields its results: the cases of training or of the engine, or the sizes of a collective."""
    if chosen.training:
        return training.Table(), training.measure(chosen, where, comm, say)
    if chosen.engine:
        return engine.Table(), engine.measure(chosen, where, comm, say)
    return report.Table(chosen.algorithms, chosen.bound), measure(chosen, comm, say)


def _printed(table: Table, measured: Iterable[Measured], say: Callable) -> tuple[list, list[str]]:
    """Print row by row as it is measured; return the results, and the places of what is wrong."""
    say(table.heading(), flush=True)
    results, places = [], []
    for result, place in measured:
        results.append(result)
        for line in table.rows(result):
            say(line, flush=True)
        if place:
            places.append(f"{result.label}, {result.bytes} bytes: {result.wrong} wrong, first on {place}")
    return results, places


def measure(chosen: argparse.Namespace, comm: MPI.Comm, say: Callable) -> Iterator[tuple[Result, str]]:
    """Yield the results of all sizes, size by size, each with the place of its first wrong element."""
    counts, names = options.sizes(chosen), list(chosen.algorithms)
    if chosen.collective == "alltoall":                  # whole blocks, one for each rank
        counts = sorted({max(1, count // comm.size) * comm.size for count in counts})
    for number, count in enumerate(counts):
        nbytes = count * chosen.datatype.itemsize
        _progress(comm, f"{number + 1}/{len(counts)}: {nbytes} bytes")
        buffers = Buffers(chosen.collective, chosen.op, chosen.datatype, count, comm, chosen.inplace, chosen.root, chosen.buffers)
        calls, wrong = _prepared(names, buffers, bool(chosen.check), say)
        times = interleaved(list(calls.values()), buffers.reset, chosen.warmup_iters,
                            options.iterations(chosen, nbytes), chosen.agg_iters, comm) * 1e6
        _progress(comm, "")
        ran = {name: what_ran(name, buffers, call) for name, call in calls.items()}
        medians = dict(zip(calls, np.median(times, axis=1)))
        buffers.free()
        for name, samples in zip(calls, times):
            yield _result(chosen, comm.size, count, name, samples, medians, wrong[name][0], *ran[name]), wrong[name][1]


def _prepared(names: list[str], buffers: Buffers, check: bool,
              say: Callable) -> tuple[dict[str, Callable], dict[str, tuple[int | None, str]]]:
    """Bind and check the subjects; one that this library or machine has not is left out of this size and of all that follow."""
    calls, wrong = {}, {}
    for name in list(names):
        try:
            call = bind(name, buffers)
            wrong[name] = _check(call, buffers, check and name != BOUND)
            calls[name] = call
        except (TypeError, ValueError) as error:
            if name not in (NATIVE, SHARED, COMM):
                raise
            names.remove(name)
            say(f"# {name} left out: {error}", flush=True)
    return calls, wrong


def _check(call: Callable[[], object], buffers: Buffers, check: bool) -> tuple[int | None, str]:
    """Run once, so that the plan is made, and check what comes out."""
    buffers.reset()
    buffers.spoil()
    call()
    return buffers.wrong() if check else (None, "")


def _result(chosen: argparse.Namespace, size: int, count: int, name: str, samples: np.ndarray, medians: dict[str, float],
            wrong: int | None, ran: str | None, path: str | None) -> Result:
    nbytes, median = count * chosen.datatype.itemsize, float(medians[name])
    algbw = nbytes / median / 1e3
    ratio, share = (round(float(medians[other]) / median, 4) if other in medians else None for other in (NATIVE, BOUND))
    op = chosen.op if COLLECTIVES[chosen.collective].reduces else "-"
    return Result(chosen.collective, name, nbytes, count, str(chosen.datatype), op, time_of(samples), round(algbw, 6),
                  round(algbw * BUS_FACTORS[chosen.collective](size), 6), ratio, wrong, ran, path, share)


def _write(chosen: argparse.Namespace, where: dict, results: list, found: list[dict]) -> None:
    if chosen.json:
        report.write_json(chosen.json, where, results, found)
    if chosen.csv:
        report.write_csv(chosen.csv, results)
    if chosen.plot:
        from mpiring.bench.plot import draw

        draw(chosen.plot, where, results)


def _progress(comm: MPI.Comm, text: str) -> None:
    """Show on a terminal what is being measured; an empty text clears the line."""
    if comm.rank == 0 and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _nothing(*_: object, **__: object) -> None:
    """Say nothing: the other ranks' print."""


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    sys.exit(status)
