"""tune, as its user meets it: under mpirun, with little time; and what it decides, and does where a rank fails."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

from mpiring import select
from mpiring.algorithms.registry import names
from mpiring.select import NATIVE, SHARED

from launch import ROOT, run

TINY = ["-b", "256", "-e", "4K", "--seconds", "40"]

DECISIONS = """
import numpy as np
from mpi4py import MPI
from mpiring.bench import tune

US = {"native": 10, "shared": 20, "ring": 31, "tree": 29}
tried = []

class Call:
    def __init__(self, name, buffers):
        self.name, self.nbytes = name, buffers.send.nbytes

    def __call__(self):
        pass

    def us(self):
        return 15 if self.name == "bruck" and self.nbytes == 4096 else US.get(self.name, 35)

def timed(calls, reset, warmup, iterations, repeat, comm):
    tried.append(([call.name for call in calls], warmup, iterations))
    us = np.array([call.us() for call in calls]) if comm.rank == 0 else np.arange(len(calls))[::-1] + 1
    return np.repeat(us[:, None] * 1e-6, iterations, axis=1)

tune.bind, tune.interleaved = Call, timed
comm = MPI.COMM_WORLD
sweep = tune.Sweep("allreduce", "ordinary", comm, tune.perf_counter() + (100 if comm.rank == 0 else 0), lambda text: None)
times = sweep.run([1024, 4096, 16384, 65536])
assert comm.allgather(times) == [times] * comm.size
assert comm.allgather(tried) == [tried] * comm.size
if comm.rank == 0:
    print({nbytes: sorted(entry) for nbytes, entry in times.items()}[65536], times[1024]["native"])
"""

FAILS = """
import sys
from mpi4py import MPI
from mpiring.bench import tune

which = sys.argv[1]
bind = tune.bind
tune.WAIT = 0.5

def failing(name, buffers):
    call = bind(name if name != "shared" else "ring", buffers)
    bad = MPI.COMM_WORLD.rank == 1 or which == "everywhere"
    def fail():
        raise ValueError("it cannot")
    return fail if bad and name == ("tree" if which == "tree" else "shared") else call

tune.bind = failing
sys.exit(tune.main(sys.argv[2:]))
"""

SELDOM = """
import sys
from mpiring.bench import tune

tune.FEW = 1000
sys.exit(tune.main(sys.argv[1:]))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mpiring"


def tune(ranks, *options):
    return run(ranks, ["-m", "mpiring", "tune", *options])


def test_a_table_is_measured_and_found(cache):
    done = tune(2, *TINY, "--collectives", "allreduce,broadcast")
    assert done.returncode == 0, done.stderr
    path, = cache.iterdir()
    assert path.name.endswith(f"_1x2_{select.processor()}.json") and done.stdout.endswith(f"\nwrote {path}\n")
    assert "allreduce, ordinary, 256 B: " in done.stdout and "broadcast, ordinary, 4 KiB: " in done.stdout
    rows = select.read(path).rows
    for collective, kind in product(("allreduce", "broadcast"), ("ordinary", "shared")):
        mine = [row for row in rows if (row.collective, row.kind) == (collective, kind)]
        assert mine[-1].upto == 4096 and {str(row.nodes) + str(row.ranks) for row in mine} == {"12"}
        times = {nbytes: entry for row in mine for nbytes, entry in row.measured.items()}
        assert sorted(times) == [256, 1024, 4096]
        assert set(times[256]) == {NATIVE, SHARED, *names(collective)}
        assert all(0 < us < 1e6 for entry in times.values() for us in entry.values())
        for row in mine:
            for entry in row.measured.values():
                assert entry[row.algorithms[0]] <= select.CLOSE * min(entry.values())
    shown = subprocess.run([sys.executable, "-m", "mpiring", "select", "--ranks", "2", "--collective", "allreduce", "--json"],
                           cwd=ROOT, capture_output=True, text=True, check=True)
    data = json.loads(shown.stdout)
    assert data["source"] == str(path)
    assert set(data["tables"][0]["sizes"][0]["measured_us"]) == {NATIVE, SHARED, *names("allreduce")}


def test_a_table_of_ones_own_place(cache, tmp_path):
    path = tmp_path / "there" / "table.json"
    done = tune(3, "-e", "256", "--seconds", "10", "--collectives", "alltoall", "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\nwrote {path}; MPIRING_TABLE={path} lets calls use it\n")
    assert not cache.exists() and os.listdir(tmp_path / "there") == ["table.json"]
    assert {row.collective for row in select.read(tmp_path / "there" / "table.json").rows} == {"alltoall"}


@pytest.mark.parametrize("ranks, options, complaint", [
    (2, ["--collectives", "alreduce"], "argument --collectives: unknown collective 'alreduce' (did you mean 'allreduce'?)"),
    (2, ["-b", "8K", "-e", "4K"], "argument -e: 4096 is less than -b 8192"), (2, ["-b", "much"], "'much' is not a size"),
    (1, [], "on one rank there is nothing to choose: mpirun -np 8 python -m mpiring tune"),
    (2, ["--out", "/dev/null/table.json"], "cannot be written"),
])
def test_wrong_use_is_told_once(cache, ranks, options, complaint):
    done = tune(ranks, *options)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("error: ") == 1 and complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_measured_too_seldom_is_not_kept(cache, tmp_path):
    (tmp_path / "seldom.py").write_text(SELDOM)
    done = run(2, [str(tmp_path / "seldom.py"), "-e", "256", "--seconds", "10", "--collectives", "alltoall"])
    assert done.returncode == 2 and "error: no size was measured often enough to say anything" in done.stderr
    assert "too few, not kept" in done.stdout and not list(cache.glob("*.json"))


def test_a_broken_table_is_told_before_anything_is_measured(cache):
    assert tune(2, "-e", "256", "--collectives", "reduce").returncode == 0
    path, = cache.iterdir()
    path.write_text("{")
    done = tune(2, "-e", "256", "--collectives", "reduce")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count(f"error: rank 0: {path}: not JSON") == 1


def test_all_ranks_decide_as_rank_0_does_and_leave_out_what_is_slow_twice(tmp_path):
    (tmp_path / "decide.py").write_text(DECISIONS)
    done = run(3, ["-m", "mpi4py", str(tmp_path / "decide.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['bruck', 'native', 'shared', 'tree'] 10.0\n"


@pytest.mark.parametrize("which, words", [("tree", "ValueError: it cannot"), ("shared", "it cannot; other ranks did not fail")])
def test_a_rank_that_fails_ends_all(cache, tmp_path, which, words):
    (tmp_path / "fails.py").write_text(FAILS)
    done = run(3, [str(tmp_path / "fails.py"), which, *TINY, "--collectives", "allreduce"], timeout=30)
    assert done.returncode not in (0, 2) and words in done.stderr and not list(cache.glob("*.json"))


def test_shared_is_left_out_where_no_rank_can(cache, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    done = run(2, [str(tmp_path / "fails.py"), "everywhere", *TINY, "--collectives", "reduce"])
    assert done.returncode == 0, done.stderr
    assert "# reduce, ordinary: shared left out: it cannot" in done.stdout
