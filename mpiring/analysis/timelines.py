"""Where an engine's time went, from the timelines that its ranks wrote; and the timelines of all ranks in one file.

Within a machine the ranks' clock is the same. Between machines the wall clocks join them, as well as those agree.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ON_ENGINE = ("negotiate", "pack", "exchange", "unpack")
"""What an engine does, in this order; what is left of its time is idle."""

ON_OPERATION = ("negotiate", "queue", "pack", "exchange", "unpack")
"""What an operation goes through."""

EVENTS = '"traceEvents":['


class Span(NamedTuple):
    """A phase: when it began and how long it lasted, in microseconds."""

    name: str
    begin: int
    lasted: int
    args: dict[str, Any]


@dataclass
class Timeline:
    """What one rank wrote. operations: by name, in order. shift: what takes its times to those of all ranks together."""

    path: str
    rank: int
    size: int
    machine: str
    epoch: int
    whole: bool
    engine: list[Span] = field(default_factory=list)
    operations: dict[str, list[Span]] = field(default_factory=dict)
    moments: list[str] = field(default_factory=list)
    shift: int = 0

    @cached_property
    def window(self) -> tuple[int, int]:
        """When the first span begins and the last one ends."""
        spans = [span for row in (self.engine, *self.operations.values()) for span in row]
        return min((span.begin for span in spans), default=0), max((span.begin + span.lasted for span in spans), default=0)

    @property
    def ends(self) -> tuple[int, int]:
        """The window in the times of all ranks together."""
        return self.window[0] + self.shift, self.window[1] + self.shift

    def seconds(self, spans: Iterable[Span], name: str) -> float:
        """Return how long all spans of a name lasted."""
        return sum(span.lasted for span in spans if span.name == name) / 1e6


class Algorithm(NamedTuple):
    """Exchanges by one algorithm: what a rank did on average. busbw, in bytes per s, is None where it is not known."""

    kind: str
    algorithm: str
    path: str
    exchanges: float
    operations: float
    nbytes: float
    seconds: float
    busbw: float | None

    @property
    def rate(self) -> float:
        """Bytes of the vectors for each second of exchange."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class Negotiation(NamedTuple):
    """One negotiation: how long the rank that waited longest did, who was last, and how far behind the first.

    alone: from when to when all others waited for that rank, in microseconds. last is None where one rank only is known.
    """

    operation: str
    lasted: float
    last: int | None
    behind: float
    alone: tuple[int, int]
    args: dict[str, Any]


def read(path: str) -> list[Timeline]:
    """Read a file: of one rank, or of all; one that was cut off, up to there. ValueError where it is none of ours."""
    data, whole = _loaded(path)
    about = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(about, dict) or "mpiring" not in about or not isinstance(data.get("traceEvents"), list):
        raise ValueError(f"{path} is no timeline of mpiring")
    try:
        return _by_rank(path, about, data["traceEvents"], whole)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no timeline of mpiring: {type(error).__name__}: {error}") from None


def _loaded(path: str) -> tuple[Any, bool]:
    """Return the file's JSON, and whether it was whole."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return _mended(text), False


def _mended(text: str) -> Any:
    """Return what there is of a file that was cut off: its head and all whole events."""
    place = text.find(EVENTS) + len(EVENTS)
    try:
        data = json.loads(text[:place] + "]}")
    except ValueError:
        return None
    decoder = json.JSONDecoder()
    while (place := _skip(text, place)) < len(text):
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            break
        data["traceEvents"].append(event)
    return data


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in ", \t\r\n":
        place += 1
    return place


def _by_rank(path: str, about: dict[str, Any], events: Iterable[dict[str, Any]], whole: bool) -> list[Timeline]:
    """Sort events into ranks and rows; all that is written of a row stands behind what makes it."""
    machines = about.get("machines", {})
    found: dict[int, Timeline] = {}
    tracks: dict[tuple[int, int], str] = {}
    for event in events:
        rank = event["pid"]
        if rank not in found:
            where = machines.get(str(rank), about.get("machine", ""))
            found[rank] = Timeline(path, rank, int(about["size"]), where, int(about["epoch_us"]), whole)
        if event["ph"] == "M" and event["name"] == "thread_name":
            tracks[rank, event["tid"]] = event["args"]["track"]
        elif event["ph"] == "X":
            track, mine = tracks[rank, event["tid"]], found[rank]
            row = mine.operations.setdefault(track, []) if track else mine.engine
            row.append(Span(event["name"], int(event["ts"]), int(event["dur"]), event.get("args", {})))
        elif event["ph"] == "i":
            found[rank].moments.append(event["name"])
    return list(found.values())


def join(timelines: Iterable[Timeline]) -> list[Timeline]:
    """Return the timelines by rank, on the first one's clock. ValueError where they are not of one engine."""
    ranks = sorted(timelines, key=lambda one: one.rank)
    for one, other in zip(ranks, ranks[1:]):
        if one.size != other.size:
            raise ValueError(f"{one.path} is of {one.size} ranks, {other.path} of {other.size}")
        if one.rank == other.rank:
            raise ValueError(f"{one.path} and {other.path} are both of rank {one.rank}")
    epochs = {machine: round(median(one.epoch for one in ranks if one.machine == machine)) for machine in
              {one.machine for one in ranks}}
    for one in ranks:
        one.shift = epochs[one.machine] - epochs[ranks[0].machine]
    return ranks


def strangers(ranks: Sequence[Timeline]) -> list[Timeline]:
    """Return those that were over before another one began, or began after another one was over: hardly of the same run."""
    busy = [one for one in ranks if one.engine or one.operations]
    begin, end = max((one.ends[0] for one in busy), default=0), min((one.ends[1] for one in busy), default=0)
    return [one for one in busy if one.ends[1] < begin or one.ends[0] > end] if begin > end else []


def merged(ranks: Sequence[Timeline], version: str) -> Iterator[str]:
    """Yield the text of one file with all ranks' events, on one clock that begins with the first event."""
    zero = min((one.ends[0] for one in ranks if one.engine or one.operations), default=0)
    about = {"mpiring": version, "size": ranks[0].size, "epoch_us": ranks[0].epoch + zero,
             "machines": {str(one.rank): one.machine for one in ranks}}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},{EVENTS}'
    shifts = {one.rank: one.shift - zero for one in ranks}
    between = "\n"
    for path in dict.fromkeys(one.path for one in ranks):
        for event in _loaded(path)[0]["traceEvents"]:
            if event["ph"] != "M":
                event["ts"] += shifts[event["pid"]]
            yield between + json.dumps(event, separators=(",", ":"))
            between = ",\n"
    yield "\n]}\n"


def engine_seconds(ranks: Sequence[Timeline]) -> dict[str, list[float]]:
    """Return what each rank's engine spent, by phase, and idle."""
    names = list(dict.fromkeys([*ON_ENGINE, *(span.name for one in ranks for span in one.engine)]))
    spent = {name: [one.seconds(one.engine, name) for one in ranks] for name in names}
    busy = [_covered((span.begin, span.begin + span.lasted) for span in one.engine) for one in ranks]
    return {**spent, "idle": [(one.window[1] - one.window[0] - much) / 1e6 for one, much in zip(ranks, busy)]}


def operation_seconds(ranks: Sequence[Timeline]) -> dict[str, list[float]]:
    """Return how long an operation took on average on each rank, by phase."""
    return {name: [_mean_of(one, name) for one in ranks] for name in ON_OPERATION}


def submitted(one: Timeline) -> int:
    """Return how many operations a rank submitted."""
    return sum(span.name == "negotiate" for row in one.operations.values() for span in row)


def _mean_of(one: Timeline, name: str) -> float:
    total = sum(one.seconds(row, name) for row in one.operations.values())
    return total / max(1, submitted(one))


def algorithms(ranks: Sequence[Timeline]) -> list[Algorithm]:
    """Return the exchanges by algorithm, those that took longest first."""
    groups: dict[tuple[str, str, str], list[tuple[int, Span]]] = defaultdict(list)
    for one in ranks:
        for span in one.engine:
            if span.name == "exchange":
                key = tuple(str(span.args.get(what, "")) for what in ("kind", "algorithm", "path"))
                groups[key].append((one.rank, span))  # type: ignore[index]
    found = [_algorithm(key, spans, ranks[0].size) for key, spans in groups.items()]
    return sorted(found, key=lambda one: -one.seconds)


def _algorithm(key: tuple[str, str, str], spans: Sequence[tuple[int, Span]], size: int) -> Algorithm:
    members = len({rank for rank, _ in spans})
    seconds = sum(span.lasted for _, span in spans) / 1e6
    nbytes = sum(_number(span, "bytes", 0) for _, span in spans)
    moved = sum(_number(span, "bytes", 0) * (1 - 1 / max(1, _number(span, "ranks", size))) for _, span in spans)
    factor = {"allreduce": 2, "reduce_scatter": 1}.get(key[0])   # as nccl-tests count: each byte in 1/n of the vector and back
    return Algorithm(*key, len(spans) / members, sum(_number(span, "operations", 1) for _, span in spans) / members,
                     nbytes / members, seconds / members, factor * moved / seconds if factor and seconds else None)


def _number(span: Span, what: str, default: float) -> float:
    value = span.args.get(what, default)
    return value if isinstance(value, (int, float)) else default


def negotiations(ranks: Sequence[Timeline]) -> tuple[list[Negotiation], int]:
    """Return all negotiations that could be matched between ranks, and the number of operations that could not.

    The n-th of a name is the n-th on every rank, unless their argument `round` says which is which.
    """
    found: list[Negotiation] = []
    unmatched = 0
    for track in dict.fromkeys(track for one in ranks for track in one.operations):
        own = [(one, _asked(one, track)) for one in ranks if track in one.operations]
        keys = [set(asked) for _, asked in own]
        both = set.intersection(*keys) if all(map(_rounds, own)) or all(one == keys[0] for one in keys) else set()
        unmatched += len(set.union(*keys)) - len(both)
        found += [_negotiation(track, [(one, asked[key]) for one, asked in own]) for key in own[0][1] if key in both]
    return found, unmatched


def _rounds(own: tuple[Timeline, dict[Any, Span]]) -> bool:
    return all("round" in span.args for span in own[1].values())


def _asked(one: Timeline, track: str) -> dict[Any, Span]:
    """Return a rank's negotiations of a name, by what matches them between ranks."""
    spans = sorted((span for span in one.operations[track] if span.name == "negotiate"), key=lambda span: span.begin)
    return {span.args.get("round", place): span for place, span in enumerate(spans)}


def _negotiation(track: str, asked: Sequence[tuple[Timeline, Span]]) -> Negotiation:
    begins = sorted((span.begin + one.shift, one.rank) for one, span in asked)
    (end, rank), before = begins[-1], begins[-2:][0][0]
    lasted, args = max(((span.lasted, span.args) for _, span in asked), key=lambda entry: entry[0])
    last = rank if len(begins) > 1 else None
    return Negotiation(track, lasted / 1e6, last, (end - begins[0][0]) / 1e6, (before, end), args)


def longest(found: Iterable[Negotiation]) -> list[tuple[Negotiation, float, int, int]]:
    """Return for each operation its longest negotiation, the median one, how many, and how often the same rank was last."""
    named: dict[str, list[Negotiation]] = defaultdict(list)
    for one in found:
        named[one.operation].append(one)
    worst = [(max(group, key=lambda one: one.lasted), group) for group in named.values()]
    return [(one, median(other.lasted for other in group), len(group), sum(other.last == one.last for other in group))
            for one, group in sorted(worst, key=lambda entry: -entry[0].lasted)]


def stragglers(found: Iterable[Negotiation]) -> list[tuple[int, int, float, float]]:
    """Return of each rank how often it was last, its median time behind the first, and how long others waited for it alone."""
    by_rank: dict[int, list[Negotiation]] = defaultdict(list)
    for one in found:
        if one.last is not None:
            by_rank[one.last].append(one)
    rows = [(rank, len(group), median(one.behind for one in group), _covered(one.alone for one in group) / 1e6)
            for rank, group in by_rank.items()]
    return sorted(rows, key=lambda row: -row[3])


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Return how much time intervals cover, which may overlap: operations wait side by side."""
    total, reached = 0, None
    for begin, end in sorted(intervals):
        begin = begin if reached is None else max(begin, reached)
        total += max(0, end - begin)
        reached = max(begin, end)
    return total
