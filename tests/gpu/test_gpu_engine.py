"""The engine on arrays in device memory: nothing is read before it is there, and results are complete when synchronize returns."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.engine import bursts, exchanges
from mpiring.engine.schedule import DIRECT

import standin

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LARGE = DIRECT // 8 + 3
TOTAL = SIZE * (SIZE - 1) // 2

pytestmark = pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="plans need MPI.THREAD_MULTIPLE")


@pytest.fixture
def engine(stand, monkeypatch):
    """Give an engine whose large arrays go in several segments."""
    monkeypatch.setenv("MPIRING_SEGMENT", "65536")
    with mpiring.Engine(timeout=20) as engine:
        yield engine


def values(count, rank=RANK, dtype=np.float64):
    return (np.arange(count) % 50 + rank).astype(dtype)


def total(count, dtype=np.float64):
    return (np.arange(count) % 50 * SIZE + TOTAL).astype(dtype)


class Work:
    """Operations, each on a stream of its own, on arrays that are still on their way to the device when it is submitted."""

    def __init__(self, engine):
        self.engine, self.handles, self.inputs = engine, [], []

    def start(self, call, host, *args, in_place=False, **options):
        """Submit an operation on what was in host memory."""
        with standin.Stream() as stream:
            array = [standin.asarray(each) for each in host] if isinstance(host, list) else standin.asarray(host)
            extra = [array] if in_place else []
            self.handles.append(getattr(self.engine, f"{call}_async")(array, *extra, *args, **options))
        self.inputs.append((stream, array))
        return array

    def finish(self):
        """Return what the results hold when the operations are over, without waiting for anything else."""
        found = [self.engine.synchronize(handle) for handle in self.handles]
        peeked = [[standin.peek(each) for each in result] if isinstance(result, list) else standin.peek(result) for result in found]
        assert not standin.pending(), "work is under way when an operation is over"
        return peeked


@pytest.fixture
def work(engine):
    return Work(engine)


# ----------------------------------------------------------------- allreduce

@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
def test_fused(engine, work, in_place):
    for turn in range(2):
        work = Work(engine)
        arrays = [work.start("allreduce", values(10 + index), name=str(index), in_place=in_place) for index in range(20)]
        for index, (got, array) in enumerate(zip(work.finish(), arrays)):
            assert (got == total(10 + index)).all()
            assert (standin.peek(array) == (total if in_place else values)(10 + index)).all()
        assert turn == 0 or engine.metrics()["known"] >= 20
    assert engine.metrics()["fused"] > 1


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
def test_large(work, in_place):
    arrays = [work.start("allreduce", values(LARGE + index), name=str(index), in_place=in_place) for index in range(3)]
    for index, (got, array) in enumerate(zip(work.finish(), arrays)):
        assert (got == total(LARGE + index)).all()
        assert (standin.peek(array) == (total if in_place else values)(LARGE + index)).all()


@pytest.mark.parametrize(("op", "expected"), [(mpiring.AVERAGE, total(9, np.float32) / np.float32(SIZE)),
                                              (MPI.MAX, values(9, SIZE - 1, np.float32))], ids=["AVERAGE", "MAX"])
def test_ops(work, op, expected):
    work.start("allreduce", values(9, dtype=np.float32), name="a", op=op)
    got, = work.finish()
    assert got.dtype == np.float32 and (got == expected).all()


def test_a_group_of_small_and_large_arrays(work):
    counts = [5, LARGE, 1, 0]
    arrays = work.start("grouped_allreduce", [values(count) for count in counts], name="group")
    got, = work.finish()
    assert all((each == total(count)).all() for each, count in zip(got, counts))
    assert all((standin.peek(array) == values(count)).all() for array, count in zip(arrays, counts))


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
@pytest.mark.parametrize("count", [9, LARGE])
def test_factors(work, count, in_place):
    array = work.start("allreduce", values(count), name="a", prescale=2.0, postscale=0.25, in_place=in_place)
    work.start("allreduce", values(count), name="b", postscale=3.0)
    work.start("allreduce", values(count), name="c")
    a, b, c = work.finish()
    assert (a == total(count) / 2).all() and (b == total(count) * 3).all() and (c == total(count)).all()
    assert (standin.peek(array) == (total(count) / 2 if in_place else values(count))).all()


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
@pytest.mark.parametrize("count", [9, LARGE])
def test_adasum(engine, work, count, in_place):
    """Computed in host memory: of the same values, the same bits."""
    array = work.start("allreduce", values(count), name="a", op=mpiring.ADASUM, prescale=0.5, in_place=in_place)
    host = engine.allreduce(values(count), name="host", op=mpiring.ADASUM, prescale=0.5)
    got, = work.finish()
    assert (got == host).all() and not np.array_equal(got, values(count))
    assert (standin.peek(array) == (host if in_place else values(count))).all()


def test_integers_are_scaled_toward_zero(work):
    work.start("allreduce", -values(9, dtype=np.int32), name="a", prescale=0.5)
    got, = work.finish()
    assert (got == sum(np.trunc(-values(9, rank) / 2) for rank in range(SIZE))).all()


@pytest.mark.parametrize("rows", [5, LARGE])
def test_a_column(engine, rows):
    with standin.Stream():
        array = standin.asarray(np.stack([values(rows), values(rows, 7)], 1))
        handle = engine.allreduce_async(array[:, 0], array[:, 0], name="a")
    engine.synchronize(handle)
    assert not standin.pending()
    assert (standin.peek(array) == np.stack([total(rows), values(rows, 7)], 1)).all()


def test_arrays_of_both_memories_and_of_several_dtypes(engine, work):
    kinds = [np.float32, np.int16, np.float64]
    for index, dtype in enumerate(kinds * 2):
        work.start("allreduce", values(7, dtype=dtype), name=str(index))
    host = engine.allreduce_async(values(7), name="host")
    for got, dtype in zip(work.finish(), kinds * 2):
        assert got.dtype == dtype and (got == total(7, dtype)).all()
    assert (engine.synchronize(host) == total(7)).all()


def test_nobody_may_wait_for_it(engine, work):
    work.start("allreduce", values(9), name="a")
    while not engine.poll(work.handles[0]):
        pass
    assert (standin.peek(work.handles[0].result) == total(9)).all()


# ----------------------------------------------------------------- the others

@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
@pytest.mark.parametrize("count", [9, LARGE])
def test_broadcast(work, count, in_place):
    root, arrays = SIZE - 1, []
    for index, dtype in enumerate([np.float64, np.int8, np.float32]):
        host = values(count, dtype=dtype)
        with standin.Stream() as stream:
            array = standin.asarray(host)
            work.handles.append(work.engine.broadcast_async(array, root, array if in_place else None, name=str(index)))
        arrays.append((stream, array))
    for got, (_, array), dtype in zip(work.finish(), arrays, [np.float64, np.int8, np.float32]):
        assert (got == values(count, root, dtype)).all()
        assert (standin.peek(array) == values(count, root if in_place else RANK, dtype)).all()


@pytest.mark.parametrize("rows", [3, 1000])
def test_allgather(work, rows):
    work.start("allgather", np.full((rows * RANK, 2), RANK, np.int32), name="a")
    got, = work.finish()
    assert got.tolist() == [[rank] * 2 for rank in range(SIZE) for _ in range(rows * rank)]


def test_alltoall(work):
    work.start("alltoall", np.repeat(np.arange(SIZE) + 10 * RANK, 4).reshape(-1, 2), name="even")
    even, = work.finish()
    assert even.tolist() == [[10 * rank + RANK] * 2 for rank in range(SIZE) for _ in range(2)]


def test_alltoall_by_splits(engine):
    splits = [(RANK + peer) % 3 for peer in range(SIZE)]
    with standin.Stream():
        array = standin.asarray(np.repeat(np.arange(SIZE) + 10 * RANK, splits))
        handle = engine.alltoall_async(array, splits, name="a")
    got, counts = engine.synchronize(handle)
    assert not standin.pending()
    assert standin.peek(got).tolist() == [10 * rank + RANK for rank in range(SIZE) for _ in range((rank + RANK) % 3)]
    assert list(counts) == [(rank + RANK) % 3 for rank in range(SIZE)]


@pytest.mark.parametrize("factors", [{}, {"prescale": 0.5, "postscale": 4.0}], ids=["plain", "factors"])
def test_reduce_scatter(work, factors):
    count = 7 * SIZE + 1
    array = work.start("reduce_scatter", values(count), name="a", **factors)
    got, = work.finish()
    assert (got == np.array_split(total(count), SIZE)[RANK] * (2 if factors else 1)).all()
    assert (standin.peek(array) == values(count)).all()


# ----------------------------------------------------------------- errors, and waits that are needed

def test_ranks_whose_array_is_in_another_memory_are_told(engine):
    if SIZE == 1:
        pytest.skip("one rank agrees with itself")
    with standin.Stream() as stream:
        array = standin.asarray(values(9)) if RANK == 0 else values(9)
        handle = engine.allreduce_async(array, name="a")
        stream.synchronize()
    with pytest.raises(mpiring.MismatchError, match=r"rank 0: allreduce of float64 \(9,\) on a GPU by SUM; ranks? 1"):
        engine.synchronize(handle)
    work = Work(engine)
    work.start("allreduce", values(9), name="a")
    assert (work.finish()[0] == total(9)).all()


def test_an_out_in_another_memory_is_refused(engine):
    array = standin.asarray(values(9))
    with pytest.raises(ValueError, match=f"allreduce on rank {RANK}: out is not in the same memory"):
        engine.allreduce_async(array, values(9), name="a")
    op = MPI.Op.Create(lambda *_: None)
    with pytest.raises(TypeError, match=f"allreduce on rank {RANK}: op is made with MPI.Op.Create"):
        engine.allreduce_async(array, name="a", op=op)
    op.Free()


def test_without_waiting_the_result_is_not_there(engine, work, monkeypatch):
    monkeypatch.setattr(exchanges, "settle", lambda *_: None)
    for index in range(3):
        work.start("allreduce", values(9), name=str(index))
    found = [standin.peek(engine.synchronize(handle)) for handle in work.handles]
    assert any((got != total(9)).any() for got in found)
    standin.reset()


def test_on_a_stream_that_nobody_waits_for_the_result_is_wrong(engine, work, monkeypatch):
    other, put = standin.Stream(), bursts.put

    def astray(view, array, operation, factor=1.0):
        stream, operation.stream = operation.stream, other
        put(view, array, operation, factor)
        operation.stream = stream

    monkeypatch.setattr(bursts, "put", astray)
    work.start("allreduce", values(9), name="a")
    got = standin.peek(engine.synchronize(work.handles[0]))
    assert (got != total(9)).any()
    standin.reset()
