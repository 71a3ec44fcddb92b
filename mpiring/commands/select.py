"""Show which algorithms a call would run: python -m mpiring select."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from mpiring import select
from mpiring.algorithms.cuts import counts
from mpiring.algorithms.registry import COLLECTIVES, names, unknown
from mpiring.analysis.machines import Machine, find_machine, with_ranks_per_node
from mpiring.commands import options as shared
from mpiring.commands import show
from mpiring.commands.prices import Prices
from mpiring.select import KINDS, SHARED, Row, Table
from mpiring.units import binary, count, seconds

EPILOG = f"""The table in force is that of the file in {select.TABLE}, or the one that tune has measured on this machine for so many
ranks, above the shipped one; with what {select.VARIABLE} asks for. A call takes the first algorithm of its size that can do it.

Predicted times are the cost model's for --machine (python -m mpiring simulate). What is no schedule is priced so:
  shared  two barriers of ceil(log2 k) messages among the k ranks of a node, and every byte read once and written once at gamma;
          between H nodes a ring of each lane besides: H - 1 messages (allreduce: twice) of 1/H of its part of the vector
  native  as the fastest schedule

examples:
  python -m mpiring select --ranks 8
  python -m mpiring select --ranks 16 --nodes 4 --collective allreduce --kind ordinary,shared
  python -m mpiring select --model ethernet-10g --ranks 16 --json"""

SIZES = tuple(1 << power for power in range(8, 27, 2))
"""Bytes that are shown, and that tune measures: 256 to 64M."""

MACHINES = {"one node": "cpu-node", "several nodes": "ethernet-10g", "device": "dgx-h100"}
SHOWN = 3
"""Algorithms that are named beside the one that runs."""


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("select", "Show which algorithm runs at which size, which would be next, and the times predicted and "
                         "measured. No MPI is started.", EPILOG)
    made.add_argument("--ranks", type=shared.a_number, metavar="N", help="(default 8, or --model's)")
    made.add_argument("--nodes", type=shared.a_number, metavar="M", help="ranks on M nodes, as evenly as can be (default 1)")
    made.add_argument("--library", default="", metavar="NAME", help="the MPI library, such as 'Open MPI' or 'MPICH 5.0.2'")
    made.add_argument("--collective", type=_collectives, default=list(COLLECTIVES), metavar="LIST",
                      help=f"{', '.join(COLLECTIVES)} (default: all)")
    made.add_argument("--kind", type=_kinds, default=["ordinary"], metavar="LIST", help=f"{', '.join(KINDS)} (default ordinary)")
    made.add_argument("--bytes", type=shared.many_sizes, default=list(SIZES), metavar="LIST", help="(default 256 to 64M)")
    shared.add_machine(made, needed=False)
    made.add_argument("--model", type=shared.find_machine_or_say, metavar="NAME|FILE.json",
                      help="show the table that the cost model gives for a machine instead; --json prints it as a table's file")
    shared.add_json(made)
    return made


def _collectives(text: str) -> list[str]:
    return list(map(shared.a_collective, shared.a_list(text)))


def _kinds(text: str) -> list[str]:
    for name in shared.a_list(text):
        if name not in KINDS:
            raise argparse.ArgumentTypeError(unknown("kind", name, KINDS))
    return shared.a_list(text)


def run(options: argparse.Namespace) -> int:
    """Print the table in force, or the model's."""
    if options.model:
        ranks = options.ranks or options.model.ranks
        table = modelled(_on_nodes(options.model, ranks, options.nodes), ranks, options.collective, options.kind, options.bytes)
        print(select.to_json(table).rstrip() if options.json else f"{table.about}\n\n{listed(table.rows)}")
        return 0
    ranks, nodes = options.ranks or 8, options.nodes or 1
    if nodes > ranks:
        raise ValueError(f"--nodes {nodes}: {count(ranks, 'rank')} cannot be on so many")
    table = in_force(options.library, ranks, nodes)
    records = [_record(table, options, collective, kind, ranks, nodes)
               for collective in options.collective for kind in options.kind]
    print(show.as_json({"source": table.source, "override": table.override.text, "tables": records}) if options.json
          else "\n".join(_lines(table, options, records)))
    return 0


def in_force(library: str, ranks: int, nodes: int) -> Table:
    """Return the table given or measured here for so many ranks above the shipped one; with the environment's override."""
    measured = select.given_table()
    if measured is None and (path := _measured_here(library, ranks, nodes)):
        measured, library = select.read(path), library or _library_of(path)
    return select.above_shipped(measured).for_library(library).with_override(select.override_setting())


def _measured_here(library: str, ranks: int, nodes: int) -> Path | None:
    """Return the file of the table measured here for so many ranks; ValueError where there are several."""
    layout = select.Key("", "", nodes, tuple(counts(ranks, nodes)), select.processor())
    folder = select.cache_folder()
    found = sorted(folder.glob(f"{select.slug(library)}*_{layout.layout}_{layout.processor}.json")) if folder else []
    if len(found) > 1:
        raise ValueError(f"--library says not which: there are {', '.join(path.name for path in found)} in {folder}")
    return found[0] if found else None


def _library_of(path: Path) -> str:
    """Return the library whose rows go with a measured table, by its file's name."""
    rows = select.shipped().rows
    return next((row.library for row in rows if row.library and path.name.startswith(select.slug(row.library))), "")


def _record(table: Table, options: argparse.Namespace, collective: str, kind: str, ranks: int, nodes: int) -> dict:
    """Return what is to be said of one collective and kind, size by size."""
    machine = options.machine and _on_nodes(options.machine, ranks, nodes)
    prices = Prices(machine, ranks) if machine else _usual_prices(kind, ranks, nodes)
    lines = []
    for nbytes in options.bytes:
        shared.progress(f"{collective}, {kind}, {binary(nbytes)}")
        chosen = table.preferences(collective, kind, ranks, nodes, nbytes)
        price = prices.all(collective, nbytes, chosen[:1])
        fitting = table.fitting(collective, kind, ranks, nodes, nbytes)
        found = [row.measured[nbytes] for row in fitting if nbytes in row.measured]
        measured = found[0] if found else {}
        lines.append({"bytes": nbytes, "algorithms": chosen, "predicted_us": price, "measured_us": measured})
    shared.progress("")
    return {"collective": collective, "kind": kind, "ranks": ranks, "nodes": nodes, "machine": prices.machine.name, "sizes": lines}


def _lines(table: Table, options: argparse.Namespace, records: Sequence[dict]) -> Iterable[str]:
    where = f"{count(records[0]['ranks'], 'rank')} on {count(records[0]['nodes'], 'node')}"
    yield f"{where}{', ' + options.library if options.library else ''}; table: {table.source}"
    if table.override.entries:
        yield f"{select.VARIABLE}: {table.override.text}"
    if table.source == "shipped":
        yield "nothing measured for these ranks yet: mpirun -np N python -m mpiring tune"
    for record in records:
        yield ""
        yield f"{record['collective']}, {record['kind']} arrays; predicted on {record['machine']}"
        rows = [(binary(line["bytes"]), *_cells(line)) for line in record["sizes"]]
        yield show.table(("bytes", "runs", "predicted", "measured", "then"), rows, left=(1, 4))


def _cells(line: dict) -> tuple[str, ...]:
    first, *others = line["algorithms"] or ["-"]
    times = (line[key].get(first) for key in ("predicted_us", "measured_us"))
    more = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
    return first, *("-" if us is None else seconds(us / 1e6) for us in times), more


@cache
def _usual_prices(kind: str, ranks: int, nodes: int) -> Prices:
    name = MACHINES["device" if kind == "device" else "several nodes" if nodes > 1 else "one node"]
    return Prices(_on_nodes(find_machine(name), ranks, nodes), ranks)


def _on_nodes(machine: Machine, ranks: int, nodes: int | None) -> Machine:
    """Return the machine with the ranks on so many nodes, where its nodes may have any number of ranks."""
    fixed = nodes is None or (nodes == 1 and machine.ranks_per_node >= ranks) or machine.levels[0].wires is not None
    return machine if fixed else with_ranks_per_node(machine, -(-ranks // nodes))


def modelled(machine: Machine, ranks: int, collectives: Iterable[str], kinds: Iterable[str], sizes: Iterable[int]) -> Table:
    """Return the table that the cost model gives for a machine; not for native, whose schedules are not known."""
    prices = Prices(machine, ranks)
    nodes = len(prices.layout.members)
    place = {"nodes": select.Span(nodes, nodes), "ranks": select.Span(ranks, ranks)}
    rows: list[Row] = []
    for collective in collectives:
        for kind in kinds:
            shared.progress(f"{collective}, {kind}")
            sharing = kind != "device" and select.can_share(collective, ranks, nodes)
            runners = [*names(collective), *([SHARED] if sharing else [])]
            times = {nbytes: prices.all(collective, nbytes, runners) for nbytes in sizes}
            rows += select.rows_from(times, False, collective=collective, kind=kind, **place)
    shared.progress("")
    return Table(tuple(rows), "model", f"by the cost model for {count(ranks, 'rank')} on {machine.name}")


def listed(rows: Iterable[Row]) -> str:
    """Return rows as a table."""
    cells = []
    for row in rows:
        first, *others = row.algorithms
        cells.append((row.collective, row.kind, "all" if row.upto is None else binary(row.upto), first, ", ".join(others[:SHOWN])))
    return show.table(("collective", "arrays", "up to", "runs", "then"), cells, left=(0, 1, 3, 4))
