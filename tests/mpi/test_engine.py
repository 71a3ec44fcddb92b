"""The engine: named operations, submitted in any order; results are NumPy's, and the same on all ranks."""

import random
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.runtime import ops

from cases import BFLOAT16, COMM, DTYPES, KINDS, LAYOUTS, RANK, SIZE, bits, same_bits, values
from engines import (
    EVERYONE,
    SETS,
    assert_same,
    block,
    everyones,
    means_something,
    operations,
    reduced,
    scaled,
    started,
    use_every_operation,
)


@pytest.fixture(scope="module")
def engine():
    with started() as engine:
        yield engine


@pytest.fixture(scope="module")
def sets(engine):
    made = [engine.add_process_set(ranks) for ranks in SETS]
    yield made
    for each in made:
        engine.remove_process_set(each)


def test_what_it_says_of_itself(engine):
    assert (engine.rank, engine.size) == (RANK, SIZE)
    assert engine.comm.rank == RANK and engine.comm.size == SIZE


# ----------------------------------------------------------------- allreduce

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_op(engine, dtype):
    mine = values(RANK, 1003, dtype)
    known = {name: op for name, op in ops.NAMES.items() if means_something(op, dtype)}
    handles = {name: engine.allreduce_async(mine, name=name, op=op) for name, op in known.items()}
    for name, op in known.items():
        got = engine.synchronize(handles[name])
        assert_same(got, reduced(op, everyones(1003, dtype)))
        assert not np.shares_memory(got, mine)
    assert bits(mine) == bits(values(RANK, 1003, dtype)), "the input is not touched"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_moved(engine, dtype):
    mine = values(RANK, 6 * SIZE, dtype).reshape(-1, 2)
    parts = [array.reshape(-1, 2) for array in everyones(6 * SIZE, dtype)]
    gather, broadcast = engine.allgather_async(mine, name="gather"), engine.broadcast_async(mine, SIZE - 1, name="broadcast")
    alltoall, scatter = engine.alltoall_async(mine, name="alltoall"), engine.reduce_scatter_async(mine, name="scatter")
    assert_same(engine.synchronize(gather), np.concatenate(parts).astype(dtype))        # keeps no byte order
    assert_same(engine.synchronize(broadcast), parts[-1])
    assert_same(engine.synchronize(alltoall), np.concatenate([part[3 * RANK:3 * RANK + 3] for part in parts]).astype(dtype))
    assert_same(engine.synchronize(scatter), reduced(MPI.SUM, parts)[3 * RANK:3 * RANK + 3])
    assert bits(mine) == bits(parts[RANK]), "the input is not touched"


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 1), (2, 3, 4)], ids=str)
def test_every_shape(engine, shape):
    mine = np.full(shape, RANK + 1.0)
    total = np.full(shape, SIZE * (SIZE + 1) / 2)
    assert_same(engine.allreduce(mine), total)
    assert_same(engine.broadcast(mine, SIZE - 1), np.full(shape, float(SIZE)))
    for got in engine.grouped_allreduce([mine, mine]):
        assert_same(got, total)
    assert engine.allreduce(mine, mine) is mine
    assert_same(mine, total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(engine, layout):
    base = values(RANK, 7 * 11 * SIZE, np.dtype(np.float64)).reshape(7 * SIZE, 11)
    parts = [array.reshape(base.shape) for array in everyones(base.size, np.float64)]
    whole = reduced(MPI.SUM, parts)
    mine = LAYOUTS[layout](base)
    assert_same(engine.allreduce(mine), whole)
    assert_same(engine.allgather(mine), np.concatenate(parts))
    assert_same(engine.broadcast(mine, SIZE - 1), parts[-1])
    assert_same(engine.alltoall(mine), np.concatenate([part[7 * RANK:7 * RANK + 7] for part in parts]))
    assert_same(engine.reduce_scatter(mine), whole[7 * RANK:7 * RANK + 7])
    assert_same(mine, base)
    out = LAYOUTS[layout](np.zeros_like(base))
    assert engine.allreduce(mine, out) is out
    assert_same(out, whole)
    assert_same(mine, base)
    assert engine.broadcast(mine, SIZE - 1, mine) is mine
    assert_same(mine, parts[-1])
    assert engine.allreduce(mine, mine) is mine
    assert_same(mine, parts[-1] * SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_ranks_share(engine, kind):
    mine = KINDS[kind](values(RANK, 50_000, np.dtype(np.float32)))
    engine.synchronize(engine.allreduce_async(mine, mine, name="shared"))
    assert_same(mine, reduced(MPI.SUM, everyones(50_000, np.float32)))


@pytest.mark.parametrize("count", [1, 300, 70_000, 1_500_000])
def test_every_rank_has_the_same_bits(engine, count):
    mine = [np.random.default_rng(RANK * 10 + index).normal(size=count).astype(np.float32) for index in range(3)]
    order = random.Random(RANK).sample(range(3), 3)
    handles = {index: engine.allreduce_async(mine[index], name=f"bits {index}", op=mpiring.AVERAGE) for index in order}
    for index, handle in sorted(handles.items()):
        got = engine.synchronize(handle)
        assert same_bits(got)
        exact = sum(np.random.default_rng(rank * 10 + index).normal(size=count) for rank in EVERYONE) / SIZE
        assert np.allclose(got, exact, atol=1e-5)


def test_not_a_number_and_signed_zero(engine):
    mine = np.array([np.nan if RANK == 0 else 1, np.inf, -0.0], np.float32)
    assert_same(engine.allreduce(mine, op=MPI.MAX), np.array([np.nan, np.inf, -0.0], np.float32))
    assert_same(engine.allreduce(mine), np.array([np.nan, np.inf, -0.0], np.float32))


def test_integers_that_are_not_scaled_are_exact(engine):
    mine = np.array([(1 << 58) + RANK, -1 - RANK])
    assert_same(engine.allreduce(mine), np.array([(SIZE << 58) + SIZE * (SIZE - 1) // 2, -SIZE * (SIZE + 1) // 2]))
    assert_same(engine.allreduce(mine, op=MPI.MIN), np.array([1 << 58, -SIZE]))


@pytest.mark.parametrize("dtype", [np.dtype(char) for char in "bilBefdgFD"] + [BFLOAT16], ids=str)
def test_scales(engine, dtype):
    def part(rank):
        return (np.arange(100) * 5 % 17 + 2 * rank + (0 if dtype.kind == "u" else -20)).astype(dtype)

    parts = [part(rank) for rank in EVERYONE]
    for index, (prescale, postscale) in enumerate([(0.5, 1.0), (1.0, 0.3), (0.25, 2.0)]):
        for op in (MPI.SUM, MPI.MAX) if dtype.kind != "c" else (MPI.SUM,):
            got = engine.allreduce(part(RANK), name=f"scaled {index}", op=op, prescale=prescale, postscale=postscale)
            assert_same(got, reduced(op, parts, prescale, postscale))
    assert_same(engine.allreduce(part(RANK), op=mpiring.AVERAGE, prescale=0.5, postscale=0.5),
                reduced(mpiring.AVERAGE, parts, 0.5, 0.5))
    rows = engine.reduce_scatter(part(RANK), prescale=0.5, postscale=0.3)
    assert_same(rows, np.array_split(reduced(MPI.SUM, parts, 0.5, 0.3), SIZE)[RANK])


def test_integers_are_truncated_toward_zero(engine):
    assert engine.allreduce(np.array([-3, 3]), prescale=0.5).tolist() == [-SIZE, SIZE]
    mine = np.array([-7, 7]) if RANK == 0 else np.array([0, 0])
    assert engine.allreduce(mine, postscale=0.5).tolist() == [-3, 3]
    assert engine.allreduce(mine, op=mpiring.AVERAGE).tolist() == [-(7 // SIZE), 7 // SIZE]


def test_in_place_with_scales_in_a_group(engine):
    mine = [np.full(3, RANK + 1.0), np.full((2, 2), RANK + 1, np.int32)]
    got = engine.grouped_allreduce(mine, mine, name="group", prescale=2.0, postscale=0.5)
    assert got[0] is mine[0] and got[1] is mine[1]
    for array in mine:
        assert (array == SIZE * (SIZE + 1) // 2).all()


def test_groups(engine):
    shapes = [(), (5,), (0,), (3, 4), (1000,)]
    mine = [np.full(shape, RANK + index, np.float32) for index, shape in enumerate(shapes)]
    first = engine.grouped_allreduce_async(mine, name="first", op=mpiring.AVERAGE)
    second = engine.grouped_allreduce_async([array.astype(dtype) for array, dtype in zip(mine, "fdiqe")])
    for got in (engine.synchronize(second), engine.synchronize(first)):
        assert isinstance(got, list) and len(got) == len(shapes)
    for index, (shape, mean, total) in enumerate(zip(shapes, engine.synchronize(first), engine.synchronize(second))):
        assert_same(mean, np.full(shape, (SIZE - 1) / 2 + index, np.float32))
        assert_same(total, np.full(shape, SIZE * (SIZE - 1) // 2 + SIZE * index, "fdiqe"[index]))
    assert all((array == RANK + index).all() for index, array in enumerate(mine))


# ----------------------------------------------------------------- the others

@pytest.mark.parametrize("rows", [EVERYONE, [5] + [0] * (SIZE - 1), [0] * SIZE, range(1000 * SIZE, 0, -1000)], ids=str)
def test_allgather_of_unequal_rows(engine, rows):
    parts = {rest: [np.full((rows[rank], *rest), rank, np.int16) for rank in EVERYONE] for rest in ((), (3,), (2, 2))}
    handles = {rest: engine.allgather_async(arrays[RANK], name=str(rest)) for rest, arrays in parts.items()}
    for rest, arrays in parts.items():
        assert_same(engine.synchronize(handles[rest]), np.concatenate(arrays))


def test_broadcast_from_every_rank(engine):
    mine = np.full(700, float(RANK))
    handles = [engine.broadcast_async(mine, root, name=f"from {root}") for root in EVERYONE]
    for root, handle in enumerate(handles):
        assert_same(engine.synchronize(handle), np.full(700, float(root)))
    out = np.zeros(700)
    assert engine.broadcast(mine, SIZE - 1, out) is out
    assert (out == SIZE - 1).all() and (mine == RANK).all()


def test_alltoall(engine):
    rows = np.arange(2 * SIZE) + 100 * RANK
    got = engine.alltoall(rows)
    assert_same(got, np.concatenate([[2 * RANK + 100 * rank, 2 * RANK + 1 + 100 * rank] for rank in EVERYONE]))
    assert engine.alltoall(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_alltoall_with_splits(engine, form):
    blocks, inbox = [block(RANK, peer) for peer in EVERYONE], [block(peer, RANK) for peer in EVERYONE]
    got, received = engine.alltoall(np.concatenate(blocks), form([len(rows) for rows in blocks]))
    assert_same(got, np.concatenate(inbox))
    assert list(received) == [len(rows) for rows in inbox]
    got, received = engine.alltoall(np.zeros(0), form([0] * SIZE))
    assert got.shape == (0,) and list(received) == [0] * SIZE


@pytest.mark.parametrize("rows", [0, 1, SIZE - 1, SIZE + 1, 2 * SIZE + 1, 1001])
def test_reduce_scatter_of_uneven_rows(engine, rows):
    parts = [array.reshape(rows, 3) for array in everyones(3 * rows, np.int64)]
    for op in (MPI.SUM, MPI.MIN, mpiring.AVERAGE):
        assert_same(engine.reduce_scatter(parts[RANK], op=op), np.array_split(reduced(op, parts), SIZE)[RANK])


def test_a_barrier_waits_for_the_last(engine):
    COMM.Barrier()
    begin = time.monotonic()
    if RANK == SIZE - 1:
        time.sleep(0.3)
    engine.barrier()
    assert time.monotonic() - begin > 0.2


@pytest.mark.parametrize("name", [None, "object"])
def test_objects(engine, name):
    for thing in (None, {"a": [1, None, "b"], "rank": RANK}, bytes(5_000_000), "x" * RANK):
        got = engine.broadcast_object(thing if RANK == SIZE - 1 else RANK, SIZE - 1, name=name)
        assert got == ({"a": [1, None, "b"], "rank": SIZE - 1} if isinstance(thing, dict) else
                       "x" * (SIZE - 1) if isinstance(thing, str) else thing)
    assert engine.allgather_object("x" * RANK, name=name) == ["x" * rank for rank in EVERYONE]
    assert engine.allgather_object(None, name=name) == [None] * SIZE
    big = engine.allgather_object(bytes([RANK]) * (5_000_000 if RANK == 0 else RANK), name=name)
    assert big == [bytes([rank]) * (5_000_000 if rank == 0 else rank) for rank in EVERYONE]


# ----------------------------------------------------------------- order and names

@pytest.mark.parametrize("seed", range(3))
def test_one_of_every_operation_in_any_order(engine, seed):
    use_every_operation(engine, seed)


def test_many_at_once_in_any_order(engine):
    counts = {f"gradient {index}": index * 37 % 900 for index in range(200)}
    for step in range(4):
        chance = random.Random(step * SIZE + RANK)
        names = chance.sample(list(counts), len(counts))
        handles = {name: engine.allreduce_async(values(RANK + step, counts[name], np.dtype(np.float32)), name=name)
                   for name in names}
        for name in chance.sample(names, len(names)):
            expected = reduced(MPI.SUM, everyones(counts[name], np.float32, range(step, step + SIZE)))
            assert_same(engine.synchronize(handles[name]), expected)


def test_unnamed_pair_in_their_order(engine):
    """The named ones between them come in each rank's own order."""
    handles, names = [], random.Random(RANK).sample(range(30), 30)
    for index in range(30):
        if RANK == index % SIZE:
            time.sleep(0.001)
        handles.append(engine.allreduce_async(np.full(index, index + RANK)))
        handles.append(engine.allreduce_async(np.full(3, names[index]), name=f"between {names[index]}"))
    for index in reversed(range(30)):
        assert_same(engine.synchronize(handles[2 * index]), np.full(index, SIZE * index + SIZE * (SIZE - 1) // 2))
        assert_same(engine.synchronize(handles[2 * index + 1]), np.full(3, SIZE * names[index]))


def test_the_rank_that_is_late_finds_what_the_others_submitted(engine):
    known = operations(engine)
    for late in range(min(SIZE, 3)):
        COMM.Barrier()
        if RANK == late:
            time.sleep(0.05)
        handles = {name: submit() for name, (submit, _) in known.items()}
        assert all(right(engine.synchronize(handles[name])) for name, (_, right) in known.items())


def test_a_name_is_free_again_when_its_operation_is_over(engine):
    for step in range(20):
        got = engine.allreduce(np.full(10, step + RANK), name="again")
        assert_same(got, np.full(10, SIZE * step + SIZE * (SIZE - 1) // 2))


def test_what_a_name_stands_for_may_change(engine):
    for step, (shape, dtype, op) in enumerate((
        ((3,), "f", MPI.SUM), ((3,), "f", MPI.SUM), ((4,), "f", MPI.SUM), ((4,), "d", MPI.SUM), ((2, 2), "d", MPI.SUM),
        ((2, 2), "d", MPI.MAX), ((), "i", MPI.MIN), ((3,), "f", MPI.SUM),
    )):
        parts = [np.full(shape, rank + step, dtype) for rank in EVERYONE]
        assert_same(engine.allreduce(parts[RANK], name="changes", op=op), reduced(op, parts))
        assert_same(engine.allgather(np.full(step * RANK, RANK, dtype), name="grows"),
                    np.concatenate([np.full(step * rank, rank, dtype) for rank in EVERYONE]))
    assert_same(engine.broadcast(np.full(3, RANK), SIZE - 1, name="changes"), np.full(3, SIZE - 1))
    assert_same(engine.allgather(np.full(1, RANK), name="changes"), np.arange(SIZE))
    assert_same(engine.allreduce(np.full(3, RANK), name="changes", postscale=2.0), np.full(3, SIZE * (SIZE - 1)))
    assert_same(engine.allreduce(np.full(3, RANK), name="changes", postscale=4.0), np.full(3, SIZE * (SIZE - 1) * 2))


def test_names_may_be_any_text(engine):
    for name in ("", " ", "ä/ö\n", "x" * 5000, "'\"\\", "\N{SNOWMAN}"):
        assert (engine.allreduce(np.ones(2), name=name) == SIZE).all()


def test_the_caller_may_drop_an_array_and_a_handle(engine):
    for index in range(20):
        engine.allreduce_async(np.ones(10_000), name=f"dropped {index}")
    assert (engine.allreduce(np.ones(3), name="after") == SIZE).all()
    engine.barrier()


def test_poll_and_synchronize(engine):
    COMM.Barrier()
    if RANK == SIZE - 1 and SIZE > 1:
        COMM.Recv(np.zeros(1), source=0)
    handle = engine.allreduce_async(np.ones(5), name="polled")
    if RANK == 0 and SIZE > 1:
        time.sleep(0.02)
        assert engine.poll(handle) is False
        COMM.Send(np.zeros(1), dest=SIZE - 1)
    deadline = time.monotonic() + 20
    while not engine.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.poll(handle) is True
    first = engine.synchronize(handle)
    assert (first == SIZE).all()
    assert engine.synchronize(handle) is first and engine.poll(handle) is True


def test_submissions_from_several_threads(engine):
    results = {}

    def work(number):
        for index in range(20):
            name = f"thread {number} {index}"
            results[name] = engine.allreduce(np.full(50, number * index + RANK), name=name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        for index in range(20):
            assert_same(results[f"thread {number} {index}"], np.full(50, SIZE * number * index + SIZE * (SIZE - 1) // 2))


# ----------------------------------------------------------------- process sets

def test_what_a_set_says_of_itself(sets):
    for made, ranks in zip(sets, SETS):
        assert made.ranks == ranks and made.size == len(ranks)
        assert made.included == (RANK in ranks)
        assert made.rank == (ranks.index(RANK) if RANK in ranks else None)


def test_sets_at_once_under_one_name(engine, sets):
    mine = [(number, made) for number, made in enumerate(sets) if made.included]
    random.Random(RANK).shuffle(mine)
    everyone = engine.allreduce_async(values(RANK, 40, np.dtype(int)), name="one")
    use = (mpiring.AVERAGE, MPI.SUM, MPI.MAX)
    handles = [engine.allreduce_async(values(RANK + number, 30, np.dtype(int)), name="one", op=use[number], process_set=made)
               for number, made in mine]
    for handle, (number, made) in reversed(list(zip(handles, mine))):
        assert_same(engine.synchronize(handle), reduced(use[number], everyones(30, int, [rank + number for rank in made.ranks])))
    assert_same(engine.synchronize(everyone), reduced(MPI.SUM, everyones(40, int)))


def test_every_operation_in_a_set(engine, sets):
    for made in sets:
        if not made.included:
            continue
        ranks, place = made.ranks, made.ranks.index(RANK)
        mine = np.full((len(ranks), 2), RANK)
        assert_same(engine.grouped_allreduce([mine], process_set=made)[0], np.full((len(ranks), 2), sum(ranks)))
        assert_same(engine.allgather(mine[:place + 1], process_set=made),
                    np.concatenate([np.full((index + 1, 2), rank) for index, rank in enumerate(ranks)]))
        assert_same(engine.broadcast(mine, ranks[-1], process_set=made), np.full((len(ranks), 2), ranks[-1]))
        assert_same(engine.alltoall(mine, process_set=made), np.repeat(ranks, 2).reshape(-1, 2))
        got, received = engine.alltoall(np.full(sum(range(len(ranks))), RANK), range(len(ranks)), process_set=made)
        assert_same(got, np.repeat(ranks, place))
        assert list(received) == [place] * len(ranks)
        assert_same(engine.reduce_scatter(np.full(len(ranks) + 1, RANK), process_set=made), np.full(1 + (place == 0), sum(ranks)))
        engine.barrier(process_set=made)
        assert engine.broadcast_object(RANK, ranks[-1], process_set=made) == ranks[-1]
        assert engine.allgather_object(RANK, process_set=made) == list(ranks)


def test_sets_come_and_go(engine):
    for turn in range(3):
        made = engine.add_process_set([(turn + 1) % SIZE, turn % SIZE] if SIZE > 1 else [0])
        if made.included:
            assert_same(engine.allreduce(np.full(3, RANK), process_set=made), np.full(3, sum(made.ranks)))
        engine.remove_process_set(made)
    with started(process_sets=SETS) as other:
        assert (other.allreduce(np.ones(3)) == SIZE).all()


# ----------------------------------------------------------------- join

@pytest.mark.parametrize("last", [0, SIZE - 1])
def test_join_with_uneven_numbers_of_batches(engine, last):
    batches = [(rank if last else SIZE - 1 - rank) + 1 for rank in EVERYONE]
    for step in range(batches[RANK]):
        here = sum(step < count for count in batches)
        handles = [engine.allreduce_async(np.full(7, 2.0), name="batch"),
                   engine.allreduce_async(np.full(7, 2.0), op=mpiring.AVERAGE, name="mean"),
                   engine.grouped_allreduce_async([np.full(3, 1), np.full((), -1)], op=MPI.MAX, name="group")]
        batch, mean, group = map(engine.synchronize, handles)
        assert_same(batch, np.full(7, 2.0 * here))
        assert_same(mean, np.full(7, 2.0 * here / SIZE))
        assert_same(group[0], np.full(3, 1))
        assert_same(group[1], np.full((), -1 if here == SIZE else 0))        # a joined rank has zeros
    assert engine.join() == last
    use_every_operation(engine)


def test_join_at_once(engine):
    for _ in range(3):
        assert engine.join() in EVERYONE
    assert len(set(COMM.allgather(engine.join()))) == 1


# ----------------------------------------------------------------- settings and figures

def test_metrics(engine):
    engine.barrier()
    before = engine.metrics()
    for _ in range(4):
        handles = [engine.allreduce_async(np.ones(100, np.float32), name=f"counted {index}") for index in range(10)]
        for handle in handles:
            engine.synchronize(handle)
    after = engine.metrics()
    assert all(isinstance(value, (int, float)) for value in after.values())
    assert after["operations"] - before["operations"] == 40
    assert after["bytes"] - before["bytes"] == 40 * 400
    assert 0 < after["exchanges"] - before["exchanges"] <= 40 and after["fused"] >= 1
    assert after["errors"] == before["errors"] and after["pending"] == 0
    assert {"rounds", "declared", "stalls"} <= after.keys()
    assert all(after[f"seconds_{part}"] > 0 for part in ("negotiate", "pack", "exchange", "unpack"))
    if SIZE > 1:
        assert after["known"] - before["known"] >= 20, "names that ranks agreed about before need bits alone"


@pytest.mark.parametrize("options", [{"fusion_threshold": 0}, {"fusion_threshold": 1000}, {"fusion_threshold": 1 << 30},
                                     {"cycle_time": 0.02}, {"cycle_time": 0}, {"deterministic": True},
                                     {"deterministic": True, "fusion_threshold": 500}], ids=str)
def test_settings_do_not_change_results(options):
    with started(**options) as engine:
        for step in range(3):
            use_every_operation(engine, step)
        handles = [engine.allreduce_async(np.full(index, 1.0), name=str(index)) for index in range(60)]
        assert all((engine.synchronize(handle) == SIZE).all() for handle in handles)


def test_operations_that_are_ready_together_are_fused():
    figures = {}
    for threshold in (0, 1 << 20):
        with started(fusion_threshold=threshold, cycle_time=0.02) as engine:
            for handle in [engine.allreduce_async(np.ones(100, np.float32), name=str(index)) for index in range(50)]:
                engine.synchronize(handle)
            figures[threshold] = engine.metrics()
    assert figures[0]["exchanges"] == 50 and figures[0]["fused"] == 1
    assert figures[1 << 20]["exchanges"] < 25 and figures[1 << 20]["fused"] > 2


def test_two_engines_at_once(engine):
    with started() as other:
        handles = [each.allreduce_async(np.full(5, RANK + number), name="x") for number, each in enumerate((engine, other))]
        for number, each in [(1, other), (0, engine)]:
            assert_same(each.synchronize(handles[number]), np.full(5, SIZE * (SIZE - 1) // 2 + number * SIZE))
    assert (engine.allreduce(np.ones(2)) == SIZE).all()


def test_an_engine_of_some_ranks():
    part = COMM.Split(RANK % 2, -RANK)
    with started(part) as engine:
        assert (engine.rank, engine.size) == (part.rank, part.size)
        assert_same(engine.allgather(np.array([RANK])), np.array([rank for rank in reversed(EVERYONE) if rank % 2 == RANK % 2]))
    part.Free()


def test_the_engine_of_the_module():
    assert not mpiring.is_initialized()
    engine = mpiring.init(timeout=30)
    assert mpiring.is_initialized() and mpiring.init() is engine
    use_every_operation(engine)
    mpiring.shutdown()
    assert not mpiring.is_initialized()
    again = mpiring.init(COMM, timeout=30)
    assert again is not engine and (again.allreduce(np.ones(3)) == SIZE).all()
    mpiring.shutdown()
    mpiring.shutdown()


def test_other_calls_beside_the_engine(engine):
    """The engine has comms of its own."""
    handles = []
    for index in range(20):
        handles.append(engine.allreduce_async(np.ones(5000), name=f"beside {index}"))
        assert (mpiring.allreduce(np.ones(3000)) == SIZE).all()
        assert COMM.allreduce(1) == SIZE
    assert all((engine.synchronize(handle) == SIZE).all() for handle in handles)


def test_scaled_is_what_it_says():
    assert scaled(np.array([-7, 7]), 0.5).tolist() == [-3, 3]
