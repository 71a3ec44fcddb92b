"""broadcast and reduce: every root, algorithm and layout; the root's input of a broadcast and all other inputs stay untouched."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.algorithms import registry
from mpiring.runtime import binding

from cases import COMM, COUNTS, DTYPES, KINDS, LAYOUTS, RANK, SIZE, bits, result, same_bits, values

ROOTS = sorted({0, SIZE // 2, SIZE - 1})
OUR_BROADCASTS = [*registry.names("broadcast"), "shared"]
OUR_REDUCES = [*registry.names("reduce"), "shared"]
BROADCASTS = [*OUR_BROADCASTS, "native", "auto"]
CASES = [(np.float32, MPI.SUM), (np.int64, MPI.MAX), (np.complex128, mpiring.AVERAGE), (np.int16, mpiring.AVERAGE)]
REDUCES = [*OUR_REDUCES, "native", "auto"]


def filled(count, dtype, root):
    """Return what a rank passes to a broadcast: the root's values, or rubbish."""
    return values(root, count, dtype) if RANK == root else np.ones(count, dtype)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("algorithm", BROADCASTS)
def test_broadcast(algorithm, root):
    for count in COUNTS:
        for dtype in (np.float32, np.int8, np.complex128, bool):
            mine = filled(count, np.dtype(dtype), root)
            if RANK == root:
                mine.flags.writeable = False
            assert mpiring.broadcast(mine, root=root, algorithm=algorithm) is mine
            assert (mine == values(root, count, np.dtype(dtype))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", [*OUR_BROADCASTS, "auto"])
def test_broadcast_of_every_dtype(algorithm, dtype):
    mine = filled(1000, dtype, SIZE - 1)
    mpiring.broadcast(mine, root=np.int64(SIZE - 1), algorithm=algorithm)
    assert bits(mine) == bits(values(SIZE - 1, 1000, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", BROADCASTS)
def test_broadcast_into_every_layout(algorithm, layout):
    base = values(0, 40 * 7, np.dtype(np.float64)).reshape(40, 7)
    view = LAYOUTS[layout](base if RANK == 0 else np.zeros_like(base))
    assert mpiring.broadcast(view, algorithm=algorithm) is view and (view == base).all()


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("algorithm", REDUCES)
def test_reduce(algorithm, root):
    for count in COUNTS:
        for dtype, op in CASES:
            mine, expected = values(RANK, count, np.dtype(dtype)), result(op, count, np.dtype(dtype))
            before, out = mine.copy(), np.zeros(count, dtype)
            found = mpiring.reduce(mine, out if RANK == root else None, op=op, root=root, algorithm=algorithm)
            assert found is (out if RANK == root else None) and (mine == before).all()
            assert RANK != root or (out == expected).all()
            if RANK != root:
                mine.flags.writeable = False
            found = mpiring.reduce(mine, op=op, root=root, algorithm=algorithm)
            assert found is (mine if RANK == root else None)
            assert (mine == (expected if RANK == root else before)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", REDUCES)
def test_reduce_of_every_layout(algorithm, layout):
    base = values(RANK, 40 * 7, np.dtype(np.float64)).reshape(40, 7)
    out = LAYOUTS[layout](np.zeros_like(base))
    mpiring.reduce(LAYOUTS[layout](base), out, root=SIZE - 1, algorithm=algorithm)
    assert RANK != SIZE - 1 or (out == result(MPI.SUM, 280, np.dtype(np.float64)).reshape(40, 7)).all()


@pytest.mark.parametrize("algorithm", [*OUR_REDUCES, "auto"])
def test_reduce_of_every_dtype(algorithm):
    for dtype in DTYPES:
        op = MPI.LOR if dtype.kind == "b" else MPI.SUM
        out = mpiring.reduce(values(RANK, 1000, dtype), op=op, algorithm=algorithm)
        assert RANK or bits(out) == bits(result(op, 1000, dtype))


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("kind", ["shared", "mixed"])
def test_in_shared_arrays(kind, root):
    for algorithm in ("shared", "auto"):
        for count in (1, 1000, 100_000):
            mine, expected = values(RANK, count, np.dtype(np.float32)), result(MPI.SUM, count, np.dtype(np.float32))
            send, recv = KINDS[kind](mine), KINDS[kind](np.zeros_like(mine))
            mpiring.reduce(send, recv, root=root, algorithm=algorithm)
            assert (send == mine).all() and (recv == (expected if RANK == root else 0)).all()
            mpiring.reduce(send, root=root, algorithm=algorithm)
            assert (send == (expected if RANK == root else mine)).all()
            mpiring.broadcast(send, root=root, algorithm=algorithm)
            assert (send == expected).all()


def test_many_segments(monkeypatch):
    monkeypatch.setenv("MPIRING_SEGMENT", "64")
    monkeypatch.setattr(binding, "STAGE", 1024 * SIZE)
    comm = COMM.Dup()
    for count in (1, 1000, 2503):
        for root in ROOTS:
            for algorithm in OUR_BROADCASTS:
                mine = filled(count, np.dtype(np.float32), root)
                mpiring.broadcast(mine, root=root, comm=comm, algorithm=algorithm)
                assert same_bits(mine) and (mine == values(root, count, np.dtype(np.float32))).all()
            for algorithm in OUR_REDUCES:
                out = mpiring.reduce(values(RANK, count, np.dtype(np.float32)), root=root, comm=comm, algorithm=algorithm)
                assert RANK != root or (out == result(MPI.SUM, count, np.dtype(np.float32))).all()
    comm.Free()


def test_errors():
    with pytest.raises(ValueError, match=f"broadcast on rank {RANK}: root {SIZE} is not one of {SIZE} ranks"):
        mpiring.broadcast(np.ones(3), root=SIZE)
    with pytest.raises(ValueError, match=f"reduce on rank {RANK}: root -1 is not one of"):
        mpiring.reduce(np.ones(3), root=-1)
    with pytest.raises(TypeError, match="root is of type float, not a rank"):
        mpiring.reduce(np.ones(3), root=0.0)
    with pytest.raises(TypeError, match="buf is of type list"):
        mpiring.broadcast([1, 2])
    with pytest.raises(TypeError, match="buf has dtype object"):
        mpiring.broadcast(np.array([None]))
    with pytest.raises(ValueError, match=r"unknown algorithm 'ring' for broadcast; known: tree, pipelined_tree, .*, shared, "):
        mpiring.broadcast(np.ones(3), algorithm="ring")
    constant = np.ones(3)
    constant.flags.writeable = False
    for root in range(SIZE):
        if root != RANK:
            with pytest.raises(ValueError, match="buf is read-only"):
                mpiring.broadcast(constant, root=root)
        else:
            with pytest.raises(ValueError, match=r"sendbuf .* is read-only"):
                mpiring.reduce(constant, root=root)
    COMM.Barrier()


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
def test_ranks_that_disagree():
    for algorithm in OUR_BROADCASTS:
        error = None
        try:
            mpiring.broadcast(np.ones(3000 if RANK == 0 else 1000), algorithm=algorithm)
        except mpiring.MismatchError as caught:
            error = caught
        found = COMM.allgather(error is not None)
        assert all(found) if algorithm == "shared" else all(found[1:]) if algorithm == "tree" else any(found), found
        assert (mpiring.allreduce(np.ones(10)) == SIZE).all()
    for algorithm in OUR_REDUCES:
        error = None
        try:
            mpiring.reduce(np.ones(3000 if RANK == SIZE - 1 else 1000), algorithm=algorithm)
        except mpiring.MismatchError as caught:
            error = caught
        found = COMM.allgather(error is not None)
        assert all(found) if algorithm == "shared" else found[0], found
        assert (mpiring.allreduce(np.ones(10)) == SIZE).all()
