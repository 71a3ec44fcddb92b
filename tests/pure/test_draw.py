"""Text and pictures show every message of every algorithm, and fit where they are to be read."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from mpiring.algorithms.registry import ALGORITHMS, COLLECTIVES, Algorithm, find
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import IDLE, Step, one
from mpiring.analysis import pictures
from mpiring.analysis.draw import chunk_names, moves, text
from mpiring.analysis.machines import find_machine
from mpiring.analysis.replay import replay
from mpiring.errors import ScheduleError
from mpiring.units import binary, rate, seconds, size

RING = """\
allreduce by ring, 2 ranks: the vector is cut into chunks c0 to c1
2 rounds, 4 messages; the busiest rank sends 1 vector; sums keep the order of ranks

round  rank 0  rank 1
    0  c1 +>1  c0 +>0
-----  ------  ------
    1  c0 =>1  c1 =>0

  c3 +>1    sends chunk 3 to rank 1, which adds it to its own
  c3 =>1    sends chunk 3 to rank 1, which keeps it as it is
  -----     sums above, copies below
"""


def settings(ranks):
    return Setting(ranks, pieces=2, nodes=tuple(rank // 3 for rank in range(ranks)))


def test_a_small_ring_to_the_letter():
    assert text(find("ring"), Setting(2)) == RING


@pytest.mark.parametrize("collective, name", ALGORITHMS)
def test_every_message_is_in_the_text(collective, name):
    algorithm = find(name, collective)
    for ranks in (1, 2, 5, 8):
        drawn = text(algorithm, settings(ranks))
        table = drawn.split("\n\n  ")[0]
        sent = [move for steps in replay(algorithm, settings(ranks)) for move in moves(steps)]
        shown = sorted(("+" if move.adds else "=", str(move.receiver)) for move in sent)
        assert sorted(re.findall(r"([+=])>(\d+)", table)) == shown
        assert all(len(line) <= 100 for line in drawn.splitlines()) and "\033" not in drawn


def test_ranks_that_do_not_fit_stand_below():
    drawn = text(find("ring"), Setting(16), width=80)
    assert max(map(len, drawn.splitlines()[3:])) <= 80 and drawn.count("round  rank") == 3
    assert text(find("ring"), Setting(16), width=1000).count("round  rank") == 1


def test_what_a_rank_does():
    drawn = text(find("tree"), Setting(4)).splitlines()
    assert drawn[4] == "    0  <1      c0 +>0  <3      c0 +>2" and drawn[5] == "    1  <2      .       c0 +>0  ."


def test_idle_rounds_and_wrong_schedules():
    broadcast = COLLECTIVES["broadcast"]
    late = Algorithm("late", broadcast, lambda rank, n: [IDLE, Step(1, one(0)) if rank == 0 else Step(recv_from=0, recv=one(0))],
                     lambda setting: 1, lambda setting: 2, lambda setting: 1, "")
    assert "    0  .       .\n    1  c0 =>1  <0\n" in text(late, Setting(2))
    never = Algorithm("never", broadcast, lambda rank, n: [IDLE], lambda setting: 1, lambda setting: 1, lambda setting: 0, "")
    with pytest.raises(ScheduleError, match="rank 1, chunk 0: never gets the chunk"):
        text(never, Setting(2))


@pytest.mark.parametrize("chunks, short", [
    (range(3, 4), "c3"), (range(0, 4), "c0-3"), ((6, 7, 0, 1), "c6-1"), ((7, 0), "c7-0"), ((1, 5), "c1,5"), ((1, 2, 5), "c1-2,5"),
    ((1, 3, 5, 7), "c1,..(4)")])
def test_chunk_names(chunks, short):
    assert chunk_names(chunks, 8) == short


def test_units():
    assert [seconds(value) for value in (0, 2.5e-9, 5.926e-3, 15.8e-6, 0.2805, 12, 0.9999e-3)] == [
        "0 s", "2.5 ns", "5.93 ms", "15.8 us", "280 ms", "12 s", "1 ms"]
    assert [size(value) for value in (0, 999, 160_000_000, 2.5e9)] == ["0 B", "999 B", "160 MB", "2.5 GB"]
    assert [binary(value) for value in (0, 1000, 64 << 10, 3 << 19, 160_000_000)] == ["0 B", "1 KB", "64 KiB", "1.57 MB", "160 MB"]
    assert rate(1 / 18e9) == "18 GB/s" and rate(0) == "no limit"


def words(path):
    return [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name, ranks", [("ring", 8), ("bruck", 5), ("hierarchical", 6), ("double_tree", 4), ("ring", 1)])
def test_a_picture_of_steps_has_a_label_for_every_message(name, ranks, tmp_path):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "a.svg")
    pictures.steps(path, find(name), settings(ranks))
    found = words(path)
    sent = [move for steps in replay(find(name), settings(ranks)) for move in moves(steps)]
    labels = [chunk_names(move.chunks, find(name).chunks(settings(ranks))) for move in sent]
    assert sorted(word for word in found if word and word[0] == "c" and word[1].isdigit()) == sorted(labels)
    assert ("the receiver adds it to its own" in found) == (ranks > 1)
    if name == "ring" and ranks == 8:
        assert found.count("to 0") == found.count("from 7") == 14 and "rank 7" in found


def test_other_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    machine = find_machine("cpu-node")
    pictures.space_time(str(tmp_path / "time.svg"), find("ring"), 1 << 20, machine, 4)
    assert "a rank reduces" in words(tmp_path / "time.svg")
    pictures.times(str(tmp_path / "ranks.svg"), [find("ring"), find("tree"), find("hierarchical")], 1 << 20, machine, 6)
    assert {"tree", "ring, hierarchical", "6"} < set(words(tmp_path / "ranks.svg"))
    pictures.steps(str(tmp_path / "a.png"), find("tree"), Setting(3))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_pictures_refuse(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"does not end in \.svg or \.png"):
        pictures.steps("a.pdf", find("ring"), Setting(2))
    with pytest.raises(ValueError, match=r"cannot be read, more than 4,000"):
        pytest.importorskip("matplotlib")
        pictures.steps(str(tmp_path / "a.svg"), find("ring"), Setting(100))
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        pictures.steps(str(tmp_path / "no" / "a.svg"), find("ring"), Setting(2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'mpiring\[plot\]'"):
        pictures.steps(str(tmp_path / "a.svg"), find("ring"), Setting(2))
