"""Every example runs, says what it should, and keeps what its text promises."""

import re

import numpy as np
import pytest

from launch import ROOT, run

SAME_BITS = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import numpy as np
from mpi4py import MPI
import mpiring
from ring_by_hand import ring_allreduce

comm = MPI.COMM_WORLD
for count in (0, 1, 2, 3, 5, 7, 64, 1001, 99_999, 400_003):
    for dtype in (np.float32, np.float64, np.complex128, np.int32):
        random = np.random.default_rng([comm.rank, count])
        vector = (random.standard_normal(count) * 10.0 ** random.integers(-6, 7, count)).astype(dtype)
        by_hand, ring = vector.copy(), vector.copy()
        ring_allreduce(by_hand, comm)
        mpiring.ring_allreduce(ring)
        assert by_hand.tobytes() == ring.tobytes(), (comm.rank, count, dtype)
if comm.rank == 0:
    print("same bits")
"""


@pytest.fixture
def same_bits(tmp_path):
    path = tmp_path / "same_bits.py"
    path.write_text(SAME_BITS)
    return str(path)


@pytest.mark.parametrize("ranks", [1, 4])
def test_ring_by_hand_has_the_bits_of_the_ring(ranks, same_bits):
    done = run(ranks, ["-m", "mpi4py", same_bits])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same bits\n"


def test_ring_by_hand_does_without_mpiring():
    text = (ROOT / "examples" / "ring_by_hand.py").read_text()
    assert not re.search(r"^\s*(import|from) mpiring", text, re.MULTILINE)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ring_by_hand_shows_the_sum_on_every_rank(ranks):
    done = run(ranks, ["examples/ring_by_hand.py"])
    assert done.returncode == 0, done.stderr
    total = ranks * np.arange(10.0) + 100 * sum(range(ranks))
    assert done.stdout.splitlines() == [f"rank {rank}: {total}" for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_allreduce_shows_the_calls(ranks):
    done = run(ranks, ["examples/allreduce.py"])
    assert done.returncode == 0, done.stderr
    total = sum(range(1, ranks + 1))
    assert done.stdout.splitlines() == [
        f"sum      {np.full(8, float(total))}",
        f"average  {np.full(8, total / ranks)}",
        f"largest  {np.arange(8.0) * ranks}",
        f"gathered {np.arange(8.0)}",
        f"reduced  {np.arange(3.0) * sum(range(ranks))}",
        f"blocks   {np.arange(float(ranks))}",
    ]


def trained(ranks, path, *options):
    done = run(ranks, ["examples/train_numpy.py", *options, "--save-weights", str(path)])
    assert done.returncode == 0, done.stderr
    accuracy = re.fullmatch(rf"{ranks} rank\(s\), all with the same weights bit for bit; test accuracy (0\.\d+)\n", done.stdout)
    assert accuracy and float(accuracy[1]) > 0.9, done.stdout
    return np.load(path)["weights"]


@pytest.mark.parametrize("ranks, options", [(3, ["--epochs", "3"]), (4, ["--epochs", "1", "--batch", "2", "--rate", "0.02"])])
def test_training_on_some_ranks_is_training_on_one(tmp_path, ranks, options):
    """Neither 50 nor 2 images are the same number for each rank: a wrong weighting would show. Of 2 some ranks get none."""
    pytest.importorskip("sklearn")
    alone, together = trained(1, tmp_path / "1.npz", *options), trained(ranks, tmp_path / "n.npz", *options)
    assert np.allclose(together, alone, rtol=1e-10, atol=1e-12)


def test_training_without_scikit_learn_says_what_to_install(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError\n")
    program = tmp_path / "program.py"
    program.write_text(f"import runpy, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
                       f"runpy.run_path({str(ROOT / 'examples' / 'train_numpy.py')!r}, run_name='__main__')\n")
    done = run(2, [str(program)])
    assert done.returncode != 0
    assert done.stderr.count("pip install 'mpiring[examples]'") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_algorithm_of_ones_own_is_proven_and_run(ranks):
    done = run(ranks, ["examples/own_algorithm.py"])
    assert done.returncode == 0, done.stderr
    proof, vector = done.stdout.splitlines()
    assert proof.startswith(f"Proof(rounds={2 * (ranks - 1)}, ") and proof.endswith("ordered=True)")
    assert vector == str(np.full(3, float(sum(range(ranks)))))


def test_an_algorithm_of_ones_own_joins_the_bench():
    done = run(3, ["-m", "mpiring.bench", "-b", "64", "-e", "64", "-n", "2", "--algorithms", "ring,examples/own_algorithm.py:star"])
    assert done.returncode == 0, done.stderr
    assert "own_algorithm.py:star" in done.stdout
