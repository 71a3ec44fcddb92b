"""Plans: made once and reused, with scratch of a few segments; what travels is counted, not timed."""

import gc
import tracemalloc
import warnings
from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.runtime import channel as channels
from mpiring.runtime.channel import Cache, channel_key

from cases import COMM, KINDS, RANK, SIZE


@pytest.fixture
def comm(monkeypatch):
    monkeypatch.setenv("MPIRING_SEGMENT", "4096")
    comm = COMM.Dup()
    yield comm
    comm.Free()


class Counting:
    """A comm that counts messages and bytes by peer."""

    def __init__(self, comm):
        self._comm, self.messages, self.bytes = comm, Counter(), Counter()

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, buffer, dest, tag):
        self.messages[dest] += 1
        self.bytes[dest] += buffer[1]
        return self._comm.Isend(buffer, dest, tag)

    def Sendrecv(self, sendbuf, dest, sendtag, *rest):
        self.messages[dest] += 1
        self.bytes[dest] += sendbuf[1]
        return self._comm.Sendrecv(sendbuf, dest, sendtag, *rest)


@pytest.fixture
def counted(comm):
    """The comm, and the counts of what is sent on its channel."""
    mpiring.allreduce(np.ones(1), comm=comm)
    channel = comm.Get_attr(channel_key())
    channel.comm, real = Counting(channel.comm), channel.comm
    yield comm, channel.comm
    channel.comm = real


def test_ring_sends_right_what_the_bound_says(counted):
    comm, counts = counted
    nbytes = SIZE * 64 * 1024
    mpiring.ring_allreduce(np.ones(nbytes, np.uint8), comm=comm)
    assert set(counts.bytes) == ({(RANK + 1) % SIZE} if SIZE > 1 else set())
    assert sum(counts.bytes.values()) == 2 * (SIZE - 1) * nbytes // SIZE
    assert sum(counts.messages.values()) == 2 * (SIZE - 1) * 16


def test_tree_sends_the_whole_vector_to_parent_and_children(counted):
    comm, counts = counted
    mpiring.tree_allreduce(np.ones(10_000, np.uint8), comm=comm)
    parent = set() if RANK == 0 else {RANK & (RANK - 1)}
    children = {RANK + (1 << k) for k in range(8) if RANK % (2 << k) == 0 and RANK + (1 << k) < SIZE}
    assert set(counts.bytes) == parent | children
    assert set(counts.bytes.values()) <= {10_000}


def test_halves_send_half(counted):
    comm, counts = counted
    nbytes = SIZE * 64 * 1024
    mpiring.reduce_scatter(np.ones(nbytes, np.uint8), np.ones(64 * 1024, np.uint8), comm=comm, algorithm="ring")
    assert sum(counts.bytes.values()) == (SIZE - 1) * nbytes // SIZE
    mpiring.allgather(np.ones(64 * 1024, np.uint8), np.ones(nbytes, np.uint8), comm=comm, algorithm="ring")
    assert sum(counts.bytes.values()) == 2 * (SIZE - 1) * nbytes // SIZE


def test_shared_sends_nothing(counted):
    comm, counts = counted
    mpiring.allreduce(np.ones(1_000_000, np.uint8), comm=comm, algorithm="shared")
    assert not counts.messages


def test_scratch_is_a_few_segments_never_the_vector(comm):
    count, strided = 1 << 19, np.zeros((1 << 19, 2), np.uint8)[:, 1]
    whole, part = np.ones(count, np.uint8), np.ones(len(range(RANK, count, SIZE)), np.uint8)
    shares = [len(range(rank, count, SIZE)) for rank in range(SIZE)]
    mpiring.ring_allreduce(whole, comm=comm)
    mpiring.tree_allreduce(whole, comm=comm)
    mpiring.ring_allreduce(strided, comm=comm)
    mpiring.ring_allreduce(whole, strided, comm=comm)
    mpiring.reduce_scatter(strided, part, counts=shares, comm=comm, algorithm="ring")
    mpiring.allgather(part, strided, counts=shares, comm=comm, algorithm="ring")
    channel = comm.Get_attr(channel_key())
    scratch = [slot.nbytes for slot in channel._slots.values()]
    assert set(scratch) <= {4096} and len(scratch) <= 12, scratch


def test_memory_of_a_first_run_does_not_grow_with_the_vector(comm):
    def peak(count):
        array = np.ones(count, np.float32)
        gc.collect()
        tracemalloc.start()
        mpiring.ring_allreduce(array, comm=comm)
        arrays = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]).traces)
        tracemalloc.stop()
        return arrays

    assert peak(1 << 18) <= 8 * 4096


@pytest.mark.parametrize("algorithm, kind", [*((name, "ordinary") for name in ("ring", "tree", "shared", "native", "auto")),
                                             ("shared", "shared")])
@pytest.mark.parametrize("dtype, op", [(np.float32, MPI.SUM), (np.int16, mpiring.AVERAGE), (np.float16, mpiring.AVERAGE),
                                       (np.float16, MPI.MAX)], ids=["f4-SUM", "i2-AVERAGE", "f2-AVERAGE", "f2-MAX"])
def test_running_a_cached_plan_makes_no_array(comm, algorithm, kind, op, dtype):
    ones, strided = np.ones(20_000, dtype), np.ones((20_000, 2), dtype)[:, 0]
    array, out = KINDS[kind](ones), KINDS[kind](ones)

    def run():
        mpiring.allreduce(array, op=op, algorithm=algorithm, comm=comm)
        mpiring.allreduce(array, out, op=op, algorithm=algorithm, comm=comm)
        mpiring.allreduce(strided, out, op=op, algorithm=algorithm, comm=comm)
        array[:], strided[:] = 1, 1

    run()
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    made = []
    real = np.empty
    gc.collect()
    tracemalloc.start()
    try:
        np.empty = lambda *a, **k: made.append(a) or real(*a, **k)
        run()
        peak = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([domain]).traces)
    finally:
        np.empty = real
        tracemalloc.stop()
    assert not made and peak == 0


def test_a_plan_is_made_once(comm):
    array, other = np.ones(100), np.ones(100)
    for _ in range(5):
        mpiring.allreduce(array, comm=comm, algorithm="ring")
        mpiring.allreduce(array, other, comm=comm, algorithm="ring")
        mpiring.allreduce(array, comm=comm, algorithm="tree")
        mpiring.allreduce(array, comm=comm, algorithm="ring", op=MPI.MAX)
    channel = comm.Get_attr(channel_key())
    assert len(channel.plans) == 4
    assert len(channel.programs) == 3
    assert mpiring.allreduce(np.ones(100), comm=comm, algorithm="ring") is not None and len(channel.programs) == 3
    for _ in range(3):
        for algorithm in ("shared", "native", "auto"):
            mpiring.allreduce(array, comm=comm, algorithm=algorithm)
    assert len(channel.plans) == 8 and len(channel.programs) <= 4         # a rank alone: auto is the first of the registry


@pytest.mark.parametrize("algorithm", ["ring", "shared", "native", "auto"])
def test_a_plan_does_not_keep_its_buffer(comm, algorithm):
    import weakref

    array = np.ones(100)
    mpiring.allreduce(array, comm=comm, algorithm=algorithm)
    gone = weakref.ref(array)
    del array
    assert gone() is None


@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_old_plans_are_forgotten(comm, algorithm):
    mpiring.allreduce(np.ones(1), comm=comm)
    channel = comm.Get_attr(channel_key())
    channel.plans = Cache(50)
    arrays = [np.ones(10 + n) for n in range(60)]
    for array in arrays:
        mpiring.allreduce(array, comm=comm, algorithm=algorithm)
    assert channel.plans.length == sum(plan.length for plan in channel.plans.values())
    assert channel.plans.length <= 50 or len(channel.plans) == 1
    for array in arrays:
        array[:] = 1
        assert (mpiring.allreduce(array, comm=comm, algorithm=algorithm) == SIZE).all()


def test_a_call_is_checked_again_where_its_arrays_or_arguments_are_others(comm):
    line = np.arange(200.0)
    array = line[:100]
    for _ in range(2):
        mpiring.allreduce(array, comm=comm)
    line[:] = np.arange(200.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.strides = (16,)
    mpiring.allreduce(array, comm=comm)
    assert (line[::2] == SIZE * np.arange(0.0, 200, 2)).all() and (line[1::2] == np.arange(1.0, 200, 2)).all()
    whole = np.ones(8)
    mpiring.broadcast(whole, comm=comm)
    with pytest.raises(TypeError, match="root is of type float, not a rank"):
        mpiring.broadcast(whole, comm=comm, root=0.0)
    mpiring.allreduce(whole, comm=comm)
    whole.dtype = np.int64
    whole[:] = 2**53 + 1
    assert (mpiring.allreduce(whole, comm=comm) == SIZE * (2**53 + 1)).all()


def test_plans_that_are_made_anew_count_once(comm):
    mpiring.allreduce(np.ones(1), comm=comm)
    channel = comm.Get_attr(channel_key())
    for _ in range(20):
        array = mpiring.empty(100, comm=comm)
        mpiring.allreduce(array, comm=comm, algorithm="shared")
        del array
    assert channel.plans.length == sum(plan.length for plan in channel.plans.values())


def test_a_freed_op_is_not_taken_for_a_new_one(comm):
    def op_that(multiplies):
        def function(inbuf, inout, _):
            out = np.frombuffer(inout)
            out[:] = out * np.frombuffer(inbuf) if multiplies else out + np.frombuffer(inbuf)
        return MPI.Op.Create(function, commute=True)

    array = np.full(4, 2.0)
    for multiplies in (False, True, False, True):
        op = op_that(multiplies)
        for algorithm in ("ring", "shared", "auto"):
            array[:] = 2
            mpiring.allreduce(array, op=op, comm=comm, algorithm=algorithm)
            assert (array == (2.0**SIZE if multiplies else 2 * SIZE)).all()
        op.Free()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_the_channel_goes_with_its_comm(algorithm):
    made = []
    original = channels.Channel.free
    channels.Channel.free = lambda self: made.append(self) or original(self)
    try:
        comm = COMM.Dup()
        mpiring.allreduce(np.ones(1), comm=comm, algorithm=algorithm)
        private = comm.Get_attr(channel_key()).comm
        comm.Free()
    finally:
        channels.Channel.free = original
    assert len(made) == 1 and private == MPI.COMM_NULL


def test_plans_without_messages_are_forgotten_too():
    arrays = [np.ones(1) for _ in range(200)]
    comm = MPI.COMM_SELF.Dup()
    mpiring.allreduce(np.ones(1), comm=comm)
    channel = comm.Get_attr(channel_key())
    channel.plans = Cache(50)
    for array in arrays:
        mpiring.allreduce(array, comm=comm)
    assert len(channel.plans) <= 50
    comm.Free()


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "pipelined_tree"])
@pytest.mark.parametrize("patient", [False, True])
def test_waits_may_be_patient_or_not_from_run_to_run(algorithm, patient):
    comm = COMM.Dup()
    waits = channels.channel_of(comm).waits
    waits.both = True
    for turn in range(4):
        waits.patient = patient if turn % 2 else not patient
        buf = np.full(100_003, RANK + turn, np.int64)
        assert (mpiring.allreduce(buf, comm=comm, algorithm=algorithm) == SIZE * (SIZE - 1) // 2 + SIZE * turn).all()
    comm.Free()
