"""allreduce: algorithms x counts x dtypes x ops x in place, thinned where it multiplies."""

import itertools

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.algorithms import registry
from mpiring.runtime import ops

from cases import BFLOAT16, COMM, COUNTS, DTYPES, KINDS, RANK, SIZE, bits, result, same_bits, values

OURS = [*registry.names("allreduce"), "shared", "auto"]
"""Those with NumPy's results."""

ALGORITHMS = [*OURS, "native"]
IN_SHARED_ARRAYS = [("shared", "shared"), ("shared", "mixed"), ("auto", "shared")]


def run(algorithm, kind, count, dtype, op, inplace):
    """Run one case and check result, identity, input and bits."""
    before, make = values(RANK, count, dtype), KINDS[kind]
    mine = make(before)
    if inplace:
        out = mine
        assert mpiring.allreduce(out, op=op, algorithm=algorithm) is out
    else:
        out = make(np.zeros(count, dtype))
        assert mpiring.allreduce(mine, out, op=op, algorithm=algorithm) is out
        assert (mine == before).all()
    expected = result(op, count, dtype)
    assert bits(out) == bits(expected), (out, expected)
    assert same_bits(out)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("algorithm, kind", [*((name, "ordinary") for name in ALGORITHMS), *IN_SHARED_ARRAYS])
def test_counts(algorithm, kind, count, inplace):
    for dtype, op in ((np.float32, MPI.SUM), (np.int64, MPI.MAX), (np.complex128, mpiring.AVERAGE)):
        run(algorithm, kind, count, np.dtype(dtype), op, inplace)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm, kind", [*((name, "ordinary") for name in OURS), ("shared", "shared")])
def test_dtypes_and_ops(algorithm, kind, dtype):
    for index, (op, count) in enumerate(itertools.product(ops.NAMES.values(), (SIZE + 1, 1000))):
        try:
            ops.find(op, dtype)
        except TypeError:
            with pytest.raises(TypeError, match=f"rank {RANK}: op .* has no meaning for dtype"):
                run(algorithm, "ordinary", count, dtype, op, True)
        else:
            with np.errstate(all="ignore"):
                run(algorithm, kind, count, dtype, op, index % 2 == 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_user_op(algorithm):
    def smallest_magnitude(inbuf, inout, _):
        a, b = np.frombuffer(inbuf, np.float64), np.frombuffer(inout, np.float64)
        b[:] = np.where(abs(a) < abs(b), a, b)

    op = MPI.Op.Create(smallest_magnitude, commute=True)
    try:
        for count in COUNTS:
            mine = values(RANK, count, np.float64) - 3.5
            every = np.array([values(rank, count, np.float64) - 3.5 for rank in range(SIZE)])
            out = mpiring.allreduce(mine.copy(), op=op, algorithm=algorithm)
            assert (abs(out) == abs(every).min(axis=0)).all()
            wide = np.zeros((count, 2))
            wide[:, 1] = mine
            assert (mpiring.allreduce(wide[:, 1], op=op, algorithm=algorithm) == out).all()
    finally:
        op.Free()
    with pytest.raises(ValueError, match="OP_NULL"):
        mpiring.allreduce(np.ones(3), op=op, algorithm=algorithm)


def test_named_functions_are_the_algorithms():
    for function, algorithm in ((mpiring.ring_allreduce, "ring"), (mpiring.tree_allreduce, "tree")):
        mine = np.random.default_rng(RANK).normal(size=999)
        assert function(mine.copy()).tobytes() == mpiring.allreduce(mine.copy(), algorithm=algorithm).tobytes()


@pytest.mark.parametrize("algorithm", OURS)
def test_same_bits_on_every_rank_and_every_run(algorithm):
    mine = np.random.default_rng(RANK).normal(size=10007).astype(np.float32)
    first = mpiring.allreduce(mine.copy(), algorithm=algorithm)
    assert same_bits(first)
    for _ in range(3):
        assert mpiring.allreduce(mine.copy(), algorithm=algorithm).tobytes() == first.tobytes()
    wide = np.zeros((10007, 2), np.float32)
    wide[:, 0] = mine
    assert mpiring.allreduce(wide[:, 0], algorithm=algorithm).tobytes() == first.tobytes()
    exact = np.sum([np.random.default_rng(rank).normal(size=10007).astype(np.float32) for rank in range(SIZE)], axis=0, dtype=float)
    assert np.allclose(first, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", OURS)
def test_nan_and_signed_zero_follow_numpy(algorithm):
    mine = np.full(64, float(RANK))
    mine[RANK::SIZE] = np.nan
    for op in (MPI.MAX, MPI.MIN, MPI.SUM):
        assert np.isnan(mpiring.allreduce(mine.copy(), op=op, algorithm=algorithm)).all()
    zeros = np.full(8, -0.0)
    assert np.signbit(mpiring.allreduce(zeros.copy(), algorithm=algorithm)).all()
    zeros[RANK % 8] = 0.0
    assert same_bits(mpiring.allreduce(zeros, op=MPI.MAX, algorithm=algorithm))


def test_average_of_integers_truncates_toward_zero():
    for sign in (1, -1):
        mine = np.full(5, sign * (2 * RANK + 1), np.int32)
        total = sign * SIZE * SIZE
        assert (mpiring.ring_allreduce(mine, op=mpiring.AVERAGE) == int(total / SIZE)).all()
        for algorithm in ("tree", "shared", "auto"):
            odd = np.full(3, sign * (1 if RANK == 0 else 0), np.int64)
            assert (mpiring.allreduce(odd, op=mpiring.AVERAGE, algorithm=algorithm) == (sign if SIZE == 1 else 0)).all()


def test_average_alone_keeps_what_float64_cannot_hold():
    big = np.array([2**60 + 1])
    for algorithm in ALGORITHMS:
        found = mpiring.allreduce(big.copy(), op=mpiring.AVERAGE, comm=MPI.COMM_SELF, algorithm=algorithm)
        assert (found == big).all(), algorithm


@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_average_of_bfloat16_divides_in_float32(algorithm):
    mine = np.full(9, 3.0, BFLOAT16)
    expected = np.asarray(np.float32(3 * SIZE) / np.float32(SIZE), BFLOAT16)
    assert (mpiring.allreduce(mine, op=mpiring.AVERAGE, algorithm=algorithm) == expected).all()


def test_alternating_buffers_ops_and_algorithms_on_one_comm():
    buffers = [KINDS[kind](np.zeros(count)) for count, kind in ((5, "ordinary"), (1000, "ordinary"), (5, "shared"))]
    for _ in range(4):
        for buffer, algorithm, op in itertools.product(buffers, OURS, (MPI.SUM, MPI.MAX)):
            buffer[:] = values(RANK, buffer.size, buffer.dtype)
            assert (mpiring.allreduce(buffer, algorithm=algorithm, op=op) == result(op, buffer.size, buffer.dtype)).all()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_a_new_array_at_an_old_address(algorithm):
    for round_ in range(50):
        array = np.full(100 + round_ % 3, float(RANK + round_))
        assert (mpiring.allreduce(array, algorithm=algorithm) == SIZE * round_ + SIZE * (SIZE - 1) / 2).all()
        del array


def test_native_names_what_the_library_lacks():
    if MPI.get_vendor()[0] == "Open MPI":
        with pytest.raises(TypeError, match=f"rank {RANK}: algorithm 'native': this MPI library has no SUM for dtype bool"):
            mpiring.allreduce(np.ones(3, bool), algorithm="native")
    with pytest.raises(TypeError, match="MPI has no datatype for dtype bfloat16"):
        mpiring.allreduce(np.ones(3, BFLOAT16), algorithm="native")
    COMM.Barrier()
