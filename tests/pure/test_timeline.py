"""Timelines: complete JSON at any time, as viewers want it, read and joined; where time went and who was waited for."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from time import perf_counter, time

import pytest

from mpiring.__main__ import main
from mpiring.analysis import timelines
from mpiring.engine import timeline as written
from mpiring.engine.timeline import Timeline, of_rank

REQUIRED = {"M": {"name", "ph", "pid", "tid", "args"}, "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur"},
            "i": {"name", "cat", "ph", "pid", "tid", "ts", "s"}}
"""Keys by phase, as the Trace Event Format has them."""

METADATA = {"process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index", "thread_name": "name",
            "thread_sort_index": "sort_index"}


def strict(text):
    """Parse JSON, without what Python takes besides."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def checked(path):
    """Check a file against the format; return its events."""
    data = strict(path.read_text(encoding="ascii"))
    assert data["displayTimeUnit"] in ("ms", "ns") and isinstance(data["otherData"], dict)
    rows, spans = set(), {}
    for event in data["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["ts"], int) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            rows |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
            continue
        assert (event["pid"], event["tid"]) in rows, "an event on a row that nothing has named yet"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
    for row in spans.values():
        nested(sorted(row))
    return data["traceEvents"]


def nested(spans):
    """Check that spans of a row lie beside or in each other."""
    open_ends = []
    for begin, minus in spans:
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or begin - minus <= open_ends[-1], "spans of a row overlap"
        open_ends.append(begin - minus)


def named(events, name):
    return [event for event in events if event["name"] == name]


def test_paths_are_of_a_rank(tmp_path):
    assert of_rank("a/trace.json", 3) == "a/trace.rank3.json" and of_rank("trace", 3) == "trace.rank3"
    assert of_rank("a.b/trace", 3) == "a.b/trace.rank3"
    assert of_rank("{rank:02}/t{rank}.json", 3) == "03/t3.json"
    for wrong in ("t{rank", "{rank}{other}", "{rank}{}"):
        with pytest.raises(ValueError, match=r"timeline '.*' is not a path"):
            of_rank(wrong, 0)
    line = Timeline(tmp_path / "t.json", 1, 2)
    assert line.path == str(tmp_path / "t.rank1.json") and os.path.exists(line.path)
    line.close()


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"rank 2 cannot write its timeline: No such file.*none/t\.rank2\.json") as caught:
        Timeline(tmp_path / "none" / "t.json", 2, 3)
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "t.rank0.json").mkdir()
    with pytest.raises(IsADirectoryError):
        Timeline(tmp_path / "t.json", 0, 1)


def test_every_flush_leaves_a_complete_file(tmp_path):
    line = Timeline(tmp_path / "t.json", 3, 8)
    path, seen = tmp_path / "t.rank3.json", 0
    checked(path)
    for step in range(200):
        for index in range(step % 5):
            line.span(f"gradient {index}", "queue", step + index / 10, step + index / 10 + 0.05, bytes=step)
            seen += 1
        line.span("", "exchange", step, step + 0.5, algorithm="ring")
        line.flush()
        assert len([event for event in checked(path) if event["ph"] == "X"]) == seen + step + 1
    line.close()
    line.close()
    line.span("", "late", 0, 1)
    line.flush()
    events = checked(path)
    assert not named(events, "late") and {event["pid"] for event in events} == {3}
    assert named(events, "process_name")[0]["args"]["name"] == "rank 3 of 8"
    assert [row["args"]["name"] for row in named(events, "thread_name")] == ["engine", *(f"gradient {k}" for k in range(4))]


def test_any_name_and_argument_is_written(tmp_path):
    line = Timeline(tmp_path / "t.json", 0, 1)
    names = ['"', "\\", "\n\t\0\x1f", "gr\u00fc\u00dfe \U0001f525", "\udc80 alone", "</script>", "\u2028", ""]
    args = {"nan": float("nan"), "inf": float("-inf"), "none": None, "yes": True, "n": 2**70, "x": 0.5, "list": [1, "]}"],
            "level": logging.Formatter, 'ke"y': "v\n]}"}
    for place, name in enumerate(names):
        line.span(name, name or "empty", place, place + 0.5, **args)
    line.instant("", "moment", 1.0, why='"')
    line.close()
    events = checked(tmp_path / "t.rank0.json")
    assert [event["name"] for event in events if event["ph"] == "X"] == [*names[:-1], "empty"]
    found = events[-2]["args"]
    assert (found["nan"], found["inf"], found["none"]) == ("nan", "-inf", None)
    assert (found["yes"], found["n"], found["x"]) == (True, 2**70, 0.5)
    assert found['ke"y'] == "v\n]}" and found["list"] == "[1, ']}']"


def test_numpy_numbers_are_written_as_json(tmp_path):
    numpy = pytest.importorskip("numpy")
    line = Timeline(tmp_path / "t.json", 0, 1)
    line.span("", "pack", 0, 1, a=numpy.float64(1.5), b=numpy.int64(3), c=numpy.float32(0.5))
    line.close()
    args = checked(tmp_path / "t.rank0.json")[-1]["args"]
    assert args["a"] == 1.5 and args["b"] == "3" and args["c"] == "0.5"


def test_times_are_on_the_clock_of_the_machine(tmp_path):
    before = time()
    line, now = Timeline(tmp_path / "t.json", 0, 1), perf_counter()
    line.span("", "pack", now, now + 1.25)
    line.close()
    data = strict((tmp_path / "t.rank0.json").read_text())
    event = data["traceEvents"][-1]
    assert event["ts"] == round(now * 1e6) and event["dur"] == 1_250_000
    wall = (data["otherData"]["epoch_us"] + event["ts"]) / 1e6
    assert before - 0.1 < wall < time() + 0.1


def test_what_follows_never_overlaps_by_rounding(tmp_path):
    line, at = Timeline(tmp_path / "t.json", 0, 1), 123456.7
    for place in range(300):
        ends = [at, at + 0.3e-6, at + 1.7e-6 + place * 1e-8, at + 9.1e-6]
        for name, begin, end in zip(("pack", "exchange", "unpack"), ends, ends[1:]):
            line.span("", name, begin, end)
        at = ends[-1]
    line.close()
    events = checked(tmp_path / "t.rank0.json")
    assert len(named(events, "thread_name")) == 1 and len([event for event in events if event["ph"] == "X"]) == 900


def test_what_overlaps_gets_a_row_beside(tmp_path):
    line = Timeline(tmp_path / "t.json", 1, 3)
    for begin, end in ((0, 4), (1, 3), (2, 6), (4, 5), (6, 7)):
        line.span("a", "queue", begin, end)
        line.span("", "exchange", begin, end)
    line.close()
    events = checked(tmp_path / "t.rank1.json")
    rows = {row["args"]["name"]: row["tid"] for row in named(events, "thread_name")}
    assert list(rows) == ["engine", "a", "a (2)", "engine (2)", "a (3)", "engine (3)"]
    assert [event["ts"] // 10**6 for event in events if event["ph"] == "X" and event["tid"] == rows["a"]] == [0, 4, 6]
    one, = timelines.read(str(tmp_path / "t.rank1.json"))
    assert len(one.operations["a"]) == len(one.engine) == 5


def test_row_numbers_are_like_no_rank_and_no_other_row(tmp_path):
    tids = []
    for rank in range(5):
        line = Timeline(tmp_path / "t.json", rank, 5)
        for track in "abc":
            line.span(track, "queue", 0, 1)
        line.close()
        tids += [row["tid"] for row in named(checked(tmp_path / f"t.rank{rank}.json"), "thread_name")]
    assert len(set(tids)) == 20 and min(tids) >= 5


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "BUFFERED", 50)
    monkeypatch.setattr(written, "MOST_TRACKS", 7)
    monkeypatch.setattr(written, "LANES", 3)
    line = Timeline(tmp_path / "t.json", 0, 1)
    for place in range(1000):
        line.span(f"t{place}", "queue", place, place + 1)
        line.span("same", "queue", 0, 1)
        assert len(line._events) < 50
    line.span("t1", "queue", 1001, 1002)
    line.close()
    assert len(line._rows) == 8 and all(len(rows) <= 3 for rows in line._rows.values())
    events = checked(tmp_path / "t.rank0.json")
    assert len([event for event in events if event["ph"] == "i"]) == 1
    assert events[-1]["ts"] == 1001 * 10**6, "a name that has a row keeps it"


def test_many_threads_add_at_once(tmp_path):
    line = Timeline(tmp_path / "t.json", 0, 1)

    def work(name):
        for place in range(500):
            line.span(name, "queue", place, place + 1)
            if place % 7 == 0:
                line.flush()

    threads = [threading.Thread(target=work, args=(f"thread {k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.close()
    assert len(named(checked(tmp_path / "t.rank0.json"), "queue")) == 4000


KILLED = """
import os, signal, sys
from mpiring.engine.timeline import Timeline
line = Timeline(sys.argv[1], 0, 1)
for step in range(100):
    line.span("a", "queue", step, step + 1)
    line.flush()
line.span("a", "not flushed", 100, 101)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_what_was_flushed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "t.json")])
    assert ended.returncode == -signal.SIGKILL
    events = checked(tmp_path / "t.rank0.json")
    assert len(named(events, "queue")) == 100 and not named(events, "not flushed")


def test_a_fork_writes_nothing(tmp_path):
    line = Timeline(tmp_path / "t.json", 0, 1)
    line.span("", "pack", 0, 1)
    with line._lock:                                     # as another thread may, at that moment
        child = os.fork()
    if not child:
        line._lock.acquire(blocking=False)
        signal.alarm(10)
        for _ in range(9):
            line.span("", "of the child", 0, 1)
        line.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    line.close()
    events = checked(tmp_path / "t.rank0.json")
    assert len(named(events, "pack")) == 1 and not named(events, "of the child")


def test_a_full_disk_ends_the_timeline_not_the_engine(tmp_path, monkeypatch, caplog):
    line, put = Timeline(tmp_path / "t.json", 0, 1), os.pwrite
    line.span("", "pack", 0, 1)
    line.flush()
    room = [70]

    def full(file, data, place):
        wrote = put(file, data[:room[0]], place) if len(data) > 10 and room[0] else 0
        if not room[0] and len(data) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] = 0 if len(data) > 10 else room[0]
        return wrote or put(file, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    line.span("", "exchange", 1, 2)
    with caplog.at_level(logging.WARNING, "mpiring"):
        line.flush()
        line.span("", "unpack", 2, 3)
        line.flush()
    line.close()
    assert [event["name"] for event in checked(tmp_path / "t.rank0.json") if event["ph"] == "X"] == ["pack"]
    assert len(caplog.records) == 1 and "rank 0: the timeline in" in caplog.text and "No space left" in caplog.text


# Reading, joining, and the command

LATE, STEPS = 2, 10


def run_of(folder, ranks=4, late=LATE, machines=None):
    """Write the timelines of a run with known times: a rank that is 5 ms late, 1 ms of everything else."""
    lines = [Timeline(folder / "t.json", rank, ranks) for rank in range(ranks)]
    for step in range(STEPS):
        at = 10 + step * 0.1
        for rank, line in enumerate(lines):
            line.span("", "negotiate", at, at + 0.006)
            for name in ("a", "b"):
                line.span(name, "negotiate", at + (0.005 if rank == late else 0.001 * (rank % 2)), at + 0.006, kind="allreduce",
                          dtype="float32", shape="(250000,)", bytes=1_000_000)
                line.span(name, "queue", at + 0.006, at + 0.007)
            for place, name in enumerate(("pack", "exchange", "unpack")):
                args = {"kind": "allreduce", "algorithm": "ring", "path": "x", "bytes": 2_000_000, "operations": 2}
                for track in ("", "a", "b"):
                    line.span(track, name, at + 0.007 + place / 1e3, at + 0.008 + place / 1e3,
                              **(args if (name, track) == ("exchange", "") else {}))
    for line in lines:
        line.close()
    for rank, (machine, offset) in (machines or {}).items():
        text = (folder / f"t.rank{rank}.json").read_text()
        data = strict(text)
        data["otherData"].update(machine=machine, epoch_us=data["otherData"]["epoch_us"] - offset)
        for event in data["traceEvents"]:
            event["ts"] += offset if event["ph"] != "M" else 0
        (folder / f"t.rank{rank}.json").write_text(json.dumps(data))
    return [str(folder / f"t.rank{rank}.json") for rank in range(ranks)]


def ran(capsys, *words, status=0):
    assert main(["timeline", *words]) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err and bool(err) == bool(status)
    return err if status else out


def cells(out, heading, first):
    """Return the cells of a table's row, by its heading's first words and its own first cell."""
    below = out[out.index(heading):].splitlines()
    return next(line.split() for line in below if line.split()[:1] == [first])


def test_the_figures_are_those_of_the_run(tmp_path, capsys):
    files = run_of(tmp_path)
    record = json.loads(ran(capsys, *files, "--json"))
    assert record["ranks"] == [0, 1, 2, 3] and record["operations"] == [20] * 4 and record["unmatched"] == 0
    near = pytest.approx
    assert record["engine_seconds"] == {"negotiate": near([0.06] * 4), "pack": near([0.01] * 4), "exchange": near([0.01] * 4),
                                        "unpack": near([0.01] * 4), "idle": near([0.91 - 0.1 + 0.01] * 4, abs=1e-5)}
    means = record["operation_seconds"]
    assert means["negotiate"] == near([0.006, 0.005, 0.001, 0.005]) and means["queue"] == near([0.001] * 4)
    exchange, = record["exchanges"]
    assert exchange["exchanges"] == 10 and exchange["operations"] == 20 and exchange["nbytes"] == 20e6
    assert exchange["algbw"] == near(2e9) and exchange["busbw"] == near(3e9)
    assert [one["operation"] for one in record["negotiations"]] == ["a", "b"]
    worst = record["negotiations"][0]
    assert (worst["last"], worst["same_rank_last"], worst["times"]) == (LATE, 10, 10)
    assert worst["lasted"] == near(0.006) and worst["behind"] == near(0.005)
    late, = record["last"]
    assert late == {"rank": LATE, "times": 20, "median_behind": near(0.005), "waited_alone": near(0.04)}


def test_the_table(tmp_path, capsys):
    out = ran(capsys, *run_of(tmp_path), "--longest", "1")
    assert out.startswith("4 ranks on 1 machine: 910 ms, 20 operations on a rank\n")
    assert cells(out, "the engine's time", "negotiate") == ["negotiate", "6.6%", "60", "ms", "60", "ms", "60", "ms", "0"]
    assert cells(out, "an operation's time", "negotiate") == ["negotiate", "51.5%", "1", "ms", "5", "ms", "6", "ms", "0"]
    assert cells(out, "collective ", "allreduce")[-6:] == ["10", "ms", "2", "GB/s", "3", "GB/s"]
    assert cells(out, "who was the last", "2") == ["2", "20", "100.0%", "5", "ms", "40", "ms", "4.4%"]
    assert "(1 of 2 operations)" in out and max(map(len, out.splitlines())) <= 132


def test_files_are_merged_on_one_clock(tmp_path, capsys):
    files = run_of(tmp_path, machines={1: ("other", 10**9), 3: ("other", 10**9)})
    out = ran(capsys, *files, "--out", str(tmp_path / "all.json"))
    assert "4 ranks on 2 machines" in out and "wall clocks" in out
    assert cells(out, "who was the last", "2")[:2] == ["2", "20"]
    events = checked(tmp_path / "all.json")
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    times = {rank: [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == rank] for rank in range(4)}
    assert min(times[0]) == 0 and all(abs(min(times[rank])) < 2000 for rank in times), "epochs differ by how exactly they are read"
    assert max(map(max, times.values())) < 10**6 + 2000
    again = ran(capsys, str(tmp_path / "all.json"))
    assert again.splitlines()[0] == out.splitlines()[0]
    assert again[again.index("the engine's time"):] in out


def test_one_machine_is_merged_exactly(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(written, "epoch", iter((10**15, 10**15 + 7, 10**15 - 90, 10**15 + 3)).__next__)
    files = run_of(tmp_path)
    ran(capsys, *files, "--out", str(tmp_path / "all.json"))
    events = checked(tmp_path / "all.json")
    for rank in range(4):
        own = [event for event in checked(tmp_path / f"t.rank{rank}.json") if event["ph"] == "X"]
        merged = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        assert [event["ts"] - 10_000_000 for event in own] == [event["ts"] for event in merged]


@pytest.mark.parametrize("cut", [2, 4, 20, 400, 4000])
def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path, capsys, cut):
    files = run_of(tmp_path)
    text = (tmp_path / "t.rank1.json").read_text()
    (tmp_path / "t.rank1.json").write_text(text[:-cut] + ("\0" * 50 if cut == 400 else ""))
    out = ran(capsys, *files, "--out", str(tmp_path / "all.json"))
    assert "t.rank1.json is cut off: read as far as it goes" in out
    checked(tmp_path / "all.json")
    whole = text[:-cut].count('"ph":"X"') - (not text[:-cut].rstrip(",\n]").endswith("}"))
    one, = timelines.read(files[1])
    assert len(one.engine) + sum(map(len, one.operations.values())) == whole
    assert ("could not be matched" in out) == (cut == 4000)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "no json", '{"traceEvents":[]}', '{"otherData":{"mpiring":"1"}}', "\0" * 99,
                                  '{"otherData":{"mpiring":"1"},"traceEvents":[1]}', "[" * 100_000,
                                  '{"otherData":{"mpiring":"1"},"traceEvents":[{"ph":"X"}]}'])
def test_what_is_no_timeline_is_named(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    err = ran(capsys, *run_of(tmp_path), str(tmp_path / "x.json"), status=2)
    assert err.startswith(f"error: {tmp_path / 'x.json'} is no timeline of mpiring") and len(err.splitlines()) == 1


def test_wrong_use_is_one_line(tmp_path, capsys):
    files = run_of(tmp_path)
    assert "no.json: No such file or directory" in ran(capsys, str(tmp_path / "no.json"), status=2)
    (tmp_path / "twice.json").write_text((tmp_path / "t.rank1.json").read_text())
    assert "are both of rank 1" in ran(capsys, *files, str(tmp_path / "twice.json"), status=2)
    assert "is one of the files to be read" in ran(capsys, *files, "--out", files[0], status=2)
    assert "cannot be written" in ran(capsys, *files, "--out", str(tmp_path / "none" / "all.json"), status=2)
    other = tmp_path / "other"
    other.mkdir()
    assert "of 2 ranks" in ran(capsys, files[3], *run_of(other, ranks=2), status=2)
    checked(tmp_path / "t.rank0.json")


def test_missing_and_foreign_files_are_told(tmp_path, capsys):
    files = run_of(tmp_path)
    assert "no file of ranks 1, 3: if one of these was last" in ran(capsys, files[0], files[2])
    alone = ran(capsys, files[0])
    assert "who was last cannot be told" in alone and "last rank" not in alone
    stale = Timeline(tmp_path / "t.json", 3, 4)
    stale.span("", "pack", 5, 6)
    stale.close()
    assert "WARNING" in (out := ran(capsys, *files)) and "t.rank3.json does not overlap" in out
    empty = Timeline(tmp_path / "e.json", 0, 1)
    empty.close()
    assert ran(capsys, str(tmp_path / "e.rank0.json")).startswith("1 rank on 1 machine: 0 s, 0 operations")


@pytest.mark.parametrize("rounds, matched", [(True, 3), (False, 0)])
def test_rounds_say_which_negotiations_belong_together(tmp_path, rounds, matched):
    for rank in range(2):
        line = Timeline(tmp_path / "t.json", rank, 2)
        for number in range(rank, 4):
            line.span("a", "negotiate", number + rank / 10, number + 0.5, **({"round": number} if rounds else {}))
        line.close()
    files = [str(tmp_path / f"t.rank{rank}.json") for rank in range(2)]
    found, unmatched = timelines.negotiations(timelines.join(one for path in files for one in timelines.read(path)))
    assert unmatched == 4 - matched and [(one.last, one.behind) for one in found] == [(1, pytest.approx(0.1))] * matched
