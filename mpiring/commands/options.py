"""What the commands' options share: sizes, ranks, names with the nearest valid one, layouts, and errors in one line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from runpy import run_path
from textwrap import fill
from typing import Any, NoReturn

from mpiring.algorithms.registry import COLLECTIVES, Algorithm, find, names, unknown
from mpiring.algorithms.setting import Setting
from mpiring.analysis.gradients import Model, known, load
from mpiring.analysis.machines import Machine, find_machine, with_ranks_per_node
from mpiring.units import parse_size, parse_whole

MOST_RANKS, MOST_BYTES = 1 << 20, 1 << 50
DTYPES = ("float32", "float64", "float16", "bfloat16", "longdouble", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
          "uint64", "bool", "complex64", "complex128", "clongdouble")
WIDTH = 110
"""Characters in a line of text."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose epilog keeps its lines."""

    def __init__(self, name: str, description: str, epilog: str):
        super().__init__(prog=f"python -m mpiring {name}", description=fill(description, WIDTH), epilog=epilog,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a line that says what is wrong."""
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


def add_collective(parser: Parser) -> None:
    """Add --collective."""
    parser.add_argument("--collective", type=a_collective, default="allreduce", metavar="NAME",
                        help=f"{', '.join(COLLECTIVES)} (default allreduce)")


def add_json(parser: Parser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_layout(parser: Parser, nodes: bool = True) -> None:
    """Add --per-node, --nodes, --root and --pieces: what a Setting has beside the number of ranks."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--per-node", type=a_number, metavar="K", help="K ranks on each node (default: one node)")
    if nodes:
        group.add_argument("--nodes", type=a_number, metavar="M", help="ranks on M nodes, as evenly as can be")
    parser.add_argument("--root", type=_natural, default=0, metavar="R", help="the root, where there is one (default 0)")


def add_machine(parser: Parser, needed: bool) -> None:
    """Add --machine, and how many ranks are on it."""
    parser.add_argument("--machine", type=find_machine_or_say, required=needed, metavar="NAME|FILE.json",
                        help="a ready-made machine (simulate --list), or your own")


def add_algorithms(parser: Parser) -> None:
    """Add --algorithms."""
    parser.add_argument("--algorithms", type=a_list, default=[], metavar="LIST",
                        help="names with commas between, or FILE.py:NAME for an mpiring.Algorithm of your own (default: all; for "
                        "buckets those that are quick to price)")


def find_machine_or_say(text: str) -> Machine:
    """Parse a machine's name or path."""
    return _said(find_machine, text)


def a_model(text: str) -> Model:
    """Parse a model's name."""
    return _said(load, text)


def models() -> str:
    """Return the names of the models, for a help text."""
    return ", ".join(known())


def a_dtype(text: str) -> str:
    """Parse a dtype's name."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(unknown("dtype", text, DTYPES))
    return text


def a_collective(text: str) -> str:
    """Parse a collective's name."""
    if text not in COLLECTIVES:
        raise argparse.ArgumentTypeError(unknown("collective", text, COLLECTIVES))
    return text


def a_size(text: str) -> int:
    """Parse bytes."""
    nbytes = _said(parse_size, text)
    if nbytes > MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is too large: {MOST_BYTES >> 40} TiB are the most")
    return nbytes


def many_sizes(text: str) -> list[int]:
    """Parse sizes with commas between."""
    return [a_size(part) for part in text.split(",")]


def a_number(text: str) -> int:
    """Parse a whole number from 1 on."""
    return _said(lambda text: parse_whole(text, 1, MOST_RANKS), text)


def _natural(text: str) -> int:
    return _said(lambda text: parse_whole(text, 0, MOST_RANKS), text)


def many_ranks(text: str) -> list[int]:
    """Parse numbers of ranks: 8, 2-64, or 3,5,7."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if last > MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{text!r} is too large: {MOST_RANKS} ranks are the most")
        if not 1 <= first <= last:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks such as 8, 2-64 or 3,5,7")
        found.update(range(first, last + 1))
    return sorted(found)


def algorithms(chosen: Iterable[str], collective: str) -> list[Algorithm]:
    """Return the algorithms named, each once; all of the collective where none is. ValueError gives the nearest name."""
    return [algorithm(name, collective) for name in named(chosen, collective)]


def named(chosen: Iterable[str], collective: str) -> list[str]:
    """Return the names chosen, also with commas between, each once; all of the collective where none is."""
    return list(dict.fromkeys([name for entry in chosen for name in entry.split(",") if name] or names(collective)))


def algorithm(name: str, collective: str) -> Algorithm:
    """Return an algorithm by name, or your own from FILE.py:NAME."""
    return _own(*name.rsplit(":", 1)) if ".py:" in name else find(name, collective)


@cache
def _own(path: str, name: str) -> Algorithm:
    try:
        found = run_path(path).get(name)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    if not isinstance(found, Algorithm):
        raise ValueError(f"{path} has no mpiring.Algorithm {name}")
    return found


def a_list(text: str) -> list[str]:
    """Parse names with commas between."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} has no name")
    return found


def setting(ranks: int, options: argparse.Namespace, pieces: int = 1) -> Setting:
    """Return the setting that the layout's options ask for."""
    nodes: tuple[int, ...] = ()
    if options.per_node:
        nodes = tuple(rank // options.per_node for rank in range(ranks))
    elif getattr(options, "nodes", None):
        nodes = tuple(rank * options.nodes // ranks for rank in range(ranks))
    return Setting(ranks, root=options.root, pieces=pieces, nodes=nodes)


def on_nodes(machine: Machine, per_node: int | None) -> Machine:
    """Return the machine, with so many ranks on each node where that is given."""
    return with_ranks_per_node(machine, per_node) if per_node else machine


def write(path: str, text: str) -> None:
    """Write a file; ValueError where that cannot be done."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None


def progress(text: str) -> None:
    """Show on a terminal what is being done; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _said(function: Callable[[str], Any], text: str) -> Any:
    """Call a function of the library, its ValueError as argparse wants it."""
    try:
        return function(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
