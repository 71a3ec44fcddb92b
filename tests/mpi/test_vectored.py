"""Many private arrays reduced as one vector, where the kernel lets ranks reach each other's memory."""

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import mpiring
from mpiring.runtime import memory, ops, vectored
from mpiring.runtime.binding import KERNEL_BLOCK
from mpiring.runtime.channel import channel_of
from mpiring.runtime.halves import is_narrow
from mpiring.runtime.plan import Call
from mpiring.runtime.vectored import PIECES, VectoredPlan

from cases import COMM, DTYPES, RANK, SIZE, attempt, bits, result, same_bits, values
from spmd import drawn

pytestmark = pytest.mark.skipif(SIZE < 2, reason="one rank has nothing to reach")

COUNTS = [5, 0, 1, 1000, 0, 10_007, 3, 65_537, 2, 2, 1]
"""Short and long arrays, odd, and empty ones among them."""


@pytest.fixture
def comm():
    """Give a comm whose ranks reach each other's memory."""
    comm = COMM.Dup()
    node = channel_of(comm).node
    reaches = node is not None and node.private and node.size == SIZE
    if reaches:
        yield comm
    comm.Free()
    if not reaches:
        pytest.skip("the kernel does not let processes reach each other's memory")


def made(comm, counts=COUNTS, dtype=np.float32, op="SUM"):
    """Return the plan of an allreduce of arrays of these lengths."""
    dtype = np.dtype(dtype)
    call = Call("allreduce", "shared", sum(counts), str(dtype), op)
    return VectoredPlan(channel_of(comm), call, ops.find(ops.NAMES[op], dtype), dtype, counts)


def mine(counts=COUNTS, dtype=np.float32):
    """Return this rank's arrays: the parts of its values."""
    whole = values(RANK, sum(counts), np.dtype(dtype))
    return [part.copy() for part in np.split(whole, np.cumsum(counts)[:-1])]


def assert_reduced(outs, counts=COUNTS, dtype=np.float32, op="SUM"):
    """See that arrays hold what NumPy makes of all ranks' values, on all ranks the same bits."""
    got = np.concatenate(outs).astype(dtype)             # NumPy joins in the machine's byte order
    assert [out.size for out in outs] == counts
    assert bits(got) == bits(result(ops.NAMES[op], sum(counts), np.dtype(dtype)))
    assert same_bits(got)


MEANT = [(op, dtype) for op in ("SUM", "AVERAGE", "MAX") for dtype in DTYPES
         if ops.kind(dtype) in ops.find(ops.NAMES[op], np.dtype(np.int32)).kinds and not is_narrow(dtype)]
"""Ops and dtypes; floats of 16 bits, which are to be summed in float32, never go this way."""


@pytest.mark.parametrize(("op", "dtype"), MEANT, ids=[f"{op} {dtype}" for op, dtype in MEANT])
def test_results_are_numpys(comm, op, dtype):
    arrays, plan = mine(dtype=dtype), made(comm, dtype=dtype, op=op)
    outs = [np.full_like(array, 3) for array in arrays]
    assert plan.run(arrays, outs)
    assert_reduced(outs, dtype=dtype, op=op)
    assert all((array == before).all() for array, before in zip(arrays, mine(dtype=dtype))), "the arrays are only read"
    assert plan.run(arrays, arrays)
    assert_reduced(arrays, dtype=dtype, op=op)


@pytest.mark.parametrize("counts", [[0], [0, 0, 0], [1], [0, 1, 0], [SIZE - 1], [1] * (SIZE + 1), [2] * (2 * PIECES * SIZE + 3)],
                         ids=lambda counts: f"{len(counts)} of {sum(counts)}")
def test_few_elements_and_many_arrays(comm, counts):
    arrays, plan = mine(counts), made(comm, counts)
    outs = [np.zeros_like(array) for array in arrays]
    for _ in range(2):
        assert plan.run(arrays, outs)
        assert_reduced(outs, counts)


def test_shapes_do_not_matter(comm):
    arrays = [np.full((3, 5), RANK), np.array(RANK), np.zeros((0, 4), int), np.full((2, 3, 4), RANK)]
    outs = [np.zeros_like(array) for array in arrays]
    assert made(comm, [15, 1, 0, 24], np.int64).run(arrays, outs)
    assert all((out == SIZE * (SIZE - 1) // 2).all() for out in outs)


def test_arrays_of_several_blocks(comm):
    count = SIZE * (2 * KERNEL_BLOCK // 8 + 7)
    counts = [3, count, 1, count + 1]
    arrays, plan = mine(counts, np.float64), made(comm, counts, np.float64)
    outs = [np.zeros_like(array) for array in arrays]
    assert plan.run(arrays, outs) and plan.run(arrays, arrays)
    assert_reduced(outs, counts, np.float64)
    assert_reduced(arrays, counts, np.float64)


def test_arrays_that_do_not_begin_where_their_dtype_wants_it(comm):
    arrays = [np.frombuffer(bytearray(bytes(1 + RANK) + array.tobytes()), np.uint8)[1 + RANK:].view(array.dtype)
              for array in mine()]
    assert made(comm).run(arrays, arrays)
    assert_reduced(arrays)


# ----------------------------------------------------------------- arrays that move

@pytest.mark.parametrize("mover", range(SIZE))
def test_arrays_that_move_on_one_rank(comm, mover):
    plan, kept = made(comm), []
    arrays, outs = mine(), mine()
    for turn in range(4):
        if mover == RANK:
            kept.append((arrays, outs))                  # so that no new array lies where an old one was
            arrays, outs = mine(), (outs if turn % 2 else mine())
        for out in outs:
            out[...] = 9
        assert plan.run(arrays, outs)
        assert_reduced(outs)
        for older, _ in kept:
            for array, before in zip(older, mine()):
                assert (array == before).all(), "what was an array is written no more"
    assert plan.moves == (4 if mover == RANK else 1)


def test_arrays_that_stay_are_told_once(comm, monkeypatch):
    plan, meetings = made(comm), []
    monkeypatch.setattr(plan, "_meet", lambda meet=plan._meet: meetings.append(meet()))
    arrays, outs = mine(), mine()
    for _ in range(3):
        assert plan.run(arrays, outs)
    assert len(meetings) == 1
    one = [*arrays[:-1], arrays[-1].copy()]
    for _ in range(2):
        assert plan.run(one if RANK == SIZE - 1 else arrays, outs)
        assert_reduced(outs)
    assert len(meetings) == 2


def test_new_values_where_the_old_ones_were(comm):
    plan, arrays = made(comm), mine()
    outs = [np.zeros_like(array) for array in arrays]
    for turn in range(3):
        for array, before in zip(arrays, mine()):
            array[...] = before + turn
        assert plan.run(arrays, outs)
        assert (np.concatenate(outs) == result(MPI.SUM, sum(COUNTS), np.dtype(np.float32)) + turn * SIZE).all()


def test_in_place_and_not_in_turn(comm):
    plan = made(comm)
    for turn in range(4):
        arrays = mine()
        outs = arrays if turn % 2 else [np.zeros_like(array) for array in arrays]
        assert plan.run(arrays, outs)
        assert_reduced(outs)


def test_in_place_on_one_rank_alone(comm):
    plan, arrays = made(comm), mine()
    outs = arrays if RANK == 0 else [np.zeros_like(array) for array in arrays]
    assert plan.run(arrays, outs)
    assert_reduced(outs)


def test_the_plan_keeps_no_arrays(comm):
    plan, arrays = made(comm), mine()
    assert plan.run(arrays, arrays)
    assert plan.arrays == plan.outs == ()


# ----------------------------------------------------------------- what cannot be reached

@pytest.mark.parametrize("odd", range(SIZE))
@pytest.mark.parametrize("which", ["array", "out"])
def test_a_strided_array_on_one_rank_is_for_others_to_reduce(comm, odd, which):
    plan = made(comm)
    arrays, outs = mine(), [np.full_like(array, 9) for array in mine()]
    strided = np.zeros((COUNTS[3], 2), np.float32)[:, 0]
    strided[...] = (arrays if which == "array" else outs)[3]
    for turn in range(3):
        given, taken = list(arrays), list(outs)
        if odd == RANK and turn == 1:
            (given if which == "array" else taken)[3] = strided
        for out in taken:
            out[...] = 9
        ran = plan.run(given, taken)
        assert ran is (turn != 1)
        if ran:
            assert_reduced(taken)
        else:
            COMM.Barrier()
            assert all((out == 9).all() for out in taken), "nothing was written"
            assert all((array == before).all() for array, before in zip(given, mine()))


def test_a_strided_array_from_the_first_run_on(comm):
    plan, arrays = made(comm, [4, 4]), mine([4, 4])
    strided = [arrays[0], np.repeat(arrays[1], 2)[::2]]
    for _ in range(2):
        assert plan.run(strided, strided) is False
        assert (np.concatenate(strided) == values(RANK, 8, np.dtype(np.float32))).all()
    assert plan.run(arrays, arrays) is True
    assert_reduced(arrays, [4, 4])


def test_ranks_with_other_arrays_are_told(comm):
    counts = [10 + (RANK == 1), 5]
    plan = made(comm, counts)
    kind, text = attempt(lambda: plan.run(mine(counts), mine(counts)))
    assert kind is mpiring.MismatchError
    assert "rank 0 called" in text and "rank 1 called" in text and "15" in text and "16" in text
    again, arrays = made(comm), mine()
    assert again.run(arrays, arrays), "the comm is as good as before"
    assert_reduced(arrays)


def test_ranks_that_cut_the_same_length_otherwise_are_told(comm):
    counts = [10, 5] if RANK else [5, 10]
    kind, _ = attempt(lambda: made(comm, counts).run(mine(counts), mine(counts)))
    assert kind is mpiring.MismatchError


def test_memory_that_is_not_there_is_an_error_on_all_ranks(comm, monkeypatch):
    plan, arrays = made(comm), mine()
    spans = vectored.VectoredPlan._spans
    monkeypatch.setattr(vectored.VectoredPlan, "_spans", lambda *args: [(16, size) for _, size in spans(*args)] if RANK == 0
                        else spans(*args))
    kind, text = attempt(lambda: plan.run(arrays, arrays))
    assert kind is (OSError if RANK == 0 else mpiring.PeerError)
    assert RANK == 0 or "rank 0: " in text
    monkeypatch.undo()
    again, arrays = made(comm), mine()
    assert again.run(arrays, arrays)
    assert_reduced(arrays)


@drawn(st.tuples(st.lists(st.integers(0, 300) | st.integers(1000, 90_000), min_size=1, max_size=12),
                 st.sampled_from(["int16", "float64", ">i4"]), st.integers(0, SIZE - 1), st.booleans()), examples=20)
def test_any_lengths(case):
    counts, dtype, mover, in_place = case
    if not channel_of(COMM).node.private:
        return
    plan, arrays = made(COMM, counts, dtype), mine(counts, dtype)
    for turn in range(2):
        arrays = mine(counts, dtype) if mover == RANK or turn == 0 or in_place else arrays
        outs = arrays if in_place else [np.zeros_like(array) for array in arrays]
        assert plan.run(arrays, outs)
        assert_reduced(outs, counts, dtype)


def test_arrays_that_stay_where_they_are_go_into_huge_pages(comm, monkeypatch):
    """Once, those that lie side by side together; not before they have stayed for some runs."""
    asked = []
    monkeypatch.setattr(memory, "_advise", lambda *arguments: asked.append(arguments) or True)
    counts = [700_000, 3, 700_000]
    whole, other = np.zeros(sum(counts), np.float32), np.zeros(sum(counts), np.float32)
    arrays, plan = np.split(whole, np.cumsum(counts)[:-1]), made(comm, counts)
    for _ in range(vectored.SETTLED):
        assert plan.run(arrays, arrays)
        assert plan.run(np.split(other, np.cumsum(counts)[:-1]), arrays)
    assert not asked
    for _ in range(vectored.SETTLED + 2):
        assert plan.run(arrays, arrays)
    (start, nbytes, advice), = asked
    assert start <= whole.ctypes.data < start + memory.PAGE and advice == memory.COLLAPSE
    assert start + nbytes == whole.ctypes.data + whole.nbytes


def test_shared_arrays_are_left_to_those_that_need_no_kernel(comm):
    counts = [5, 1000]
    shared, plan = mpiring.empty(sum(counts), np.float32, comm), made(comm, counts)
    arrays = np.split(shared, [5])
    assert not plan.run(arrays, mine(counts))
    assert not plan.run(mine(counts), arrays)
    assert plan.run(mine(counts), mine(counts))
