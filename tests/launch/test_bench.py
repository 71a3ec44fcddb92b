"""The bench's command line, as its user meets it: under mpirun, on tiny vectors."""

import csv
import json
from math import prod

import pytest

from mpiring.algorithms.registry import COLLECTIVES, names

from launch import assert_told_once, run

TINY = ["-b", "8", "-e", "1K", "-f", "8", "-n", "3", "-w", "1"]
KEYS = ["collective", "algorithm", "bytes", "count", "dtype", "op", "time_us", "algbw", "busbw", "native_ratio", "wrong", "ran",
        "path", "bound_share"]
HEADING = ["bytes", "count", "dtype", "op", "algorithm", "median_us", "min_us", "p99_us", "algbw", "busbw", "xnative", "#wrong"]
ALL = {name: ["auto", "shared", *names(name), "native"] for name in COLLECTIVES} | {"allreduce": ["auto", "ring", "tree", "native"]}

CORRUPT = """
import numpy as np
from mpi4py import MPI

def allreduce(buf, comm):
    comm.Allreduce(MPI.IN_PLACE, buf)
    if comm.rank == 1 and buf.size > 5:
        buf[5] += 1
"""


def bench(ranks, *options):
    return run(ranks, ["-m", "mpiring.bench", *options])


def results(path, ranks, *options):
    """Run the bench with success, all right, and return the results that its JSON holds."""
    done = bench(ranks, *TINY, *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["results"]
    assert found and all(result["wrong"] == (None if result["algorithm"] == "bound" else 0) for result in found)
    return found


def table(text, heading=HEADING):
    """Return the rows of a printed table as dicts by heading."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines[0] == heading
    return [dict(zip(heading, line, strict=True)) for line in lines[1:]]


def test_table_json_and_csv_say_the_same(tmp_path):
    ranks = 3
    done = bench(ranks, *TINY, "--json", str(tmp_path / "b.json"), "--csv", str(tmp_path / "b.csv"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "b.json").read_text())
    assert list(written) == ["environment", "results", "summary"]
    assert [written["environment"][key] for key in ("ranks", "nodes", "buffers", "inplace")] == [ranks, 1, "ordinary", False]
    rows, lines = table(done.stdout), list(csv.DictReader((tmp_path / "b.csv").read_text().splitlines()))
    assert len(rows) == len(lines) == len(written["results"]) == 4 * 4
    for row, line, result in zip(rows, lines, written["results"]):
        assert list(result) == KEYS
        assert list(result["time_us"]) == ["median", "min", "p99"]
        assert [line[key] for key in ("algorithm", "ran", "path")] == [result[key] for key in ("algorithm", "ran", "path")]
        assert row["algorithm"] == (f"auto:{result['ran']}" if result["algorithm"] == "auto" else result["algorithm"])
        assert int(row["bytes"]) == int(line["bytes"]) == result["bytes"] == 4 * result["count"]
        assert (row["#wrong"], line["wrong"], result["wrong"]) == ("0", "0", 0)
        assert float(line["median_us"]) == result["time_us"]["median"] == pytest.approx(float(row["median_us"]), abs=0.01)
    assert [result["bytes"] for result in written["results"][::4]] == [8, 64, 512, 1024]
    last = [line for line in done.stdout.splitlines() if line.startswith("# ")][-1]
    for entry, name in zip(written["summary"], ("auto", "ring", "tree"), strict=True):
        ratios = [result["native_ratio"] for result in written["results"] if result["algorithm"] == name]
        assert entry["algorithm"] == name and entry["worst"] == min(ratios)
        assert entry["native_ratio"] == pytest.approx(prod(ratios) ** 0.25, rel=1e-3)
        assert f" {name} {entry['native_ratio']:.2f} (worst {entry['worst']:.2f} at " in last


def test_what_ran_is_named(tmp_path):
    by_hand = "examples/ring_by_hand.py:ring_allreduce"
    found = results(tmp_path / "b.json", 2, "--algorithms", f"auto,plan,shared,ring,native,comm,{by_hand}")
    for start in range(0, len(found), 7):
        auto, plan, shared, ring, native, comm, own = found[start:start + 7]
        assert auto["ran"] == plan["ran"] and auto["ran"] in (*names("allreduce"), "shared", "native")
        assert (ring["ran"], shared["ran"], native["ran"]) == ("ring", "shared", "native")
        assert (ring["path"], native["path"]) == ("messages", "native")
        assert shared["path"] in ("one pass", "staged", "process_vm", "messages")
        assert comm["ran"] is comm["path"] is own["ran"] is own["path"] is None


def test_columns_fit_each_other(tmp_path):
    found = results(tmp_path / "b.json", 3, "-b", "64K", "-e", "64K")
    native = found[3]["time_us"]["median"]
    for result in found:
        assert result["time_us"]["min"] <= result["time_us"]["median"] <= result["time_us"]["p99"]
        assert result["algbw"] == pytest.approx(result["bytes"] / result["time_us"]["median"] / 1e3, rel=1e-3)
        assert result["busbw"] == pytest.approx(result["algbw"] * 4 / 3, rel=1e-3)
        assert result["native_ratio"] == pytest.approx(native / result["time_us"]["median"], rel=1e-3)


@pytest.mark.parametrize("collective", ALL)
def test_every_collective(collective, tmp_path):
    found = results(tmp_path / "b.json", 3, "--collective", collective)
    assert [result["algorithm"] for result in found[:len(ALL[collective])]] == ALL[collective]
    assert {result["collective"] for result in found} == {collective}


@pytest.mark.parametrize("collective", ALL)
def test_every_collective_in_place_on_shared_arrays_and_by_the_comm(collective, tmp_path):
    done = bench(3, *TINY, "--collective", collective, "--inplace", "--buffers", "shared",
                 "--algorithms", "auto,shared,comm,native", "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "b.json").read_text())
    assert (written["environment"]["buffers"], written["environment"]["inplace"]) == ("shared", True)
    assert "cores, shared buffers, in place\n" in done.stdout
    elsewhere = collective == "reduce_scatter"
    assert [line for line in done.stdout.splitlines() if "left out" in line] == elsewhere * [
        "# comm left out: MPI's Reduce_scatter in place leaves the chunk at the front of the vector, not in its place"]
    subjects = ["auto", "shared", *(not elsewhere) * ["comm"], "native"]
    assert [(result["algorithm"], result["wrong"]) for result in written["results"]] == 4 * [(name, 0) for name in subjects]
    if collective == "allreduce":
        assert {result["path"] for result in written["results"] if result["algorithm"] == "shared"} == {"one pass"}


@pytest.mark.parametrize("options, why", [(["-o", "AVERAGE"], "MPI has no AVERAGE"),
                                          (["-d", "bfloat16"], "this MPI library has no SUM for dtype bfloat16")])
def test_what_the_comm_cannot_do_is_left_out(options, why):
    pytest.importorskip("ml_dtypes")
    done = bench(2, *TINY, "--algorithms", "comm,ring", *options)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "left out" in line] == [f"# comm left out: {why}"]
    assert {row["algorithm"] for row in table(done.stdout)} == {"ring"}


@pytest.mark.parametrize("options", [["--inplace"], ["-d", "float16", "--buffers", "shared"]])
def test_the_bound_and_the_shares_of_it(options, tmp_path):
    done = bench(2, *TINY, "--bound", "--algorithms", "ring,native", *options, "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout, [*HEADING[:-1], "bound%", "#wrong"])
    found = json.loads((tmp_path / "b.json").read_text())["results"]
    assert [row["algorithm"] for row in rows] == 4 * ["ring", "native", "bound"]
    for row, result, bound in zip(rows, found, [found[i // 3 * 3 + 2] for i in range(12)]):
        share = bound["time_us"]["median"] / result["time_us"]["median"]
        assert result["bound_share"] == pytest.approx(share, rel=1e-2)
        assert float(row["bound%"]) == pytest.approx(100 * result["bound_share"], abs=0.06)
        assert row["#wrong"] == ("-" if row["algorithm"] == "bound" else "0")
    assert "bound" not in [line for line in done.stdout.splitlines() if line.startswith("# ")][-1]


@pytest.mark.parametrize("options", [["-d", "int64", "--inplace"], ["--buffers", "shared"]])
def test_gloo_sums_the_same_data(options, tmp_path):
    pytest.importorskip("torch")
    done = bench(3, *TINY, "--peers", "--algorithms", "native", *options, "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    found = json.loads((tmp_path / "b.json").read_text())["results"]
    told = [(result["algorithm"], result["wrong"], result["ran"]) for result in found]
    assert told == 4 * [("native", 0, "native"), ("gloo", 0, None)]


def test_an_error_beside_gloo_ends_the_program(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "failing.py"
    path.write_text("def fails(buf, comm):\n    if comm.rank == 1:\n        raise OSError('no more')\n    comm.Barrier()\n")
    done = bench(2, *TINY, "--peers", "--algorithms", f"native,{path}:fails")
    assert done.returncode != 0 and "OSError: no more" in done.stderr


@pytest.mark.parametrize("op, dtype", [("MAX", "int32"), ("LOR", "bool"), ("SUM", "float16"), ("AVERAGE", "float64"),
                                       ("BXOR", "uint8"), ("PROD", "complex64")])
def test_ops_and_dtypes(op, dtype, tmp_path):
    found = results(tmp_path / "b.json", 3, "-o", op, "-d", dtype)
    assert {(result["op"], result["dtype"]) for result in found} == {(op, dtype)}
    assert {"auto", "ring", "tree"} <= {result["algorithm"] for result in found}


def test_calls_back_to_back(tmp_path):
    results(tmp_path / "b.json", 2, "-m", "10")


def test_what_a_call_costs_as_the_help_has_it(tmp_path):
    done = bench(2, "-b", "4", "-e", "4", "-n", "3", "-m", "10", "--algorithms", "comm,native,auto,plan")
    assert done.returncode == 0, done.stderr
    assert [row["algorithm"].partition(":")[0] for row in table(done.stdout)] == ["comm", "native", "auto", "plan"]
    assert "geometric mean" not in done.stdout


def test_without_check_nothing_is_said_of_wrong_elements(tmp_path):
    done = bench(2, *TINY, "-c", "0", "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    assert {row["#wrong"] for row in table(done.stdout)} == {"-"}
    assert {result["wrong"] for result in json.loads((tmp_path / "b.json").read_text())["results"]} == {None}


@pytest.mark.parametrize("ending, magic", [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml")])
def test_plot(ending, magic, tmp_path):
    pytest.importorskip("matplotlib")
    done = bench(2, *TINY, "--plot", str(tmp_path / f"plot.{ending}"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"plot.{ending}").read_bytes().startswith(magic)


def test_help_is_printed_once():
    done = bench(3, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == 1


@pytest.mark.parametrize("options, complaint", [
    (["--algorithms", "ring,rign"], "argument --algorithms: unknown algorithm 'rign' for allreduce (did you mean 'ring'?); "),
    (["--algorithms", "nowhere.py:allreduce"], "argument --algorithms: there is no file nowhere.py"),
    (["--collective", "allgather", "--algorithms", "tree"], "unknown algorithm 'tree' for allgather; known: auto, shared, ring, "
     "bruck, native, comm"),
    (["-o", "SUMM"], "'SUMM' is not one of SUM, "),
    (["-d", "float31"], "'float31' is not one of bool, "),
    (["-o", "BXOR", "-d", "float32"], "BXOR"),
    (["-b", "8X"], "'8X' is not a size such as 8, 64K"),
    (["-n", "many"], "argument -n/--iters: 'many' is not a whole number from 1 on"),
    (["-f", "1"], "argument -f/--stepfactor: '1' is not a number above 1"),
    (["-b", "1K", "-e", "8"], "argument -e: 8 is less than -b 1024"),
    (["--plot", "plot.gif"], "'plot.gif' does not end in .png or .svg"),
    (["--buffers", "mine"], "argument --buffers: invalid choice: 'mine'"),
    (["--collective", "reduce", "--bound"], "argument --bound: is for --collective allreduce, not reduce"),
    (["--peers", "-o", "MAX"], "argument --peers: is for an allreduce with SUM of float32, float64, int32, int64, not allreduce"),
])
def test_a_wrong_command_line_is_told_once(options, complaint):
    done = bench(2, *options)
    assert_told_once(done, complaint)


def test_an_algorithm_from_a_file(tmp_path):
    by_hand = "examples/ring_by_hand.py:ring_allreduce"
    for place in ([], ["--inplace"]):
        found = results(tmp_path / "b.json", 3, "--algorithms", f"ring,{by_hand}", *place)
        assert [result["algorithm"] for result in found[:2]] == ["ring", by_hand]
        assert {result["native_ratio"] for result in found} == {None}


def test_a_wrong_result_is_told_with_its_place(tmp_path):
    path = tmp_path / "corrupt.py"
    path.write_text(CORRUPT)
    done = bench(2, *TINY, "--algorithms", f"ring,{path}:allreduce")
    assert done.returncode == 1
    assert [row["#wrong"] for row in table(done.stdout)] == ["0", "0", "0", "1", "0", "1", "0", "1"]
    told = [line for line in done.stderr.splitlines() if line.startswith("WRONG: ")]
    assert len(told) == 3
    assert "corrupt.py:allreduce, 64 bytes: 1 wrong, first on rank 1, element 5: " in told[0]
