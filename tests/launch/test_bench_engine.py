"""The engine's bench, as its user meets it: under mpirun, with few bytes and little work."""

import csv
import json

import pytest

from launch import assert_told_once, run

TINY = ["-n", "3", "-w", "1", "-e", "64K", "--work", "2"]
KEYS = ["case", "subject", "arrays", "bytes", "time_us", "busbw", "allreduce_ratio", "hidden", "wrong"]
HEADING = ["case", "subject", "arrays", "bytes", "median_us", "min_us", "p99_us", "busbw", "xallreduce", "hidden%", "#wrong"]
SUBJECTS = {"many_small": ["engine", "allreduce", "comm"], "resnet50": ["engine", "allreduce"],
            "single": ["engine", "allreduce", "comm"], "overlap": ["work", "engine", "both"]}
EVERY = [(case, subject) for case, subjects in SUBJECTS.items() for subject in subjects]

BROKEN = """
import sys
import mpiring
from mpiring.bench.__main__ import main

class Broken(mpiring.Engine):
    '''Spoils one element of one array on one rank, from the time on when it has seen the name so often.'''

    seen = 0

    def synchronize(self, handle):
        result = super().synchronize(handle)
        if result.size == 1024 and self.rank == 1:
            self.seen += 1
            if self.seen > {after} and self.seen % 16 == 5:
                result[7] += 1
        return result

mpiring.Engine = Broken
sys.exit(main(sys.argv[1:]))
"""


def bench(ranks, *options):
    return run(ranks, ["-m", "mpiring.bench", "--engine", *options], timeout=120)


def table(text):
    """Return the rows of a printed table as dicts by heading."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines[0] == HEADING
    return [dict(zip(HEADING, line, strict=True)) for line in lines[1:]]


def comments(text):
    return [line for line in text.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize("ranks, place", [(3, []), (2, ["--inplace"]), (1, [])])
def test_table_json_and_csv_say_the_same(ranks, place, tmp_path):
    done = bench(ranks, *TINY, *place, "--json", str(tmp_path / "b.json"), "--csv", str(tmp_path / "b.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((tmp_path / "b.json").read_text())
    assert list(written) == ["environment", "results", "summary"]
    assert [written["environment"][key] for key in ("ranks", "nodes", "inplace")] == [ranks, 1, bool(place)]
    rows, lines = table(done.stdout), list(csv.DictReader((tmp_path / "b.csv").read_text().splitlines()))
    assert [(result["case"], result["subject"]) for result in written["results"]] == EVERY
    for row, line, result in zip(rows, lines, written["results"], strict=True):
        assert list(result) == KEYS and list(result["time_us"]) == ["median", "min", "p99"]
        assert [row["case"], row["subject"]] == [line["case"], line["subject"]] == [result["case"], result["subject"]]
        assert int(row["bytes"]) == int(line["bytes"]) == result["bytes"] and int(row["arrays"]) == result["arrays"]
        assert float(line["median_us"]) == result["time_us"]["median"] == pytest.approx(float(row["median_us"]), abs=0.01)
        assert result["wrong"] == (None if result["subject"] == "work" else 0)
        assert row["#wrong"] == ("-" if result["subject"] == "work" else "0")
    assert [entry["case"] for entry in written["summary"]] == list(SUBJECTS)
    assert [line.split()[1] for line in comments(done.stdout)[-4:]] == [f"{case}:" for case in SUBJECTS]


def test_columns_fit_each_other(tmp_path):
    done = bench(3, *TINY, "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "b.json").read_text())
    found = {(result["case"], result["subject"]): result for result in written["results"]}
    median = {key: result["time_us"]["median"] for key, result in found.items()}
    for (case, subject), result in found.items():
        assert result["time_us"]["min"] <= result["time_us"]["median"] <= result["time_us"]["p99"]
        if case != "overlap":
            ratio = median[case, "allreduce"] / median[case, subject]
            assert result["allreduce_ratio"] == pytest.approx(ratio, rel=1e-2) and result["hidden"] is None
        if subject in ("work", "both"):
            assert result["busbw"] is None
        else:
            assert result["busbw"] == pytest.approx(result["bytes"] / median[case, subject] / 1e3 * 4 / 3, rel=1e-2, abs=1e-6)
    work, engine, both = (median["overlap", subject] for subject in SUBJECTS["overlap"])
    assert found["overlap", "both"]["hidden"] == pytest.approx((work + engine - both) / min(work, engine), abs=1e-3)
    assert (found["many_small", "engine"]["arrays"], found["many_small", "comm"]["bytes"]) == (16, 64 << 10)
    assert found["resnet50", "engine"]["bytes"] == found["resnet50", "allreduce"]["bytes"] <= 64 << 10
    assert (found["resnet50", "engine"]["arrays"] > 5, found["resnet50", "allreduce"]["arrays"]) == (True, 1)
    assert (found["single", "engine"]["arrays"], found["single", "engine"]["bytes"]) == (1, 4)


def test_sizes_and_work_where_nothing_else_is_asked_for(tmp_path):
    done = bench(2, "many_small,overlap", "-n", "2", "-w", "0", "--work", "20", "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "b.json").read_text())["results"]
    assert [(result["arrays"], result["bytes"]) for result in found[:3]] == 3 * [(1000, 4096000)]
    work, engine = (result["time_us"]["min"] / 1e3 for result in found[3:5])
    assert 1 < work < 1000 and 1 < engine < 2000, (work, engine)        # 20 ms each, where nothing else runs
    assert found[4]["bytes"] == found[5]["bytes"] > 64 << 10


def test_one_node_with_too_few_cores_is_told():
    done = bench(8, "overlap", *TINY)
    assert done.returncode == 0, done.stderr
    told = [line for line in comments(done.stdout) if line.startswith("# overlap: on one node")]
    cores = int(comments(done.stdout)[1].split(" cores")[0].split()[-1])
    assert bool(told) == (cores < 16)


@pytest.mark.parametrize("after, wrong", [(0, 2), (40, 1)])
def test_a_wrong_result_is_told_with_its_array(after, wrong, tmp_path):
    """Also one that comes only with names that the engine already knows: 16 arrays are seen once before the timing."""
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(after=after))
    done = run(2, [str(path), "--engine", "many_small,single", *TINY[:-2]])
    assert done.returncode == 1, done.stderr
    assert [row["#wrong"] for row in table(done.stdout)] == [str(wrong), *5 * ["0"]]
    told, = [line for line in done.stderr.splitlines() if line.startswith("WRONG: ")]
    assert told.startswith(f"WRONG: many_small by engine, 65536 bytes: {wrong} wrong, first on rank 1, array 'small.")


def test_without_check_nothing_is_said_of_wrong_elements():
    done = bench(2, "single", "-n", "3", "-w", "1", "-c", "0")
    assert done.returncode == 0, done.stderr
    assert {row["#wrong"] for row in table(done.stdout)} == {"-"}


@pytest.mark.parametrize("options, complaint", [
    (["singel"], "argument --engine: unknown case 'singel' (did you mean 'single'?); known: many_small, resnet50, single, overlap"),
    (["single", "--bound"], "argument --engine: its cases leave no choice of --bound"),
    (["single", "--work", "9"], "argument --work: is for --engine overlap"),
])
def test_a_wrong_command_line_is_told_once(options, complaint):
    done = bench(2, *options)
    assert_told_once(done, complaint)
