"""Fit a machine to a bench: python -m mpiring fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpiring.analysis.fit import Fit, Prediction, fit, read_bench, shape_of
from mpiring.analysis.machines import to_json
from mpiring.commands import options as shared
from mpiring.commands import show
from mpiring.units import binary, count, seconds

EPILOG = """Every second size of each algorithm stays out of the fit and judges it, unless --hold-out says otherwise.
--out writes the fitted machine, which simulate and draw take as --machine.

example:
  mpirun -np 8 python -m mpiring.bench --json bench.json
  python -m mpiring fit bench.json --out mine.json
  python -m mpiring simulate --machine mine.json --bytes 64M"""


POOR = 0.25
"""A median error above which a fit is not to be relied on."""


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("fit", "Find alpha, beta and gamma from the times of a bench, and see how well they foretell.", EPILOG)
    made.add_argument("bench", metavar="BENCH.json", help="what python -m mpiring.bench --json wrote")
    made.add_argument("--hold-out", type=shared.a_list, metavar="LIST",
                      help="algorithms and sizes that judge the fit, such as tree,64K")
    made.add_argument("--machine", type=shared.find_machine_or_say, metavar="NAME|FILE.json",
                      help="the shape to fit (default: the bench's nodes and ranks)")
    made.add_argument("--out", metavar="FILE.json", help="write the fitted machine")
    shared.add_json(made)
    return made


def run(options: argparse.Namespace) -> int:
    """Fit, print, and write the machine if asked to."""
    bench = read_bench(options.bench)
    shape = options.machine or shape_of(bench)
    if shape.ranks != bench.ranks:
        raise ValueError(f"{options.bench} has {count(bench.ranks, 'rank')}, machine {shape.name} has {shape.ranks}")
    if options.out and not options.out.endswith(".json"):
        raise ValueError(f"{options.out!r} does not end in .json")
    held = [_held(entry, bench.points) for entry in options.hold_out] if options.hold_out else None
    found = fit(bench.points, shape, hold_out=held)
    about = f"fitted to {options.bench}: median error {found.median_error:.0%}, worst {found.worst_error:.0%}"
    found = replace(found, machine=replace(found.machine, about=about))
    if options.out:
        shared.write(options.out, to_json(found.machine))
    print(show.as_json(_record(found)) if options.json else "\n".join(_lines(found, options)))
    return 0


def _held(text: str, points: Sequence) -> str | int:
    """Return an algorithm's name, or a size."""
    if text in {point.algorithm for point in points}:
        return text
    try:
        return shared.a_size(text)
    except argparse.ArgumentTypeError:
        known = ", ".join(sorted({point.algorithm for point in points}))
        raise ValueError(f"--hold-out: {text!r} is neither an algorithm of the bench ({known}) nor a size") from None


def _lines(found: Fit, options: argparse.Namespace) -> Iterator[str]:
    several = len({(entry.point.collective, entry.point.dtype) for entry in found.points}) > 1
    rows = [(_name(entry, several), binary(entry.point.nbytes), seconds(entry.measured), seconds(entry.predicted),
             f"{entry.error:+.0%}", "held out" if entry.held_out else "") for entry in found.points]
    yield show.table(("algorithm", "bytes", "measured", "predicted", "error", ""), rows, left=(0, 5))
    yield ""
    yield show.machine(found.machine)
    yield ""
    yield (f"{count(len(found.judged), 'point')} {'held out' if any(entry.held_out for entry in found.points) else 'fitted'}: "
           f"median error {found.median_error:.1%}, worst {found.worst_error:.1%}")
    if found.median_error > POOR or found.worst_error > 2 * POOR:
        yield "WARNING: this machine foretells poorly: were there more ranks than cores, or sizes at which other things count?"
    yield from _rankings(found)
    if options.out:
        yield f"wrote {options.out}"


def _name(entry: Prediction, several: bool) -> str:
    return f"{entry.point.collective} {entry.point.algorithm} {entry.point.dtype}" if several else entry.point.algorithm


def _rankings(found: Fit) -> Iterator[str]:
    """Yield for each size how the order of the algorithms was foretold."""
    rows = [(binary(nbytes), " < ".join(measured), "the same" if measured == predicted else " < ".join(predicted))
            for (_, nbytes, _), (measured, predicted) in found.ranking.items() if len(measured) > 1]
    if not rows:
        return
    first = sum(measured[0] == predicted[0] for measured, predicted in found.ranking.values() if len(measured) > 1)
    same = sum(row[2] == "the same" for row in rows)
    yield f"the fastest algorithm is the predicted one at {first} of {count(len(rows), 'size')}, the whole order at {same}"
    yield ""
    yield show.table(("bytes", "fastest first, as measured", "as predicted"), rows, left=(1, 2))


def _record(found: Fit) -> dict:
    return {
        "machine": json.loads(to_json(found.machine)), "median_error": found.median_error, "worst_error": found.worst_error,
        "points": [{**entry.point._asdict(), "bytes": entry.point.nbytes, "measured": entry.measured, "predicted": entry.predicted,
                    "error": entry.error, "held_out": entry.held_out} for entry in found.points],
        "rankings": [{"collective": key[0], "bytes": key[1], "dtype": key[2], "measured": measured, "predicted": predicted}
                     for key, (measured, predicted) in found.ranking.items()]}


