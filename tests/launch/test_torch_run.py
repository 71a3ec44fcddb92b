"""Programs written for Horovod, run unchanged by mpiring.horovod, and how they end; data loaders with processes of their own."""

import importlib.util
import sys
import time

import pytest

from launch import finish

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed: pip install 'mpiring[torch]'", allow_module_level=True)

RUNNER = ["-m", "mpiring.horovod"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs a program of these lines on some ranks, and notes how long that took after it had begun."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(ranks, body, runner=RUNNER, arguments=(), timeout=100):
        path, mark = tmp_path / "train.py", tmp_path / "begun"
        path.write_text(body)
        done = finish(["mpirun", "-np", str(ranks), sys.executable, *runner, str(path), *arguments], timeout)
        done.seconds = time.time() - mark.stat().st_mtime if mark.exists() else None
        return done

    return start


# ----------------------------------------------------------------- unchanged programs

TRAIN = """
import argparse
import sys

import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async, synchronize
from beside import Model

parser = argparse.ArgumentParser(description="Train something.")
parser.add_argument("--flag", default="y")
options = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).sum().backward()
    optimizer.step()
same = hvd.allgather(torch.cat([weights.detach().ravel() for weights in model.parameters()])[None], name="weights")
assert (same == same[0]).all()
total = synchronize(allreduce_async(torch.ones(3), name="total", op=hvd.Sum))
assert total.tolist() == [hvd.size()] * 3
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {__name__} {options.flag} {sys.argv[1:]}\\n")
"""

MODEL = """
import torch

class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 2))
"""


def test_a_program_for_horovod_runs_unchanged(start, tmp_path):
    """It sees its arguments, is the main program, and imports what is beside it; a folder called horovod there is not taken."""
    (tmp_path / "beside.py").write_text(MODEL)
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('not this one')\n")
    done = start(2, TRAIN, arguments=["--flag", "x"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: __main__ x ['--flag', 'x']" for rank in range(2)]
    helped = start(1, TRAIN, arguments=["--help"])
    assert helped.returncode == 0 and helped.stdout.startswith("usage: train.py [-h] [--flag FLAG]"), helped.stderr


def test_a_module_for_horovod_runs_unchanged(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "beside.py").write_text(MODEL)
    (tmp_path / "package" / "train.py").write_text(TRAIN.replace("from beside", "from .beside"))
    monkeypatch.setattr("launch.ROOT", tmp_path)
    done = finish(["mpirun", "-np", "2", sys.executable, *RUNNER, "-m", "package.train", "--flag=x"], 100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: __main__ x ['--flag=x']" for rank in range(2)]


def test_the_names_that_programs_import(start):
    """Horovod's modules are mpiring's own: their classes are the same, and they know where they come from."""
    done = start(1, """
import importlib, pickle, subprocess, sys
import horovod
import horovod.torch as hvd
import mpiring.torch
from horovod import torch as again
from horovod.common import util
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import check_extension, extension_available, gpu_available, mpi_built, nccl_built, split_list

assert hvd is again is mpiring.torch is sys.modules["horovod.torch"]
for name in ("mpi_ops", "compression", "functions", "optimizer", "sync_batch_norm"):
    module = importlib.import_module(f"horovod.torch.{name}")
    assert module is importlib.import_module(f"mpiring.torch.{name}") is getattr(hvd, name)
    assert module.__name__ == module.__spec__.name == f"mpiring.torch.{name}"
    assert importlib.util.find_spec(f"horovod.torch.{name}").origin == module.__file__
assert tuple(map(int, horovod.__version__.split("."))) > (0, 19, 2)
assert HorovodInternalError is hvd.HorovodInternalError and ProcessSet is hvd.ProcessSet
assert issubclass(HorovodVersionMismatchError, ImportError) and HostsUpdatedInterrupt(True).skip_sync
assert global_process_set is hvd.global_process_set

hvd.init()
assert HorovodBasics(hvd.__file__, "mpi_lib_v2").rank() == hvd.rank() == 0
assert mpi_built() and not nccl_built() and extension_available("torch") and not extension_available("tensorflow")
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2")
assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
assert util.num_rank_is_power_2(8) and not util.num_rank_is_power_2(6) and not util.num_rank_is_power_2(0)
assert util.is_iterable([]) and not util.is_iterable(3)
assert util.is_version_greater_equal_than("2.13.0+cpu", "2.2") and not util.is_version_greater_equal_than("1.9", "1.10.0")
with util.env(HOROVOD_X="1", HOROVOD_Y=None):
    assert subprocess.check_output(["printenv", "HOROVOD_X"], text=True) == "1\\n"
assert subprocess.run(["printenv", "HOROVOD_X"], stdout=subprocess.DEVNULL).returncode == 1
assert util.get_average_backwards_compatibility_fun(hvd.mpi_ops)(None, None) == hvd.Average
try:
    check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", "x", "y")
    raise SystemExit("no error")
except ImportError as error:
    print(error)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mpiring has no horovod.tensorflow, or what it needs is not installed\n"


MISSING = "tensorflow", "tensorflow.keras", "keras", "mxnet", "spark", "ray", "elastic", "runner", "torch.elastic"


@pytest.mark.parametrize("line", [*(f"import horovod.{name}" for name in MISSING), "from horovod import tensorflow"])
def test_what_mpiring_has_not_is_said_plainly(line, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"try:\n    {line}\nexcept ImportError as error:\n    print(error)\n")
    done = finish([sys.executable, *RUNNER, str(program)], 60)
    assert done.returncode == 0, done.stderr
    name = line.split()[-1].removeprefix("horovod.").removesuffix(".keras")
    only = "" if name == "torch.elastic" else ": of Horovod's interfaces it has the one for PyTorch, horovod.torch, only"
    assert done.stdout == f"mpiring has no horovod.{name}{only}\n"


def test_horovod_run_says_what_to_use(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import horovod\nhorovod.run(print, args=(1,), np=2)\n")
    done = finish([sys.executable, *RUNNER, str(program)], 60)
    assert done.returncode == 1
    assert "mpirun -np N python -m mpiring.horovod program.py" in done.stderr


def test_nothing_called_horovod_is_left_for_others():
    assert finish([sys.executable, "-c", "import mpiring.torch, mpiring.horovod, horovod"], 60).returncode == 1


# ----------------------------------------------------------------- how one rank ends all

@pytest.mark.parametrize("runner, module", [(RUNNER, "horovod.torch"), (["-m", "mpiring.run"], "mpiring.torch"),
                                            ([], "mpiring.torch")])
@pytest.mark.parametrize("elsewhere", ["time.sleep(60)", "hvd.allreduce(torch.ones(3), name='x')",
                                       "hvd.shutdown()\n    time.sleep(60)"])
def test_a_rank_that_raises_ends_the_job(start, runner, module, elsewhere):
    done = start(2, f"""
import os, sys, time, torch
import {module} as hvd
hvd.init()
hvd.allreduce(torch.ones(3), name="first")
kept = hvd.allreduce_async(torch.ones(3), name=f"of rank {{hvd.rank()}} alone")
open(f"{{os.path.dirname(sys.argv[0])}}/begun", "w").close()
if hvd.rank() == 1:
    raise KeyError("of rank 1")
else:
    {elsewhere}
""", runner)
    assert done.returncode != 0 and done.seconds < 10
    assert done.stderr.count("rank 1 of 2 ends the job:\nTraceback (most recent call last):\n") == 1, done.stderr
    assert done.stderr.count("KeyError: 'of rank 1'\n") == 1


@pytest.mark.parametrize("leave, says", [("sys.exit(3)", "rank 1 of 2 ends the job with exit status 3\n"),
                                         ("os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)", "\nKeyboardInterrupt\n")])
def test_a_rank_that_exits_or_is_interrupted_ends_the_job(start, leave, says):
    done = start(2, f"""
import os, signal, sys, time, torch
import horovod.torch as hvd
signal.signal(signal.SIGINT, signal.default_int_handler)
hvd.init()
hvd.allreduce(torch.ones(3))
open(f"{{os.path.dirname(sys.argv[0])}}/begun", "w").close()
if hvd.rank() == 1:
    {leave}
hvd.allreduce(torch.ones(3), name="x")
time.sleep(60)
""")
    assert done.returncode != 0 and done.seconds < 10
    assert done.stderr.count(says) == 1, done.stderr


def test_a_program_that_catches_the_error_of_another_rank(start):
    """A mismatch ends nobody's job by itself."""
    done = start(2, """
import torch
import horovod.torch as hvd
hvd.init()
try:
    hvd.allreduce(torch.ones(3 + hvd.rank()), name="x")
except hvd.HorovodInternalError:
    print(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="y").item(), flush=True)
""")
    assert (done.returncode, done.stdout) == (0, "2.0\n2.0\n"), done.stderr


# ----------------------------------------------------------------- data loaders

LOADING = """
import sys, torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 7 and sys.argv[2] == "fail":
            raise KeyError("of a worker")
        return torch.tensor(float(index)) ** 2

if __name__ == "__main__":
    hvd.init()
    sampler = DistributedSampler(Squares(), hvd.size(), hvd.rank())
    loader = DataLoader(Squares(), 4, sampler=sampler, num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[1])
    weights = torch.zeros(1000, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=0.1), named_parameters=[("weights", weights)])
    for epoch in range(3):
        total = torch.zeros(1)
        for batch in loader:
            kept = hvd.allreduce_async(batch, name="under way")
            optimizer.zero_grad()
            (weights.sum() * batch.mean()).backward()
            optimizer.step()
            hvd.synchronize(kept)
            total += batch.sum()
        if sys.argv[2] == "extra":
            assert len([*DataLoader(Squares(), 4, num_workers=2)]) == 10
        print(epoch, hvd.allreduce(total, op=hvd.Sum).item(), flush=True)
"""


@pytest.mark.parametrize("context, also", [("fork", "extra"), ("spawn", ""), ("forkserver", "")])
@pytest.mark.parametrize("runner, module", [(RUNNER, "horovod.torch"), ([], "mpiring.torch")])
def test_a_data_loader_with_workers(start, context, also, runner, module):
    """Workers that are spawned import the program afresh, and with it Horovod's names; they must not take themselves for ranks."""
    done = start(2, LOADING.replace("horovod.torch", module), runner, arguments=[context, also])
    assert done.returncode == 0, done.stderr
    expected = [f"{epoch} {float(sum(index ** 2 for index in range(40)))}" for epoch in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected * 2)
    assert "Traceback" not in done.stderr and "ends the job" not in done.stderr, done.stderr


def test_a_data_loaders_worker_that_raises_ends_the_job(start):
    done = start(2, LOADING, arguments=["fork", "fail"])
    assert done.returncode != 0
    assert "ends the job:\n" in done.stderr and "KeyError: 'of a worker'" in done.stderr


def test_processes_that_a_program_starts_know_the_names(start):
    done = start(1, """
import subprocess, sys
print(subprocess.check_output([sys.executable, "-c", "import horovod.torch as hvd; print(hvd.__name__)"], text=True), end="")
""")
    assert (done.returncode, done.stdout) == (0, "mpiring.torch\n"), done.stderr


def test_processes_that_a_program_starts_are_no_ranks(start):
    """They have the rank's words from the launcher, with which MPI would begin as that rank a second time."""
    done = start(2, """
import subprocess, sys
import torch, horovod.torch as hvd
hvd.init()
code = "import horovod.torch as hvd; from mpi4py import MPI; print(MPI.Is_initialized()); hvd.init()"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
assert child.stdout == "False\\n" and "ValueError: init: MPI has not begun in this process" in child.stderr, child
model = torch.nn.Linear(30, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
print("trained", flush=True)
""")
    assert (done.returncode, done.stdout) == (0, "trained\n" * 2), done.stderr
