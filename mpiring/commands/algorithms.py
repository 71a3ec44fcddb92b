"""List the algorithms with their cost lines: python -m mpiring algorithms."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from mpiring.algorithms.costs import SYMBOLS
from mpiring.algorithms.registry import ALGORITHMS, COLLECTIVES, Algorithm
from mpiring.commands import options as shared
from mpiring.commands.show import as_json, table

EPILOG = """example:
  python -m mpiring algorithms --collective broadcast"""

HEADING = "algorithm", "steps", "vectors that the busiest rank sends", "best for"


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("algorithms", "List all algorithms: their steps, what the busiest rank sends, what each is for.", EPILOG)
    made.add_argument("--collective", type=shared.a_collective, metavar="NAME", help=f"only those for {', '.join(COLLECTIVES)}")
    made.add_argument("--markdown", action="store_true", help="print tables as the README has them")
    shared.add_json(made)
    return made


def run(options: argparse.Namespace) -> int:
    """Print the list."""
    chosen = [algorithm for algorithm in ALGORITHMS.values() if options.collective in (None, algorithm.collective.name)]
    if options.json:
        print(as_json([{"collective": algorithm.collective.name, "algorithm": algorithm.name, "steps": str(algorithm.rounds),
                        "sent": str(algorithm.sent), "use": algorithm.use} for algorithm in chosen]))
        return 0
    print(markdown(chosen) if options.markdown else table(("collective", *HEADING), _rows(chosen), left=(0, 1, 2, 3, 4), indent=""))
    print("\n" + legend(chosen, options.markdown))
    return 0


def markdown(algorithms: list[Algorithm]) -> str:
    """Return a Markdown table."""
    rows = [("collective", *HEADING), ("---",) * 5, *_rows(algorithms)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def legend(algorithms: list[Algorithm], in_line: bool) -> str:
    """Explain the letters that the cost lines use."""
    used = {name for algorithm in algorithms for cost in (algorithm.rounds, algorithm.sent)
            for name in re.findall(r"[A-Za-z]+", cost.text)}
    lines = [f"{name}: {words}" for name, words in SYMBOLS.items() if name in used]
    return "; ".join(lines) + "." if in_line else "\n".join(f"  {line}" for line in lines)


def _rows(algorithms: list[Algorithm]) -> Iterator[tuple[str, ...]]:
    before = None
    for algorithm in algorithms:
        name = algorithm.collective.name
        yield "" if name == before else name, algorithm.name, str(algorithm.rounds), str(algorithm.sent), algorithm.use
        before = name
