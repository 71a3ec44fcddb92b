"""The bench's command line. Options are those of nccl-tests where it has them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpiring.algorithms import registry
from mpiring.bench.cases import CASES, OVERLAP
from mpiring.bench.epilog import EPILOG
from mpiring.bench.peers import GLOO, GLOO_DTYPES
from mpiring.bench.subjects import BOUND, COMM, PLAN
from mpiring.bench.training import ITERATIONS as TRAININGS
from mpiring.bench.training import OVERHEAD
from mpiring.bench.values import DTYPES, a_dtype, a_size, above_one, an_op, natural, positive
from mpiring.planning import AUTO
from mpiring.runtime import ops
from mpiring.select import NATIVE, SHARED

COMPARED = (AUTO, "ring", "tree", NATIVE)
"""What an allreduce is measured with where nothing else is asked for."""

LARGEST, MOST, WORK = 64 << 20, 512 << 20, 50
"""Where nothing else is asked for: bytes of the largest vector, bytes of one of --engine's or --training's cases, ms of work."""

WARMUP, TRAININGS_WARMUP = 6, 3
"""Iterations that do not count, where nothing else is asked for."""

NOT_ENGINES = ("collective", "algorithms", "peers", "bound", "op", "datatype", "root", "buffers", "minbytes", "stepfactor", "plot")
"""Options without a meaning for the engine's cases, which are what their names say."""

NOT_TRAININGS = (*NOT_ENGINES, "inplace", "engine")
"""Those without a meaning for the training's."""


def parse(argv: list[str] | None, quiet: bool, size: int = 1) -> argparse.Namespace:
    """Parse the command line for `size` ranks; `quiet` ones leave the words to another."""
    parser = _Parser(prog="python -m mpiring.bench", usage="%(prog)s [options], under mpirun", epilog=EPILOG,
                     description="Time collectives, interleaved, iteration by iteration.\nOptions are those of nccl-tests where "
                     "it has them.", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.quiet = quiet
    _add_what(parser.add_argument_group("what is measured").add_argument)
    _add_how(parser.add_argument_group("how it is measured").add_argument)
    _add_files(parser.add_argument_group("what is written, beside the table").add_argument)
    options = parser.parse_args(argv)
    _complete(parser, options, size)
    return options


def _add_what(add: Any) -> None:
    add("--collective", choices=tuple(registry.COLLECTIVES), default="allreduce", metavar="NAME",
        help=f"{', '.join(registry.COLLECTIVES)} (default allreduce)")
    add("--algorithms", metavar="LIST", help="names with commas between, or all (default for allreduce: "
        f"{','.join(COMPARED)}; for others: all)")
    add("--peers", action="store_true", help="as well PyTorch's gloo, for sums of float32, float64, int32, int64 (extra 'torch')")
    add("--bound", action="store_true", help="as well the time that memory alone takes; each algorithm's share: bound%%")
    add("-o", "--op", default="SUM", type=an_op, metavar="OP", help=f"{', '.join(ops.NAMES)} (default SUM)")
    add("-d", "--datatype", default="float32", type=a_dtype, metavar="DTYPE", help=f"{', '.join(DTYPES)} (default float32)")
    add("-r", "--root", type=natural, default=0, metavar="RANK", help="root of broadcast and reduce (default 0)")
    add("--inplace", action="store_true", help="in place (default: from sendbuf to recvbuf)")
    add("--buffers", choices=("ordinary", "shared"), default="ordinary", help="NumPy's own arrays, or those of mpiring.empty in "
        "memory that the ranks of a node share (default ordinary)")
    add("--engine", nargs="?", const="all", metavar="CASES", help="mpiring.Engine instead of a collective: names with commas "
        f"between (default all: {','.join(CASES)})")
    add("--training", nargs="?", const="all", metavar="CASES", help="steps of a model by mpiring.torch and by PyTorch's DDP "
        f"instead (extra 'torch'; default all: {','.join(TRAININGS)})")
    add("--work", type=positive, metavar="MS", help=f"ms of work in --engine {OVERLAP} (default {WORK})")


def _add_how(add: Any) -> None:
    add("-b", "--minbytes", type=a_size, default=8, metavar="SIZE", help="smallest vector, with K, M or G (default 8)")
    add("-e", "--maxbytes", type=a_size, metavar="SIZE", help="largest vector (default 64M); always measured. With --engine: "
        "arrays beyond so many bytes are left out; with --training: wider models are made narrower (default 512M)")
    add("-f", "--stepfactor", type=above_one, default=4, metavar="F", help="factor between sizes (default 4)")
    add("-n", "--iters", type=positive, metavar="N", help="iterations (default 20, below 64K 100, of --engine single 500, of "
        f"--training 10 and its {OVERHEAD} 100)")
    add("-w", "--warmup_iters", type=natural, metavar="N", help="iterations that do not count, first (default "
        f"{WARMUP}, with --training {TRAININGS_WARMUP})")
    add("-m", "--agg_iters", type=positive, default=1, metavar="N", help="calls in one iteration, back to back with no barrier "
        "between (default 1); times are of one call")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="check every element of a run of its own (default 1)")


def _add_files(add: Any) -> None:
    add("--json", metavar="FILE", help="write environment, results and summary")
    add("--csv", metavar="FILE", help="write results")
    add("--plot", metavar="FILE", help="draw time and busbw over bytes: .png or .svg (extra 'plot')")


def _complete(parser: _Parser, options: argparse.Namespace, size: int) -> None:
    _complete_training(parser, options)
    _complete_engine(parser, options)
    _complete_algorithms(parser, options)
    _complete_beside(parser, options)
    if options.root >= size:
        parser.error(f"argument -r: root {options.root} is not one of {size} ranks")
    if options.maxbytes < options.minbytes:
        parser.error(f"argument -e: {options.maxbytes} is less than -b {options.minbytes}")
    if registry.COLLECTIVES[options.collective].reduces:
        try:
            ops.find(ops.NAMES[options.op], options.datatype)
        except TypeError as error:
            parser.error(str(error))
    for option in ("json", "csv", "plot"):
        path = getattr(options, option)
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"argument --{option}: there is no folder {os.path.dirname(path)!r}")
        if path and not os.access(path if os.path.exists(path) else os.path.dirname(path) or ".", os.W_OK):
            parser.error(f"argument --{option}: {path!r} cannot be written")
    if options.plot:
        if not options.plot.endswith((".png", ".svg")):
            parser.error(f"argument --plot: {options.plot!r} does not end in .png or .svg")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("argument --plot: needs matplotlib: pip install 'mpiring[plot]'")


def _complete_engine(parser: _Parser, options: argparse.Namespace) -> None:
    """Split the names of --engine's cases, and refuse options that do not fit together with it."""
    if options.engine is not None:
        options.engine = _cases(parser, options, "engine", CASES, NOT_ENGINES)
    if options.work and OVERLAP not in (options.engine or ()):
        parser.error(f"argument --work: is for --engine {OVERLAP}")
    options.work = options.work or WORK
    if options.maxbytes is None:
        options.maxbytes = MOST if options.engine or options.training else LARGEST


def _complete_training(parser: _Parser, options: argparse.Namespace) -> None:
    """Split the names of --training's cases, and refuse options that do not fit together with it, or to go without PyTorch."""
    if options.training is not None:
        options.training = _cases(parser, options, "training", TRAININGS, NOT_TRAININGS)
        if importlib.util.find_spec("torch") is None:
            parser.error("argument --training: needs PyTorch: pip install 'mpiring[torch]'")
    if options.warmup_iters is None:
        options.warmup_iters = TRAININGS_WARMUP if options.training else WARMUP


def _cases(parser: _Parser, options: argparse.Namespace, option: str, known: Iterable[str], without: Sequence[str]) -> list[str]:
    """Return an option's cases, all or those that are named; refuse the options that have no meaning for them."""
    text = getattr(options, option)
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"argument --{option}: " + registry.unknown("case", name, known))
    if len(set(names)) < len(names):
        parser.error(f"argument --{option}: the same name twice")
    for name in without:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"argument --{option}: its cases leave no choice of --{name}")
    return names


def _complete_algorithms(parser: _Parser, options: argparse.Namespace) -> None:
    every = [AUTO, SHARED, *registry.names(options.collective), NATIVE]
    known = [*every, COMM, *([PLAN] if options.collective == "allreduce" else [])]
    usual = COMPARED if options.collective == "allreduce" else every
    options.algorithms = every if options.algorithms == "all" else (options.algorithms or ",".join(usual)).split(",")
    for name in options.algorithms:
        if name in known:
            continue
        if name == PLAN:
            parser.error(f"argument --algorithms: {PLAN} is for --collective allreduce, not {options.collective}")
        if not re.fullmatch(r".+\.py:\w+", name):
            parser.error("argument --algorithms: " + registry.unknown("algorithm", name, [*known, "FILE.py:FUNCTION"],
                                                                      f" for {options.collective}"))
        path, _, function = name.rpartition(":")
        if not Path(path).is_file():
            parser.error(f"argument --algorithms: there is no file {path}")
        if not re.search(rf"^(def {function}\b|{function}\s*=|from .*\b{function}\b)", Path(path).read_text(), re.MULTILINE):
            parser.error(f"argument --algorithms: {path} has no function {function}")
        if (options.collective, options.op) != ("allreduce", "SUM"):
            parser.error("argument --algorithms: FILE.py:FUNCTION is for --collective allreduce and --op SUM")
    if len(set(options.algorithms)) < len(options.algorithms):
        parser.error("argument --algorithms: the same name twice")


def _complete_beside(parser: _Parser, options: argparse.Namespace) -> None:
    """Add what --peers and --bound ask for to the algorithms."""
    if options.peers:
        if (options.collective, options.op) != ("allreduce", "SUM") or str(options.datatype) not in GLOO_DTYPES:
            op = f" {options.op}" if registry.COLLECTIVES[options.collective].reduces else ""
            parser.error(f"argument --peers: is for an allreduce with SUM of {', '.join(GLOO_DTYPES)}, not "
                         f"{options.collective}{op} of {options.datatype}")
        if importlib.util.find_spec("torch") is None:
            parser.error("argument --peers: needs PyTorch: pip install 'mpiring[torch]'")
        options.algorithms.append(GLOO)
    if options.bound:
        if options.collective != "allreduce":
            parser.error(f"argument --bound: is for --collective allreduce, not {options.collective}")
        options.algorithms.append(BOUND)


def sizes(options: argparse.Namespace) -> list[int]:
    """Return the numbers of elements to measure: from the smallest to the largest vector by the factor, whole elements."""
    itemsize, nbytes, found = options.datatype.itemsize, float(options.minbytes), []
    while nbytes < options.maxbytes:
        found.append(int(nbytes) // itemsize)
        nbytes = max(nbytes * options.stepfactor, 1)
    return sorted({max(1, count) for count in [*found, options.maxbytes // itemsize]})


def iterations(options: argparse.Namespace, nbytes: int) -> int:
    """Return how often a size is measured."""
    return options.iters or (20 if nbytes >= 64 << 10 else 100)


class _Parser(argparse.ArgumentParser):
    """A parser that one rank only lets speak."""

    quiet = False

    def _print_message(self, message: str, file: Any = None) -> None:
        if not self.quiet:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")
