"""What ops.NATIVE_AGREES says of the MPI library: its results are NumPy's, for values that libraries are known to get wrong."""

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.runtime import ops

from cases import COMM, RANK, SIZE, same_bits

LENGTH = 10_000
PARTS = [slice(start, start + count) for count, repeats in ((1, 12), (3, 4), (63, 1), (64, 1), (65, 1), (1000, 1))
         for start in range(0, count * repeats, count)] + [slice(LENGTH)]


def special(dtype, op):
    """Return values at the edges of a dtype that give one result in whatever order they are reduced."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([0, 1, 2, 3, info.min, info.min + 1, info.max, info.max - 1, info.max // 2 + 1], dtype)
    values = [0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan]
    if op != "PROD":        # there the first product may underflow, or not
        tiny = np.finfo(dtype).tiny
        values += [tiny, tiny / 4, -tiny / 8, 1e10]
    if dtype.kind != "c":
        return np.array(values, dtype)
    pairs = np.zeros((len(values), len(values)), dtype)
    pairs.real, pairs.imag = np.array(values, pairs.real.dtype)[:, None], values
    return pairs.reshape(-1)


def ordinary(rng, count, dtype):
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    array = rng.normal(size=count).astype(dtype)
    return array if dtype.kind != "c" else array + dtype.type(1j) * rng.normal(size=count).astype(dtype)


def vectors(op, dtype):
    """Return all ranks' vectors, where each place is of a kind: ordinary, special, special on one rank alone, or overflowing."""
    shared, rng, edge = np.random.default_rng(0), np.random.default_rng([1, RANK]), special(dtype, op)
    kinds, lone, signs = shared.integers(0, 4, LENGTH), shared.integers(0, SIZE, LENGTH), shared.choice([-1, 1], LENGTH)
    huge = signs.astype(dtype) * (np.finfo(dtype).max if dtype.kind == "f" else 1)
    alone = np.where(lone == RANK, rng.choice(edge, LENGTH), np.ones(1, dtype))
    mine = np.stack([ordinary(rng, LENGTH, dtype), rng.choice(edge, LENGTH), alone, huge])[kinds, np.arange(LENGTH)]
    return np.frombuffer(b"".join(COMM.allgather(mine.tobytes())), dtype).reshape(SIZE, LENGTH)


def parts(array):
    """Return real and imaginary parts side by side, each NaN as the positive quiet one."""
    real = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    return np.where(np.isnan(real), real.dtype.type(np.nan), real) if real.dtype.kind == "f" else real


def numpys(op, arrays):
    """Return NumPy's result, and how far rounding in another order may take another one from it."""
    operation = ops.find(ops.NAMES[op], arrays.dtype)
    combine = getattr(np, operation.ufunc)
    out = reduce(lambda left, right: combine(left, right).astype(arrays.dtype), arrays[1:], arrays[0].copy())
    if operation.average and SIZE > 1:      # one vector is its own average, of integers above 2**53 too
        ops.divide(np, out.dtype, SIZE)(out)
    if out.dtype.kind in "iu":
        return out, np.zeros(LENGTH)
    scale = np.abs(parts(out)) if op == "PROD" else sum(np.abs(parts(array)) for array in arrays)
    return parts(out), 2 * SIZE * np.finfo(out.dtype).eps * scale


def check(got, want, error, arrays):
    """Compare a result with NumPy's: all integers, and where floats are infinite, NaN or sums of zeros; else up to rounding."""
    if got.dtype.kind == "f":
        zeros = np.all([array == 0 for array in arrays], axis=0)
        right = (got == want) & ~(zeros & (np.signbit(got) != np.signbit(want))) | np.isnan(got) & np.isnan(want)
        right |= np.isfinite(got) & np.isfinite(want) & (np.abs(got - want) <= error) & ~zeros
    else:
        right = got == want
    wrong = np.flatnonzero(~right)
    assert not wrong.size, f"{[array[wrong[0]] for array in arrays]} gave {got[wrong[0]]!r}, not {want[wrong[0]]!r}"


@pytest.mark.parametrize("op", ops.NATIVE_AGREES)
def test_the_library_gives_numpys_result(op):
    for dtype in map(np.dtype, ops.NATIVE_AGREES[op]):
        with np.errstate(all="ignore"):
            arrays = vectors(op, dtype)
            want, error = numpys(op, arrays)
            width = want.size // LENGTH
            results = []
            for part in PARTS:
                results.append(parts(mpiring.allreduce(arrays[RANK][part].copy(), op=ops.NAMES[op], algorithm="native")))
                there = slice(part.start and part.start * width, part.stop * width)
                check(results[-1], want[there], error[there], [parts(array)[there] for array in arrays])
            assert same_bits(np.concatenate(results))


def test_native_is_for_the_librarys_own_types_only():
    total, most = (ops.find(op, np.dtype("f")) for op in (MPI.SUM, MPI.MAX))
    for dtype in ("e", ">f4", ">i4", ml_dtypes.bfloat16, "b", "H"):
        assert not ops.native_agrees(total, np.dtype(dtype))
    assert not ops.native_agrees(most, np.dtype("f"))
    assert not ops.native_agrees(ops.find(MPI.LOR, np.dtype("?")), np.dtype("?"))


def test_native_may_call_users_functions_where_it_has_a_datatype():
    op = MPI.Op.Create(lambda left, right, datatype: None, commute=True)
    known = ops.find(op, np.dtype("f"))
    assert ops.native_agrees(known, np.dtype("f")) and ops.native_agrees(known, np.dtype("?"))
    assert not ops.native_agrees(known, np.dtype(">f4")) and not ops.native_agrees(known, np.dtype(ml_dtypes.bfloat16))
    op.Free()


@pytest.mark.parametrize("nbytes", [256, 4096])
def test_a_broadcast_is_not_overwritten_by_what_follows(nbytes):
    """Intel MPI alone does that to ranks that are slow to take what was broadcast."""
    short = np.ones(nbytes // 4, np.float32)
    for turn in range(60):
        sent = np.random.default_rng(turn).random(5000)
        got = sent.copy() if RANK == 0 else np.zeros_like(sent)
        mpiring.broadcast(got, algorithm="native")
        mpiring.allreduce(short.copy(), algorithm="native")
        assert np.array_equal(got, sent)
