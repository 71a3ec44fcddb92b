"""Allreduces that are started, and waited for later."""

import gc

import numpy as np
import pytest
from mpi4py import MPI

import mpiring

from cases import COMM, RANK, SIZE, result, values

ALGORITHMS = ["auto", "native", "shared", "ring"]
DTYPE = np.dtype(np.float64)


@pytest.fixture
def comm():
    comm = COMM.Dup()
    yield comm
    comm.Free()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_a_plan_runs_again_and_again(algorithm, count, comm):
    mine, out = np.zeros(count), np.zeros(count)
    plan = mpiring.allreduce_init(mine, out, comm=comm, algorithm=algorithm)
    assert not out.any(), "nothing is reduced yet"
    for round_ in range(6):
        mine[:] = values(RANK, count, DTYPE) + round_
        if round_ % 2:
            assert plan() is out
        else:
            plan.start()
            mpiring.allreduce(np.ones(5), comm=comm)
            assert plan.wait() is out
        assert (out == result(MPI.SUM, count, DTYPE) + SIZE * round_).all()
    assert plan.algorithm in ("native", "shared", "ring", "bruck", "tree") and plan.path
    if algorithm != "auto":
        assert plan.algorithm == algorithm


def test_a_plan_keeps_its_buffers_alive(comm):
    plan = mpiring.allreduce_init(np.ones(50_000), comm=comm)
    gc.collect()
    others = [np.zeros(50_000) for _ in range(4)]
    assert (plan() == SIZE).all()
    assert not any(other.any() for other in others)


def test_plans_are_started_once_at_a_time(comm):
    plan = mpiring.allreduce_init(np.ones(3), comm=comm)
    with pytest.raises(RuntimeError, match="not under way"):
        plan.wait()
    plan.start()
    with pytest.raises(RuntimeError, match="under way"):
        plan.start()
    with pytest.raises(RuntimeError, match="under way"):
        plan()
    assert (plan.wait() == SIZE).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_of_a_comm_that_is_freed(algorithm):
    comm = COMM.Dup()
    plan = mpiring.allreduce_init(np.ones(1000), comm=comm, algorithm=algorithm)
    plan()
    comm.Free()
    for call in (plan, plan.start):
        with pytest.raises(RuntimeError, match="freed with its comm"):
            call()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_under_way(algorithm, comm):
    counts = [1, 1000, 300_000, 7]
    arrays = [values(RANK, count, DTYPE) for count in counts]
    requests = [mpiring.iallreduce(array, comm=comm, algorithm=algorithm) for array in arrays]
    between = mpiring.allreduce(np.full(1000, 2.0), comm=comm, algorithm=algorithm)
    assert (between == 2 * SIZE).all()
    order = range(len(counts)) if RANK % 2 else reversed(range(len(counts)))       # each rank waits in its own order
    for index in order:
        assert requests[index].wait() is arrays[index]
        assert requests[index].test()
        assert (arrays[index] == result(MPI.SUM, counts[index], DTYPE)).all()


def test_it_goes_on_while_the_caller_waits_for_something_else(comm):
    """The last rank starts late, only when it has got word from a rank that is under way already."""
    array = np.full(400_000, 1.0)
    mpiring.iallreduce(np.ones(1), comm=comm, algorithm="ring").wait()     # the first one makes what all share
    if RANK == SIZE - 1 and SIZE > 1:
        comm.recv(source=0)
    request = mpiring.iallreduce(array, comm=comm, algorithm="ring")
    if RANK == 0 and SIZE > 1:
        comm.send("go", dest=SIZE - 1)
    assert (request.wait() == SIZE).all()


def test_recvbuf_and_in_place(comm):
    mine, out = np.full(1000, RANK + 1.0), np.zeros(1000)
    assert mpiring.iallreduce(mine, out, comm=comm).wait() is out
    assert (out == SIZE * (SIZE + 1) / 2).all() and (mine == RANK + 1).all()
    assert mpiring.iallreduce(MPI.IN_PLACE, out, op=mpiring.AVERAGE, comm=comm).wait() is out
    assert (out == SIZE * (SIZE + 1) / 2).all()


def test_shared_arrays(comm):
    array = mpiring.empty(100_000, np.float32, comm)
    for _ in range(3):
        array[:] = RANK
        assert (mpiring.iallreduce(array, comm=comm, algorithm="shared").wait() == SIZE * (SIZE - 1) / 2).all()


def test_errors_come_when_they_are_due(comm):
    for call, name in ((mpiring.iallreduce, "iallreduce"), (mpiring.allreduce_init, "allreduce_init")):
        with pytest.raises(TypeError, match=f"{name} on rank {RANK}: .*not numeric"):
            call(np.array([None]), comm=comm)
        with pytest.raises(ValueError, match=f"{name} on rank {RANK}: .*algorithm 'rong'"):
            call(np.ones(3), comm=comm, algorithm="rong")
    if SIZE > 1:
        request = mpiring.iallreduce(np.ones(1000 + RANK), comm=comm, algorithm="ring")
        with pytest.raises(mpiring.MismatchError):
            request.wait()
        assert (mpiring.iallreduce(np.ones(1000), comm=comm, algorithm="ring").wait() == SIZE).all()


@pytest.mark.skipif(SIZE < 2, reason="one rank adds nothing")
def test_numpy_settings_of_the_caller_count(comm):
    with np.errstate(over="raise"):
        request = mpiring.iallreduce(np.full(1000, 3e38, np.float32), comm=comm, algorithm="ring")
    with pytest.raises((FloatingPointError, mpiring.PeerError)):
        request.wait()
