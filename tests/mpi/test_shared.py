"""Arrays in memory that ranks share, and the ways that "shared" takes through a node: one pass, process_vm, staged."""

import gc
import os
import platform
import random
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import mpiring
from mpiring.algorithms.cuts import cuts
from mpiring.arguments import parse
from mpiring.planning import plan_for
from mpiring.runtime import barrier, binding, memory, ops, shared
from mpiring.runtime.channel import channel_of

from cases import BFLOAT16, COMM, RANK, SIZE, bits, result, same_bits, values
from spmd import drawn

several = pytest.mark.skipif(SIZE < 2, reason="one rank shares nothing")


@pytest.fixture
def comm():
    comm = COMM.Dup()
    yield comm
    if comm != MPI.COMM_NULL:
        comm.Free()


def path(sendbuf, recvbuf=None, comm=COMM, collective="allreduce", **options):
    """Return which way the call took that was made with these arguments."""
    return plan_for(parse(collective, "shared", sendbuf, recvbuf, options.pop("op", MPI.SUM), comm, **options)).path


def made(count, dtype, comm=COMM):
    """Return a shared array of this rank's values."""
    array = mpiring.empty(count, dtype, comm)
    array[...] = values(RANK, count, array.dtype)
    return array


# ----------------------------------------------------------------- arrays

def test_arrays_are_ordinary_ones():
    array = mpiring.empty((3, 4), np.float32)
    assert type(array) is np.ndarray and array.shape == (3, 4) and array.dtype == np.float32 and array.flags.c_contiguous
    assert array.flags.writeable and not array.any()
    assert mpiring.zeros(5).dtype == float and not mpiring.zeros(5).any()
    like = mpiring.empty_like(np.asfortranarray(np.ones((2, 3), np.int16)))
    assert like.shape == (2, 3) and like.dtype == np.int16 and like.flags.c_contiguous
    assert mpiring.empty((), np.int8).shape == () and mpiring.empty((0, 3)).size == 0
    array[:] = RANK
    COMM.Barrier()
    assert (array == RANK).all(), "each rank has its own"


def test_torch_takes_them():
    torch = pytest.importorskip("torch")
    array = mpiring.empty(1000, np.float32)
    tensor = torch.from_numpy(array)
    tensor.fill_(RANK + 1.0)
    mpiring.allreduce(array, algorithm="shared")
    assert (tensor == SIZE * (SIZE + 1) / 2).all()


def test_wrong_arguments_of_empty():
    with pytest.raises(TypeError, match=f"empty on rank {RANK}: dtype object is not numeric"):
        mpiring.empty(3, object)
    with pytest.raises(ValueError):
        mpiring.empty(-1)
    with pytest.raises(TypeError, match="not an MPI communicator"):
        mpiring.empty(3, comm=None)
    if SIZE > 1:
        with pytest.raises(mpiring.MismatchError, match="rank 0 asked for 80 bytes, rank 1 for 88"):
            mpiring.empty(10 + RANK)


def test_freed_arrays_are_zero_and_refused():
    array = made(10_000, np.float64)
    mpiring.allreduce(array, algorithm="shared")
    COMM.Barrier()
    mpiring.free(array)
    assert not array.any()
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"allreduce on rank \d+: sendbuf is in shared memory that was freed with free\(\)"):
            mpiring.allreduce(array, algorithm="shared")
        mpiring.free(array)
    with pytest.raises(ValueError, match=r"not in memory made by mpiring\.empty"):
        mpiring.free(np.ones(3))


@pytest.mark.parametrize("algorithm", ["ring", "native", "shared", "auto"])
def test_no_plan_runs_on_a_freed_array(algorithm):
    array, calls = made(100, np.float32), []
    for plan in (mpiring.allreduce_init(array, algorithm=algorithm), lambda: mpiring.allreduce(array, algorithm=algorithm)):
        plan()
        calls.append(plan)
    COMM.Barrier()
    mpiring.free(array)
    for call in calls:
        with pytest.raises((RuntimeError, ValueError), match=r"freed with free\(\)"):
            call()
    with pytest.raises(ValueError, match=r"empty on rank \d+: shape -1: "):
        mpiring.empty(-1)


@pytest.mark.parametrize("maps", ["_by_memfd", "_by_window"])
def test_a_forked_child_leaves_the_pages_alone(monkeypatch, maps):
    monkeypatch.setattr(memory, "_by_memfd", getattr(memory, maps))
    array = mpiring.empty(5000)
    array[:] = RANK + 1
    child = os.fork()
    if child == 0:
        mpiring.free(array)
        del array
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    COMM.Barrier()
    assert (array == RANK + 1).all()


@several
def test_an_interrupt_while_it_sums_reaches_every_rank(comm):
    def interrupt(*_):
        raise KeyboardInterrupt

    array = mpiring.empty(1000, np.float32, comm)
    array[:] = 3e38
    own = KeyboardInterrupt if RANK == 0 else mpiring.PeerError
    with np.errstate(over="call" if RANK == 0 else "ignore"):
        np.seterrcall(interrupt)
        with pytest.raises(own):
            mpiring.allreduce(array, comm=comm, algorithm="shared")
    array[:] = 1
    assert (mpiring.allreduce(array, comm=comm, algorithm="shared") == SIZE).all(), "the comm is as it was"


@several
@pytest.mark.skipif(platform.machine() not in barrier.ORDERED, reason="this processor waits in MPI's barrier")
def test_an_interrupt_in_a_barrier_ends_the_calls_of_the_others(comm):
    array = made(1000, np.float64, comm)
    mpiring.allreduce(array, comm=comm, algorithm="shared")
    if RANK == 0:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            mpiring.allreduce(array, comm=comm, algorithm="shared")
    COMM.Barrier()
    if RANK > 0:
        with pytest.raises(mpiring.PeerError, match="rank 0 was interrupted in a call"):
            mpiring.allreduce(array, comm=comm, algorithm="shared")
    with pytest.raises(RuntimeError, match="this comm cannot be used any more"):
        mpiring.allreduce(array, comm=comm, algorithm="shared")


@several
def test_messages_under_way_arrive_while_others_wait(comm):
    """Rank 0 waits in the call while its message still has to be sent; the next rank comes only once it has it."""
    sent, got, array = np.full(1 << 21, 7.0), np.zeros(1 << 20), made(1000, np.float64, comm)
    second = MPI.DOUBLE.Create_vector(1 << 20, 1, 2).Commit()          # rank 0 itself has to pack it, bit by bit
    requests = [comm.Isend([sent, 1, second], dest) for dest in range(1, SIZE)] if RANK == 0 else []
    if RANK > 0:
        comm.Recv(got, 0)
        assert (got == 7).all()
    second.Free()
    mpiring.allreduce(array, comm=comm, algorithm="shared")
    MPI.Request.Waitall(requests)


@several
def test_an_array_of_a_comm_that_is_freed(comm):
    array = made(1000, np.float64, comm)
    mpiring.allreduce(array, comm=comm, algorithm="shared")
    total = array.copy()
    comm.Free()
    assert (array == total).all(), "it can be read still"
    for call in (mpiring.allreduce, lambda array: mpiring.allreduce(np.ones(1000), array)):
        with pytest.raises(ValueError, match="buf is in shared memory that was freed with its comm"):
            call(array)
    with pytest.raises(ValueError, match="COMM_NULL"):
        mpiring.allreduce(array, comm=comm)


@several
def test_regions_go_with_their_last_view():
    gc.collect()                                         # what earlier tests have left
    before = len(memory._REGIONS)
    array = made(1000, np.float64)
    view = array[10:20]
    mpiring.allreduce(array, algorithm="shared")
    del array
    gc.collect()
    assert len(memory._REGIONS) == before + 1
    mpiring.allreduce(view, algorithm="shared")
    del view
    gc.collect()
    assert len(memory._REGIONS) == before
    for _ in range(20):                                  # new memory may come to lie where the old was
        array = made(1000, np.float64)
        mpiring.allreduce(array, algorithm="shared")
        assert (array == result(MPI.SUM, 1000, array.dtype)).all()
        del array


# ----------------------------------------------------------------- ways

@several
def test_which_way_is_taken():
    array, other, plain = made(4096, np.float32), made(4096, np.float32), values(RANK, 4096, np.dtype(np.float32))
    cases = [
        ((array,), "one pass"), ((array, other), "one pass"), ((array[100:200],), "one pass"),
        ((array[100:200], other[:100]), "one pass"),
        ((array.reshape(64, 64),), "one pass"), ((array[::2],), "staged"), ((plain, array), "staged"), ((array, plain), "staged"),
        ((plain,), "staged"), ((array[RANK:RANK + 100],), "one pass"), ((array if RANK else plain,), "staged"),
        ((array if RANK else other,), "staged"),
    ]
    for arguments, way in cases:
        for buffer in arguments:
            buffer[...] = values(RANK, buffer.size, buffer.dtype).reshape(buffer.shape)
        out = mpiring.allreduce(*arguments, algorithm="shared")
        assert (out.reshape(-1) == result(MPI.SUM, out.size, out.dtype)).all(), way
        assert path(*arguments) == way
        assert set(COMM.allgather(path(*arguments))) == {way}


@several
@pytest.mark.parametrize("private", [True, False])
def test_long_private_arrays(comm, private):
    node = channel_of(comm).node
    permitted, node.private = node.private, node.private and private
    count = shared.PRIVATE_FROM // 4 // SIZE + 13
    mine, out = values(RANK, count, np.dtype(np.float32)), np.zeros(count, np.float32)
    mpiring.allreduce(mine, out, comm=comm, algorithm="shared")
    assert (out == result(MPI.SUM, count, out.dtype)).all() and (mine == values(RANK, count, mine.dtype)).all()
    assert path(mine, out, comm) == ("process_vm" if permitted and private else "staged")
    part = np.zeros(len(range(count)[cuts(count, SIZE)[RANK]]), np.float32)
    mpiring.reduce_scatter(mine, part, comm=comm, algorithm="shared")
    assert (part == out[cuts(count, SIZE)[RANK]]).all()
    out[...] = 0
    mpiring.allgather(part, out, comm=comm, algorithm="shared")
    assert (out == result(MPI.SUM, count, out.dtype)).all()
    mpiring.broadcast(mine, root=SIZE - 1, comm=comm, algorithm="shared")
    assert (mine == values(SIZE - 1, count, mine.dtype)).all()
    out[...] = RANK
    assert (mpiring.reduce(out, comm=comm, algorithm="shared", root=SIZE - 1) is None) == (RANK != SIZE - 1)
    assert (out == (SIZE * (SIZE - 1) // 2 if RANK == SIZE - 1 else RANK)).all()
    blocks = np.repeat(np.arange(SIZE, dtype=np.float32), count // SIZE)
    mpiring.alltoall(blocks, comm=comm, algorithm="shared")
    assert (blocks == RANK).all()


OPS = [(np.float32, MPI.SUM), (np.int64, MPI.MAX), (np.complex128, mpiring.AVERAGE), (np.uint8, MPI.BXOR), (np.bool_, MPI.LOR),
       (np.float16, MPI.SUM), (BFLOAT16, mpiring.AVERAGE), (np.dtype(">f4"), MPI.SUM), (np.longdouble, MPI.PROD)]


@drawn(st.tuples(st.integers(0, 3000), st.integers(0, 50), st.sampled_from(range(len(OPS))),
                 st.sampled_from(["one", "two", "mixed"]), st.sampled_from([1 << 10, 1 << 14, 2 << 20]),
                 st.sampled_from([512, 128 * 1024])), examples=60)
def test_drawn_parts_of_shared_arrays(case):
    """In place, and out of place; segments and blocks short enough for many rounds."""
    count, skip, which, how, stage, block = case
    dtype, op = np.dtype(OPS[which][0]), OPS[which][1]
    comm = COMM.Dup()
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(binding, "STAGE", stage)
        patch.setattr(binding, "BLOCK", block)
        array, other = mpiring.empty(4000, dtype, comm), mpiring.empty(4000, dtype, comm)
        mine = array[skip:skip + count]
        if how == "mixed" and RANK % 2:
            mine = np.empty((count, 2), dtype)[:, 0]
        mine[...] = values(RANK, count, dtype)
        out = mine if how == "one" else other[:count]
        assert mpiring.allreduce(mine, None if how == "one" else out, op=op, comm=comm, algorithm="shared") is out
        assert bits(out) == bits(result(op, count, dtype))
        assert same_bits(out)
        if how != "one":
            assert bits(mine) == bits(values(RANK, count, dtype))
    comm.Free()


@pytest.mark.parametrize("kind", ["shared", "ordinary"])
def test_the_sum_is_that_of_numpy_in_the_order_of_ranks(kind):
    every = [np.random.default_rng(rank).normal(size=10_007).astype(np.float32) for rank in range(SIZE)]
    mine = mpiring.empty(10_007, np.float32) if kind == "shared" else np.empty(10_007, np.float32)
    mine[:] = every[RANK]
    exact = every[0].copy()
    for other in every[1:]:
        exact += other
    assert mpiring.allreduce(mine, algorithm="shared").tobytes() == exact.tobytes()


def test_signs_of_zero_in_long_rows():
    for dtype in (np.float32, np.complex128):
        array = mpiring.empty(20_000, dtype)
        array[:] = complex(-0.0, -0.0) if dtype == np.complex128 else -0.0
        array[RANK::7] = 0
        expected = np.array([np.signbit(np.array(COMM.allgather(array.real[place])).sum(initial=-0.0)) for place in range(50)])
        mpiring.allreduce(array, algorithm="shared")
        assert (np.signbit(array.real[:50]) == expected).all()
        assert same_bits(array)


def test_half_floats_are_rounded_once():
    """1 + 1/2048 is 1 in float16, but the sum of all ranks' is not, if it is made in float32."""
    for dtype, small in ((np.float16, 2**-11), (BFLOAT16, 2**-8)):
        mine = np.full(5000, 1.0 if RANK == 0 else small, dtype)
        expected = np.asarray(np.float32(1 + (SIZE - 1) * small), dtype)
        assert (mpiring.allreduce(mine, algorithm="shared") == expected).all()
        assert same_bits(mine)


# ----------------------------------------------------------------- many calls, many comms

@pytest.mark.deadline(180)
def test_many_rounds_with_random_delays(comm):
    """Ranks that run ahead, or lag behind, must not see each other's next values."""
    rng, array, plain = random.Random(RANK), mpiring.empty(257, np.int64, comm), np.empty(257, np.int64)
    for round_ in range(2000):
        buffer = array if round_ % 3 else plain
        buffer[:] = RANK + round_
        if rng.random() < 0.02:
            time.sleep(rng.random() * 0.002)
        mpiring.allreduce(buffer, comm=comm, algorithm="shared")
        assert (buffer == SIZE * round_ + SIZE * (SIZE - 1) // 2).all(), round_
        if round_ % 5 == 0:
            buffer[:] = round_ if RANK == round_ % SIZE else -1
            mpiring.broadcast(buffer, root=round_ % SIZE, comm=comm, algorithm="shared")
            assert (buffer == round_).all(), round_


def test_two_comms_in_turn(comm):
    other = COMM.Split(0, -RANK)
    a, b = mpiring.empty(1000, float, comm), mpiring.empty(1000, float, other)
    for round_ in range(50):
        a[:], b[:] = RANK, round_
        mpiring.allreduce(a, comm=comm, algorithm="shared")
        mpiring.allreduce(b, comm=other, algorithm="shared")
        assert (a == SIZE * (SIZE - 1) / 2).all() and (b == SIZE * round_).all()
        a[:] = RANK
        mpiring.allreduce(a, comm=other, algorithm="shared")     # an array serves any comm of its ranks, in any order
        assert (a == SIZE * (SIZE - 1) / 2).all()
    other.Free()


def test_part_of_the_ranks(comm):
    array = made(1000, np.float64, comm)
    half = comm.Split(RANK % 2, -RANK)
    ranks = half.allgather(RANK)
    mpiring.allreduce(array, comm=half, algorithm="shared")
    assert (array == sum(values(rank, 1000, array.dtype) for rank in ranks)).all()
    if len(ranks) > 1:
        assert path(array, comm=half) == "one pass"
    half.Free()


# ----------------------------------------------------------------- errors

def attempt(call):
    """Return the kind and text of the error on this rank, after all ranks are through."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


@several
@pytest.mark.parametrize("count", [10, 1000, 3_000_000])
@pytest.mark.parametrize("kind", ["shared", "ordinary"])
def test_ranks_that_disagree(kind, count, comm):
    array = mpiring.zeros(count + 1, np.float64, comm) if kind == "shared" else np.zeros(count + 1)
    odd = RANK == SIZE - 1
    for call, word in ((lambda: mpiring.allreduce(array[:count + odd], comm=comm, algorithm="shared"), f"count {count + odd}"),
                       (lambda: mpiring.allreduce(array, op=MPI.MAX if odd else MPI.SUM, comm=comm, algorithm="shared"), "SUM"),
                       (lambda: mpiring.reduce(array, root=int(odd), comm=comm, algorithm="shared"), f"root {int(odd)}")):
        error, text = attempt(call)
        assert error is mpiring.MismatchError and "ranks disagree" in text and word in text, (error, text)
        assert f"rank {SIZE - 1} called" in text and "rank 0 called" in text
        array[:] = 1
        assert (mpiring.allreduce(array, comm=comm, algorithm="shared") == SIZE).all()


@several
@pytest.mark.parametrize("count", [1000, 3_000_000])
@pytest.mark.parametrize("kind", ["shared", "ordinary"])
def test_an_error_in_the_middle_reaches_every_rank(kind, count, comm):
    array = mpiring.zeros(count, np.float32, comm) if kind == "shared" else np.zeros(count, np.float32)
    array[:] = 3e38
    with np.errstate(over="raise" if RANK == 0 else "ignore"):
        error, text = attempt(lambda: mpiring.allreduce(array, comm=comm, algorithm="shared"))
    if RANK == 0:
        assert error is FloatingPointError
    else:
        assert error is mpiring.PeerError and "rank 0: FloatingPointError: overflow" in text, (error, text)
    for _ in range(3):
        array[:] = 1
        assert (mpiring.allreduce(array, comm=comm, algorithm="shared") == SIZE).all()


def test_what_a_non_commutative_op_gets_is_in_order():
    def second(inbuf, inout, _):
        pass                                             # keeps the right operand: the last rank's

    op = MPI.Op.Create(second, commute=False)
    try:
        mine = np.full(1000, float(RANK))
        assert (mpiring.allreduce(mine, op=op, algorithm="shared") == SIZE - 1).all()
    finally:
        op.Free()


def test_scratch_does_not_grow_with_the_vector(comm):
    node = channel_of(comm).node
    for count in (1 << 16, 1 << 20, 1 << 22):
        mpiring.allreduce(np.ones(count, np.float32), comm=comm, algorithm="shared")
        assert sum(room.nbytes for room in node._scratch.values()) <= (SIZE + 1) * (binding.KERNEL_BLOCK + 4096)
    assert len(node.stage) == SIZE + 1 and all(row.nbytes == binding.STAGE for row in node.stage)
    assert ops.kind(np.dtype(np.float32)) == "f"
