"""Prove algorithms: python -m mpiring verify."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from typing import NamedTuple

from mpiring.algorithms.registry import ALGORITHMS, COLLECTIVES
from mpiring.algorithms.setting import Setting
from mpiring.analysis.verify import Proof, prove
from mpiring.commands import options as shared
from mpiring.commands.show import as_json, table
from mpiring.errors import ScheduleError

EPILOG = """Proven are: every message meets its receive, no rank waits for ever even if MPI buffers nothing, every contribution is
in every result exactly once, no chunk is overwritten while it is sent, and all ranks end with the same bits.
Exit status: 0, 1 where a schedule is wrong (with its rank, step and chunk), 2 for wrong use.

examples:
  python -m mpiring verify ring tree --ranks 2-64
  python -m mpiring verify --all --ranks 2-33 --draw 10 --jobs 4
  python -m mpiring verify hierarchical --ranks 24 --per-node 8"""

DRAWN = 65, 1024


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("verify", "Prove algorithms for given numbers of ranks, from their schedules alone. No MPI is started.",
                         EPILOG)
    made.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help="names, or FILE.py:NAME for an mpiring.Algorithm of "
                      "your own (default: all of the collective)")
    shared.add_collective(made)
    made.add_argument("--all", action="store_true", help="every algorithm of every collective")
    made.add_argument("--ranks", type=shared.many_ranks, default=[8], metavar="LIST", help="8, 2-64 or 3,5,7 (default 8)")
    made.add_argument("--draw", type=shared.a_number, metavar="N", help="also N numbers of ranks drawn from 65 to 1024, large ones "
                      "seldom: a number n with weight n**-3, for a proof takes n**2 messages")
    made.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    shared.add_layout(made)
    made.add_argument("--pieces", type=shared.a_number, default=1, metavar="K", help="pieces of a pipeline (default 1)")
    made.add_argument("--jobs", type=shared.a_number, default=1, metavar="N", help="processes (default 1)")
    shared.add_json(made)
    return made


class Task(NamedTuple):
    """A proof to make."""

    algorithm: str
    collective: str
    setting: Setting


class Outcome(NamedTuple):
    """A proof, or what is wrong."""

    task: Task
    proof: Proof | None
    problem: str = ""


def run(options: argparse.Namespace) -> int:
    """Prove, print, and return 1 where a schedule is wrong."""
    sizes = sorted({*options.ranks, *(drawn(options.draw, options.seed) if options.draw else ())})
    tasks = [Task(*chosen, shared.setting(ranks, options, options.pieces)) for chosen in _chosen(options) for ranks in sizes]
    outcomes = list(_progress(prove_all(tasks, options.jobs), len(tasks)))
    if options.json:
        print(as_json([_record(outcome) for outcome in outcomes]))
    else:
        print(table(("algorithm", "ranks", "rounds", "messages", "sent (vectors)", "keeps order"), _rows(outcomes), left=(0, 5)))
    wrong = [outcome for outcome in outcomes if outcome.proof is None]
    for outcome in wrong:
        print(f"error: {_name(outcome.task)} for {outcome.task.setting.size} ranks: {outcome.problem}", file=sys.stderr)
    return 1 if wrong else 0


def _chosen(options: argparse.Namespace) -> Sequence[tuple[str, str]]:
    """Return names, or FILE.py:NAME, each with its collective; an own algorithm brings its own."""
    if not options.all:
        named = shared.named(options.algorithms, options.collective)
        return [(name, shared.algorithm(name, options.collective).collective.name) for name in named]
    if options.algorithms:
        raise ValueError("--all leaves no algorithm to name")
    return [(name, collective) for collective, name in ALGORITHMS]


def drawn(number: int, seed: int) -> list[int]:
    """Draw different numbers of ranks n from DRAWN, each with weight n**-3."""
    dice, found = random.Random(seed), set()
    low, high = (bound ** -2 for bound in (DRAWN[0] - 0.5, DRAWN[1] + 0.5))
    if number > DRAWN[1] - DRAWN[0] + 1:
        raise ValueError(f"--draw {number}: there are {DRAWN[1] - DRAWN[0] + 1} numbers from {DRAWN[0]} to {DRAWN[1]}")
    while len(found) < number:
        found.add(min(DRAWN[1], max(DRAWN[0], round((low - dice.random() * (low - high)) ** -0.5))))
    return sorted(found)


def prove_all(tasks: Sequence[Task], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes in the order of the tasks, made by so many processes."""
    if jobs == 1 or len(tasks) < 2:
        yield from map(attempt, tasks)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks))) as pool:
        yield from pool.map(attempt, tasks)


def attempt(task: Task) -> Outcome:
    """Make a proof."""
    try:
        return Outcome(task, prove(shared.algorithm(task.algorithm, task.collective), task.setting))
    except ScheduleError as error:
        return Outcome(task, None, str(error))


def _progress(outcomes: Iterator[Outcome], of: int) -> Iterator[Outcome]:
    for number, outcome in enumerate(outcomes, 1):
        shared.progress(f"{number}/{of}: {_name(outcome.task)} for {outcome.task.setting.size} ranks")
        yield outcome
    shared.progress("")


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple]:
    """Yield a row for each algorithm."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_name(outcome.task), []).append(outcome)
    for name, group in groups.items():
        good = [outcome for outcome in group if outcome.proof is not None]
        sizes = _numbers([outcome.task.setting.size for outcome in group])
        if len(good) < len(group):
            yield name, sizes, "-", "-", "-", f"WRONG at {_numbers([o.task.setting.size for o in group if o.proof is None])}"
        else:
            proofs = [outcome.proof for outcome in good]
            yield name, sizes, *(_span([proof[column] for proof in proofs]) for column in range(3)), _order(good)


def _name(task: Task) -> str:
    return task.algorithm if task.collective == "allreduce" else f"{task.collective} {task.algorithm}"


def _span(values: Sequence[int | Fraction]) -> str:
    low, high = min(values), max(values)
    return _figure(low) if low == high else f"{_figure(low)} to {_figure(high)}"


def _figure(value: int | Fraction) -> str:
    """Write a fraction as 7/4 where that is short, else as 1.97."""
    return f"{value:,}" if isinstance(value, int) else str(value) if value.denominator < 100 else f"{float(value):.3f}"


def _order(outcomes: Sequence[Outcome]) -> str:
    """Say for which sizes sums keep the order of the ranks; of a collective that does not reduce, nothing."""
    if not COLLECTIVES[outcomes[0].task.collective].reduces:
        return "-"
    kept = [outcome.task.setting.size for outcome in outcomes if outcome.proof.ordered]
    return "yes" if len(kept) == len(outcomes) else f"at {_numbers(kept)}" if kept else "no"


def _numbers(values: Sequence[int]) -> str:
    """Write numbers shortly: 2-64, or 2,4,8, or 164 from 1 to 735."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ",".join(parts) if len(parts) <= 8 else f"{len(values)} from {values[0]} to {values[-1]}"


def _record(outcome: Outcome) -> dict:
    task, proof = outcome.task, outcome.proof
    record = {"algorithm": task.algorithm, "collective": task.collective, "ranks": task.setting.size}
    if proof is None:
        return {**record, "error": outcome.problem}
    return {**record, "rounds": proof.rounds, "messages": proof.messages, "sent": float(proof.sent), "ordered": proof.ordered}
