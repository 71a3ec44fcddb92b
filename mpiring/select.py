"""Which algorithm a call runs: a table that a person can read, write and override. Plain data; neither MPI nor NumPy.

A row says for which calls it is, and names algorithms for them, the preferred one first:

    {"collective": "allreduce", "kind": "ordinary", "nodes": "1", "bytes": "32K", "algorithms": ["native", "shared", "tree"]}

Rows are gone through in order. Those that fit the collective, the kind of array, the nodes, the ranks, the ranks of the fullest
node (`per_node`), the MPI library (`library`: how its name begins) and the bytes (up to `bytes`) offer their algorithms, and the
first that can do the call is taken. So a row for fewer bytes stands above one for more, and what a row does not offer, those
below it may. Bytes are those of the longest buffer of a rank: the vector, for alltoall all blocks of a rank. A table that
`python -m mpiring tune` has measured stands above the shipped one.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from mpiring.algorithms.registry import COLLECTIVES, names, unknown
from mpiring.units import parse_size

NATIVE, SHARED = "native", "shared"
"""The MPI library's own collective, and sums through memory that the ranks of a node share: they run, but are no schedules."""

ON_ONE_NODE = ("reduce_scatter", "allgather", "alltoall")
"""Collectives that shared does among the ranks of one node only."""

KINDS = {"ordinary": "host memory", "shared": "memory that the ranks of a node share", "device": "memory of a GPU"}
VARIABLE, TABLE = "MPIRING_ALGORITHM", "MPIRING_TABLE"
SHIPPED = Path(__file__).parent / "tables" / "shipped.json"
UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
CLOSE = 1.03
"""Algorithms whose times differ by less are equally fast: noise must not cut a table into many rows."""

OPEN_END = 4 << 20
"""Bytes from which on the order of the algorithms stays as it is: bandwidth alone counts."""

Times = Mapping[int, Mapping[str, float]]
"""Microseconds by bytes and algorithm."""


def can_share(collective: str, ranks: int, nodes: int) -> bool:
    """Tell whether shared is something for a collective on these nodes, where their memory allows it."""
    return ranks > nodes and (nodes == 1 or collective not in ON_ONE_NODE)


def known(collective: str) -> list[str]:
    """List what can run a collective: the registry's algorithms, native and shared."""
    return [*names(collective), NATIVE, SHARED]


class Span(NamedTuple):
    """A range of whole numbers, both ends in it; no end: None."""

    low: int = 1
    high: int | None = None

    def holds(self, number: int) -> bool:
        """Tell whether a number is in it."""
        return self.low <= number and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{'' if self.high is None else self.high}"


ANY = Span()


def a_span(text: str) -> Span:
    """Parse "4", "2-8" or "2-"; ValueError for anything else."""
    match = re.fullmatch(r"(\d+)(-(\d*))?", text)
    if not match or int(match[1]) < 1:
        raise ValueError(f"{text!r} is not a range such as 4, 2-8 or 2-")
    low, high = int(match[1]), int(match[1]) if match[2] is None else int(match[3]) if match[3] else None
    if high is not None and high < low:
        raise ValueError(f"{text!r} ends before it begins")
    return Span(low, high)


@dataclass(frozen=True)
class Row:
    """For which calls a row is, and its algorithms, the preferred one first. upto: bytes, None: no limit."""

    collective: str
    kind: str
    algorithms: tuple[str, ...]
    upto: int | None = None
    nodes: Span = ANY
    ranks: Span = ANY
    per_node: Span = ANY
    library: str = ""
    predicted: Times = field(default_factory=dict)
    measured: Times = field(default_factory=dict)

    def fits(self, ranks: int, nodes: int, nbytes: int) -> bool:
        """Tell whether it is for a call of its collective and kind."""
        return ((self.upto is None or nbytes <= self.upto) and self.nodes.holds(nodes) and self.ranks.holds(ranks)
                and self.per_node.holds(-(-ranks // nodes)))


@dataclass(frozen=True)
class Entry:
    """A part of an override: forces an algorithm, or excludes it; collective None: in all that have it."""

    algorithm: str
    excluded: bool = False
    collective: str | None = None
    low: int = 0
    high: int | None = None

    def is_for(self, collective: str, nbytes: int) -> bool:
        """Tell whether it says something about a call."""
        fits = self.algorithm in known(collective) if self.collective is None else self.collective == collective
        return fits and self.low <= nbytes and (self.high is None or nbytes <= self.high)


@dataclass(frozen=True)
class Override:
    """What the user wants instead of the table's choice."""

    text: str = ""
    entries: tuple[Entry, ...] = ()

    def apply(self, collective: str, nbytes: int, algorithms: Iterable[str]) -> list[str]:
        """Return what is left of the algorithms: the one that is forced (the first entry counts), or those not excluded."""
        mine = [entry for entry in self.entries if entry.is_for(collective, nbytes)]
        forced = [entry.algorithm for entry in mine if not entry.excluded][:1]
        excluded = {entry.algorithm for entry in mine if entry.excluded}
        return [name for name in forced or algorithms if name not in excluded]


def parse_override(text: str) -> Override:
    """Parse entries with `;` between: [COLLECTIVE:[LO-HI:]]ALGORITHM forces, with ^ before the algorithm it excludes.

    LO-HI are bytes, both ends in it; either may be left out. ValueError names the entry that is wrong.
    """
    entries = [part.strip() for part in text.split(";") if part.strip()]
    return Override(text, tuple(map(_entry, entries)))


def override_setting() -> Override:
    """Return the override that the environment asks for; an empty one where it does not."""
    return parse_override(os.environ.get(VARIABLE, ""))


def _entry(text: str) -> Entry:
    try:
        *where, name = (part.strip() for part in text.split(":"))
        collective, span = (*where, None, None)[:2]
        if len(where) > 2:
            raise ValueError("more than COLLECTIVE:LO-HI:ALGORITHM")
        if collective is not None and collective not in COLLECTIVES:
            raise ValueError(unknown("collective", collective, COLLECTIVES))
        excluded, name = name.startswith("^"), name.removeprefix("^").strip()
        if not name:
            raise ValueError("names no algorithm")
        choices = known(collective) if collective else list(dict.fromkeys(name for owner in COLLECTIVES for name in known(owner)))
        if name not in choices:
            raise ValueError(unknown("algorithm", name, choices, f" for {collective}" if collective else ""))
        return Entry(name, excluded, collective, *_bytes(span))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {text!r}: {error}") from None


def _bytes(text: str | None) -> tuple[int, int | None]:
    """Parse LO-HI."""
    if text is None:
        return 0, None
    low, dash, high = text.partition("-")
    if not dash or not (low or high):
        raise ValueError(f"{text!r} is not a range of bytes such as 64K-1M, 64K- or -1M")
    bounds = parse_size(low) if low else 0, parse_size(high) if high else None
    if bounds[1] is not None and bounds[1] < bounds[0]:
        raise ValueError(f"{text!r} ends before it begins")
    return bounds


@dataclass(frozen=True)
class Key:
    """What a measured table holds for: an MPI library, the ranks of each node, and the processor."""

    library: str
    version: str
    nodes: int
    ranks_per_node: tuple[int, ...]
    processor: str

    def __post_init__(self) -> None:
        if len(self.ranks_per_node) != self.nodes:
            raise ValueError(f"ranks_per_node has {len(self.ranks_per_node)} entries for {self.nodes} nodes")

    @property
    def layout(self) -> str:
        """The nodes by their ranks: 4x8, or 3x8+1x4 where they differ."""
        together = Counter(self.ranks_per_node)
        return "+".join(f"{together[ranks]}x{ranks}" for ranks in sorted(together, reverse=True))


def key_for(vendor: tuple[str, Sequence[int]], nodes: Sequence[int]) -> Key:
    """Return the key of a comm from MPI.get_vendor() and the node of every rank; the processor is this one."""
    together = tuple(Counter(nodes).values())
    return Key(vendor[0], ".".join(map(str, vendor[1])), len(together), together, processor())


@cache
def processor() -> str:
    """Return a short name of this machine's processor, with the number of its cores."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|cpu model|cpu)\s*:\s*(.*[^\d\n].*)$", text, re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    name = re.sub(r"\((?:R|TM)\)|@.*|\b(?:CPU|Processor|with .*)\b|\d+-Core", " ", name, flags=re.IGNORECASE)
    return f"{slug(name)[:40].strip('-')}-{os.cpu_count()}"


def slug(text: str) -> str:
    """Return text as it can be in a file's name."""
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-")


def cache_folder() -> Path | None:
    """Return where measured tables are: $XDG_CACHE_HOME or ~/.cache, /mpiring; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), ".cache")     # relative ones do not count
    return Path(base) / "mpiring" if os.path.isabs(base) else None


def cache_path(key: Key) -> Path:
    """Return the file of a key's measured table; ValueError where there is no folder for it."""
    folder = cache_folder()
    if folder is None:
        raise ValueError("there is no folder for measured tables: neither XDG_CACHE_HOME nor a home directory is known")
    return folder / f"{slug(key.library)}-{slug(key.version)}_{key.layout}_{slug(key.processor)}.json"


@dataclass(frozen=True)
class Table:
    """Rows, where they are from ("shipped", or a path), and what the user wants instead."""

    rows: tuple[Row, ...]
    source: str = "shipped"
    about: str = ""
    override: Override = Override()

    def with_override(self, override: Override) -> Table:
        """Return the table under an override."""
        return replace(self, override=override)

    def for_library(self, library: str) -> Table:
        """Return the table without the rows that are for other MPI libraries."""
        return replace(self, rows=tuple(row for row in self.rows if library.startswith(row.library)))

    @cached_property
    def _by_use(self) -> dict[tuple[str, str], list[Row]]:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.collective, row.kind), []).append(row)
        return found

    def fitting(self, collective: str, kind: str, ranks: int, nodes: int, nbytes: int) -> list[Row]:
        """Return the rows that fit a call, in order."""
        return [row for row in self._by_use.get((collective, kind), ()) if row.fits(ranks, nodes, nbytes)]

    def preferences(self, collective: str, kind: str, ranks: int, nodes: int, nbytes: int) -> list[str]:
        """Return the algorithms for a call, the preferred one first, as the override leaves them."""
        offered = (name for row in self.fitting(collective, kind, ranks, nodes, nbytes) for name in row.algorithms)
        return self.override.apply(collective, nbytes, dict.fromkeys(offered))

    def choose(self, collective: str, kind: str, ranks: int, nodes: int, nbytes: int, allowed: Callable[[str], bool]) -> str:
        """Return the preferred algorithm that is allowed; ValueError where there is none."""
        offered = self.preferences(collective, kind, ranks, nodes, nbytes)
        for name in offered:
            if allowed(name):
                return name
        why = f"none of {', '.join(offered)} can do it" if offered else "no algorithm is left"
        asked = f"; {VARIABLE} is {self.override.text!r}" if self.override.entries else ""
        raise ValueError(f"{collective} of {nbytes} bytes ({kind} arrays) on {ranks} ranks of {nodes} node(s): {why} "
                         f"(table: {self.source}{asked})")


def load(key: Key) -> Table:
    """Return the table for a key: the measured rows, if there are, above the shipped ones; those of a given file, if it is named.

    ValueError names a file that cannot be read or is wrong.
    """
    return above_shipped(given_table() or (_read(cache_path(key)) if cache_folder() else None)).for_library(key.library)


def above_shipped(measured: Table | None) -> Table:
    """Return the shipped table with the rows of another one, if there is one, above its own."""
    return replace(measured, rows=measured.rows + shipped().rows) if measured else shipped()


def given_table() -> Table | None:
    """Return the table in the file that the environment names, None where it names none; ValueError for what is none."""
    path = os.environ.get(TABLE, "")
    return read(path) if path else None


@cache
def shipped() -> Table:
    """Return the table that comes with the package, with the rows of all libraries."""
    return replace(read(SHIPPED), source="shipped")


def read(path: str | Path) -> Table:
    """Return a table from a file; ValueError names a file that cannot be read or is wrong."""
    table = _read(Path(path))
    if table is None:
        raise ValueError(f"{path}: cannot be read: {os.strerror(2)}")
    return table


def _read(path: Path) -> Table | None:
    """Return a table from a file, None where there is none."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or not isinstance(data.get("about", ""), str):
        raise ValueError(f"{path}: not an object with the key 'rows', a list, and perhaps 'about', text")
    return Table(tuple(_row(row, f"{path}: rows[{number}]") for number, row in enumerate(data["rows"])), str(path),
                 data.get("about", ""))


FIELDS = "collective", "kind", "algorithms", "bytes", "nodes", "ranks", "per_node", "library", "predicted_us", "measured_us"


def _row(data: Any, where: str) -> Row:
    """Read a row; ValueError says what is wrong with it."""
    try:
        if not isinstance(data, dict):
            raise ValueError("not an object")
        for key in data:
            if key not in FIELDS:
                raise ValueError(unknown("key", key, FIELDS))
        for key, choices in (("collective", COLLECTIVES), ("kind", KINDS)):
            if data.get(key) not in choices:
                raise ValueError(unknown(key, str(data.get(key, "")), choices))
        spans = {key: a_span(str(data[key])) for key in ("nodes", "ranks", "per_node") if key in data}
        times = {"predicted": _times(data, "predicted_us"), "measured": _times(data, "measured_us")}
        return Row(data["collective"], data["kind"], _algorithms(data), _upto(data.get("bytes")), **spans, **times,
                   library=str(data.get("library", "")))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _algorithms(data: dict[str, Any]) -> tuple[str, ...]:
    chosen = data.get("algorithms")
    if not isinstance(chosen, list) or not chosen:
        raise ValueError(f"key 'algorithms' is {chosen!r}, not a list of names")
    for name in chosen:
        if name not in known(data["collective"]):
            raise ValueError(unknown("algorithm", str(name), known(data["collective"]), f" for {data['collective']}"))
    return tuple(chosen)


def _upto(value: Any) -> int | None:
    return None if value is None else parse_size(str(value))


def _times(data: dict[str, Any], key: str) -> Times:
    try:
        return {parse_size(size): {name: float(us) for name, us in times.items()} for size, times in data.get(key, {}).items()}
    except (AttributeError, TypeError):
        raise ValueError(f"key {key!r} is not an object such as {{\"64K\": {{\"ring\": 123.4}}}}") from None


def to_json(table: Table) -> str:
    """Write a table as JSON text, a row a line."""
    rows = ",\n  ".join(json.dumps(_fields(row)) for row in table.rows)
    return f'{{\n "about": {json.dumps(table.about)},\n "rows": [\n  {rows}\n ]\n}}\n'


def _fields(row: Row) -> dict[str, Any]:
    """Return a row's fields as JSON has them, without those that say nothing."""
    spans = {key: str(getattr(row, key)) for key in ("nodes", "ranks", "per_node") if getattr(row, key) != ANY}
    library = {"library": row.library} if row.library else {}
    upto = {} if row.upto is None else {"bytes": short(row.upto)}
    times = {key: {short(nbytes): {name: float(f"{us:.5g}") for name, us in entry.items()} for nbytes, entry in found.items()}
             for key, found in (("predicted_us", row.predicted), ("measured_us", row.measured)) if found}
    return {"collective": row.collective, "kind": row.kind, **library, **spans, **upto, "algorithms": list(row.algorithms), **times}


def short(nbytes: int) -> str:
    """Write bytes as parse_size reads them, shortly: 64K."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if nbytes >= unit and nbytes % unit == 0), (1, ""))
    return f"{nbytes // unit}{letter}"


def store(table: Table, path: Path) -> None:
    """Write a table into a file, with its folder; who reads meanwhile gets the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        part.write_text(to_json(table))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def rows_from(times: Times, measured: bool, **place: Any) -> list[Row]:
    """Return the fewest rows that name an algorithm within CLOSE of the fastest at each size; `place`: fields of every row.

    A row ends midway (by ratio) between its last size and the next row's first; the last one never, if its sizes reach OPEN_END.
    """
    rows, runs = [], list(_runs(times))
    for number, (first, sizes) in enumerate(runs):
        following = runs[number + 1][1][0] if number + 1 < len(runs) else None
        upto = isqrt(sizes[-1] * following) if following else None if sizes[-1] >= OPEN_END else sizes[-1]
        part = {nbytes: times[nbytes] for nbytes in sizes}
        others = [name for name in _ranked(part) if name != first]
        rows.append(Row(**place, upto=upto, algorithms=(first, *others), **{"measured" if measured else "predicted": part}))
    return rows


def _runs(times: Times) -> Iterator[tuple[str, list[int]]]:
    """Yield an algorithm with the sizes that it serves, from the smallest on, as many as can be."""
    sizes = sorted(times)
    while sizes:
        reach = {name: _reach(times, sizes, name) for name in times[sizes[0]]}
        best = max(reach, key=lambda name: (reach[name], -times[sizes[0]][name]))
        yield best, sizes[:reach[best]]
        sizes = sizes[reach[best]:]


def _reach(times: Times, sizes: Sequence[int], name: str) -> int:
    """Return at how many of the first sizes an algorithm is about as fast as the fastest."""
    for number, nbytes in enumerate(sizes):
        if times[nbytes].get(name, float("inf")) > CLOSE * min(times[nbytes].values()):
            return number
    return len(sizes)


def _ranked(times: Times) -> list[str]:
    """Return algorithms by their mean ratio to the fastest; those that some size is missing come last."""
    ratios: dict[str, list[float]] = {}
    for entry in times.values():
        for name, us in entry.items():
            ratios.setdefault(name, []).append(us / max(min(entry.values()), 1e-9))
    return sorted(ratios, key=lambda name: (-len(ratios[name]), sum(ratios[name]) / len(ratios[name])))
