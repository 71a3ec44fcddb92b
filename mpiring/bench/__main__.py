"""Run the bench: python -m mpiring.bench --help."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.registry import COLLECTIVES
from mpiring.bench import environment, options, report
from mpiring.bench.report import Result
from mpiring.bench.subjects import BUS_FACTORS, Buffers, bind
from mpiring.bench.timing import interleaved
from mpiring.collectives import NATIVE
from mpiring.runtime.launcher import wrong_launcher


def main(argv: list[str] | None = None, comm: MPI.Comm = MPI.COMM_WORLD) -> int:
    """Measure what the command line asks for; return the exit status."""
    if problem := wrong_launcher(comm):
        print(f"mpiring.bench: {problem}", file=sys.stderr)
        return 2
    chosen = options.parse(argv, quiet=comm.rank != 0, size=comm.size)
    where = environment.describe(comm)
    say = print if comm.rank == 0 else _nothing
    for line in environment.header(where):
        say(f"# {line}", flush=True)
    width = max(9, *map(len, chosen.algorithms))
    say(report.heading(width), flush=True)
    results, places = [], []
    for result, place in measure(chosen, comm, say):
        results.append(result)
        say(report.row(result, width), flush=True)
        if place:
            places.append(f"{result.algorithm}, {result.bytes} bytes: {result.wrong} wrong, first on {place}")
    if comm.rank == 0 and results:
        _write(chosen, where, results)
    for place in places:
        say(f"WRONG: {place}", file=sys.stderr)
    return 1 if places else 0


def measure(chosen: argparse.Namespace, comm: MPI.Comm, say: Callable) -> Iterator[tuple[Result, str]]:
    """Yield the results of all sizes, size by size, each with the place of its first wrong element."""
    counts, names = options.sizes(chosen), list(chosen.algorithms)
    if chosen.collective == "alltoall":                  # whole blocks, one for each rank
        counts = sorted({max(1, count // comm.size) * comm.size for count in counts})
    for number, count in enumerate(counts):
        nbytes = count * chosen.datatype.itemsize
        _progress(comm, f"{number + 1}/{len(counts)}: {nbytes} bytes")
        buffers = Buffers(chosen.collective, chosen.op, chosen.datatype, count, comm, chosen.inplace, chosen.root)
        calls, wrong = {}, {}
        for name in list(names):
            try:
                calls[name] = bind(name, buffers)
                wrong[name] = _check(calls[name], buffers, bool(chosen.check))
            except TypeError as error:                # native alone: this library has no such op for the dtype
                if name != NATIVE:
                    raise
                names.remove(name)
                calls.pop(name, None)
                say(f"# {name} left out: {error}", flush=True)
        times = interleaved(list(calls.values()), buffers.reset, chosen.warmup_iters,
                            options.iterations(chosen, nbytes), chosen.agg_iters, comm) * 1e6
        _progress(comm, "")
        medians = dict(zip(calls, np.median(times, axis=1)))
        for name, samples in zip(calls, times):
            yield _result(chosen, comm.size, count, name, samples, medians, wrong[name][0]), wrong[name][1]


def _check(call: Callable[[], object], buffers: Buffers, check: bool) -> tuple[int | None, str]:
    """Run once, so that the plan is made, and check what comes out."""
    buffers.reset()
    buffers.spoil()
    call()
    return buffers.wrong() if check else (None, "")


def _result(chosen: argparse.Namespace, size: int, count: int, name: str, samples: np.ndarray, medians: dict[str, float],
            wrong: int | None) -> Result:
    nbytes, median = count * chosen.datatype.itemsize, float(medians[name])
    algbw = nbytes / median / 1e3
    time = {"median": round(median, 3), "min": round(float(samples.min()), 3), "p99": round(float(np.percentile(samples, 99)), 3)}
    ratio = round(float(medians[NATIVE]) / median, 4) if NATIVE in medians else None
    op = chosen.op if COLLECTIVES[chosen.collective].reduces else "-"
    return Result(chosen.collective, name, nbytes, count, str(chosen.datatype), op, time, round(algbw, 6),
                  round(algbw * BUS_FACTORS[chosen.collective](size), 6), ratio, wrong)


def _write(chosen: argparse.Namespace, where: dict, results: list[Result]) -> None:
    if chosen.json:
        report.write_json(chosen.json, where, results)
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
