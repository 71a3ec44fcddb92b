"""Draw schedules and prices: python -m mpiring draw."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from mpiring.algorithms.registry import Algorithm
from mpiring.analysis import pictures
from mpiring.analysis.buckets import curve, timer
from mpiring.analysis.draw import text
from mpiring.analysis.machines import Machine
from mpiring.commands import options as shared
from mpiring.units import seconds

EPILOG = """pictures, by --picture (all but steps need --machine):
  steps      ranks across, rounds down, an arrow for each message
  spacetime  what each rank does over time, for --bytes
  ranks      the time of --algorithms over the number of ranks, up to --ranks, for --bytes
  buckets    what --model's backward does not hide, over the size of the buckets

examples:
  python -m mpiring draw ring --ranks 4
  python -m mpiring draw bruck --ranks 8 --out bruck.svg
  python -m mpiring draw ring --picture spacetime --machine p3.16xlarge --bytes 160MB --out ring.png
  python -m mpiring draw --picture ranks --machine ethernet-10g --bytes 1MB --ranks 256 --out ranks.svg"""

PICTURES = ("steps", "spacetime", "ranks", "buckets")
PIECES = 3
"""Pieces of a pipeline in a drawing: enough to see them follow one another."""


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("draw", "Draw a schedule: as text, or with --out as a picture; and pictures of what it costs.", EPILOG)
    made.add_argument("algorithm", nargs="?", metavar="ALGORITHM",
                      help="a name, or FILE.py:NAME for an mpiring.Algorithm of your own")
    made.add_argument("--ranks", type=shared.a_number, metavar="N", help="(default 8, or the machine's; for ranks: up to 64)")
    shared.add_collective(made)
    shared.add_layout(made)
    made.add_argument("--pieces", type=shared.a_number, default=PIECES, metavar="K",
                      help=f"pieces of a pipeline (default {PIECES})")
    made.add_argument("--out", metavar="FILE", help="write a picture: .svg or .png (extra 'plot')")
    made.add_argument("--picture", choices=PICTURES, default="steps", help="(default steps)")
    shared.add_machine(made, needed=False)
    made.add_argument("--bytes", type=shared.a_size, metavar="SIZE", help="bytes of the vector, such as 160MB or 64M")
    shared.add_algorithms(made)
    made.add_argument("--model", type=shared.a_model, metavar="NAME", help=f"for buckets: {shared.models()}")
    return made


def run(options: argparse.Namespace) -> int:
    """Draw what the options ask for."""
    if options.picture == "steps":
        return _steps(options)
    if options.out is None:
        raise ValueError(f"--picture {options.picture} needs --out FILE.svg or FILE.png")
    if options.machine is None:
        raise ValueError(f"--picture {options.picture} needs --machine")
    if options.picture != "buckets" and options.bytes is None:
        raise ValueError(f"--picture {options.picture} needs --bytes")
    draw = {"spacetime": _space_time, "ranks": _ranks, "buckets": _buckets}[options.picture]
    draw(options, shared.on_nodes(options.machine, options.per_node))
    print(f"wrote {options.out}")
    return 0


def _steps(options: argparse.Namespace) -> int:
    algorithm = _one(options)
    setting = shared.setting(options.ranks or (options.machine.ranks if options.machine else 8), options, options.pieces)
    if options.out is None:
        print(text(algorithm, setting, max(40, shutil.get_terminal_size((100, 24)).columns)), end="")
    else:
        pictures.steps(options.out, algorithm, setting)
        print(f"wrote {options.out}")
    return 0


def _space_time(options: argparse.Namespace, machine: Machine) -> None:
    pictures.space_time(options.out, _one(options), options.bytes, machine, options.ranks)


def _ranks(options: argparse.Namespace, machine: Machine) -> None:
    pictures.times(options.out, _several(options), options.bytes, machine, options.ranks or 64)


def _buckets(options: argparse.Namespace, machine: Machine) -> None:
    if options.model is None:
        raise ValueError(f"--picture buckets needs --model: {shared.models()}")
    model, ranks = options.model, options.ranks or machine.ranks
    curves = {algorithm.name: curve(model.gradients, timer([algorithm], machine, ranks)) for algorithm in _several(options)}
    pictures.exposed(options.out, curves, f"{model.name} on {machine.name}, {ranks} ranks: backward takes {seconds(model.seconds)}")


def _one(options: argparse.Namespace) -> Algorithm:
    if options.algorithm is None:
        known = ", ".join(algorithm.name for algorithm in shared.algorithms([], options.collective))
        raise ValueError(f"which algorithm? {options.collective} has {known}")
    return shared.algorithm(options.algorithm, options.collective)


def _several(options: argparse.Namespace) -> Sequence[Algorithm]:
    named = [*([options.algorithm] if options.algorithm else []), *options.algorithms]
    if options.picture == "buckets":                     # pipelines are slow to price
        return shared.algorithms(named or ["ring", "tree", "recursive_doubling", "rabenseifner"], options.collective)
    return shared.algorithms(named, options.collective)
