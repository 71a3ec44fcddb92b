"""Show where an engine's time went: python -m mpiring timeline."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from mpiring.analysis import timelines
from mpiring.analysis.timelines import Negotiation, Timeline
from mpiring.commands import options as shared
from mpiring.commands import show
from mpiring.units import binary, count, seconds, size
from mpiring.version import __version__

EPILOG = """The files are those of one run's ranks: MPIRING_TIMELINE=trace.json makes trace.rank0.json, trace.rank1.json, ...
--out joins them in one file, for Perfetto (ui.perfetto.dev), chrome://tracing or speedscope.

The engine's phases: negotiate (ranks learn which operations all have submitted), pack (arrays into one buffer), exchange (the
collective itself, with what it waits for other ranks), unpack, and idle. An operation's: negotiate (submitted until submitted
everywhere), queue (until its exchange is prepared), then those of the exchange that it shares with others.

examples:
  python -m mpiring timeline trace.rank*.json
  python -m mpiring timeline trace.rank*.json --out trace.json --longest 20"""

LONGEST = 10
"""Operations that are shown, unless told otherwise."""

WIDTH = 40
"""Characters of an operation's name."""


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("timeline", "Show where an engine's time went, from the timelines that its ranks wrote: by phase, by "
                         "algorithm, and which operations waited for which rank.", EPILOG)
    made.add_argument("files", nargs="+", metavar="FILE", help="what the ranks wrote, or what --out has joined")
    made.add_argument("--out", metavar="FILE.json", help="write all ranks' events into one file for a viewer")
    made.add_argument("--longest", type=shared.a_number, default=LONGEST, metavar="N",
                      help=f"operations to show: those whose negotiation lasted longest (default {LONGEST})")
    shared.add_json(made)
    return made


def run(options: argparse.Namespace) -> int:
    """Read, join if asked to, and print."""
    ranks = timelines.join(_read(options.files))
    if options.out:
        _write(options.out, options.files, ranks)
    found, unmatched = timelines.negotiations(ranks)
    print(show.as_json(_record(ranks, found, unmatched)) if options.json else
          "\n".join(_lines(ranks, found, unmatched, options)))
    return 0


def _read(files: Sequence[str]) -> list[Timeline]:
    """Read the files, telling a terminal which."""
    found = []
    for path in dict.fromkeys(files):
        shared.progress(f"reading {path}")
        found += timelines.read(path)
    shared.progress("")
    if not found:
        raise ValueError(f"{', '.join(files)}: no events")
    return found


def _write(path: str, files: Sequence[str], ranks: Sequence[Timeline]) -> None:
    if Path(path).resolve() in {Path(file).resolve() for file in files}:
        raise ValueError(f"--out {path} is one of the files to be read")
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(timelines.merged(ranks, __version__))
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None


def _lines(ranks: Sequence[Timeline], found: Sequence[Negotiation], unmatched: int, options: argparse.Namespace) -> Iterator[str]:
    window = max(one.ends[1] for one in ranks) - min(one.ends[0] for one in ranks)
    yield f"{_who(ranks)}: {seconds(window / 1e6)}, {count(max(map(timelines.submitted, ranks)), 'operation')} on a rank"
    yield from _notes(ranks, unmatched)
    if any(one.engine for one in ranks):
        yield f"\nthe engine's time{_over(ranks)}\n"
        yield _phases(ranks, timelines.engine_seconds(ranks))
        yield from _exchanges(ranks)
    if any(map(timelines.submitted, ranks)):
        yield f"\nan operation's time, on average{_over(ranks)}\n"
        yield _phases(ranks, timelines.operation_seconds(ranks))
        yield from _waits(ranks, found, options.longest)
    if options.out:
        yield f"\nwrote {options.out}"


def _who(ranks: Sequence[Timeline]) -> str:
    present = {one.rank for one in ranks}
    some = "" if len(present) == ranks[0].size else f" of {ranks[0].size}"
    machines = len({one.machine for one in ranks})
    return f"{count(len(present), 'rank')}{some} on {count(machines, 'machine')}"


def _over(ranks: Sequence[Timeline]) -> str:
    return f", over {count(len(ranks), 'rank')}" if len(ranks) > 1 else f" on rank {ranks[0].rank}"


def _notes(ranks: Sequence[Timeline], unmatched: int) -> Iterator[str]:
    """Yield what the reader must know to trust the figures."""
    missing = sorted(set(range(ranks[0].size)) - {one.rank for one in ranks})
    if missing:
        yield (f"no file of {_ranks(missing)}: " + ("if one of these was last, another is named for it" if len(ranks) > 1 else
                                                   "who was last cannot be told"))
    if len({one.machine for one in ranks}) > 1:
        yield "between machines times are joined by their wall clocks: differences below these clocks' error mean nothing"
    for one in timelines.strangers(ranks):
        yield f"WARNING: {one.path} does not overlap the others in time: is it of another run?"
    for path in dict.fromkeys(one.path for one in ranks if not one.whole):
        yield f"{path} is cut off: read as far as it goes"
    for one in ranks:
        yield from (f"rank {one.rank}: {moment}" for moment in dict.fromkeys(one.moments) if moment.startswith("no more rows"))
    if unmatched:
        yield f"{count(unmatched, 'operation')} could not be matched between ranks, whose counts differ: left out below"


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _phases(ranks: Sequence[Timeline], spent: dict[str, list[float]]) -> str:
    """Return a table of phases: their share, and least, median and most over ranks."""
    whole = sum(map(sum, spent.values())) or 1.0
    rows = []
    for name, values in spent.items():
        most = max(range(len(ranks)), key=lambda place: values[place])
        rows.append((name, f"{sum(values) / whole:.1%}", seconds(min(values)), seconds(median(values)), seconds(max(values)),
                     ranks[most].rank))
    if len(ranks) == 1:
        return show.table(("phase", "share", "time"), [row[:3] for row in rows])
    return show.table(("phase", "share", "min", "median", "max", "on rank"), rows)


def _exchanges(ranks: Sequence[Timeline]) -> Iterator[str]:
    """Yield a table of exchanges by algorithm, if there are any."""
    found = timelines.algorithms(ranks)
    if not found:
        return
    exchanges, operations = sum(one.exchanges for one in found), sum(one.operations for one in found)
    yield (f"\n{_count(exchanges, 'exchange')} of a rank, {operations / exchanges:.3g} operations in one, "
           f"{size(sum(one.nbytes for one in found))}\n")
    rows = [(one.kind, one.algorithm or "-", one.path, f"{one.exchanges:,.0f}", f"{one.operations / one.exchanges:.3g}",
             size(one.nbytes), seconds(one.seconds), f"{size(one.rate)}/s", "" if one.busbw is None else f"{size(one.busbw)}/s")
            for one in found]
    heading = ("collective", "algorithm", "path", "exchanges", "operations in one", "bytes", "time", "algbw", "busbw")
    used = [column for column in range(len(heading)) if any(row[column] for row in rows)]
    yield show.table([heading[column] for column in used], [[row[column] or "-" for column in used] for row in rows],
                     left=[place for place, column in enumerate(used) if column < 3])


def _count(number: float, what: str) -> str:
    return count(round(number), what)


def _waits(ranks: Sequence[Timeline], found: Sequence[Negotiation], most: int) -> Iterator[str]:
    """Yield the ranks that operations waited for, and the operations that waited longest."""
    known = [one for one in found if one.last is not None]
    if known:
        window = max(one.ends[1] for one in ranks) - min(one.ends[0] for one in ranks)
        yield f"\nwho was the last to submit, {count(len(known), 'operation')}\n"
        rows = [(rank, f"{times:,}", f"{times / len(known):.1%}", seconds(behind), seconds(alone), f"{alone * 1e6 / window:.1%}")
                for rank, times, behind, alone in timelines.stragglers(known)]
        yield show.table(("rank", "was last", "share", "behind the first", "others waited for it alone", "of the time"), rows,
                         left=())
    rows = timelines.longest(found)
    if rows:
        yield f"\nnegotiations, the longest first{_first(most, len(rows))}\n"
        heading = ("operation", "what", "times", "median", "longest", "last rank", "behind the first", "this rank last")
        cells = [(_short(one.operation), _what(one), f"{times:,}", seconds(middle), seconds(one.lasted),
                  "-" if one.last is None else one.last, seconds(one.behind), f"{often / times:.0%}")
                 for one, middle, times, often in rows[:most]]
        yield show.table(heading if known else heading[:5], cells if known else [row[:5] for row in cells], left=(0, 1))


def _first(most: int, all_of_them: int) -> str:
    return f" ({most} of {all_of_them:,} operations)" if most < all_of_them else ""


def _short(name: str) -> str:
    """Return a name that fits; the end tells more than the middle."""
    return name if len(name) <= WIDTH else f"{name[:WIDTH // 2 - 2]}...{name[-WIDTH // 2 + 1:]}"


def _what(one: Negotiation) -> str:
    """Say what an operation is, as far as the engine has written it down."""
    nbytes = one.args.get("bytes")
    words = [str(one.args[what]) for what in ("kind", "dtype", "operation") if one.args.get(what)]
    return " ".join([_short(" ".join(words)), *([binary(nbytes)] if isinstance(nbytes, int) else [])])


def _record(ranks: Sequence[Timeline], found: Sequence[Negotiation], unmatched: int) -> dict:
    return {
        "ranks": [one.rank for one in ranks], "size": ranks[0].size, "machines": len({one.machine for one in ranks}),
        "cut_off": [one.path for one in ranks if not one.whole], "unmatched": unmatched,
        "engine_seconds": timelines.engine_seconds(ranks), "operation_seconds": timelines.operation_seconds(ranks),
        "operations": [timelines.submitted(one) for one in ranks],
        "exchanges": [{**one._asdict(), "algbw": one.rate} for one in timelines.algorithms(ranks)],
        "negotiations": [{**one._asdict(), "median": middle, "times": times, "same_rank_last": often}
                         for one, middle, times, often in timelines.longest(found)],
        "last": [{"rank": rank, "times": times, "median_behind": behind, "waited_alone": alone}
                 for rank, times, behind, alone in timelines.stragglers(found)]}
