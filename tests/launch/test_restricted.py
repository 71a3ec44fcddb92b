"""Where a container forbids ranks to share memory, or grants little of it: all agree on another way, and results stay right.

Also what is left behind by ranks that are killed, and how much memory a call takes.
"""

import json
import re
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import forbid
import pytest

from launch import finish

WITHOUT_CMA = {"OMPI_MCA_smsc": "^cma", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
"""Open MPI and MPICH try process_vm_readv when they start: what programs forbid later, they must not have come to rely on."""

PRELUDE = f"""
import json, os, signal, sys, threading, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from mpi4py import MPI
import forbid
import mpiring
from mpiring.collectives import plan_of
from mpiring.runtime import memory, shared
from mpiring.runtime.channel import channel_of

SMALL, LARGE = 1000, 1 << 20
shared.PRIVATE_FROM = 1 << 20
VM = "process_vm_readv", "process_vm_writev"
world = MPI.COMM_WORLD
rank, size = world.rank, world.size
report = {{}}

def way(array, comm, algorithm="shared"):
    '''Sum an array, check the result, and return the algorithm and the way that took.'''
    pattern = np.resize(np.arange(999, dtype=array.dtype), array.size)
    np.add(pattern, comm.rank, array)
    mpiring.allreduce(array, comm=comm, algorithm=algorithm)
    pattern *= comm.size
    pattern += sum(range(comm.size))
    assert np.array_equal(array, pattern)
    plan = plan_of("allreduce", array, comm=comm, op=MPI.SUM, algorithm=algorithm)
    return plan.algorithm, plan.path

def made(count, comm):
    '''Return a shared array, and whether there was a warning.'''
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        array = mpiring.empty(count, np.float32, comm)
    return array, ["cannot share memory" in str(warning.message) and warning.category is RuntimeWarning for warning in caught]

def ways():
    '''Return how arrays of all kinds are summed on a new comm, which is freed after it.'''
    comm = world.Dup()
    found = {{name: way(np.empty(count, np.float32), comm)[1] for name, count in (("small", SMALL), ("large", LARGE))}}
    array, found["warned"] = made(LARGE, comm)
    found["empty"] = way(array, comm)[1]
    node = channel_of(comm).node
    found["private"], found["window"] = node.private, node.mapping.win is not None
    comm.Barrier()
    mpiring.free(array)
    found["zero"] = not array.any()
    comm.Free()
    return found
"""

POSTLUDE = """
reports = world.gather(report)
if rank == 0:
    print(json.dumps(reports))
"""

PRIVATE_SHM = ["unshare", "-m", "sh", "-c", """
mount -t tmpfs -o size=$0 tmpfs /dev/shm || exit
"$@"
code=$?
ls -A /dev/shm | sed "s/^/left: /"
exit $code
"""]
"""Runs a command with a /dev/shm of its own, of the size that follows; says at the end what is left there."""

STAGED = {"small": "staged", "large": "staged", "empty": "one pass", "warned": [], "private": False, "window": False, "zero": True}
"""What ranks report that cannot reach each other's private memory."""

PRIVATE = {**STAGED, "large": "process_vm", "private": True}

needs_seccomp = pytest.mark.skipif(not forbid.POSSIBLE, reason="no seccomp here, or a processor whose system calls are not known")


@cache
def can_mount():
    return subprocess.run([*PRIVATE_SHM, "1m", "true"], capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small /dev/shm: root, or CAP_SYS_ADMIN")


def launch(path, ranks, body, *arguments, before=()):
    """Write a program with these lines and run it on some ranks."""
    path.write_text(PRELUDE + body + POSTLUDE)
    return finish([*before, "mpirun", "-np", str(ranks), sys.executable, "-m", "mpi4py", str(path), *arguments], 60)


@pytest.fixture
def start(tmp_path):
    return partial(launch, tmp_path / "program.py")


@pytest.fixture
def reports(start):
    """Return a function that runs such a program to a good end, and returns what its ranks report."""
    def reports(ranks, body, **options):
        done = start(ranks, body, **options)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert len(found) == 1 and len(found[0]) == ranks, done.stdout
        return found[0]

    return reports


@pytest.fixture
def without_cma(monkeypatch):
    for name, value in WITHOUT_CMA.items():
        monkeypatch.setenv(name, value)


# ----------------------------------------------------------------- what is forbidden

def test_the_ways_do_not_depend_on_those_of_the_library(reports, monkeypatch):
    body = "report = ways()"
    found = reports(4, body)
    assert found in ([PRIVATE] * 4, [STAGED] * 4)
    monkeypatch.setenv("OMPI_MCA_smsc", "^cma")
    assert reports(4, body) == found


@needs_seccomp
def test_without_process_vm_all_stage(reports, without_cma):
    """Forbidden to the last rank alone at first, then to all."""
    found = reports(4, """
if rank == 3:
    forbid.calls(*VM)
report["last"] = ways()
forbid.calls(*VM)
report["all"] = ways()
""")
    assert found == [{"last": STAGED, "all": STAGED}] * 4


@needs_seccomp
def test_without_memfd_there_is_a_window(reports):
    """Only rank 0 makes files, so it is enough to forbid it that."""
    found = reports(4, """
if rank == 0:
    forbid.calls("memfd_create")
report["first"] = ways()
forbid.calls("memfd_create")
report["all"] = ways()
""")
    assert found in ([{"first": one, "all": one}] * 4 for one in ({**PRIVATE, "window": True}, {**STAGED, "window": True}))


def test_without_proc_there_is_a_window(reports, without_cma):
    """Only rank 1 hides at first: the others cannot reach its memory, but need none of its files. Then rank 0 hides as well."""
    found = reports(4, """
forbid.ptrace()
for hidden in (1, 0):
    if rank == hidden:
        forbid.hide()
    world.Barrier()
    report[hidden] = ways()
""")
    assert found == [{"1": STAGED, "0": {**STAGED, "window": True}}] * 4


@needs_seccomp
def test_without_shared_memory_there_are_messages(reports):
    """The last rank alone finds no room for a window at first, then none does."""
    found = reports(4, """
forbid.calls("memfd_create")
for who in ("last", "all"):
    if rank == 3 or who == "all":
        memory.SPARE = 1 << 60
    comm = world.Dup()
    found = report[who] = {"errors": []}
    for array in (np.ones(SMALL), np.ones(LARGE)):
        try:
            mpiring.allreduce(array, comm=comm, algorithm="shared")
        except ValueError as error:
            found["errors"].append(str(error))
        assert (array == 1).all()
    found["auto"] = [way(np.empty(count, np.float32), comm, "auto") for count in (SMALL, LARGE)]
    array, found["warned"] = made(LARGE, comm)
    found["empty"] = way(array, comm, "auto")
    mpiring.free(array)
    assert not array.any()
    comm.Free()
""")
    for rank, report in enumerate(found):
        for one in report.values():
            assert one["errors"] == [f"allreduce on rank {rank}: algorithm 'shared' needs memory that ranks of a node share: "
                                     "neither memfd through /proc nor an MPI window works here"] * 2
            assert one["warned"] == [True]
            assert all(way == "messages" or way == algorithm == "native" for algorithm, way in [*one["auto"], one["empty"]])
    assert len({str([[one["auto"], one["empty"]] for one in report.values()]) for report in found}) == 1


# ----------------------------------------------------------------- a small /dev/shm

HUGE_ARRAYS = """
comm = world.Dup()
array = np.empty(16 << 20, np.float32)
report["ordinary"] = way(array, comm)
array, report["warned"] = made(16 << 20, comm)
report["empty"] = way(array, comm)
node = channel_of(comm).node
report["window"] = node.mapping.win is not None
"""


@needs_mount
def test_files_are_not_bound_by_a_small_dev_shm(reports):
    found = reports(4, HUGE_ARRAYS, before=[*PRIVATE_SHM, "64m"])
    assert found == [{**found[0], "warned": [], "empty": ["shared", "one pass"], "window": False}] * 4
    assert found[0]["ordinary"] in (["shared", "process_vm"], ["shared", "staged"])


@needs_seccomp
@needs_mount
def test_windows_leave_room_in_a_small_dev_shm(reports):
    """Those of 64 MiB are refused. Small ones go on and on: their room is given back, by free() or with the last array."""
    found = reports(4, """
forbid.calls("memfd_create")
""" + HUGE_ARRAYS + """
report["small"], kept = [], []
for turn in range(8):
    array, warned = made(1 << 20, comm)
    report["small"].append([way(array, comm)[1], *warned])
    comm.Barrier()
    if turn < 4:
        mpiring.free(array)
        kept.append(array)
    else:
        comm.Free()
        comm = world.Dup()
    del array
    world.Barrier()
""", before=[*PRIVATE_SHM, "64m"])
    large = found[0]["ordinary"]
    assert large in (["shared", "process_vm"], ["shared", "staged"])
    assert found == [{"ordinary": large, "warned": [True], "empty": large, "window": True, "small": [["one pass"]] * 8}] * 4


@needs_seccomp
@needs_mount
def test_windows_made_at_once_do_not_overfill_dev_shm(reports):
    """Each of two comms finds room for its window, but there is not enough for both: none may die of SIGBUS.

    Of Intel MPI's own they may, for it writes to all pages of a window that it makes.
    """
    found = reports(4, """
forbid.calls("memfd_create")
comm = world.Split(rank % 2, rank)
way(np.empty(SMALL), comm)
report["warned"] = []
for turn in range(5 if MPI.get_vendor()[0] != "Intel MPI" else 0):
    world.Barrier()
    array, warned = made(4 << 20, comm)
    report["warned"].append(warned)
    assert (way(array, comm)[1] == "one pass") == (not warned)
    comm.Barrier()
    mpiring.free(array)
""", before=[*PRIVATE_SHM, "64m"])
    assert found[0] == found[2] and found[1] == found[3]
    if not found[0]["warned"]:
        pytest.skip("Intel MPI dies of it before mpiring can tell")
    assert all([True] in both for both in zip(found[0]["warned"], found[1]["warned"]))


# ----------------------------------------------------------------- what is left behind, and what it takes

MEMORY_USE = """
def status():
    with open("/proc/self/status") as lines:
        return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmHWM", "Rss"))}

def added(comm):
    # The bytes resident during and after a call, beyond those before it.
    array[:] = 1
    before = status()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    mpiring.allreduce(array, comm=comm, algorithm="shared")
    after = status()
    rest = sum(after[name] - before[name] for name in ("RssAnon", "RssShmem"))
    return after["VmHWM"] - sum(before[name] for name in ("RssAnon", "RssShmem", "RssFile")), rest
"""


@needs_seccomp
def test_a_call_takes_little_memory(reports, without_cma):
    """VmHWM is the most that was resident since its reset. A first call on another comm loads what any call needs."""
    found = reports(8, MEMORY_USE + """
warm = world.Dup()
way(np.empty(SMALL), warm)
for forbidden in ((), VM):
    if forbidden:
        forbid.calls(*forbidden)
    comm, array = world.Dup(), np.ones(16 << 20, np.float32)
    first, again = added(comm), added(comm)
    assert (array == size).all()
    report[plan_of("allreduce", array, comm=comm, op=MPI.SUM, algorithm="shared").path] = first, again
    comm.Free()
""")
    assert "staged" in found[0]
    for report in found:
        for first, again in report.values():
            assert max(first) < 8 << 20, found
            assert max(again) < 256 << 10, found


HOLDING = """
how, held = sys.argv[1:]
if held == "window":
    forbid.calls("memfd_create")
comm = world.Dup()
arrays = [np.empty(SMALL) if held == "nothing" else mpiring.empty(16 << 20, np.float32, comm) for _ in range(2)]
for array in arrays:
    array[:] = rank
world.Barrier()
if rank == 0:
    with open("/proc/meminfo") as lines:
        print("shmem:", *(line.split()[1] for line in lines if line.startswith("Shmem:")), flush=True)
if how == "killed" and rank == 1:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
turns = 0
while turns < 3 or how == "killed":
    for array in arrays:
        if held == "nothing":
            comm.Allreduce(MPI.IN_PLACE, array)
        else:
            mpiring.allreduce(array, comm=comm, algorithm="shared")
    turns += 1
if how == "raised" and rank == 1:
    raise RuntimeError("on purpose")
"""


def shmem():
    """Return the bytes that this machine's files in memory take, with and without a name."""
    return 1024 * int(re.search(r"Shmem: +(\d+) kB", Path("/proc/meminfo").read_text())[1])


def holding(start, how, held):
    """Run such a program; return how it ended, the bytes in files while it ran, and the names that are left."""
    done = start(3, HOLDING, how, held, before=[*PRIVATE_SHM, "1g"])
    return done, 1024 * int(re.search(r"shmem: (\d+)", done.stdout)[1]), re.findall("left: (.+)", done.stdout)


@pytest.fixture(scope="module")
def left_by_the_library(tmp_path_factory):
    """The number of files in /dev/shm that are left when a rank without shared arrays is killed."""
    return len(holding(partial(launch, tmp_path_factory.mktemp("library") / "program.py"), "killed", "nothing")[2])


@needs_seccomp
@needs_mount
@pytest.mark.parametrize("how, held", [("killed", "files"), ("killed", "window"), ("raised", "files"), ("ended", "files")])
def test_nothing_is_left_behind(how, held, start, left_by_the_library):
    """MPICH leaves a file of its own when a rank dies: as many are left, then, as by ranks without shared arrays."""
    library = 0 if how == "ended" else left_by_the_library
    before = shmem()
    done, meanwhile, left = holding(start, how, held)
    assert (done.returncode == 0) == (how == "ended"), done.stderr
    assert ("on purpose" in done.stderr) == (how == "raised"), done.stderr
    assert meanwhile > before + (350 << 20)
    assert len(left) <= library and not any("mpiring" in name for name in left), left
    deadline = time.monotonic() + 10
    while shmem() > before + (8 << 20) and time.monotonic() < deadline:      # the kernel takes its time
        time.sleep(0.05)
    assert shmem() <= before + (8 << 20)
