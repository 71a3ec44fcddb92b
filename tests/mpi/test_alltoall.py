"""alltoall: equal and unequal blocks, in place and not, every algorithm, dtype and layout."""

import numpy as np
import pytest
from hypothesis import strategies as st

import mpiring
from mpiring.algorithms import registry
from mpiring.algorithms.cuts import counts as balanced

from cases import COMM, DTYPES, LAYOUTS, RANK, SIZE, bits
from spmd import drawn

OURS = [*registry.names("alltoall"), "shared"]
ALGORITHMS = [*OURS, "native", "auto"]


def block(source, dest, count, dtype):
    """Return what goes from one rank to another."""
    return ((np.arange(count) + 3 * source + 7 * dest) % 11).astype(dtype)


def given(rows, dtype):
    return np.concatenate([block(RANK, dest, count, dtype) for dest, count in enumerate(rows[RANK])] or [np.zeros(0, dtype)])


def wanted(rows, dtype):
    return np.concatenate([block(source, RANK, row[RANK], dtype) for source, row in enumerate(rows)] or [np.zeros(0, dtype)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("each", [0, 1, 7, 2000])
def test_equal_blocks(algorithm, each):
    rows = [[each] * SIZE] * SIZE
    for dtype in (np.float32, np.int8, np.complex128):
        mine, out = given(rows, dtype), np.zeros(each * SIZE, dtype)
        before = mine.copy()
        assert mpiring.alltoall(mine, out, algorithm=algorithm) is out
        assert (out == wanted(rows, dtype)).all() and (mine == before).all()
        assert mpiring.alltoall(mine, algorithm=algorithm) is mine
        assert (mine == wanted(rows, dtype)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_vector_that_does_not_divide(algorithm):
    count = 10 * SIZE + SIZE // 2
    rows = [balanced(count, SIZE)] * SIZE
    mine, out = given(rows, float), np.zeros(rows[0][RANK] * SIZE)
    assert (mpiring.alltoall(mine, out, algorithm=algorithm) == wanted(rows, float)).all()


@drawn(st.tuples(st.lists(st.lists(st.integers(0, 60), min_size=SIZE, max_size=SIZE), min_size=SIZE, max_size=SIZE),
                 st.sampled_from(ALGORITHMS), st.booleans(), st.sampled_from([64, 200, 1 << 19])), examples=40)
def test_unequal_blocks(case):
    rows, algorithm, inplace, segment = case
    if inplace:
        rows = [[max(rows[i][j], rows[j][i]) for j in range(SIZE)] for i in range(SIZE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIRING_SEGMENT", str(segment))
        comm = COMM.Dup()
        mine = given(rows, np.float32)
        out = None if inplace else np.zeros(sum(row[RANK] for row in rows), np.float32)
        found = mpiring.alltoall(mine, out, counts=rows, comm=comm, algorithm=algorithm)
        assert (found == wanted(rows, np.float32)).all()
        assert inplace or (mine == given(rows, np.float32)).all()
        comm.Free()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    rows = [[9] * SIZE] * SIZE
    for algorithm in (*OURS, "auto"):
        assert bits(mpiring.alltoall(given(rows, dtype), algorithm=algorithm)) == bits(wanted(rows, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layouts(algorithm, layout):
    rows = [[14] * SIZE] * SIZE
    mine, out = (LAYOUTS[layout](array.reshape(2 * SIZE, 7)) for array in (given(rows, float), np.zeros(14 * SIZE)))
    assert (mpiring.alltoall(mine, out, algorithm=algorithm).reshape(-1) == wanted(rows, float)).all()
    assert (mpiring.alltoall(mine, algorithm=algorithm).reshape(-1) == wanted(rows, float)).all()


def test_errors():
    place = f"alltoall on rank {RANK}: "
    with pytest.raises(TypeError, match=place + "counts is not a matrix of whole numbers, a row for each sender: "):
        mpiring.alltoall(np.ones(SIZE), counts=[1] * SIZE)
    with pytest.raises(ValueError, match=place + f"counts is not a matrix of {SIZE} rows of {SIZE} numbers, none negative"):
        mpiring.alltoall(np.ones(SIZE), counts=[[1] * SIZE] * (SIZE + 1))
    with pytest.raises(ValueError, match="none negative"):
        mpiring.alltoall(np.ones(SIZE), counts=[[-1] * SIZE] * SIZE)
    with pytest.raises(ValueError, match=place + f"sendbuf has {SIZE + 1} elements, but row {RANK} of counts has the sum {SIZE}"):
        mpiring.alltoall(np.ones(SIZE + 1), np.ones(SIZE), counts=[[1] * SIZE] * SIZE)
    with pytest.raises(ValueError, match=place + f"recvbuf has {SIZE + 1} elements, but this rank receives {SIZE}"):
        mpiring.alltoall(np.ones(SIZE), np.ones(SIZE + 1))
    if SIZE > 1:
        rows = [[dest + 1 for dest in range(SIZE)]] * SIZE
        words = "sendbuf takes the result, .* but ranks 0 and 1 send each other blocks of 2 and 1 "
        with pytest.raises(ValueError, match=place + words):
            mpiring.alltoall(np.ones(sum(rows[0])), counts=rows)
        with pytest.raises(ValueError, match=place + "sendbuf takes the result, .* send each other blocks of"):
            mpiring.alltoall(np.ones(2 * SIZE + 1))
    COMM.Barrier()


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
def test_ranks_that_disagree():
    for algorithm in OURS:
        error = None
        try:
            mpiring.alltoall(np.ones((300 if RANK == 0 else 100) * SIZE), algorithm=algorithm)
        except mpiring.MismatchError as caught:
            error = caught
        assert all(COMM.allgather(error is not None))
        assert (mpiring.allreduce(np.ones(10)) == SIZE).all()
