"""Narrow floats: the accumulators against a plain definition, PyTorch's conversions and steps against NumPy's, bit for bit."""

import subprocess
import sys
import warnings
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from mpiring.runtime import halves, ops

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
OTHERS = [np.dtype(">f2"), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
BACKENDS = ["numpy", "torch"]
OPS = ["SUM", "PROD", "AVERAGE"]
COUNTS = [1, 7, 63, 1001, halves.PIECE, 2 * halves.PIECE + 5]


def operation(name, dtype):
    return ops.find(ops.NAMES[name], dtype)


def backend(name, ufunc, dtype):
    if name == "torch":
        pytest.importorskip("torch")
        return halves._torch_backend(ufunc, dtype)
    return halves._NumPy(dtype)


def bits(array):
    return array.view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)


def finite(seed, count, dtype):
    """Values that make sums and products round, cancel, underflow and overflow."""
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-12, 8, count)
    with np.errstate(all="ignore"):
        array = (rng.normal(size=count) * scale).astype(dtype)
    array[rng.random(count) < 0.1] = -0.0
    return np.where(np.isfinite(array.astype(np.float32)), array, np.zeros(1, dtype)).astype(dtype)


def any_bits(seed, count, dtype):
    """Every kind of pattern: one in 32 float16 is infinite or NaN, of any payload, and so many are subnormal."""
    return np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)


def unaligned(array):
    room = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    room[...] = array
    return room


def expected(ufunc, sources, divide_by):
    """Return the definition: float32 all along, rounded once."""
    with np.errstate(all="ignore"):
        total = reduce(getattr(np, ufunc), [source.astype(np.float32) for source in sources])
        total = total if divide_by is None else total / np.float32(divide_by)
        return np.where(np.isnan(total), np.float32(np.nan), total).astype(sources[0].dtype)


def accumulated(how, ufunc, sources, divide_by, targets=None):
    dtype, count = sources[0].dtype, sources[0].size
    targets = targets or [np.zeros(count, dtype) for _ in range(2)]
    with np.errstate(all="ignore"):
        halves.Accumulator(ufunc, dtype, count, backend(how, ufunc, dtype)).bind(sources, targets, divide_by)()
    for target in targets[1:]:
        assert np.array_equal(bits(target), bits(targets[0]))
    return targets[0]


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make", [finite, any_bits])
@pytest.mark.parametrize("op", OPS)
def test_accumulators_reduce_in_float32_and_round_once(how, dtype, make, op):
    for count in COUNTS:
        for size in (1, 2, 3, 8):
            sources = [make(size * 10 + rank, count, dtype) for rank in range(size)]
            before = [source.copy() for source in sources]
            divide_by = size if op == "AVERAGE" else None
            got = accumulated(how, operation(op, dtype).ufunc, sources, divide_by)
            assert np.array_equal(bits(got), bits(expected(operation(op, dtype).ufunc, before, divide_by))), (count, size)
            assert all(np.array_equal(bits(source), bits(old)) for source, old in zip(sources, before))


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_accumulators_take_other_narrow_floats_by_numpys_casts(dtype, op):
    sources = [finite(rank, 40_001, dtype) for rank in range(5)]
    divide_by = 5 if op == "AVERAGE" else None
    accumulator = halves.accumulator(operation(op, dtype), dtype, 40_001)
    targets = [np.zeros(40_001, dtype) for _ in range(5)]
    with np.errstate(all="ignore"):
        accumulator.bind(sources, targets, divide_by)()
    assert isinstance(accumulator.backend, halves._NumPy)
    for target in targets:
        assert target.tobytes() == expected(operation(op, dtype).ufunc, sources, divide_by).tobytes()


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make", [finite, any_bits])
@pytest.mark.parametrize("size", [2, 3])
def test_accumulators_work_in_place_and_on_unaligned_arrays(how, dtype, make, size):
    for place in (np.copy, unaligned):
        arrays = [place(make(rank, 40_001, dtype)) for rank in range(size)]
        want = expected("add", arrays, None)
        assert np.array_equal(bits(accumulated(how, "add", arrays, None, targets=arrays)), bits(want))


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_accumulators_run_many_times_and_read_what_the_arrays_hold_then(how, dtype):
    arrays, target = [np.zeros(5000, dtype) for _ in range(3)], np.zeros(5000, dtype)
    run = halves.Accumulator("add", dtype, 5000, backend(how, "add", dtype)).bind(arrays, [target], None)
    for value in (1, 2):
        for array in arrays:
            array[...] = value
        run()
        assert (target == 3 * value).all()


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_converts_to_float32_and_back(how, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    ordinary = every[np.isfinite(every.astype(np.float32))]
    assert np.array_equal(bits(accumulated(how, "add", [ordinary], None)), bits(ordinary))
    special = np.setdiff1d(bits(every), bits(ordinary)).view(dtype)
    got = accumulated(how, "add", [special], None)
    assert np.array_equal(bits(got), bits(expected("add", [special], None)))
    assert np.isnan(got.astype(np.float32)).sum() == special.size - 2


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_half_way_between_two_numbers_round_to_even(how, dtype):
    every = np.arange(halves._INFINITY[dtype.name], dtype=np.uint16).view(dtype)
    low, high = every[:-1].astype(np.float64), every[1:].astype(np.float64)
    for third in (0.0, 2.0**-60, -(2.0**-60)):    # exactly half way in float32; two sources would be a special case
        half = (low + high) / 2
        sources = [every[:-1], (half - low).astype(dtype), np.full(half.size, third).astype(dtype)]
        kept = sources[1].astype(np.float64) == half - low
        sources = [source[kept] for source in sources]
        assert kept.sum() > 20_000
        assert np.array_equal(bits(accumulated(how, "add", sources, None)), bits(expected("add", sources, None)))
        even = bits(accumulated(how, "add", [*sources[:2], np.zeros(kept.sum(), dtype)], None)) % 2 == 0
        assert even.all()


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_accumulators_only_read_read_only_arrays(how, dtype):
    sources = [finite(rank, 5000, dtype) for rank in range(2)]
    for source in sources:
        source.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = accumulated(how, "add", sources, None)
    assert np.array_equal(bits(got), bits(expected("add", sources, None)))


def test_no_accumulator_where_nothing_wider_is_needed():
    for dtype in "fdgFDbhiq?":
        for op in ("SUM", "PROD", "AVERAGE") if dtype != "?" else ("SUM", "PROD"):
            assert halves.accumulator(operation(op, np.dtype(dtype)), np.dtype(dtype), 100) is None
    for op in ("MAX", "MIN"):
        assert halves.accumulator(operation(op, HALVES[0]), HALVES[0], 100) is None


def ufunc_of(op, dtype):
    ufunc = getattr(np, operation(op, dtype).ufunc)
    return lambda left, right: ufunc(left, right).astype(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make", [finite, any_bits])
@pytest.mark.parametrize("op", ["SUM", "PROD", "AVERAGE"])
def test_combine_has_the_ufuncs_bits(dtype, make, op):
    pytest.importorskip("torch")
    combine = operation(op, dtype).combine(np, dtype)
    for count in (1, halves._WORTH[dtype.name], halves._WORTH[dtype.name] + 1, 3 * halves.PIECE + 7):
        left, right = make(1, count, dtype), make(2, count, dtype)
        with np.errstate(all="ignore"):
            want = ufunc_of(op, dtype)(left, right)
            for out in (np.zeros(count, dtype), left.copy(), right.copy()):
                operands = (out if np.array_equal(bits(out), bits(array)) else array for array in (left, right))
                combine(*operands, out)
                assert np.array_equal(bits(out), bits(want)), count
            matrix = np.zeros((count, 3), dtype)
            combine(left, right, matrix[:, 1])
            assert np.array_equal(bits(matrix[:, 1].copy()), bits(want)) and not bits(matrix[:, ::2].copy()).any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_combine_uses_pytorch_for_long_flat_arrays_only(dtype, monkeypatch):
    pytest.importorskip("torch")
    used = []
    monkeypatch.setattr(halves, "_combine", lambda *args: used.append(args))
    combine = operation("SUM", dtype).combine(np, dtype)
    worth = halves._WORTH[dtype.name]
    arrays = [np.zeros(2 * worth, dtype) for _ in range(3)]
    combine(*(array[:worth - 1] for array in arrays))
    combine(*(array[::2] for array in arrays))
    assert not used
    combine(*arrays)
    assert len(used) == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_combine_warns_as_numpy_does(dtype):
    combine = operation("SUM", dtype).combine(np, dtype)
    for count in (10, 40_000):
        huge = np.full(count, ml_dtypes.finfo(dtype).max, dtype)
        with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow"):
            combine(huge, huge, np.zeros(count, dtype))


def test_without_pytorch_numpy_reduces(monkeypatch):
    monkeypatch.setattr(halves, "_torch_backend", lambda ufunc, dtype: None)
    for dtype in HALVES:
        left, right, out = finite(1, 50_000, dtype), finite(2, 50_000, dtype), np.zeros(50_000, dtype)
        assert isinstance(halves.accumulator(operation("SUM", dtype), dtype, 50_000).backend, halves._NumPy)
        operation("SUM", dtype).combine(np, dtype)(left, right, out)
        assert np.array_equal(bits(out), bits(left + right))


def test_a_missing_or_broken_pytorch_is_none(monkeypatch):
    def broken(name):
        raise OSError(f"lib{name}.so: cannot open shared object file")

    monkeypatch.setattr(halves, "import_module", broken)
    assert halves._torch_backend.__wrapped__("add", HALVES[0]) is None


def test_short_vectors_do_not_load_pytorch_and_long_ones_start_no_threads():
    """In a process of its own: threads that PyTorch once started stay."""
    pytest.importorskip("torch")
    code = """if True:
        import os, sys, ml_dtypes, numpy as np
        from mpiring.runtime import halves, ops
        def run(count):
            for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
                arrays = [np.ones(count, dtype) for _ in range(3)]
                for op in ("SUM", "PROD"):
                    operation = ops.find(ops.NAMES[op], dtype)
                    accumulator = halves.accumulator(operation, dtype, count)
                    accumulator.bind(arrays, arrays)()
                    accumulator.bind(arrays[:2], arrays)()
                    operation.combine(np, dtype)(*arrays)
        run(4000)
        early = "torch" in sys.modules
        import torch
        torch.set_num_threads(4)
        before = len(os.listdir("/proc/self/task"))
        run(500_000)
        print(early, len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0", "4"]
