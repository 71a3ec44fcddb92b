"""Tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from mpiring.analysis.machines import Level, Machine
from mpiring.units import rate, seconds


def table(heading: Sequence[str], rows: Iterable[Sequence[object]], left: Iterable[int] = (0,), indent: str = "  ") -> str:
    """Return rows under a heading, in columns: those in `left` flush left, the others flush right."""
    cells = [[str(entry) for entry in row] for row in (heading, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heading))]
    left = set(left)
    return "\n".join(
        (indent + "  ".join(entry.ljust(width) if column in left else entry.rjust(width)
                            for column, (entry, width) in enumerate(zip(row, widths)))).rstrip() for row in cells)


def as_json(data: Any) -> str:
    """Return JSON text, one key a line."""
    return json.dumps(data, indent=1)


def machine(found: Machine) -> str:
    """Describe a machine: its levels' figures, and what a reduction takes."""
    rows = [(level.name, level.group or "all", seconds(level.alpha), rate(level.beta), ports(level)) for level in found.levels]
    return "\n".join([f"{found.name}: {found.about}" if found.about else found.name,
                      table(("level", "ranks", "alpha", "a link", "links"), rows, left=(0, 4)), f"  {gammas(found)}"])


def ports(level: Level) -> str:
    """Say which links a level has."""
    ways = "" if level.duplex == "full" else ", one way at a time"
    bus = f"; all share {rate(level.bus)}" if level.bus is not None else ""
    bus += f"; {rate(level.pair)} between two, both ways together" if level.pair is not None else ""
    if level.wires is not None:
        return f"{sum(level.wires.values())} in {len(level.wires)} wires between places{ways}{bus}"
    whose = "a rank" if level.ranks_per_port == 1 else f"every {level.ranks_per_port} ranks"
    return f"{level.links} for {whose}{ways}{bus}"


def gammas(found: Machine) -> str:
    """Say how fast a rank reduces."""
    if not any(found.gamma.values()):
        return "reducing takes no time of its own"
    default = found.gamma["default"]
    others = [f", {name} at {rate(gamma)}" for name, gamma in found.gamma.items() if gamma != default]
    return f"a rank reduces at {rate(default)}{''.join(others)}"
