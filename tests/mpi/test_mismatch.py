"""Ranks that disagree, or fail on the way: an error on every rank, nothing pending, and the comm is as good as before."""

import time

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import mpiring
from mpiring.algorithms.registry import names
from mpiring.runtime import binding
from mpiring.runtime.channel import channel_of

from cases import COMM, RANK, SIZE, attempt
from spmd import drawn

pytestmark = pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")


def assert_usable(comm=COMM):
    for algorithm in ("ring", "tree", "shared"):
        assert (mpiring.allreduce(np.ones(100), algorithm=algorithm, comm=comm) == comm.size).all()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared"])
def test_both_values_are_named(algorithm):
    bad = SIZE - 1
    kind, text = attempt(lambda: mpiring.allreduce(np.ones(2000 if RANK == bad else 1000), algorithm=algorithm))
    assert kind is mpiring.MismatchError
    assert f"allreduce({algorithm}, count {2000 if RANK == bad else 1000}, float64, SUM) on rank {RANK}: ranks disagree" in text
    assert f"rank {bad} sent" in text or f"rank {bad} saw" in text or f"rank {bad} called" in text
    if RANK == bad:
        assert "count 1000" in text
    if algorithm == "shared":
        assert all(f"rank {rank} called allreduce(shared, count {2000 if rank == bad else 1000}," in text for rank in range(SIZE))
    assert_usable()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared"])
@pytest.mark.parametrize("what", ["dtype", "op"])
def test_same_bytes_of_another_call(algorithm, what):
    odd = RANK == 0
    dtype = np.int32 if what == "dtype" and odd else np.float32
    op = MPI.MAX if what == "op" and odd else MPI.SUM
    kind, text = attempt(lambda: mpiring.allreduce(np.ones(1000, dtype), op=op, algorithm=algorithm))
    assert kind is mpiring.MismatchError
    word = "belong to another call" if algorithm != "shared" else "float32, MAX" if what == "op" else "int32, SUM"
    assert word in text, text
    assert_usable()


COUNT = st.one_of(st.integers(0, 3), st.integers(0, 3000))


@drawn(st.tuples(st.sampled_from([*names("allreduce"), "shared"]), st.integers(0, SIZE - 1), COUNT, COUNT,
                 st.sampled_from([64, 200, 4096, 1 << 19]), st.booleans()), examples=60)
def test_any_counts(case):
    """Also in the way of several nodes, where sends run ahead: news of a failure must not be overtaken by empty messages."""
    algorithm, bad, some, other, segment, spread = case
    comm = COMM.Dup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIRING_SEGMENT", str(segment))
        patch.setattr(binding, "STAGE", min(binding.STAGE, segment * SIZE))
        channel_of(comm).spread = spread and algorithm != "shared"          # which test_relay.py spreads over nodes
        kind, text = attempt(lambda: mpiring.allreduce(np.ones(other if RANK == bad else some), algorithm=algorithm, comm=comm))
    assert (kind is None) if some == other else (kind is mpiring.MismatchError), (kind, text)
    assert_usable(comm)
    comm.Free()


def test_long_messages():
    """Longer than what MPI sends eagerly: an MPI library may write past a receive that is too short."""
    for some, other in ((500_000, 10_007), (10_007, 500_000), (0, 3_000_000), (3_000_000, 3_000_001)):
        for algorithm in ("ring", "tree", "shared"):
            kind, text = attempt(lambda: mpiring.allreduce(np.ones(other if RANK == 0 else some, np.float32), algorithm=algorithm))
            assert kind is mpiring.MismatchError, text
    assert_usable()


@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_halves(algorithm):
    kind, _ = attempt(lambda: mpiring.reduce_scatter(np.ones(50_000 if RANK else 20_000), algorithm=algorithm))
    assert kind is mpiring.MismatchError
    kind, _ = attempt(lambda: mpiring.allgather(np.ones(50_000 if RANK else 20_000), algorithm=algorithm))
    assert kind is mpiring.MismatchError
    shares = [10] * SIZE
    if RANK == 0:
        shares = [9, 11, *shares[2:]]
    kind, text = attempt(lambda: mpiring.reduce_scatter(np.ones(10 * SIZE), counts=shares, algorithm=algorithm))
    assert kind is mpiring.MismatchError, text
    assert_usable()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared"])
def test_an_error_in_the_middle_reaches_every_rank(algorithm):
    with np.errstate(over="raise" if RANK == 0 else "ignore"):
        kind, text = attempt(lambda: mpiring.allreduce(np.full(1000, 3e38, np.float32), algorithm=algorithm))
    if RANK == 0:
        assert kind is FloatingPointError
    else:
        assert kind is mpiring.PeerError and "rank 0: FloatingPointError: overflow" in text, (kind, text)
    assert_usable()


def test_a_rank_that_is_late_sees_an_error_in_its_turn(monkeypatch):
    """Rank 0 looks for errors after every barrier; the others may have failed in what follows already."""
    monkeypatch.setattr(binding, "STAGE", 1024)
    comm = COMM.Dup()
    node = channel_of(comm).node
    if RANK == 0:
        barrier = node.barrier
        node.barrier = lambda: (barrier(), time.sleep(0.1))
    array = np.ones(1000, np.float32)
    array[-1] = 3e38
    with np.errstate(over="raise" if RANK == SIZE - 1 else "ignore"):
        kind, text = attempt(lambda: mpiring.allreduce(array, comm=comm, algorithm="shared"))
    assert kind is (FloatingPointError if RANK == SIZE - 1 else mpiring.PeerError), text
    assert_usable(comm)
    comm.Free()


@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_another_comm_is_not_touched(algorithm):
    other = COMM.Dup()
    mpiring.allreduce(np.ones(10), comm=other, algorithm=algorithm)
    kind, _ = attempt(lambda: mpiring.allreduce(np.ones(10 + RANK), algorithm=algorithm))
    assert kind is mpiring.MismatchError
    assert_usable(other)
    assert_usable()
    other.Free()
