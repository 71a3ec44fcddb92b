"""The bench of training, as its user meets it: under mpirun, with narrow models."""

import csv
import json

import pytest

from launch import assert_told_once, run

pytest.importorskip("torch", reason="PyTorch is not installed (extra 'torch')")

TINY = ["-n", "3", "-w", "1", "-e", "64K"]
KEYS = ["case", "subject", "tensors", "bytes", "time_us", "samples_per_s", "exposed_us", "exposed_share", "ddp_ratio",
        "us_per_tensor", "wrong"]
HEADING = ["case", "subject", "tensors", "bytes", "median_ms", "min_ms", "p99_ms", "samples/s", "exposed_ms", "ofddp%", "xddp",
           "us/tensor", "same_weights"]
CASES = {"mlp": 14, "resnet": 161, "transformer": 100, "overhead": 161}
SUBJECTS = ["alone", "mpiring", "bf16", "ddp"]

BROKEN = """
import sys
import mpiring.torch as hvd
from mpiring.bench.__main__ import main

distribute = hvd.DistributedOptimizer
hvd.DistributedOptimizer = {replacement}
sys.exit(main(sys.argv[1:]))
"""

HOROVOD = """
import mpiring.torch as ours

rank, size, DistributedOptimizer, Compression = ours.rank, ours.size, ours.DistributedOptimizer, ours.Compression
init = shutdown = lambda: None
"""


def bench(ranks, *options):
    return run(ranks, ["-m", "mpiring.bench", "--training", *options], timeout=120)


def table(text):
    """Return the rows of a printed table as dicts by heading."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines[0] == HEADING
    return [dict(zip(HEADING, line, strict=True)) for line in lines[1:]]


def comments(text):
    return [line for line in text.splitlines() if line.startswith("# ")]


def test_table_json_and_csv_say_the_same(tmp_path):
    done = bench(2, *TINY, "--json", str(tmp_path / "b.json"), "--csv", str(tmp_path / "b.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((tmp_path / "b.json").read_text())
    assert list(written) == ["environment", "results", "summary"]
    assert written["environment"]["torch"] in comments(done.stdout)[1] and written["environment"]["ranks"] == 2
    rows, lines = table(done.stdout), list(csv.DictReader((tmp_path / "b.csv").read_text().splitlines()))
    assert [(row["case"], row["subject"]) for row in rows] == [(case, subject) for case in CASES for subject in SUBJECTS]
    for row, line, result in zip(rows, lines, written["results"], strict=True):
        assert list(result) == KEYS and list(result["time_us"]) == ["median", "min", "p99"]
        assert [row["case"], row["subject"]] == [line["case"], line["subject"]] == [result["case"], result["subject"]]
        assert int(row["tensors"]) == result["tensors"] == CASES[row["case"]]
        assert int(row["bytes"]) == int(line["bytes"]) == result["bytes"]
        assert float(line["median_us"]) == result["time_us"]["median"] == pytest.approx(1e3 * float(row["median_ms"]), abs=5.1)
        alone = row["subject"] == "alone"
        assert (row["same_weights"], result["wrong"]) == (("-", None) if alone else ("yes", 0))
        assert (row["us/tensor"] != "-") == (row["case"] == "overhead" and not alone)
        assert (row["xddp"], result["exposed_us"]) == ("-", None) if alone else float(row["xddp"]) > 0
    assert [(entry["case"], entry["subject"]) for entry in written["summary"]] == [(case, subject) for case in CASES
                                                                                   for subject in ("mpiring", "bf16")]
    assert [line.split()[1] for line in comments(done.stdout)[-8:]] == [case for case in CASES for _ in range(2)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_columns_fit_each_other(ranks, tmp_path):
    done = bench(ranks, "mlp,overhead", *TINY, "--json", str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    found = {(result["case"], result["subject"]): result for result in json.loads((tmp_path / "b.json").read_text())["results"]}
    for (case, subject), result in found.items():
        alone, ddp = (found[case, name]["time_us"]["median"] for name in ("alone", "ddp"))
        median = result["time_us"]["median"]
        assert result["time_us"]["min"] <= median <= result["time_us"]["p99"]
        assert result["samples_per_s"] == pytest.approx(ranks * {"mlp": 32, "overhead": 1}[case] / median * 1e6, rel=1e-3)
        if subject == "alone":
            continue
        assert result["exposed_us"] == pytest.approx(median - alone, abs=0.01)
        share = pytest.approx((median - alone) / (ddp - alone), rel=1e-2, abs=1e-3) if ddp > alone else None
        assert result["exposed_share"] == share
        least = result["time_us"]["min"] - found[case, "alone"]["time_us"]["min"]
        assert result["us_per_tensor"] == (pytest.approx(least / 161, abs=0.01) if case == "overhead" else None)
    assert found["mlp", "ddp"]["ddp_ratio"] == found["overhead", "ddp"]["ddp_ratio"] == 1


@pytest.mark.parametrize("replacement, told", [
    ("lambda optimizer, **_: optimizer", "off DDP's by "),
    ("lambda optimizer, **options: distribute(optimizer, **options, op=hvd.Sum)", "off DDP's by 1 of its way"),
])
def test_gradients_that_are_not_averaged_are_found(replacement, told, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(replacement=replacement))
    done = run(2, [str(path), "--training", "mlp", *TINY], timeout=120)
    assert done.returncode == 1, done.stderr
    assert [row["same_weights"] for row in table(done.stdout)] == ["-", "no", "no", "yes"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("WRONG: ")]
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["mlp by mpiring", "mlp by bf16"]
    assert all(f"14 wrong, first on rank 0, tensor '0.weight': {told}" in line for line in lines), lines


def test_without_check_nothing_is_said_of_the_weights(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(replacement="lambda optimizer, **_: optimizer"))
    done = run(2, [str(path), "--training", "overhead", *TINY, "-c", "0"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert {row["same_weights"] for row in table(done.stdout)} == {"-"}


def test_horovod_takes_part_where_it_is_installed(tmp_path):
    """A stand-in: the interface that the bench uses, under Horovod's name."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch.py").write_text(HOROVOD)
    path = tmp_path / "program.py"          # its folder is where Python looks first
    path.write_text("import sys\nfrom mpiring.bench.__main__ import main\nsys.exit(main(sys.argv[1:]))\n")
    done = run(2, [str(path), "--training", "overhead", *TINY], timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(row["subject"], row["same_weights"]) for row in table(done.stdout)][1:] == [
        (subject, "yes") for subject in ("mpiring", "bf16", "ddp", "horovod")]


@pytest.mark.parametrize("options, complaint", [
    (["resent"], "argument --training: unknown case 'resent' (did you mean 'resnet'?); known: mlp, resnet, transformer, overhead"),
    (["mlp", "--engine"], "argument --training: its cases leave no choice of --engine"),
])
def test_a_wrong_command_line_is_told_once(options, complaint):
    assert_told_once(bench(2, *options), complaint)
