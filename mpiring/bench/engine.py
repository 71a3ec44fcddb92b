"""The bench of the engine: its cases measured, their table, and what each says of the engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.bench.cases import ALLREDUCE, BOTH, CASES, ENGINE, OVERLAP, WORK, Setting, Subject
from mpiring.bench.report import cell, time_of
from mpiring.bench.subjects import BUS_FACTORS
from mpiring.bench.timing import interleaved

ITERATIONS = {"many_small": 20, "resnet50": 20, "single": 500, "overlap": 20}
"""How often a case is measured where -n says nothing."""


@dataclass
class CaseResult:
    """One subject of one case. Times in microseconds, busbw in GB/s.

    allreduce_ratio: mpiring.allreduce's median over this one's; hidden: how much of the shorter one of work and communication.
    """

    case: str
    subject: str
    arrays: int
    bytes: int
    time_us: dict[str, float]
    busbw: float | None
    allreduce_ratio: float | None
    hidden: float | None
    wrong: int | None

    @property
    def label(self) -> str:
        """The case and the subject."""
        return f"{self.case} by {self.subject}"


class Table:
    """The printed table of the engine's cases."""

    def heading(self) -> str:
        """Return the heading."""
        return (f"{'case':>10} {'subject':>9} {'arrays':>6} {'bytes':>11} {'median_us':>10} {'min_us':>10} {'p99_us':>10} "
                f"{'busbw':>7} {'xallreduce':>10} {'hidden%':>7} {'#wrong':>6}")

    def rows(self, result: CaseResult) -> list[str]:
        """Return a result as a row."""
        times = " ".join(f"{result.time_us[key]:>10.2f}" for key in ("median", "min", "p99"))
        hides = None if result.hidden is None else 100 * result.hidden
        return [f"{result.case:>10} {result.subject:>9} {result.arrays:>6} {result.bytes:>11} {times} "
                f"{cell(result.busbw, 7, '.3f')} {cell(result.allreduce_ratio, 10, '.2f')} {cell(hides, 7, '.1f')} "
                f"{cell(result.wrong, 6)}"]


def measure(chosen: argparse.Namespace, where: dict[str, Any], comm: MPI.Comm, say: Callable) -> Iterator[tuple[CaseResult, str]]:
    """Yield the results of all cases, each with the place of its first wrong element."""
    with mpiring.Engine(comm) as engine:
        setting = Setting(engine, comm, chosen.inplace, chosen.maxbytes, chosen.work / 1e3)
        for case in chosen.engine:
            if case == OVERLAP and (why := nothing_hides(where)):
                say(f"# {case}: {why}", flush=True)
            yield from _measured(case, CASES[case](setting), chosen, comm)


def nothing_hides(where: dict[str, Any]) -> str:
    """Return why no communication can hide behind work on this machine, or nothing."""
    ranks, cores = where["ranks_per_node"], where["cores"]
    if where["nodes"] > 1 or ranks * 2 <= cores:
        return ""
    return (f"on one node communication is work of its cores, and {ranks} ranks with an engine each want {2 * ranks}, not {cores}: "
            "little or nothing can be hidden")


def _measured(case: str, subjects: list[Subject], chosen: argparse.Namespace,
              comm: MPI.Comm) -> Iterator[tuple[CaseResult, str]]:
    """Check the subjects, time them in turn, and check them again: by then the engine knows the names."""
    check = partial(_checked, subjects, bool(chosen.check))
    before = check()
    times = interleaved([subject.call for subject in subjects], partial(_reset, subjects), chosen.warmup_iters,
                        chosen.iters or ITERATIONS[case], chosen.agg_iters, comm) * 1e6
    medians = {subject.name: float(np.median(samples)) for subject, samples in zip(subjects, times)}
    for subject, samples, (wrong, place), (later, there) in zip(subjects, times, before, check()):
        yield _result(case, subject, samples, medians, comm.size, None if wrong is None else wrong + later), place or there


def _checked(subjects: list[Subject], check: bool) -> list[tuple[int | None, str]]:
    """Run every subject once and check what comes out."""
    found = []
    for subject in subjects:
        _reset(subjects)
        if subject.arrays:
            subject.arrays.spoil()
        subject.call()
        found.append(subject.arrays.wrong() if check and subject.arrays else (None, ""))
    return found


def _reset(subjects: list[Subject]) -> None:
    for arrays in {id(subject.arrays): subject.arrays for subject in subjects if subject.arrays}.values():
        arrays.reset()


def _result(case: str, subject: Subject, samples: np.ndarray, medians: dict[str, float], size: int,
            wrong: int | None) -> CaseResult:
    name, arrays, median = subject.name, subject.arrays, medians[subject.name]
    nbytes = arrays.nbytes if arrays else 0
    busbw = round(BUS_FACTORS["allreduce"](size) * nbytes / median / 1e3, 6) if arrays and name != BOTH else None
    ratio = round(medians[ALLREDUCE] / median, 4) if ALLREDUCE in medians else None
    share = round(hidden(medians), 4) if name == BOTH else None
    return CaseResult(case, name, len(arrays.names) if arrays else 0, nbytes, time_of(samples), busbw, ratio, share, wrong)


def hidden(times: dict[str, float]) -> float:
    """Return how much of the shorter one of work and communication did not lengthen both: 1 is all of it, 0 nothing."""
    return (times[WORK] + times[ENGINE] - times[BOTH]) / min(times[WORK], times[ENGINE])


WORDS = {
    "many_small": "{allreduce_ratio:.2f} times as fast as separate calls",
    "resnet50": "{allreduce_ratio:.1%} of the busbw of one call",
    "single": "{allreduce_ratio:.2f} times as fast as mpiring.allreduce",
    "overlap": "{hidden:.1%} of the shorter one of work and communication is hidden",
}
"""What a case says of the engine."""


def summary(results: list[CaseResult]) -> list[dict[str, Any]]:
    """Return of each case what it says of the engine."""
    return [{"case": result.case, "allreduce_ratio": result.allreduce_ratio, "hidden": result.hidden} for result in results
            if result.subject == BOTH or (result.subject == ENGINE and result.allreduce_ratio is not None)]


def summary_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the summary as lines for people."""
    return [f"{entry['case']}: {WORDS[entry['case']].format(**entry)}" for entry in found]
