"""A result, and the forms it is given in: a row of the table, JSON, CSV; and the summary of all sizes."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from math import exp, log
from textwrap import wrap
from typing import Any

import numpy as np

from mpiring.bench.subjects import BOUND, PLAN
from mpiring.planning import AUTO
from mpiring.select import NATIVE
from mpiring.units import binary


@dataclass
class Result:
    """One algorithm at one size. Times in microseconds, bandwidths in GB/s; native_ratio above 1: faster than native.

    ran, path: the algorithm that mpiring has run, and how; None for what is not mpiring's. bound_share: how much of the time must
    be, for memory is no faster.
    """

    collective: str
    algorithm: str
    bytes: int
    count: int
    dtype: str
    op: str
    time_us: dict[str, float]
    algbw: float
    busbw: float
    native_ratio: float | None
    wrong: int | None
    ran: str | None = None
    path: str | None = None
    bound_share: float | None = None

    @property
    def label(self) -> str:
        """The algorithm as the table has it: with what has run, where the name leaves that open."""
        return f"{self.algorithm}:{self.ran}" if self.algorithm in (AUTO, PLAN) and self.ran else self.algorithm


class Table:
    """The printed table: the first column of text is as wide as the names in it."""

    def __init__(self, names: list[str], bound: bool):
        self.bound = bound
        self.width = max(9, *(len(f"{name}:{NATIVE}" if name in (AUTO, PLAN) else name) for name in names))

    def heading(self) -> str:
        """Return the heading."""
        share = f" {'bound%':>6}" if self.bound else ""
        return (f"{'bytes':>12} {'count':>11} {'dtype':>10} {'op':>7} {'algorithm':>{self.width}} {'median_us':>10} {'min_us':>10} "
                f"{'p99_us':>10} {'algbw':>7} {'busbw':>7} {'xnative':>7}{share} {'#wrong':>6}")

    def rows(self, result: Result) -> list[str]:
        """Return a result as a row; before it the heading again, as a comment, where a name is wider than all before."""
        again = []
        if len(result.label) > self.width:
            self.width = len(result.label)
            again = ["#" + self.heading()[1:]]
        times = " ".join(f"{result.time_us[key]:>10.2f}" for key in ("median", "min", "p99"))
        ratio = "-" if result.native_ratio is None else f"{result.native_ratio:.2f}"
        share = f" {100 * result.bound_share:>6.1f}" if self.bound and result.bound_share is not None else ""
        wrong = "-" if result.wrong is None else result.wrong
        return [*again, f"{result.bytes:>12} {result.count:>11} {result.dtype:>10} {result.op:>7} {result.label:>{self.width}} "
                        f"{times} {result.algbw:>7.3f} {result.busbw:>7.3f} {ratio:>7}{share} {wrong:>6}"]


def summary(results: list[Result]) -> list[dict[str, Any]]:
    """Return each algorithm's geometric mean of native_ratio, and the worst; nothing for one size, or without native."""
    found = []
    for name in dict.fromkeys(result.algorithm for result in results):
        mine = [result for result in results if result.algorithm == name and result.native_ratio]
        if name in (NATIVE, BOUND) or len(mine) < 2:
            continue
        worst = min(mine, key=lambda result: result.native_ratio)
        mean = exp(sum(log(result.native_ratio) for result in mine) / len(mine))
        found.append({"algorithm": name, "native_ratio": round(mean, 4), "worst": worst.native_ratio, "worst_bytes": worst.bytes})
    return found


def summary_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the summary as lines for people, none cut within an entry."""
    entries = ["{algorithm} {native_ratio:.2f} (worst {worst:.2f} at {at})".format(**entry, at=binary(entry["worst_bytes"]))
               for entry in found]
    text = ", ".join(entry.replace(" ", "\N{NO-BREAK SPACE}") for entry in entries)
    lines = wrap(f"geometric mean of xnative: {text}", 126, break_long_words=False, break_on_hyphens=False) if found else []
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def cell(value: float | None, width: int, form: str = "") -> str:
    """Return a value as a cell of a table: a dash where there is none."""
    return f"{'-' if value is None else format(value, form):>{width}}"


def time_of(samples: np.ndarray) -> dict[str, float]:
    """Return what is told of times in microseconds: the median, the least, and what 99 of 100 do not exceed."""
    found = {"median": np.median(samples), "min": samples.min(), "p99": np.percentile(samples, 99)}
    return {key: round(float(value), 3) for key, value in found.items()}


def write_json(path: str, environment: dict[str, Any], results: list[Any], found: list[dict[str, Any]]) -> None:
    """Write environment, results, which are dataclasses, and the summary that was found."""
    everything = {"environment": environment, "results": [asdict(result) for result in results], "summary": found}
    with open(path, "w") as file:
        json.dump(everything, file, indent=1)
        file.write("\n")


def write_csv(path: str, results: list[Any]) -> None:
    """Write results, one line each."""
    flat = [{**{key: value for key, value in asdict(result).items() if key != "time_us"},
             **{f"{key}_us": value for key, value in result.time_us.items()}} for result in results]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, flat[0])
        writer.writeheader()
        writer.writerows(flat)
