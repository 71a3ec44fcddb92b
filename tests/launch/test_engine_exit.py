"""The engine in programs of its own: how they end, what they cost when nothing happens, threads, forks and the environment."""

import json
import re
import sys
import time

import pytest

from launch import ROOT, finish

PRELUDE = f"""
import json, logging, os, random, signal, sys, threading, time
sys.path[:0] = [{str(ROOT / "tests" / "mpi")!r}, {str(ROOT / "tests")!r}]
import numpy as np
from mpi4py import MPI
import mpiring
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

def say(**what):
    os.write(1, (json.dumps({{"rank": rank, "time": time.time(), **what}}) + "\\n").encode())
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs a program with these lines, and returns what mpirun gave and what each rank said."""
    def start(ranks, body, first="", timeout=60, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        program = tmp_path / "program.py"
        program.write_text(first + PRELUDE + body)
        done = finish(["mpirun", "-np", str(ranks), sys.executable, str(program)], timeout)
        done.ended = time.time()
        lines = [json.loads(line) for line in re.findall(r"\{.*?\}\n", done.stdout)]
        return done, sorted(lines, key=lambda line: line["rank"])

    return start


# ----------------------------------------------------------------- the end of a program

def test_a_program_that_ends_with_operations_pending(start):
    """Of each kind: that nobody else has submitted, that all have, and that was waited for."""
    done, said = start(3, """
engine = mpiring.init()
assert (engine.allreduce(np.ones(3), name="waited for") == size).all()
kept = [engine.allreduce_async(np.ones(3), name=f"of rank {rank} alone"), engine.allgather_async(np.ones(rank)),
        engine.allreduce_async(np.ones(300_000), name="of all")]
say()
""")
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
    assert len(said) == 3 and done.ended - max(line["time"] for line in said) < 5


@pytest.mark.parametrize("ending", ["sys.exit(0)", "engine.shutdown()", "del engine"])
def test_a_rank_that_ends_early(start, ending):
    done, said = start(3, f"""
engine = mpiring.Engine()
engine.allreduce(np.ones(3))
if rank == 1:
    say(early=True)
    {ending}
else:
    try:
        engine.allreduce(np.ones(3), name="x")
    except mpiring.ShutdownError as error:
        say(error=str(error))
""")
    assert done.returncode == 0, done.stderr
    assert said[1]["early"] and "rank 1" in said[0]["error"] and "rank 1" in said[2]["error"], said
    assert done.ended - said[1]["time"] < 8


def test_a_rank_that_raises_takes_nobody_along_in_a_hang(start):
    done, said = start(3, """
engine = mpiring.init()
engine.allreduce(np.ones(3))
if rank == 1:
    say()
    raise KeyError("of the caller")
engine.allreduce(np.ones(3), name="x")
""")
    assert done.returncode != 0
    assert "of the caller" in done.stderr
    assert done.ended - said[0]["time"] < 8


def test_interrupted_in_synchronize(start):
    """As Ctrl-C does: the caller gets its KeyboardInterrupt, and the program its end."""
    done, said = start(2, """
signal.signal(signal.SIGINT, signal.default_int_handler)
engine = mpiring.init()
engine.allreduce(np.ones(3))
if rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        engine.allreduce(np.ones(3), name="x")
    except KeyboardInterrupt:
        say(interrupted=True)
        raise SystemExit(0)
else:
    try:
        engine.allreduce(np.ones(3), name="y")
    except mpiring.ShutdownError:
        say(shutdown=True)
""")
    assert done.returncode == 0, done.stderr
    assert said[0].get("interrupted") and said[1].get("shutdown"), (said, done.stderr)


# ----------------------------------------------------------------- forks

def test_forked_children(start):
    """One by os.fork, one by multiprocessing: each gets an error from the engine, and ends with its own status."""
    done, said = start(2, """
import multiprocessing
import warnings
warnings.simplefilter("ignore")
engine = mpiring.init()
pending = engine.allreduce_async(np.ones(3), name=f"of rank {rank} alone")
engine.allreduce(np.ones(3))

def child():
    for call in (lambda: engine.allreduce(np.ones(3)), lambda: engine.synchronize(pending), lambda: engine.poll(pending),
                 lambda: engine.barrier(), lambda: engine.add_process_set([0])):
        try:
            call()
        except RuntimeError as error:
            if "fork" not in str(error):
                return 1
        else:
            return 2
    return 7

def work():
    sys.exit(child())

pid = os.fork()
if pid == 0:
    os._exit(child())
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(20)
say(fork=status, process=process.exitcode)
assert (engine.allreduce(np.ones(3)) == size).all()
""")
    assert done.returncode == 0, done.stderr
    assert [(line["fork"], line["process"]) for line in said] == [(7, 7)] * 2, (said, done.stderr)


def test_workers_forked_while_operations_are_under_way(start):
    """As data loaders do it, again and again."""
    done, said = start(2, """
import multiprocessing
import warnings
warnings.simplefilter("ignore")
engine = mpiring.init()
context = multiprocessing.get_context("fork")
for turn in range(3):
    handles = [engine.allreduce_async(np.ones(20_000), name=str(index)) for index in range(20)]
    with context.Pool(2) as pool:
        assert pool.map(abs, range(-10, 0)) == [*range(10, 0, -1)]
    assert all((engine.synchronize(handle) == size).all() for handle in handles)
say()
""")
    assert done.returncode == 0, done.stderr
    assert len(said) == 2


# ----------------------------------------------------------------- threads and time

@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_thread_levels(start, level):
    """Without threads of its own, the engine does its work in the caller's poll and synchronize."""
    done, said = start(3, """
from cases import BFLOAT16, reduce
from engines import assert_same, everyones, reduced, use_every_operation, values

with mpiring.Engine(timeout=30) as engine:
    names = [thread.name for thread in threading.enumerate()]
    for seed in range(5):
        use_every_operation(engine, seed)
    for dtype in ("?", "b", "e", "f", "g", "D", BFLOAT16):
        dtype = np.dtype(dtype)
        for op in (MPI.SUM, MPI.PROD):
            assert_same(engine.allreduce(values(rank, 1003, dtype), op=op), reduced(op, everyones(1003, dtype)))
    handle = engine.allreduce_async(np.ones(3), name="polled")
    while not engine.poll(handle):
        time.sleep(0.001)
    assert (engine.synchronize(handle) == size).all()
    made = engine.add_process_set([0, 2])
    if made.included:
        assert (engine.allreduce(np.ones(3), process_set=made) == 2).all()
    try:
        engine.allreduce(np.ones(3 + rank))
        say(error="none")
    except mpiring.MismatchError:
        pass
    for step in range(rank):
        engine.allreduce(np.ones(3), name="uneven")
    assert engine.join() == 2
    big = np.ones(1 << 20)
    assert (engine.allreduce(big, big) == size).all() and (big == size).all()
    say(level=MPI.Query_thread(), names=names)
""", first=f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\n")
    assert done.returncode == 0, done.stderr
    assert len(said) == 3 and not any("error" in line for line in said)
    assert all("mpiring-engine" not in line["names"] for line in said), said


def test_an_idle_engine_costs_nothing(start):
    """Nor does one whose rank has nothing to do while another one waits."""
    done, said = start(2, """
engine = mpiring.Engine(stall_seconds=0)
for turn in range(20):
    engine.allreduce(np.ones(1000), name="x")
for seconds, what in ((1, "settling"), (5, "idle")):
    begin = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - begin
idle = used
assert "mpiring-engine" in [thread.name for thread in threading.enumerate()]
say(idle=idle)
assert (engine.allreduce(np.ones(3)) == size).all()
""")
    assert done.returncode == 0, done.stderr
    assert all(line["idle"] < 0.02 for line in said), said


# ----------------------------------------------------------------- what the environment says

@pytest.mark.parametrize("environment, noticed", [
    ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1.4"}, True),
    ({"MPIRING_STALL_SECONDS": "0.3", "MPIRING_TIMEOUT": "1.4", "HOROVOD_STALL_CHECK_DISABLE": "1"}, True),
    ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3", "HOROVOD_STALL_CHECK_DISABLE": "1", "MPIRING_TIMEOUT": "0"}, False),
], ids=["Horovod's", "ours", "never"])
def test_stalls(start, environment, noticed):
    done, said = start(2, """
with mpiring.Engine() as engine:
    try:
        if rank == 1:
            time.sleep(2.5)
        engine.allreduce(np.ones(3), name="late")
    except mpiring.StallError as error:
        say(error=str(error))
    else:
        say(error="")
    MPI.COMM_WORLD.Barrier()
""", **environment)
    assert done.returncode == 0, done.stderr
    assert ("'late'" in done.stderr) == noticed, done.stderr
    assert ("'late'" in said[0]["error"] and "rank 1" in said[0]["error"]) == noticed, said
    assert said[1]["error"] == ""


@pytest.mark.parametrize("environment, exchanges", [
    ({"HOROVOD_FUSION_THRESHOLD": "0"}, 50), ({"HOROVOD_FUSION_THRESHOLD": "0", "MPIRING_FUSION_THRESHOLD": "1M"}, None),
], ids=str)
def test_fusion_threshold(start, environment, exchanges):
    done, said = start(2, """
with mpiring.Engine(cycle_time=0.05) as engine:
    for handle in [engine.allreduce_async(np.ones(100), name=str(index)) for index in range(50)]:
        engine.synchronize(handle)
    say(exchanges=engine.metrics()["exchanges"])
""", **environment)
    assert done.returncode == 0, done.stderr
    assert all(line["exchanges"] == exchanges if exchanges else line["exchanges"] < 25 for line in said), said


TRACED = """
with mpiring.Engine() as engine:
    for step in range(5):
        engine.allreduce(np.ones(1000), name="gradient")
        engine.broadcast(np.ones(100), 0, name="weights")
"""


def trace(path):
    """Return a trace's text, and its events; a trace is valid JSON."""
    text = path.read_text()
    events = json.loads(text)
    return text, events["traceEvents"] if isinstance(events, dict) else events


@pytest.mark.parametrize("variable", ["MPIRING_TIMELINE", "HOROVOD_TIMELINE"])
def test_timeline(start, tmp_path, variable):
    done, _ = start(2, TRACED, **{variable: str(tmp_path / "trace.json")})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text, events = trace(tmp_path / f"trace.rank{rank}.json")
        assert "gradient" in text and "weights" in text
        assert {"negotiate", "exchange"} <= {event["name"] for event in events}


def test_timelines_of_ranks_that_are_killed(start, tmp_path):
    done, _ = start(2, """
engine = mpiring.Engine(timeout=5)
for step in range(50):
    engine.allreduce(np.ones(1000), name="gradient")
time.sleep(0.5)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    engine.allreduce(np.ones(1000), name="gradient")
except mpiring.StallError:
    os._exit(1)
""", MPIRING_TIMELINE=str(tmp_path / "trace.json"))
    assert done.returncode != 0
    for rank in range(2):
        text, events = trace(tmp_path / f"trace.rank{rank}.json")
        assert text.count("gradient") >= 1 and len(events) > 50


# ----------------------------------------------------------------- in the long run

def test_memory_stays_flat(start):
    """Over 20,000 small operations. Names that are never seen again take a little each, until the engine forgets the oldest."""
    done, said = start(2, """
def resident():
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

engine = mpiring.Engine()
figures = []
for turn in range(200):
    handles = [engine.allreduce_async(np.ones(100, np.float32), name=f"gradient {index}") for index in range(80)]
    handles += [engine.allreduce_async(np.ones(7)) for index in range(10)]
    handles += [engine.allgather_async(np.ones(rank + index), name=f"rows {index}") for index in range(10)]
    for handle in handles:
        engine.synchronize(handle)
    figures.append(resident())
assert engine.metrics()["operations"] == 20_000
for index in range(1000):
    engine.allreduce(np.ones(7), name=f"new {index}")
say(grown=figures[-1] - figures[100], fresh=(resident() - figures[-1]) // 1000, figures=figures[::20])
engine.shutdown()
""")
    assert done.returncode == 0, done.stderr
    assert all(line["grown"] < 1 << 20 and line["fresh"] < 4 << 10 for line in said), said


def test_deterministic_runs_have_the_same_bits(start):
    """Whatever the ranks' pace; without it, what is fused with what depends on it, and on that the order of sums."""
    body = """
import hashlib
engine = mpiring.Engine(deterministic=True, fusion_threshold=20_000)
chance, digest = random.Random(time.time_ns() + rank), hashlib.sha256()
for step in range(20):
    mine = [np.random.default_rng([rank, step, index]).normal(size=17 * index % 900).astype(np.float32) for index in range(40)]
    handles = []
    for index, array in enumerate(mine):
        if chance.random() < 0.2:
            time.sleep(chance.random() * 2e-3)
        handles.append(engine.allreduce_async(array, name=str(index)))
    for handle in handles:
        digest.update(engine.synchronize(handle).tobytes())
engine.shutdown()
say(digest=digest.hexdigest())
"""
    digests = {line["digest"] for _ in range(2) for line in start(3, body, MPIRING_ALGORITHM="allreduce:ring")[1]}
    assert len(digests) == 1
