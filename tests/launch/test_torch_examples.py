"""Every example for PyTorch runs, says what it should, and keeps what its text promises."""

import importlib.util
import re

import pytest

from launch import ROOT, run

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed: pip install 'mpiring[torch]'", allow_module_level=True)

SYNTHETIC = ["examples/torch_synthetic.py", "--num-iters", "3", "--num-batches-per-iter", "2", "--num-warmup-batches", "1",
             "--batch-size", "4"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """As many threads as cores on every rank would take turns."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("ranks, options", [(1, []), (2, ["--workers", "2"]), (3, []),
                                            (4, ["--batch-size", "64", "--epochs", "9"])])
def test_digits_are_learned_on_any_number_of_ranks(ranks, options):
    pytest.importorskip("sklearn")
    done = run(ranks, ["examples/torch_digits.py", *options], 180)
    assert done.returncode == 0, done.stderr
    *epochs, last = done.stdout.splitlines()
    assert len(epochs) == (9 if "--epochs" in options else 8)
    accuracy = re.fullmatch(rf"{ranks} rank\(s\), all with the same weights bit for bit; held-out accuracy (0\.\d+)", last)
    assert accuracy and float(accuracy[1]) > 0.95, done.stdout


def test_digits_without_scikit_learn_says_what_to_install(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError\n")
    program = tmp_path / "program.py"
    program.write_text(f"import runpy, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
                       f"runpy.run_path({str(ROOT / 'examples' / 'torch_digits.py')!r}, run_name='__main__')\n")
    done = run(2, [str(program)], 100)
    assert done.returncode != 0
    assert done.stderr.count("pip install 'mpiring[examples]'") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks, options", [(1, ["--model", "cnn"]), (2, ["--model", "resnet", "--fp16-allreduce"]),
                                            (2, ["--model", "mlp", "--bf16-allreduce"]), (3, ["--model", "cnn", "--use-adasum"])])
def test_the_synthetic_benchmark_prints_what_horovods_does(ranks, options):
    done = run(ranks, [*SYNTHETIC, *options], 180)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == [f"Model: {options[1]}", "Batch size: 4", f"Number of CPUs: {ranks}", "Running warmup...",
                         "Running benchmark..."]
    each = [float(re.fullmatch(rf"Iter #{number}: ([\d.]+) img/sec per CPU", line)[1]) for number, line in enumerate(lines[5:8])]
    mean, spread = map(float, re.fullmatch(r"Img/sec per CPU: ([\d.]+) \+-([\d.]+)", lines[8]).groups())
    total = re.fullmatch(rf"Total img/sec on {ranks} CPU\(s\): ([\d.]+) \+-([\d.]+)", lines[9]).groups()
    assert len(lines) == 10
    assert mean == pytest.approx(sum(each) / 3, abs=0.11)
    assert spread == pytest.approx(1.96 * (sum((one - mean) ** 2 for one in each) / 3) ** 0.5, rel=0.01, abs=0.2)
    assert [float(one) for one in total] == pytest.approx([ranks * mean, ranks * spread], abs=0.06 * (ranks + 1))


def test_the_synthetic_benchmark_says_which_models_there_are():
    done = run(1, [*SYNTHETIC, "--model", "no_such_net"], 100)
    assert done.returncode == 1
    assert done.stderr.startswith("model no_such_net: not one of resnet, cnn, mlp, and torchvision ")


SIZES = """
import runpy
for make in runpy.run_path("examples/torch_synthetic.py")["MODELS"].values():
    sizes = [weights.numel() for weights in make().parameters()]
    print(len(sizes), sum(sizes))
"""


def test_what_the_models_say_of_themselves():
    done = run(1, ["-c", SIZES], 100)
    assert done.stdout == "65 336824\n8 2142248\n6 9416680\n", done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_process_sets_train_side_by_side(ranks):
    done = run(ranks, ["examples/process_sets.py"], 150)
    assert done.returncode == 0, done.stderr
    first, second, chosen = done.stdout.splitlines()
    half = ranks // 2
    losses = [float(re.fullmatch(rf"ranks {re.escape(str(members))} learned at rate {rate}: loss ([\d.]+)", line)[1])
              for line, members, rate in ((first, [*range(half)], 0.01), (second, [*range(half, ranks)], 0.0001))]
    assert losses[0] < 0.1 < losses[1]
    assert chosen == "all ranks go on with the network of rank 0"


def test_process_sets_want_two_ranks():
    done = run(1, ["examples/process_sets.py"], 100)
    assert done.returncode == 1 and "needs two ranks" in done.stderr and "Traceback" not in done.stderr
