"""The bench's command line. Options are those of nccl-tests where it has them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpiring.algorithms import registry
from mpiring.collectives import NATIVE
from mpiring.runtime import ops
from mpiring.units import parse_size, parse_whole

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
          "longdouble", "complex64", "complex128", "clongdouble", "bfloat16")

COMPARED = ("ring", "tree", NATIVE)
"""What an allreduce is measured with where nothing else is asked for."""

EPILOG = """An algorithm may also be FILE.py:NAME: a function (buf, comm) of yours that sums in place, or an mpiring.Algorithm.
 Bandwidths are in GB/s (1e9 bytes): algbw = bytes / time, busbw = what a link carries: 2(n-1)/n * algbw for allreduce,
algbw for broadcast and reduce, (n-1)/n * algbw for the others. xnative = native's median over this one's: above 1 is faster than
the MPI library. Exit status: 0, 1 when an element is wrong, 2 for a wrong command line or launcher."""


def parse(argv: list[str] | None, quiet: bool, size: int = 1) -> argparse.Namespace:
    """Parse the command line for `size` ranks; `quiet` ones leave the words to another."""
    parser = _Parser(prog="python -m mpiring.bench", description="Time collectives, interleaved, iteration by "
                     "iteration. Options are those of nccl-tests where it has them.", epilog=EPILOG)
    parser.quiet = quiet
    add = parser.add_argument
    add("-b", "--minbytes", type=a_size, default=8, metavar="SIZE", help="smallest vector, with K, M or G (default 8)")
    add("-e", "--maxbytes", type=a_size, default=64 << 20, metavar="SIZE", help="largest vector (default 64M); always measured")
    add("-f", "--stepfactor", type=_above_one, default=4, metavar="F", help="factor between sizes (default 4)")
    add("-n", "--iters", type=_positive, metavar="N", help="iterations (default 20, below 64K 100)")
    add("-w", "--warmup_iters", type=_natural, default=6, metavar="N", help="iterations that do not count, first (default 6)")
    add("-m", "--agg_iters", type=_positive, default=1, metavar="N", help="calls in one iteration, back to back with no barrier "
        "between (default 1); times are of one call")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="check every element of a run of its own (default 1)")
    add("-o", "--op", default="SUM", type=_op, metavar="OP", help=f"{', '.join(ops.NAMES)} (default SUM)")
    add("-d", "--datatype", default="float32", type=_dtype, metavar="DTYPE", help=f"{', '.join(DTYPES)} (default float32)")
    add("--collective", choices=tuple(registry.COLLECTIVES), default="allreduce", help="(default allreduce)")
    add("-r", "--root", type=_natural, default=0, metavar="RANK", help="root of broadcast and reduce (default 0)")
    add("--algorithms", metavar="LIST", help="names with commas between, or all (default for allreduce: "
        f"{','.join(COMPARED)}; for others: all)")
    add("--inplace", action="store_true", help="in place (default: from sendbuf to recvbuf)")
    add("--json", metavar="FILE", help="write environment and results")
    add("--csv", metavar="FILE", help="write results")
    add("--plot", metavar="FILE", help="draw time and busbw over bytes: .png or .svg (extra 'plot')")
    options = parser.parse_args(argv)
    _complete(parser, options, size)
    return options


def _complete(parser: _Parser, options: argparse.Namespace, size: int) -> None:
    _complete_algorithms(parser, options)
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


def _complete_algorithms(parser: _Parser, options: argparse.Namespace) -> None:
    known = [*registry.names(options.collective), NATIVE]
    usual = COMPARED if options.collective == "allreduce" else known
    options.algorithms = known if options.algorithms == "all" else options.algorithms.split(",") if options.algorithms else [*usual]
    for name in options.algorithms:
        if name in known:
            continue
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


def a_size(text: str) -> int:
    """Parse bytes such as 8, 64K, 16M or 1G; nothing that cannot be there."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise argparse.ArgumentTypeError(f"{text!r} is more than this machine's memory")
    return nbytes


def _op(text: str) -> str:
    if text.upper() not in ops.NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ops.NAMES)}")
    return text.upper()


def _dtype(text: str) -> np.dtype:
    if text == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise argparse.ArgumentTypeError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(text)


def _above_one(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+", text) or float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 1")
    return float(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        return parse_whole(text, least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Parser(argparse.ArgumentParser):
    """A parser that one rank only lets speak."""

    quiet = False

    def _print_message(self, message: str, file: Any = None) -> None:
        if not self.quiet:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")
