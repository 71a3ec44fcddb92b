"""The matrix of the host tests on GPU arrays: one body for the stand-in and CuPy, staged and read by MPI."""

from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import AVERAGE
from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.cuts import offsets
from mpiring.algorithms.registry import names

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
CASES = [*((count, 64) for count in sorted({0, 1, SIZE - 1, SIZE, SIZE + 1})), (1000, 256), (10007, 4096)]
OPS = {"SUM": (MPI.SUM, np.add), "MAX": (MPI.MAX, np.maximum), "AVERAGE": (AVERAGE, np.add)}
LAYOUTS = {
    "flat": (lambda count: (count,), lambda base: base),
    "every second": (lambda count: (2 * count,), lambda base: base[::2]),
    "backwards": (lambda count: (count,), lambda base: base[::-1]),
    "a column": (lambda count: (count, 3), lambda base: base[:, 1:2]),
    "a box": (lambda count: (3, 2, count // 4 + 1), lambda base: base.T[1:, :, ::2]),
}

KINDS = [(algorithm, "f4", op, layout) for algorithm in ("ring", "tree", "native") for op in OPS for layout in LAYOUTS]
KINDS += [(algorithm, "f4", "AVERAGE", layout) for algorithm in names("allreduce") if algorithm not in ("ring", "tree")
          for layout in ("flat", "a box")]
KINDS += [(algorithm, dtype, op, "flat") for algorithm in ("ring", "tree") for dtype in ("i8", "f2") for op in OPS]
KINDS += [(algorithm, "c8", op, "flat") for algorithm in ("ring", "tree") for op in ("SUM", "AVERAGE")]
KINDS += [(algorithm, "i8", op, "flat") for algorithm in ("native", "auto") for op in OPS]
KINDS += [("auto", "f4", "AVERAGE", layout) for layout in ("flat", "a box")]


def values(rank, shape, dtype):
    """Return small whole numbers, whose sums are exact."""
    return ((np.arange(np.prod(shape, dtype=int)) * 7 + rank * 3) % 11 - 4).reshape(shape).astype(dtype)


def reduced(shape, dtype, op):
    """Return the result over all ranks."""
    combine = OPS[op][1]
    result = values(0, shape, dtype)
    for rank in range(1, SIZE):
        result = combine(result, values(rank, shape, dtype))
    return (result / np.float64(SIZE)).astype(dtype) if op == "AVERAGE" else result


def assert_result(found, expected, case):
    """Compare exactly, but for complex quotients: how their parts are rounded is the array module's affair."""
    if expected.dtype.kind == "c":
        np.testing.assert_allclose(found, expected, 1e-6, err_msg=case)
    else:
        np.testing.assert_array_equal(found, expected, case)


def make(gpu, layout, count, dtype, filled):
    """Make an array in a layout; return the memory around it, and the array. Its values are still on their way to the device."""
    shape, view = LAYOUTS[layout]
    host = np.full(shape(count), 99, dtype)
    array = view(host)
    if filled:
        array[...] = values(RANK, array.shape, dtype)
    base = gpu.xp.asarray(host)
    return base, view(base)


@pytest.mark.parametrize(("algorithm", "dtype", "op", "layout"), KINDS)
def test_allreduce(gpu, algorithm, dtype, op, layout):
    for count, segment in CASES:
        base, array = make(gpu, layout, count, dtype, filled=True)
        options = {"op": OPS[op][0], "comm": gpu.comms[segment], "algorithm": algorithm}
        expected = reduced(array.shape, dtype, op)

        other, result = make(gpu, layout, count, dtype, filled=False)
        assert mpiring.allreduce(array, result, **options) is result
        assert_result(gpu.now(result), expected, f"count {count}")
        np.testing.assert_array_equal(gpu.now(array), values(RANK, array.shape, dtype), f"count {count}: sendbuf")

        assert mpiring.allreduce(array, **options) is array
        assert_result(gpu.now(array), expected, f"count {count}, in place")
        for memory in (base, other):
            held = gpu.now(memory)
            LAYOUTS[layout][1](held)[...] = 99
            assert (held == 99).all(), f"count {count}: elements beside the array have changed"


@pytest.mark.parametrize("algorithm", ["ring", "bruck", "native", "auto"])
@pytest.mark.parametrize(("op", "layout"), [*(("SUM", layout) for layout in LAYOUTS), ("MAX", "flat"), ("AVERAGE", "flat")])
def test_reduce_scatter(gpu, algorithm, op, layout):
    for count, segment in CASES:
        _, array = make(gpu, layout, count, "f4", filled=True)
        whole = reduced(array.shape, "f4", op).reshape(-1)
        for counts in (balanced(whole.size, SIZE), [0] * (SIZE - 1) + [whole.size]):
            start, stop = offsets(counts)[RANK:RANK + 2]
            options = {"op": OPS[op][0], "comm": gpu.comms[segment], "algorithm": algorithm, "counts": counts}
            _, mine = make(gpu, "every second", counts[RANK], "f4", filled=False)
            mpiring.reduce_scatter(array, mine, **options)
            np.testing.assert_array_equal(gpu.now(mine), whole[start:stop], f"count {count}")
            np.testing.assert_array_equal(gpu.now(array), values(RANK, array.shape, "f4"), f"count {count}: sendbuf")
            if layout == "flat":
                _, copy = make(gpu, layout, count, "f4", filled=True)
                np.testing.assert_array_equal(gpu.now(mpiring.reduce_scatter(copy, **options)), whole[start:stop], f"count {count}")
                expected = values(RANK, copy.shape, "f4")
                expected[start:stop] = whole[start:stop]
                np.testing.assert_array_equal(gpu.now(copy), expected, f"count {count}, in place")


@pytest.mark.parametrize("algorithm", ["ring", "bruck", "native", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_allgather(gpu, algorithm, layout):
    for count, segment in CASES:
        _, array = make(gpu, layout, count, "f4", filled=False)
        counts = balanced(array.size, SIZE)
        start, stop = offsets(counts)[RANK:RANK + 2]
        expected = np.concatenate([values(rank, share, "f4") for rank, share in enumerate(counts)]).reshape(array.shape)
        options = {"comm": gpu.comms[segment], "algorithm": algorithm, "counts": counts}
        _, mine = make(gpu, "every second", counts[RANK], "f4", filled=True)
        mpiring.allgather(mine, array, **options)
        np.testing.assert_array_equal(gpu.now(array), expected, f"count {count}")

        shape, view = LAYOUTS[layout]
        host = np.zeros(shape(count), "f4")
        flat = np.zeros(array.size, "f4")
        flat[start:stop] = values(RANK, stop - start, "f4")
        view(host)[...] = flat.reshape(array.shape)
        whole = view(gpu.xp.asarray(host))
        mpiring.allgather(whole, **options)
        np.testing.assert_array_equal(gpu.now(whole), expected, f"count {count}, in place")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", [*names("broadcast"), "native", "auto"])
def test_broadcast(gpu, algorithm, layout):
    for (count, segment), root in product(CASES, {0, SIZE - 1}):
        _, array = make(gpu, layout, count, "f4", filled=RANK == root)
        expected = np.empty(array.shape, "f4")
        expected[...] = values(root, array.shape, "f4")
        assert mpiring.broadcast(array, root=root, comm=gpu.comms[segment], algorithm=algorithm) is array
        np.testing.assert_array_equal(gpu.now(array), expected, f"count {count}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", [*names("reduce"), "native", "auto"])
def test_reduce(gpu, algorithm, layout):
    for (count, segment), op in product(CASES, OPS):
        _, array = make(gpu, layout, count, "f4", filled=True)
        _, result = make(gpu, layout, count, "f4", filled=False)
        options = {"op": OPS[op][0], "root": SIZE - 1, "comm": gpu.comms[segment], "algorithm": algorithm}
        found = mpiring.reduce(array, result, **options)
        assert (found is result) == (RANK == SIZE - 1)
        np.testing.assert_array_equal(gpu.now(array), values(RANK, array.shape, "f4"), f"count {count}")
        if RANK == SIZE - 1:
            assert_result(gpu.now(result), reduced(array.shape, "f4", op), f"count {count}")
        mpiring.reduce(array, **options)
        left = reduced(array.shape, "f4", op) if RANK == SIZE - 1 else values(RANK, array.shape, "f4")
        assert_result(gpu.now(array), left, f"count {count}, in place")


@pytest.mark.parametrize("layout", ["flat", "every second"])
@pytest.mark.parametrize("algorithm", [*names("alltoall"), "native", "auto"])
def test_alltoall(gpu, algorithm, layout):
    for each, segment in ((0, 64), (1, 64), (9, 64), (300, 256)):
        count = each * SIZE
        _, array = make(gpu, layout, count, "f4", filled=True)
        _, result = make(gpu, layout, count, "f4", filled=False)
        expected = np.concatenate([values(rank, (count,), "f4")[RANK * each:(RANK + 1) * each] for rank in range(SIZE)])
        options = {"comm": gpu.comms[segment], "algorithm": algorithm}
        assert mpiring.alltoall(array, result, **options) is result
        np.testing.assert_array_equal(gpu.now(result), expected, f"blocks of {each}")
        mpiring.alltoall(array, **options)
        np.testing.assert_array_equal(gpu.now(array), expected, f"blocks of {each}, in place")


@pytest.mark.parametrize("dtype", ["?", "i1", "u8"])
@pytest.mark.parametrize("op", ["PROD", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
def test_every_op(gpu, op, dtype):
    shape = (SIZE + 1,)
    mine = gpu.xp.asarray(values(RANK, shape, "i1").astype(dtype))
    everyone = [values(rank, shape, "i1").astype(dtype) for rank in range(SIZE)]
    mpiring.ring_allreduce(mine, op=getattr(MPI, op), comm=gpu.comms[64])
    expected = everyone[0]
    for value in everyone[1:]:
        expected = getattr(np, mpiring.runtime.ops.find(getattr(MPI, op), expected.dtype).ufunc)(expected, value, dtype=None)
    np.testing.assert_array_equal(gpu.now(mine), expected.astype(dtype))


def test_the_next_call_takes_the_plan_of_the_first(gpu):
    array, comm = gpu.xp.asarray(values(RANK, 1000, "f4")), gpu.comms[64]
    for times in range(3):
        assert (gpu.now(mpiring.ring_allreduce(array, comm=comm)) == reduced((1000,), "f4", "SUM") * SIZE ** times).all()


def test_no_dimension(gpu):
    array = gpu.xp.asarray(np.array(RANK + 1.0))
    assert gpu.now(mpiring.ring_allreduce(array, comm=gpu.comms[64])) == SIZE * (SIZE + 1) / 2
