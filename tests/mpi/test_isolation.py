"""The caller's traffic and ours never meet, and comms come and go."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpiring

from cases import COMM, RANK, SIZE

RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE


@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared", "native", "auto"])
def test_pending_receives_of_any_tag(algorithm):
    comm = COMM.Dup()
    for count in (3, 200_000):
        got = np.zeros(count)
        pending = comm.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
        for _ in range(3):
            assert (mpiring.allreduce(np.ones(count), algorithm=algorithm, comm=comm) == SIZE).all()
        assert not pending.Test()
        COMM.Barrier()
        sending = comm.Isend(np.full(count, 5.0), RIGHT, 12345)
        assert (mpiring.allreduce(np.ones(count), algorithm=algorithm, comm=comm) == SIZE).all()
        status = MPI.Status()
        pending.Wait(status)
        sending.Wait()
        assert (got == 5).all() and (status.source, status.tag) == (LEFT, 12345)
    comm.Free()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_messages_under_way_with_our_tags(algorithm):
    comm = COMM.Dup()
    sent = [comm.Isend(np.full(8, float(tag)), RIGHT, tag) for tag in range(64)]
    assert (mpiring.allreduce(np.ones(50), comm=comm, algorithm=algorithm) == SIZE).all()
    for tag in range(64):
        got = np.zeros(8)
        comm.Recv(got, LEFT, tag)
        assert (got == tag).all()
    MPI.Request.Waitall(sent)
    comm.Free()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_collective_of_the_caller_under_way(algorithm):
    comm = COMM.Dup()
    mine, out = np.ones(1000), np.zeros(1000)
    request = comm.Iallreduce(mine, out)
    assert (mpiring.allreduce(np.ones(1000), comm=comm, algorithm=algorithm) == SIZE).all()
    request.Wait()
    assert (out == SIZE).all()
    comm.Free()


@pytest.mark.deadline(180)
def test_thousands_of_comms():
    for round_ in range(2100 if SIZE <= 4 else 300):     # MPICH has 2,048 context ids
        comm = COMM.Dup()
        assert (mpiring.ring_allreduce(np.array([1.0 + round_]), comm=comm) == SIZE * (1.0 + round_)).all()
        comm.Free()


def test_hundreds_of_comms_with_shared_memory():
    """Neither mapped memory nor files nor threads are left."""
    def held():
        return len(Path("/proc/self/maps").read_text().splitlines()), len(os.listdir("/proc/self/fd")), threading.active_count()

    for round_ in range(210 if SIZE <= 4 else 60):
        comm = COMM.Dup()
        array = mpiring.empty(1, comm=comm)
        array[:] = 1 + round_
        assert mpiring.allreduce(array, comm=comm, algorithm="shared") == SIZE * (1 + round_)
        assert mpiring.iallreduce(np.array([1 + round_]), comm=comm, algorithm="shared").wait() == SIZE * (1 + round_)
        del array
        comm.Free()
        if round_ == 10:
            first = held()
    assert all(now <= then + 20 for now, then in zip(held(), first)), (first, held())


def test_sub_communicators():
    for colour, key in ((RANK % 2, RANK), (RANK % 3, -RANK), (0, -RANK), (RANK, 0)):
        comm = COMM.Split(colour, key)
        ranks = comm.allgather(RANK)
        for algorithm in ("ring", "tree", "shared", "native", "auto"):
            assert (mpiring.allreduce(np.full(1001, float(RANK)), algorithm=algorithm, comm=comm) == sum(ranks)).all()
        comm.Free()
    comm = COMM.Split(0 if RANK < max(1, SIZE - 1) else MPI.UNDEFINED)
    if comm != MPI.COMM_NULL:
        assert (mpiring.allreduce(np.ones(10), comm=comm) == comm.size).all()
        comm.Free()


def test_self():
    for algorithm in ("auto", "shared", "ring"):
        out = mpiring.allreduce(np.arange(5.0), np.zeros(5), comm=MPI.COMM_SELF, algorithm=algorithm)
        assert out.tolist() == [0, 1, 2, 3, 4]


def test_two_comms_in_turn():
    one, other = COMM.Dup(), COMM.Split(0, -RANK)
    a, b = np.zeros(1000), np.zeros(1000)
    for round_ in range(20):
        a[:], b[:] = RANK, round_
        mpiring.ring_allreduce(a, comm=one)
        mpiring.tree_allreduce(b, comm=other)
        assert (a == SIZE * (SIZE - 1) / 2).all() and (b == SIZE * round_).all()
    one.Free()
    other.Free()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_a_duplicate_has_its_own_channel(algorithm):
    comm = COMM.Dup()
    mpiring.allreduce(np.ones(3), comm=comm, algorithm=algorithm)
    copy = comm.Dup()
    comm.Free()
    assert (mpiring.allreduce(np.ones(3), comm=copy, algorithm=algorithm) == SIZE).all()
    copy.Free()
