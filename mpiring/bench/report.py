"""A result, and the forms it is given in: a row of the table, JSON, CSV."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Result:
    """One algorithm at one size. Times in microseconds, bandwidths in GB/s; native_ratio above 1: faster than native."""

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


COLUMNS = f"{'bytes':>12} {'count':>11} {'dtype':>10} {'op':>7} {{:>{{width}}}} {'median_us':>10} {'min_us':>10} {'p99_us':>10} " \
          f"{'algbw':>7} {'busbw':>7} {'xnative':>7} {'#wrong':>6}"


def heading(width: int) -> str:
    """Return the table's heading."""
    return COLUMNS.format("algorithm", width=width)


def row(result: Result, width: int) -> str:
    """Return a result as a row of the table."""
    times = " ".join(f"{result.time_us[key]:>10.2f}" for key in ("median", "min", "p99"))
    ratio = "-" if result.native_ratio is None else f"{result.native_ratio:.2f}"
    wrong = "-" if result.wrong is None else result.wrong
    return (f"{result.bytes:>12} {result.count:>11} {result.dtype:>10} {result.op:>7} {result.algorithm:>{width}} {times} "
            f"{result.algbw:>7.3f} {result.busbw:>7.3f} {ratio:>7} {wrong:>6}")


def write_json(path: str, environment: dict[str, Any], results: list[Result]) -> None:
    """Write environment and results."""
    with open(path, "w") as file:
        json.dump({"environment": environment, "results": [asdict(result) for result in results]}, file, indent=1)
        file.write("\n")


def write_csv(path: str, results: list[Result]) -> None:
    """Write results, one line each."""
    flat = [{**{key: value for key, value in asdict(result).items() if key != "time_us"},
             **{f"{key}_us": value for key, value in result.time_us.items()}} for result in results]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, flat[0])
        writer.writeheader()
        writer.writerows(flat)
