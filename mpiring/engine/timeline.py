"""What an engine did and when, in the Trace Event Format that Perfetto, chrome://tracing and speedscope show: a file for each rank.

Times are microseconds of perf_counter, the clock that all processes of a machine share; epoch_us in the file is the wall clock at
its zero, by which files of several machines are joined. They are whole: viewers keep them exact then, and spans that follow each
other never seem to overlap, which would cost one of them its place on the row.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from contextlib import suppress
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from threading import Lock
from time import perf_counter_ns, time_ns
from typing import Any

from mpiring.version import __version__

ENGINE = "engine"
"""The name of the row that is the engine's own."""

BUFFERED = 1 << 14
"""Events that wait for a flush at most; the next one brings it about."""

MOST_TRACKS = 10_000
"""Operations' names that get a row in a file; others are left out, with a note on the engine's row."""

LANES = 64
"""Rows of one name at most: what overlaps on one row, viewers leave out, so it goes to the next one."""

TAIL = b"\n]}\n"
"""What makes the file complete, and is written over by what follows."""

BOOT = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger("mpiring")

Event = tuple[str, str, float, "float | None", dict[str, Any]]


class Timeline:
    """The file of one rank. Spans are kept until flush, which leaves complete JSON; a kill between two flushes changes nothing.

    A flush is one write. A kill in the middle of it can leave a cut file, which `python -m mpiring timeline` still reads.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int):
        self.path, self.rank, self.size = of_rank(path, rank), rank, size
        try:
            self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise OSError(error.errno, f"rank {rank} cannot write its timeline: {error.strerror}", self.path) from None
        self._process = os.getpid()                      # a fork has the file as well, and must not write to it
        self._events: list[Event] = []
        self._rows: dict[str, list[list[int]]] = {}      # by track: of each row its tid, and when its last span ends
        self._tid, self._full, self._end = size, False, 0
        self._lock = Lock()
        self._write(self._head())

    def span(self, track: str, name: str, begin: float, end: float, **args: Any) -> None:
        """Add what lasted from begin to end (perf_counter) on a track: an operation's name, or "" for the engine's own row."""
        self._add((track, name, begin, end, args))

    def instant(self, track: str, name: str, when: float, **args: Any) -> None:
        """Add a moment (perf_counter) on a track."""
        self._add((track, name, when, None, args))

    def flush(self) -> None:
        """Write what is new; a file that cannot be written any more ends here, with a warning."""
        if not self._events:
            return
        if self._forked():
            self._events.clear()
            return
        with self._lock:
            events = self._events[:]
            del self._events[:len(events)]               # what another thread adds meanwhile stays behind
            if self._file is not None:
                self._write("".join(map(self._line, events)))

    def close(self) -> None:
        """Flush, and close the file; what comes later goes nowhere."""
        self.flush()
        if not self._forked():                           # where another thread may have held the lock for ever
            with self._lock:
                self._shut()

    def _add(self, event: Event) -> None:
        self._events.append(event)                       # no lock: the list's own is enough
        if len(self._events) >= BUFFERED:
            self.flush()

    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _shut(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, text: str) -> None:
        """Write lines over the tail, and a new tail, in one go; where there is no room, bring the old tail back and end."""
        assert self._file is not None
        body = text.encode("ascii")
        try:
            _put(self._file, body + TAIL, self._end)
            self._end += len(body)
        except OSError as error:
            _log.warning("rank %d: the timeline in %s ends here: %s", self.rank, self.path, error.strerror)
            with suppress(OSError):
                _put(self._file, TAIL, self._end)
                os.ftruncate(self._file, self._end + len(TAIL))
            self._shut()

    def _head(self) -> str:
        """Return the beginning: whose file it is, on which clock, and the names that viewers show."""
        host = socket.gethostname()
        about = {"mpiring": __version__, "rank": self.rank, "size": self.size, "host": host, "machine": machine(),
                 "process": self._process, "epoch_us": epoch()}
        named = ((f"process_{what}", value) for what, value in (
            ("name", {"name": f"rank {self.rank} of {self.size}"}), ("sort_index", {"sort_index": self.rank}),
            ("labels", {"labels": host})))
        lines = ",\n".join(self._metadata(name, self.rank, args) for name, args in named)
        return f'{{"displayTimeUnit":"ms","otherData":{_object(about)},"traceEvents":[\n{lines}' + self._new_row(ENGINE, "")

    def _new_row(self, shown: str, track: str) -> str:
        """Make a row; its tid is like no pid and no other rank's, for viewers that take tids for the machine's."""
        self._tid += self.size
        tid = self._tid + self.rank
        rows = self._rows.setdefault(track, [])
        rows.append([tid, -1])
        order = {"sort_index": rows[0][0]}               # the same for all rows of a name: they stand together
        return ",\n" + ",\n".join((self._metadata("thread_name", tid, {"name": shown, "track": track}),
                                   self._metadata("thread_sort_index", tid, order)))

    def _metadata(self, name: str, tid: int, args: dict[str, Any]) -> str:
        return f'{{"ph":"M","pid":{self.rank},"tid":{tid},"ts":0,"name":"{name}","args":{_object(args)}}}'

    def _line(self, event: Event) -> str:
        """Return an event as a line, behind those that make its row where that is new; nothing where there are too many rows."""
        track, name, begin, end, args = event
        start = round(begin * 1e6)
        last = start if end is None else max(start, round(end * 1e6))
        row, made = self._row(track, start, end is None)
        if row is None:
            return made
        row[1] = max(row[1], last)
        kind = '"ph":"i","s":"t"' if end is None else f'"ph":"X","dur":{last - start}'
        more = f',"args":{_object(args)}' if args else ""
        category = "operation" if track else ENGINE
        return (f'{made},\n{{{kind},"pid":{self.rank},"tid":{row[0]},"ts":{start},"name":{quoted(str(name))},'
                f'"cat":"{category}"{more}}}')

    def _row(self, track: str, start: int, instant: bool) -> tuple[list[int] | None, str]:
        """Return a row of the track where nothing lasts longer than start, and what makes it where it is new."""
        rows = self._rows.get(track, ())
        for row in rows:
            if row[1] <= start or instant:
                return row, ""
        if len(rows) >= LANES or (not rows and len(self._rows) > MOST_TRACKS):
            return None, self._too_many(start)
        shown = track or ENGINE
        made = self._new_row(f"{shown} ({len(rows) + 1})" if rows else shown, track)
        return self._rows[track][-1], made

    def _too_many(self, start: int) -> str:
        """Say once, on the engine's row, that operations are left out."""
        if self._full:
            return ""
        self._full = True
        return self._line(("", "no more rows: operations are left out", start / 1e6, None, {}))


def of_rank(path: str | os.PathLike[str], rank: int) -> str:
    """Return a rank's own path: {rank} in it filled in, else trace.json becomes trace.rank3.json."""
    text = os.fspath(path)
    if "{rank" not in text:
        stem, suffix = os.path.splitext(text)
        return f"{stem}.rank{rank}{suffix}"
    try:
        return text.format(rank=rank)
    except (ValueError, LookupError) as error:
        raise ValueError(f"timeline {text!r} is not a path with {{rank}} in it: {error}") from None


def machine() -> str:
    """Return what tells machines, and with them clocks, apart: the boot's id where there is one."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return socket.gethostname()


def epoch() -> int:
    """Return the wall clock at the zero of perf_counter, in microseconds: the reading that was least interrupted of some."""
    readings = []
    for _ in range(9):
        before, wall, after = perf_counter_ns(), time_ns(), perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return round(min(readings)[1] / 1000)


def _put(file: int, data: bytes, place: int) -> None:
    """Write all of the data at a place."""
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


def _object(args: dict[str, Any]) -> str:
    return "{" + ",".join([f"{quoted(key)}:{_value(value)}" for key, value in args.items()]) + "}"


def _value(value: Any) -> str:
    """Write a number or a text as JSON; anything else, also what JSON has no number for, as the text that str gives."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)                       # not a subclass's own, which may be no number
    if isinstance(value, float) and math.isfinite(value):
        return float.__repr__(value)
    return "null" if value is None else quoted(str(value))
