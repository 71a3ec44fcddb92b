"""Whatever goes wrong on the engine's way: an error on every rank that it concerns, and then the engine goes on."""

import gc
import logging
import pickle
import re
import sys
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.engine import loop, stall
from mpiring.engine.loop import UNNAMED

from cases import COMM, RANK, SIZE, attempt
from engines import EVERYONE, assert_same, assert_usable, started, use_every_operation

needs_peers = pytest.mark.skipif(SIZE < 2, reason="one rank waits for nobody")

LAST = SIZE - 1


@pytest.fixture(scope="module")
def engine():
    with started() as engine:
        yield engine


# ----------------------------------------------------------------- wrong use on one rank

def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


BAD = [
    ("list", "allreduce", lambda: ([1, 2],), {}, TypeError, "array is of type list"),
    ("none", "allreduce", lambda: (None,), {}, TypeError, "array is of type NoneType"),
    ("text", "allreduce", lambda: (np.array(["a"]),), {}, TypeError, "array has dtype <U1, which is not numeric"),
    ("structured", "allgather", lambda: (np.zeros(2, "f4,i4"),), {}, TypeError, "array has dtype .* not numeric"),
    ("masked", "broadcast", lambda: (np.ma.masked_array([1.0], [0]),), {}, TypeError, "array is a masked array"),
    ("out's type", "allreduce", lambda: (np.ones(3), [1, 2, 3]), {}, TypeError, "out is of type list"),
    ("out's shape", "allreduce", lambda: (np.ones(3), np.ones(4)), {}, ValueError, r"out has shape \(4,\), but the array has"),
    ("out's dtype", "broadcast", lambda: (np.ones(3), 0, np.ones(3, "f")), {}, TypeError, "out has dtype float32, but the array"),
    ("read-only out", "allreduce", lambda: (np.ones(3), read_only()), {}, ValueError, "out is read-only"),
    ("read-only in place", "allreduce", lambda: (lambda a: (a, a))(read_only()), {}, ValueError, "read-only"),
    ("overlap", "allreduce", lambda: (lambda a: (a[:3], a[1:]))(np.ones(4)), {}, ValueError, "out overlaps the array"),
    ("shared elements", "allreduce", lambda: (np.ones(3), np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,))), {}, ValueError,
     "out has elements that share memory"),
    ("op's type", "allreduce", lambda: (np.ones(3),), {"op": "SUM"}, TypeError, "op is of type str"),
    ("op null", "allreduce", lambda: (np.ones(3),), {"op": MPI.OP_NULL}, ValueError, "op is MPI.OP_NULL"),
    ("bits of floats", "reduce_scatter", lambda: (np.ones(3),), {"op": MPI.BAND}, TypeError, "op BAND has no meaning for dtype"),
    ("largest complex", "allreduce", lambda: (np.ones(3, complex),), {"op": MPI.MAX}, TypeError, "op MAX has no meaning"),
    ("mean of bool", "grouped_allreduce", lambda: ([np.ones(3, bool)],), {"op": mpiring.AVERAGE}, TypeError, "op AVERAGE has no"),
    ("name", "allreduce", lambda: (np.ones(3),), {"name": 5}, TypeError, "name is of type int"),
    ("prescale", "allreduce", lambda: (np.ones(3),), {"prescale": "a"}, TypeError, "prescale is of type str"),
    ("postscale", "reduce_scatter", lambda: (np.ones(3),), {"postscale": None}, TypeError, "postscale is of type NoneType"),
    ("process set", "allgather", lambda: (np.ones(3),), {"process_set": 3}, TypeError, "process_set is of type int"),
    ("root too large", "broadcast", lambda: (np.ones(3), SIZE), {}, ValueError, f"root {SIZE}"),
    ("root negative", "broadcast", lambda: (np.ones(3), -1), {}, ValueError, "root -1"),
    ("root's type", "broadcast", lambda: (np.ones(3), 1.5), {}, TypeError, "root is of type float"),
    ("no rows to gather", "allgather", lambda: (np.array(1.0),), {}, ValueError, "array has no dimensions"),
    ("no rows to scatter", "reduce_scatter", lambda: (np.array(1.0),), {}, ValueError, "array has no dimensions"),
    ("no rows to exchange", "alltoall", lambda: (np.array(1.0),), {}, ValueError, "array has no dimensions"),
    ("splits' number", "alltoall", lambda: (np.ones(SIZE + 1), [1] * (SIZE + 1)), {}, ValueError, "splits"),
    ("splits' sum", "alltoall", lambda: (np.ones(2 * SIZE - 1), [2] * SIZE), {}, ValueError, "splits"),
    ("negative splits", "alltoall", lambda: (np.ones(SIZE), [-1] + [1] * LAST), {}, ValueError, "splits"),
    ("splits' type", "alltoall", lambda: (np.ones(SIZE), [1.0] * SIZE), {}, TypeError, "splits"),
    ("group", "grouped_allreduce", lambda: (5,), {}, TypeError, "arrays is of type int"),
    ("group's member", "grouped_allreduce", lambda: ([np.ones(2), [1]],), {}, TypeError, "is of type list"),
    ("group's outs", "grouped_allreduce", lambda: ([np.ones(2)], [np.ones(2)] * 2), {}, ValueError, "outs"),
    ("group's out", "grouped_allreduce", lambda: ([np.ones(2)], [np.ones(3)]), {}, ValueError, r"has shape \(3,\)"),
    ("one out twice", "grouped_allreduce", lambda: (lambda a: ([np.ones(2)] * 2, [a] * 2))(np.ones(2)), {}, ValueError, "outs"),
]


@pytest.mark.parametrize("method, arguments, options, error, match", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_wrong_arguments(engine, request, method, arguments, options, error, match):
    """On the last rank alone: nothing was sent, so the name is good for what the others submit."""
    name = request.node.name

    def submit():
        if RANK == LAST:
            getattr(engine, f"{method}_async")(*arguments(), **{"name": name, **options})

    kind, text = COMM.bcast(attempt(submit), LAST)
    assert kind is error, text
    assert re.search(f"^{method} on rank {LAST}: .*{match}", text), text
    assert (engine.allreduce(np.ones(4), name=name) == SIZE).all()


@needs_peers
def test_rows_that_cannot_be_shared_out(engine):
    with pytest.raises(ValueError, match=f"alltoall on rank {RANK}: .*{SIZE + 1}"):
        engine.alltoall(np.ones(SIZE + 1))
    assert_usable(engine)


@needs_peers
def test_a_name_in_flight(engine):
    COMM.Barrier()
    if RANK == LAST:
        COMM.recv(source=0)
    handle = engine.allreduce_async(np.full(3, RANK), name="taken")
    if RANK == 0:
        for call in (lambda: engine.allreduce(np.ones(3), name="taken"), lambda: engine.allgather(np.ones(3), name="taken"),
                     lambda: engine.grouped_allreduce([np.ones(3)], name="taken")):
            with pytest.raises(ValueError, match=r"on rank 0: .*'taken' is on its way already"):
                call()
        COMM.send(None, dest=LAST)
    assert_same(engine.synchronize(handle), np.full(3, SIZE * LAST // 2))
    assert_same(engine.allreduce(np.full(3, RANK), name="taken"), np.full(3, SIZE * LAST // 2))


def test_not_a_member_of_the_set(engine):
    alone = engine.add_process_set([LAST])
    for call in (lambda: engine.allreduce(np.ones(3), process_set=alone), lambda: engine.barrier(process_set=alone),
                 lambda: engine.allgather_object(3, process_set=alone)):
        if RANK == LAST:
            call()
        else:
            with pytest.raises(ValueError, match=f"on rank {RANK}: this rank is not part of .*{LAST}"):
                call()
    if RANK == LAST and SIZE > 1:
        with pytest.raises(ValueError, match=f"broadcast on rank {RANK}: root 0"):
            engine.broadcast(np.ones(3), 0, process_set=alone)
    engine.remove_process_set(alone)
    with pytest.raises(ValueError, match=f"on rank {RANK}: .*removed"):
        engine.allreduce(np.ones(3), process_set=alone)
    assert_usable(engine)


def test_sets_that_cannot_be(engine):
    for ranks in ([SIZE], [-1], [], [0, 0], [0.5], 0):
        with pytest.raises((TypeError, ValueError), match=f"add_process_set on rank {RANK}: ranks"):
            engine.add_process_set(ranks)
    with started() as other:
        foreign = other.add_process_set([*EVERYONE])
        with pytest.raises(ValueError, match=f"on rank {RANK}: process_set .*another engine"):
            engine.allreduce(np.ones(3), process_set=foreign)
    assert_usable(engine)


@needs_peers
def test_ranks_that_disagree_about_a_set(engine):
    kind, text = attempt(lambda: engine.add_process_set([0] if RANK == LAST else [*EVERYONE]))
    assert kind is mpiring.MismatchError and f"rank {LAST}" in text, text
    assert_usable(engine)


@pytest.mark.parametrize("options, match", [
    ({"comm": 5}, "comm is of type int"), ({"comm": MPI.COMM_NULL}, "comm is MPI.COMM_NULL"), ({"timeout": -1}, "timeout is -1"),
    ({"stall_seconds": "soon"}, "stall_seconds is 'soon'"), ({"fusion_threshold": float("nan")}, "fusion_threshold is nan"),
    ({"cycle_time": float("inf")}, "cycle_time is inf"),
], ids=str)
def test_settings(options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        mpiring.Engine(**options)


@pytest.mark.parametrize("variable", ["MPIRING_FUSION_THRESHOLD", "MPIRING_CYCLE_TIME", "MPIRING_TIMEOUT", "HOROVOD_CYCLE_TIME"])
def test_a_setting_that_is_no_number_is_an_error_on_every_rank(monkeypatch, variable):
    monkeypatch.setenv(variable, "much" if RANK == 0 else "1")
    with pytest.raises(ValueError, match=f"rank 0: {variable} is 'much'"):
        mpiring.Engine(COMM)


# ----------------------------------------------------------------- ranks that disagree

def call(method, *arguments, name="x", **options):
    """Return how to submit an operation to an engine."""
    return lambda engine: getattr(engine, f"{method}_async")(*arguments, name=name, **options)


FOUR = np.ones(4)

MISMATCHES = {
    "dtype": (call("allreduce", FOUR), call("allreduce", FOUR.astype("f")), "float64", "float32"),
    "shape": (call("allreduce", FOUR), call("allreduce", np.ones(5)), "(4,)", "(5,)"),
    "dimensions": (call("allreduce", FOUR), call("allreduce", FOUR.reshape(2, 2)), "(4,)", "(2, 2)"),
    "op": (call("allreduce", FOUR), call("allreduce", FOUR, op=MPI.MAX), "SUM", "MAX"),
    "average": (call("allreduce", FOUR), call("allreduce", FOUR, op=mpiring.AVERAGE), "SUM", "AVERAGE"),
    "prescale": (call("allreduce", FOUR, prescale=0.25), call("allreduce", FOUR, prescale=0.5), "prescale 0.25", "prescale 0.5"),
    "postscale": (call("allreduce", FOUR), call("allreduce", FOUR, postscale=0.5), "SUM", "postscale 0.5"),
    "group": (call("grouped_allreduce", [FOUR] * 2), call("grouped_allreduce", [FOUR] * 3), "2 arrays", "3 arrays"),
    "group's shape": (call("grouped_allreduce", [FOUR, FOUR]), call("grouped_allreduce", [FOUR, np.ones(3)]), "(4,)", "(3,)"),
    "group and array": (call("allreduce", FOUR), call("grouped_allreduce", [FOUR, FOUR]), "allreduce", "2 arrays"),
    "rows": (call("allgather", np.ones((2, 3))), call("allgather", np.ones((2, 4))), "(*, 3)", "(*, 4)"),
    "rows' dimensions": (call("allgather", np.ones((2, 3))), call("allgather", FOUR), "(*, 3)", "(*,)"),
    "gathered dtype": (call("allgather", FOUR.astype(int)), call("allgather", FOUR.astype("i2")), "int64", "int16"),
    "root": (call("broadcast", FOUR, 0), call("broadcast", FOUR, LAST), "root 0", f"root {LAST}"),
    "broadcast shape": (call("broadcast", FOUR), call("broadcast", np.ones(6)), "(4,)", "(6,)"),
    "exchanged rows": (call("alltoall", np.ones((SIZE, 3))), call("alltoall", np.ones((SIZE, 4))), "3)", "4)"),
    "scattered rows": (call("reduce_scatter", np.ones(9)), call("reduce_scatter", np.ones(8)), "(9,)", "(8,)"),
    "scatter's op": (call("reduce_scatter", FOUR), call("reduce_scatter", FOUR, op=MPI.MIN), "SUM", "MIN"),
    "sum and gather": (call("allreduce", FOUR), call("allgather", FOUR), "allreduce", "allgather"),
    "gather and broadcast": (call("allgather", FOUR), call("broadcast", FOUR), "allgather", "broadcast"),
    "exchange and scatter": (call("alltoall", np.ones(SIZE)), call("reduce_scatter", np.ones(SIZE)), "alltoall", "reduce scatter"),
    "without a name": (call("allreduce", FOUR, name=None), call("allgather", FOUR, name=None), "allreduce", "allgather"),
}
"""What all but one submit, what that one submits, and how errors name both."""


@needs_peers
@pytest.mark.parametrize("odd", [0, LAST])
@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch(engine, what, odd):
    others, other, first, second = MISMATCHES[what]
    kind, text = attempt(lambda: engine.synchronize((other if RANK == odd else others)(engine)))
    assert kind is mpiring.MismatchError, (kind, text)
    assert first in text and second in text and ("'x'" in text or what == "without a name"), text
    assert all(str(rank) in text for rank in EVERYONE), text
    assert_usable(engine)


@needs_peers
@pytest.mark.parametrize("odd", [0, LAST])
def test_mismatch_under_a_name_that_was_agreed_before(engine, odd):
    for _ in range(3):
        assert_same(engine.allreduce(np.ones(4), name="known"), np.full(4, float(SIZE)))
        kind, text = attempt(lambda: engine.allreduce(np.ones(5 if RANK == odd else 4), name="known"))
        assert kind is mpiring.MismatchError and "(5,)" in text and "(4,)" in text, text
        kind, _ = attempt(lambda: engine.allreduce(np.ones(5 if RANK == odd else 4), name="known"))
        assert kind is mpiring.MismatchError, "the ranks still say the same as last time"
        assert_same(engine.allreduce(np.ones(5), name="known"), np.full(5, float(SIZE)))
        assert_same(engine.allreduce(np.ones(5), name="known"), np.full(5, float(SIZE)))
    assert_usable(engine)


@needs_peers
@pytest.mark.parametrize("deterministic", [False, True])
def test_mismatch_among_operations_that_are_right(deterministic):
    """A group fails as a whole, in place of nothing; what is submitted with it does not, nor what is fused with it by rule."""
    with started(deterministic=deterministic) as engine:
        mine = [np.ones(4), np.ones(4)]
        good = [engine.allreduce_async(np.ones(index), name=str(index)) for index in range(10)]
        bad = [engine.grouped_allreduce_async([*mine, np.ones(RANK)], [*mine, np.ones(RANK)], name="x"),
               engine.allreduce_async(np.ones(4 + RANK), name="y")]
        good += [engine.allreduce_async(np.ones(index), name=str(index)) for index in range(10, 20)]
        assert all((engine.synchronize(handle) == SIZE).all() for handle in good)
        for handle in bad * 2:
            kind, text = attempt(lambda: engine.synchronize(handle))
            assert kind is mpiring.MismatchError, text
            assert engine.poll(handle) is True
        assert all((array == 1).all() for array in mine)
        assert engine.metrics()["errors"] == 2
        assert_usable(engine)


@needs_peers
def test_mismatch_in_a_set(engine):
    made = engine.add_process_set([0, LAST])
    if made.included:
        with pytest.raises(mpiring.MismatchError, match=f"rank 0: .*rank {LAST}: "):
            engine.allreduce(np.ones(RANK), process_set=made)
        assert (engine.allreduce(np.ones(3), process_set=made) == 2).all()
    engine.remove_process_set(made)
    assert_usable(engine)


@needs_peers
def test_objects_that_disagree(engine):
    kind, text = attempt(lambda: engine.broadcast_object(RANK, LAST if RANK == 0 else 0, name="x"))
    assert kind is mpiring.MismatchError and "root" in text, text
    kind, text = attempt(lambda: engine.allgather_object(RANK, name="x") if RANK else engine.broadcast_object(RANK, name="x"))
    assert kind is mpiring.MismatchError and "allgather" in text and "broadcast" in text, text
    assert_usable(engine)


def test_an_object_that_cannot_be_sent(engine):
    """An error at once, on its rank alone, which may then send another."""
    for method, rank in (("broadcast_object", 0), ("allgather_object", LAST)):
        if RANK == rank:
            with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
                getattr(engine, method)(lambda: None, name="x")
        assert getattr(engine, method)(rank, name="x") == ([rank] * SIZE if method == "allgather_object" else rank)
    assert_usable(engine)


# ----------------------------------------------------------------- join

@needs_peers
@pytest.mark.parametrize("what", ["allgather", "broadcast", "alltoall", "reduce_scatter", "barrier", "allgather_object"])
def test_only_allreduces_go_on_without_a_rank(engine, what):
    if RANK == LAST:
        assert engine.join() in EVERYONE[:-1]
    else:
        arguments = {"barrier": (), "allgather_object": (1,)}.get(what, (np.ones(SIZE),))
        with pytest.raises(mpiring.MismatchError, match=f"rank {LAST} joined"):
            getattr(engine, what)(*arguments)
        assert (engine.allreduce(np.ones(3), name="goes on") == LAST).all()
        engine.join()
    COMM.Barrier()
    assert_usable(engine)


@needs_peers
def test_what_was_submitted_before_joining_counts(engine):
    handle = engine.allgather_async(np.full(2, RANK), name="before")
    if RANK == 0:
        engine.join()
    else:
        time.sleep(0.02)
        assert_same(engine.allreduce(np.full(2, RANK), name="x"), np.full(2, sum(EVERYONE)))
        engine.join()
    assert_same(engine.synchronize(handle), np.repeat(EVERYONE, 2))
    assert_usable(engine)


# ----------------------------------------------------------------- ranks that do not come

@needs_peers
def test_a_rank_that_never_submits(caplog):
    """The others are told and go on; the late rank finds what they had to give."""
    mine = np.ones(3)
    with caplog.at_level(logging.WARNING, logger="mpiring"), started(stall_seconds=0.3, timeout=2) as engine:
        COMM.Barrier()
        begin = time.monotonic()
        kind, text = attempt(lambda: engine.allreduce(mine, name="gradient") if RANK != LAST else None)
        if RANK != LAST:
            assert kind is mpiring.StallError, text
            assert "'gradient'" in text and f"rank {LAST}" in text and "2 s (MPIRING_TIMEOUT)" in text, text
            with pytest.raises(ValueError, match="given up, but others may still come for it: use another name"):
                engine.allreduce_async(mine, name="gradient")
            assert 1.9 < time.monotonic() - begin < 10
        assert engine.metrics()["stalls"] > 0 or RANK == LAST
        mine[:] = 5                                      # their own again
        if RANK == LAST:
            assert (engine.allreduce(np.ones(3), name="gradient") == SIZE).all()
        COMM.Barrier()
        assert_usable(engine)
        assert (engine.allreduce(np.ones(3), name="gradient") == SIZE).all()
    warnings = [record.getMessage() for record in caplog.records if record.name == "mpiring" and record.levelno == logging.WARNING]
    if RANK != LAST:
        assert any("'gradient'" in text and f"rank {LAST}" in text for text in warnings), warnings
    assert len(warnings) < 10


@needs_peers
def test_the_stall_report_names_all_that_are_missing(caplog):
    """Rank 0 alone submits one, all but the last one another; both end well when the others come."""
    with caplog.at_level(logging.WARNING, logger="mpiring"), started(stall_seconds=0.2, timeout=0) as engine:
        COMM.Barrier()
        if RANK:
            time.sleep(2)
        first = engine.allreduce_async(np.ones(3), name="of rank 0")
        begin = time.monotonic()
        assert (engine.synchronize(first) == SIZE).all()
        assert RANK or time.monotonic() - begin > 1
        COMM.Barrier()
        use_every_operation(engine)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "mpiring")
    assert RANK or ("'of rank 0'" in text and all(str(rank) in text for rank in EVERYONE[1:])), text


@needs_peers
def test_no_report_where_it_is_switched_off(caplog):
    with caplog.at_level(logging.WARNING, logger="mpiring"), started(stall_seconds=0, timeout=0) as engine:
        COMM.Barrier()
        if RANK == LAST:
            time.sleep(0.8)
        assert (engine.allreduce(np.ones(3)) == SIZE).all()
        assert engine.metrics()["stalls"] == 0
    assert not [record for record in caplog.records if record.name == "mpiring"]


@needs_peers
def test_submissions_while_the_engine_looks_at_what_is_late(monkeypatch):
    """Threads take turns as often as can be, so that the look meets operations that come."""
    monkeypatch.setattr(stall, "BETWEEN", 1e-5)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with started() as engine:
            handles = [engine.allreduce_async(np.ones(1), name=str(index)) for index in range(1000 if RANK != LAST else 0)]
            time.sleep(0.02)                             # the engine begins when no more come, and waits for the last rank
            handles += [engine.allreduce_async(np.ones(1), name=str(index)) for index in range(len(handles), 3000)]
            assert all((engine.synchronize(handle) == SIZE).all() for handle in handles)
    finally:
        sys.setswitchinterval(switch)


@needs_peers
def test_a_timeout_in_a_group_and_in_a_set():
    with started(timeout=0.5) as engine:
        made = engine.add_process_set([0, LAST])
        COMM.Barrier()
        begin = time.monotonic()
        if RANK == 0:
            with pytest.raises(mpiring.StallError, match=f"rank {LAST}"):
                engine.grouped_allreduce([np.ones(3), np.ones(4)], process_set=made, name="x")
            assert time.monotonic() - begin < 10
        COMM.Barrier()
        assert_usable(engine)
        if RANK == LAST:
            late = engine.grouped_allreduce([np.ones(3), np.ones(4)], process_set=made, name="x")
            assert all((array == 2).all() for array in late)
        COMM.Barrier()


# ----------------------------------------------------------------- the end

@needs_peers
def test_shutdown_on_one_rank_while_others_wait():
    comm = COMM.Dup()
    engine = mpiring.Engine(comm, timeout=30)
    use_every_operation(engine)
    handle = engine.allreduce_async(np.ones(3), name=f"of rank {RANK} alone")
    COMM.Barrier()
    if RANK == 0:
        engine.shutdown()
    for _ in range(2):
        kind, text = attempt(lambda: engine.synchronize(handle))
        assert kind is mpiring.ShutdownError, (kind, text)
    assert RANK == 0 or "rank 0" in text, text
    assert engine.poll(handle) is True
    for call in (lambda: engine.allreduce(np.ones(3)), lambda: engine.barrier(), lambda: engine.join(),
                 lambda: engine.allgather_object(1), lambda: engine.broadcast_async(np.ones(3))):
        kind, text = attempt(call)
        assert kind is mpiring.ShutdownError, (kind, text)
    engine.shutdown()
    engine.shutdown()
    comm.Free()


@needs_peers
def test_shutdown_while_others_are_in_a_barrier_or_have_joined():
    for wait in ("barrier", "join"):
        comm = COMM.Dup()
        engine = mpiring.Engine(comm, timeout=30)
        if RANK == 0:
            time.sleep(0.1)
            engine.shutdown()
        kind, text = attempt(lambda: getattr(engine, wait)() if RANK else None)
        assert RANK == 0 or kind is mpiring.ShutdownError, (kind, text)
        engine.shutdown()
        comm.Free()


def test_what_was_agreed_ends_before_the_shutdown():
    comm = COMM.Dup()
    for _ in range(5):
        with mpiring.Engine(comm, timeout=30) as engine:
            handles = [engine.allreduce_async(np.ones(100), name=str(index)) for index in range(20)]
            assert all((engine.synchronize(handle) == SIZE).all() for handle in handles)
            array = np.ones(200_000)
            last = engine.allreduce_async(array, array)
            engine.synchronize(last)
        assert (array == SIZE).all() and (engine.synchronize(last) == SIZE).all()
    comm.Free()


def test_use_after_shutdown():
    comm = COMM.Dup()
    with mpiring.Engine(comm) as engine:
        handle = engine.allreduce_async(np.ones(3))
        assert (engine.synchronize(handle) == SIZE).all()
    assert engine.poll(handle) and (engine.synchronize(handle) == SIZE).all(), "what is there stays there"
    assert engine.metrics()["operations"] == 1
    for call in (lambda: engine.allreduce(np.ones(3)), lambda: engine.add_process_set([0])):
        with pytest.raises(mpiring.ShutdownError, match=f"on rank {RANK}: "):
            call()
    assert issubclass(mpiring.ShutdownError, RuntimeError) and issubclass(mpiring.StallError, RuntimeError)
    comm.Free()


@needs_peers
def test_an_exception_in_the_block_ends_the_engine_everywhere():
    comm = COMM.Dup()

    def work():
        with mpiring.Engine(comm, timeout=30) as engine:
            if RANK == LAST:
                raise KeyError("of the caller")
            engine.allreduce(np.ones(3))

    kind, text = attempt(work)
    assert kind is (KeyError if RANK == LAST else mpiring.ShutdownError), (kind, text)
    comm.Free()


@needs_peers
def test_operations_that_are_held_back_are_given_up_as_well():
    with started(stall_seconds=0, timeout=0.5) as engine:
        handles = [engine.allreduce_async(np.ones(1)) for _ in range(UNNAMED + 2)] if RANK != LAST else []
        for handle in handles[:1] + handles[-2:]:
            with pytest.raises(mpiring.StallError, match=rf"ranks? [\d, ]*{LAST}\b"):
                engine.synchronize(handle)
        COMM.Barrier()
        way = engine.everybody.loop
    assert way.clean                                     # the last rank's news are short, and the others' long


@needs_peers
def test_what_never_ends_is_kept(monkeypatch):
    """MPI may write into the arrays of a request as long as it is under way, and mpi4py does not keep them for all calls."""
    monkeypatch.setattr(loop, "LINGER", 0.2)
    monkeypatch.setattr(loop, "ROOM", 0)                 # all words go by MPI
    engine = mpiring.Engine(COMM, timeout=20)
    handle = engine.allreduce_async(np.ones(3)) if RANK != LAST else None
    way = engine.everybody.loop
    while RANK != LAST and way.request is None:
        engine.poll(handle)
    COMM.Barrier()
    round = weakref.ref(way.running) if RANK != LAST else None
    if RANK != LAST:
        engine.shutdown()
    COMM.Barrier()
    engine.shutdown()
    del way, handle, engine
    gc.collect()
    assert RANK == LAST or round() is not None


@needs_peers
def test_a_rank_that_has_shut_down_alone(monkeypatch):
    """It does not wait for ever, and who comes later is told at once."""
    monkeypatch.setattr(loop, "LINGER", 0.2)
    engine = mpiring.Engine(COMM, timeout=20)
    COMM.Barrier()
    if RANK == LAST:
        engine.everybody.loop.leave(0.2)
        engine.shutdown()
    COMM.Barrier()
    begin = time.monotonic()
    kind, text = attempt(lambda: engine.allreduce(np.ones(3), name="x"))
    assert kind is mpiring.ShutdownError and (RANK == LAST or f"rank {LAST}" in text), text
    assert time.monotonic() - begin < 10
    engine.shutdown()


@needs_peers
def test_an_engine_that_fails_on_one_rank_tells_the_others(monkeypatch):
    comm = COMM.Dup()
    engine = mpiring.Engine(comm, timeout=30)
    engine.allreduce(np.ones(3), name="x")

    def fails(*_):
        raise OSError("no more of it")

    if RANK == LAST:
        monkeypatch.setattr(engine.everybody.loop.negotiation, "compose", fails)
    COMM.Barrier()
    begin = time.monotonic()
    for _ in range(2):                                   # what is on its way, and what is submitted later
        kind, text = attempt(lambda: engine.allreduce(np.ones(3), name="x"))
        why = "the engine failed: OSError: no more of it"
        assert (kind, text) == ((RuntimeError, why) if RANK == LAST else (mpiring.PeerError, f"rank {LAST}: {why}"))
    engine.shutdown()
    assert time.monotonic() - begin < 10
    comm.Free()


def test_a_shared_array_that_was_freed(engine):
    """Also under a name whose operation was checked before."""
    array = mpiring.zeros(5, np.float32, COMM)
    for _ in range(2):
        assert (engine.allreduce(array[1:], array[1:], name="freed") == 0).all()
    mpiring.free(array)
    with pytest.raises(ValueError, match=f"allreduce on rank {RANK}: array is in shared memory that was freed"):
        engine.allreduce_async(array[1:], array[1:], name="freed")
    assert_usable(engine)


def test_what_is_no_handle_or_no_factor(engine):
    for call in (engine.poll, engine.synchronize):
        with pytest.raises(TypeError, match=f"on rank {RANK}: handle is of type NoneType"):
            call(None)
    wrong = (np.nan, "prescale is nan"), (10 ** 400, "prescale is 1000"), (np.ones(2), "prescale is of type ndarray")
    for factor, problem in wrong:
        engine.allreduce(np.ones(2), name="x")
        with pytest.raises((TypeError, ValueError), match=f"allreduce on rank {RANK}: {problem}"):
            engine.allreduce_async(np.ones(2), name="x", prescale=factor)
    assert_usable(engine)
