"""The algorithm "shared" between nodes: drawn ones on this machine, which share memory inside and send messages to each other."""

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import mpiring
from mpiring.runtime import binding

from cases import BFLOAT16, KINDS, RANK, SIZE, attempt, bits, on_nodes, result, same_bits, values
from spmd import drawn

several = pytest.mark.skipif(SIZE < 2, reason="one rank is on one node")

NODES = st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE)
COUNT = st.one_of(st.integers(0, 200), st.integers(0, 5000))
STAGES = st.sampled_from([1 << 10, 1 << 13, 2 << 20])
OPS = [(np.float32, MPI.SUM), (np.int64, MPI.MAX), (np.complex128, mpiring.AVERAGE), (np.int16, mpiring.AVERAGE),
       (np.float16, MPI.SUM), (BFLOAT16, mpiring.AVERAGE), (np.dtype(">f4"), MPI.SUM), (np.bool_, MPI.LXOR)]


def strided(flat):
    room = np.zeros((flat.size, 2), flat.dtype)[::-1, 0]
    room[...] = flat
    return room


MAKE = {**KINDS, "strided": strided, "strided on some": lambda flat: strided(flat) if RANK % 2 else flat.copy()}


@drawn(st.tuples(NODES, COUNT, STAGES, st.sampled_from(list(MAKE)), st.sampled_from(OPS), st.booleans(),
                 st.integers(0, SIZE - 1)), examples=60)
def test_drawn_nodes(case):
    """In segments so short that many are on their way, on nodes of unequal size: some ranks have no lane."""
    nodes, count, stage, kind, (dtype, op), inplace, root = case
    dtype, make = np.dtype(dtype), MAKE[kind]
    mine, expected = values(RANK, count, dtype), result(op, count, dtype)
    with pytest.MonkeyPatch.context() as patch, on_nodes(nodes) as comm, np.errstate(all="ignore"):
        patch.setattr(binding, "STAGE", stage)
        options = {"comm": comm, "algorithm": "shared"}
        send, recv = make(mine), None if inplace else make(np.zeros_like(mine))
        out = mpiring.allreduce(send, recv, op=op, **options)
        assert out is (send if inplace else recv)
        assert bits(out) == bits(expected) and same_bits(out)
        assert inplace or bits(send) == bits(mine)

        send[...] = mine
        out = mpiring.reduce(send, recv, op=op, root=root, **options)
        assert (out is None) if root != RANK else bits(out) == bits(expected)
        assert bits(send) == bits(expected if inplace and root == RANK else mine)

        send[...] = values(root, count, dtype) if root == RANK else np.ones(count, dtype)
        assert mpiring.broadcast(send, root=root, **options) is send
        assert bits(send) == bits(values(root, count, dtype))


@drawn(st.tuples(NODES, st.sampled_from([1 << 10, 1 << 13]), st.sampled_from(list(MAKE))), examples=15)
def test_many_runs(case):
    """A rank that runs ahead of other nodes must not meet the values of a later run."""
    nodes, stage, kind = case
    with pytest.MonkeyPatch.context() as patch, on_nodes(nodes) as comm:
        patch.setattr(binding, "STAGE", stage)
        array, other = MAKE[kind](np.zeros(1500)), MAKE[kind](np.zeros(700))
        for round_ in range(30):
            array[...], other[...] = RANK + round_, RANK * round_
            mpiring.allreduce(array, comm=comm, algorithm="shared")
            mpiring.reduce(other, comm=comm, algorithm="shared", root=round_ % SIZE)
            assert (array == SIZE * round_ + SIZE * (SIZE - 1) // 2).all()
            assert (other == (SIZE * (SIZE - 1) // 2 if RANK == round_ % SIZE else RANK) * round_).all()


def test_what_does_not_go_between_nodes():
    """Said on every rank, before anything is sent."""
    op = MPI.Op.Create(lambda a, b, datatype: None, commute=False)
    with on_nodes(range(SIZE)) as comm:
        if SIZE > 1:
            with pytest.raises(ValueError, match="algorithm 'shared' does allgather among the ranks of one node only"):
                mpiring.allgather(np.ones(SIZE), comm=comm, algorithm="shared")
            with pytest.raises(ValueError, match="'shared' reduces in another order than that of the ranks between nodes"):
                mpiring.allreduce(np.ones(5), op=op, comm=comm, algorithm="shared")
        for collective in (mpiring.reduce_scatter, mpiring.allgather, mpiring.alltoall):
            collective(np.ones(SIZE), comm=comm)         # auto knows it
    op.Free()


# ----------------------------------------------------------------- errors

def assert_usable(comm):
    for count in (1, 1000):
        for algorithm in ("shared", "ring"):
            assert (mpiring.allreduce(np.ones(count), comm=comm, algorithm=algorithm) == SIZE).all()


@several
@drawn(st.tuples(NODES, st.integers(0, SIZE - 1), COUNT, COUNT, STAGES, st.sampled_from(list(KINDS))), examples=40)
def test_any_counts(case):
    nodes, bad, some, other, stage, kind = case
    with pytest.MonkeyPatch.context() as patch, on_nodes(nodes) as comm:
        patch.setattr(binding, "STAGE", stage)
        array = KINDS[kind](np.ones(max(some, other)))[:other if RANK == bad else some]
        error, text = attempt(lambda: mpiring.allreduce(array, comm=comm, algorithm="shared"))
        assert_usable(comm)
    assert (error is None) if some == other else (error is mpiring.MismatchError), (error, text)
    assert error is None or (f"count {other if RANK == bad else some}," in text and f"on rank {RANK}: " in text), text


@several
@drawn(st.tuples(NODES, st.integers(0, SIZE - 1), st.integers(1, 5000), STAGES), examples=20)
def test_another_op_or_dtype(case):
    nodes, bad, count, stage = case
    with pytest.MonkeyPatch.context() as patch, on_nodes(nodes) as comm:
        patch.setattr(binding, "STAGE", stage)
        odd = RANK == bad
        for dtype, op in ((np.int32 if odd else np.float32, MPI.SUM), (np.float32, MPI.MAX if odd else MPI.SUM)):
            error, text = attempt(lambda: mpiring.allreduce(np.ones(count, dtype), op=op, comm=comm, algorithm="shared"))
            assert_usable(comm)
            assert error is mpiring.MismatchError, (error, text)


@several
@drawn(st.tuples(NODES, st.integers(0, SIZE - 1), st.integers(1, 5000), STAGES, st.sampled_from(["allreduce", "reduce"]),
                 st.integers(0, 4)), examples=40)
def test_an_error_in_the_middle_reaches_every_rank(case):
    """In the node's own sums, or in those of a lane; every rank whose result depends on the sum learns of it."""
    nodes, bad, count, stage, collective, where = case
    with pytest.MonkeyPatch.context() as patch, on_nodes(nodes) as comm:
        patch.setattr(binding, "STAGE", stage)
        array = np.full(count, 1.0, np.float32)
        array[(count - 1) * where // 4] = 3e38
        with np.errstate(over="raise" if RANK == bad else "ignore"):
            error, text = attempt(lambda: getattr(mpiring, collective)(array, comm=comm, algorithm="shared"))
        found = comm.allgather(error)
        assert_usable(comm)
    if FloatingPointError in found:
        due = range(SIZE) if collective == "allreduce" else [0]
        assert found[bad] is FloatingPointError and all(found[rank] in (mpiring.PeerError, FloatingPointError) for rank in due)
        assert error is not mpiring.PeerError or f"rank {bad}: FloatingPointError: overflow" in text, text


@several
@pytest.mark.parametrize("root", sorted({0, SIZE - 1}))
def test_a_sum_that_fails_in_the_last_step_of_a_lane(root, monkeypatch):
    """A rank whose share of a reduce is sent on by then learns of it in the next segment, not in this one."""
    monkeypatch.setattr(binding, "STAGE", 1024)
    for bad in range(SIZE):
        with on_nodes(range(SIZE)) as comm:
            mine = np.full(3000, 3e38 if RANK == bad else 1e38 if RANK == (bad + 1) % SIZE else 0, np.float32)
            with np.errstate(over="raise" if RANK == bad else "ignore"):
                error, text = attempt(lambda mine=mine: mpiring.reduce(mine, root=root, comm=comm, algorithm="shared"))
            assert_usable(comm)
        assert error is (FloatingPointError if RANK == bad else mpiring.PeerError), (error, text)


@several
def test_numpy_settings_of_the_caller_count_between_nodes():
    with on_nodes(range(SIZE)) as comm:
        with np.errstate(over="raise"):
            error, text = attempt(lambda: mpiring.allreduce(np.full(100, 3e38, np.float32), comm=comm, algorithm="shared"))
        assert_usable(comm)
    assert error in (FloatingPointError, mpiring.PeerError), text


@several
def test_a_node_of_one_rank_and_lanes_of_no_elements():
    """Ten elements are one rank's work: the other lanes have nothing to send, and have to know all the same."""
    with on_nodes([rank * 2 // SIZE for rank in range(SIZE)]) as comm:
        for some, other in ((10, 1000), (1000, 10), (0, 1000), (1000, 0), (64, 65)):
            error, text = attempt(lambda: mpiring.allreduce(np.ones(other if RANK == 1 else some), comm=comm, algorithm="shared"))
            assert_usable(comm)
            assert error is mpiring.MismatchError, (some, other, text)
