"""reduce_scatter and allgather: the ring's halves, also for counts that do not divide and for counts of the caller's."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.cuts import cuts, offsets
from mpiring.runtime import binding

from cases import COMM, COUNTS, KINDS, LAYOUTS, RANK, SIZE, result, values

ALGORITHMS = ["ring", "bruck", "shared", "native", "auto"]


def given_counts(count):
    """Return shares that are far from even: all for one rank, none for some."""
    shares = [0] * SIZE
    shares[SIZE // 2] = count - count // 3
    shares[-1] += count // 3
    return shares


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_scatter(count, algorithm):
    for dtype, op in ((np.float32, MPI.SUM), (np.int64, MPI.MIN), (np.float64, mpiring.AVERAGE)):
        for counts in (None, given_counts(count)):
            edges = offsets(counts or balanced(count, SIZE))
            own = slice(edges[RANK], edges[RANK + 1])
            mine, expected = values(RANK, count, np.dtype(dtype)), result(op, count, np.dtype(dtype))
            before, out = mine.copy(), np.zeros(own.stop - own.start, dtype)
            assert mpiring.reduce_scatter(mine, out, op=op, counts=counts, algorithm=algorithm) is out
            assert (out == expected[own]).all() and (mine == before).all()
            there = mpiring.reduce_scatter(mine, op=op, counts=counts, algorithm=algorithm)
            assert (there == expected[own]).all() and np.shares_memory(there, mine) == (there.size > 0)
            before[own] = expected[own]
            assert (mine == before).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", COUNTS)
def test_allgather(count, algorithm):
    for dtype in (np.float32, np.int8, np.complex128):
        whole = values(99, count, np.dtype(dtype))
        for counts in (None, given_counts(count)):
            edges = offsets(counts or balanced(count, SIZE))
            own = slice(edges[RANK], edges[RANK + 1])
            mine, out = whole[own].copy(), np.zeros(count, dtype)
            assert mpiring.allgather(mine, out, counts=counts, algorithm=algorithm) is out
            assert (out == whole).all()
            alone = np.zeros(count, dtype)
            alone[own] = mine
            assert mpiring.allgather(MPI.IN_PLACE, alone, counts=counts, algorithm=algorithm) is alone
            assert (alone == whole).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, algorithm):
    base = values(RANK, 40 * 7, np.dtype(np.float64)).reshape(40, 7)
    expected = result(MPI.SUM, 280, np.dtype(np.float64))
    own = cuts(280, SIZE)[RANK]
    part = np.zeros((own.stop - own.start, 2))[::-1, 0]
    mpiring.reduce_scatter(LAYOUTS[layout](base), part, algorithm=algorithm)
    assert (part == expected[own]).all()
    whole = LAYOUTS[layout](np.zeros((40, 7)))
    mpiring.allgather(part, whole, algorithm=algorithm)
    assert (whole.reshape(-1) == expected).all()


@pytest.mark.parametrize("algorithm", ["ring", "bruck", "shared"])
def test_many_segments(monkeypatch, algorithm):
    monkeypatch.setenv("MPIRING_SEGMENT", "64")
    monkeypatch.setattr(binding, "STAGE", 1024 * SIZE)
    comm = COMM.Dup()
    for count in (1, 1000, 2503):
        own = cuts(count, SIZE)[RANK]
        mine, part = values(RANK, count, np.dtype(np.float32)), np.zeros(own.stop - own.start, np.float32)
        mpiring.reduce_scatter(mine, part, comm=comm, algorithm=algorithm)
        assert (part == result(MPI.SUM, count, np.dtype(np.float32))[own]).all()
        whole = mpiring.allgather(part, np.zeros(count, np.float32), comm=comm, algorithm=algorithm)
        assert (whole == result(MPI.SUM, count, np.dtype(np.float32))).all()
        assert (mpiring.reduce_scatter(mine, comm=comm, algorithm=algorithm) == part).all()
    comm.Free()


def test_errors():
    place = f"on rank {RANK}: "
    with pytest.raises(ValueError, match=place + "recvbuf has 11 elements, but this rank's chunk has"):
        mpiring.reduce_scatter(np.zeros(10), np.zeros(11))
    with pytest.raises(ValueError, match=place + "sendbuf has 11 elements, but this rank's chunk has"):
        mpiring.allgather(np.zeros(11), np.zeros(10))
    with pytest.raises(ValueError, match=place + f"counts .* are not one for each of {SIZE} ranks, none negative, with the sum 10"):
        mpiring.reduce_scatter(np.zeros(10), counts=[10] * (SIZE + 1))
    with pytest.raises(ValueError, match=place + "counts"):
        mpiring.allgather(np.zeros(10), counts=[-1, 11] + [0] * (SIZE - 2))
    with pytest.raises(TypeError, match=place + "counts is not a list of whole numbers: 2"):
        mpiring.allgather(np.zeros(10), counts=2)
    with pytest.raises(TypeError, match=place + "counts is not a list of whole numbers"):
        mpiring.allgather(np.zeros(10), counts=[2.5] * SIZE)
    with pytest.raises(ValueError, match=place + "sendbuf is not contiguous"):
        mpiring.reduce_scatter(np.zeros((10, 2))[:, 0])
    with pytest.raises(ValueError, match=place + "unknown algorithm 'tree' for reduce_scatter; known: ring, bruck, shared, "):
        mpiring.reduce_scatter(np.zeros(10), algorithm="tree")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_shared_arrays(algorithm):
    """The chunk of a shared array in place, and in arrays of their own, which are as long on all ranks."""
    count = 7 * SIZE
    mine, expected = KINDS["shared"](values(RANK, count, np.dtype(float))), result(MPI.SUM, count, np.dtype(float))
    part, whole = mpiring.empty(7), mpiring.empty(count)
    mpiring.reduce_scatter(mine, part, algorithm=algorithm)
    assert (part == expected[7 * RANK:7 * RANK + 7]).all() and (mine == values(RANK, count, mine.dtype)).all()
    assert (mpiring.allgather(part, whole, algorithm=algorithm) == expected).all()
    assert (mpiring.reduce_scatter(mine, algorithm=algorithm) == part).all()
    assert (mpiring.allgather(mine, algorithm=algorithm) == expected).all()


def test_what_is_no_array_comes_back_as_one():
    part = bytearray(2)
    found = mpiring.reduce_scatter(np.ones(2 * SIZE, np.uint8), part)
    assert isinstance(found, np.ndarray) and (found == SIZE).all() and bytes(part) == bytes([SIZE, SIZE])


def test_counts_are_the_same_in_every_spelling():
    array = np.ones(2 * SIZE)
    for counts in ([np.int64(2)] * SIZE if RANK == 0 else [2] * SIZE, [2] * SIZE, None if RANK == 0 else np.full(SIZE, 2)):
        array[:] = 1
        assert (mpiring.reduce_scatter(array, counts=counts) == SIZE).all()
    assert mpiring.reduce_scatter(array, array[:]).size == 2
