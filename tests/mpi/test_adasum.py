"""mpiring.ADASUM: against what NumPy makes of all ranks' vectors, pair by pair, one array at a time."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.engine.adasum import BLOCK, Adasum, factors, pieces_of
from mpiring.engine.movers import Requests
from mpiring.engine.operation import Description
from mpiring.engine.schedule import parts_of
from mpiring.runtime import ops

from cases import BFLOAT16, COMM, LAYOUTS, RANK, SIZE, bits, same_bits
from engines import EVERYONE, SETS, assert_usable, started

DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-7, "float64": 1e-13}
"""By how much a result may be off: the order of sums in dot products may move a rounding."""


@pytest.fixture(scope="module")
def engine():
    with started() as engine:
        yield engine


def vector(rank, count, dtype=np.float64, seed=0):
    """Return values of a rank that have something in common with those of the others, and a size of their own."""
    common, own = np.random.default_rng(seed).normal(size=count), np.random.default_rng([seed, rank]).normal(size=count)
    return ((0.5 * common + own) * (1 + rank % 3)).astype(dtype)


def pair(a, b):
    """Combine two vectors, as the paper has it; one of zeros leaves the other."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot, norm_a, norm_b = (wide_a * wide_b).sum(), (wide_a**2).sum(), (wide_b**2).sum()
    if norm_a == 0 or norm_b == 0:
        return a + b
    return ((1 - dot / (2 * norm_a)) * wide_a + (1 - dot / (2 * norm_b)) * wide_b).astype(a.dtype)


def expected(vectors):
    """Combine in pairs, neighbours first, after the first ones have made a power of two of them."""
    rest = len(vectors) - (1 << len(vectors).bit_length() - 1)
    found = [pair(*vectors[2 * place:2 * place + 2]) for place in range(rest)] + list(vectors[2 * rest:])
    while len(found) > 1:
        found = [pair(*found[place:place + 2]) for place in range(0, len(found), 2)]
    return found[0]


def assert_near(got, wanted):
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    exact, scale = wanted.astype(np.float64), np.abs(wanted.astype(np.float64)).max(initial=1e-300)
    assert np.allclose(got.astype(np.float64), exact, rtol=0, atol=ROUNDING[wanted.dtype.name] * scale), (got, wanted)
    assert same_bits(got)


@pytest.mark.parametrize("count", [0, 1, 2, 3, SIZE, 1000, 2 * BLOCK + 1, 300_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_numpy(engine, dtype, count):
    mine = vector(RANK, count, dtype)
    got = engine.allreduce(mine, op=mpiring.ADASUM)
    assert_near(got, expected([vector(rank, count, dtype) for rank in EVERYONE]))
    assert bits(mine) == bits(vector(RANK, count, dtype)), "the input is not touched"


def test_equal_vectors_are_averaged_and_orthogonal_ones_added(engine):
    same = np.arange(1.0, 8.0)
    for size in (1.0, 1e-100, 1e100):
        assert np.allclose(engine.allreduce(same * size, op=mpiring.ADASUM), same * size, rtol=1e-15, atol=0)
    mine = np.zeros(SIZE + 2)
    mine[RANK] = RANK + 1
    assert np.allclose(engine.allreduce(mine, op=mpiring.ADASUM), [*range(1, SIZE + 1), 0, 0], rtol=1e-15)


@pytest.mark.parametrize("full", sorted({0, SIZE - 1}))
def test_zeros_count_for_nothing(engine, full):
    wanted = vector(9, 1001, np.float32)
    mine = wanted if RANK == full else np.zeros_like(wanted)
    assert bits(engine.allreduce(mine, op=mpiring.ADASUM)) == bits(wanted)
    assert not engine.allreduce(np.zeros(5), op=mpiring.ADASUM).any()


def test_each_array_has_its_own_dot_products(engine):
    """Fused with one that would drown it, and cut wherever a rank's half ends."""
    counts = [1, 7, 0, 1000, 3, BLOCK + 5, 40_000, 2, 300_000]
    mine = [vector(RANK, count, np.float32, index) * 10.0**(index % 5) for index, count in enumerate(counts)]
    handles = [engine.allreduce_async(array.astype(np.float32), name=f"a{index}", op=mpiring.ADASUM)
               for index, array in enumerate(mine)]
    group = engine.grouped_allreduce([array.astype(np.float32) for array in mine], op=mpiring.ADASUM)
    for index, count in enumerate(counts):
        wanted = expected([(vector(rank, count, np.float32, index) * 10.0**(index % 5)).astype(np.float32) for rank in EVERYONE])
        assert_near(engine.synchronize(handles[index]), wanted)
        assert_near(group[index], wanted)


def test_many_arrays_go_in_few_exchanges(engine):
    before = engine.metrics()["exchanges"]
    group = engine.grouped_allreduce([vector(RANK, 50, np.float32, index) for index in range(200)], op=mpiring.ADASUM)
    assert engine.metrics()["exchanges"] - before == 1
    for index, got in enumerate(group):
        assert_near(got, expected([vector(rank, 50, np.float32, index) for rank in EVERYONE]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [7, 30_000])
def test_every_layout(engine, layout, rows):
    base = [vector(rank, rows * 11).reshape(rows, 11) for rank in EVERYONE]
    mine, wanted = LAYOUTS[layout](base[RANK]), expected(base)
    assert_near(engine.allreduce(mine, op=mpiring.ADASUM), wanted)
    out = LAYOUTS[layout](np.zeros_like(base[RANK]))
    assert engine.allreduce(mine, out, op=mpiring.ADASUM) is out
    assert_near(out, wanted)
    assert bits(mine) == bits(base[RANK])
    assert engine.allreduce(mine, mine, op=mpiring.ADASUM) is mine
    assert_near(mine, wanted)


@pytest.mark.parametrize("count", [10, 300_000])
def test_factors(engine, count):
    mine = vector(RANK, count, np.float32)
    got = engine.allreduce(mine, op=mpiring.ADASUM, prescale=0.5, postscale=4.0)
    assert_near(got, 2 * expected([vector(rank, count, np.float32) for rank in EVERYONE]))
    assert bits(mine) == bits(vector(RANK, count, np.float32))
    engine.allreduce(mine, mine, op=mpiring.ADASUM, prescale=0.5, postscale=4.0)
    assert bits(mine) == bits(got)


def test_process_sets(engine):
    for ranks in SETS:
        made = engine.add_process_set(ranks)
        if made.included:
            got = engine.allreduce(vector(RANK, 1001), op=mpiring.ADASUM, process_set=made)
            assert np.allclose(got, expected([vector(rank, 1001) for rank in ranks]), rtol=1e-12)
        engine.remove_process_set(made)


@pytest.mark.parametrize("count", [500, 300_000])
@pytest.mark.parametrize("last", sorted({0, SIZE - 1}))
def test_who_has_joined_counts_for_nothing(engine, last, count):
    if RANK == last:
        for step in range(3):
            got = engine.allreduce(vector(RANK, count), name=f"late {step}", op=mpiring.ADASUM)
            assert np.array_equal(got, vector(RANK, count))
    assert engine.join() == last


def test_what_is_not_a_number_stays_in_its_array(engine):
    bad = np.full(10, np.nan if RANK == 0 else 1.0, np.float32)
    spoilt, good = engine.grouped_allreduce([bad, vector(RANK, 10, np.float32)], op=mpiring.ADASUM)
    assert np.isnan(spoilt).all()
    assert_near(good, expected([vector(rank, 10, np.float32) for rank in EVERYONE]))


def test_fixed_groups_give_the_same_bits_again():
    found = []
    for _ in range(2):
        with started(deterministic=True) as engine:
            order = np.random.default_rng(RANK + len(found)).permutation(5) if RANK else range(5)
            mine = [vector(RANK, 1000 * index, np.float32, index) for index in range(5)]
            handles = {index: engine.allreduce_async(mine[index], name=str(index), op=mpiring.ADASUM) for index in order}
            found.append([bits(engine.synchronize(handles[index])) for index in range(5)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "longdouble"])
def test_other_dtypes_are_refused(engine, dtype):
    name = np.dtype(dtype).name
    known = r"\(it is for float16, bfloat16, float32, float64\)"
    with pytest.raises(TypeError, match=rf"allreduce on rank {RANK}: op ADASUM has no meaning for dtype {name} {known}"):
        engine.allreduce(np.zeros(3, dtype), op=mpiring.ADASUM)


def test_other_calls_refuse_it(engine):
    mine = np.ones(3)
    alone = r"op is mpiring.ADASUM, which is for allreduces of the engine alone \(mpiring.Engine.allreduce_async\)"
    for call in (lambda: mpiring.allreduce(mine, op=mpiring.ADASUM), lambda: mpiring.reduce(mine, op=mpiring.ADASUM),
                 lambda: mpiring.iallreduce(mine, op=mpiring.ADASUM), lambda: engine.reduce_scatter(mine, op=mpiring.ADASUM)):
        with pytest.raises(TypeError, match=alone):
            call()


def test_ranks_that_disagree_about_it(engine):
    if SIZE > 1:
        with pytest.raises(mpiring.MismatchError, match=r"by ADASUM.*by SUM|by SUM.*by ADASUM"):
            engine.allreduce(np.ones(3), name="torn", op=MPI.SUM if RANK else mpiring.ADASUM)
    assert_usable(engine)


def test_where_mpi_is_not_for_several_threads(engine, monkeypatch):
    """There the engine moves on in the callers' own calls."""
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with started() as single:
        assert not single.threaded and isinstance(single._loops()[0].exchanges.mover, Requests)
        for count in (100, 300_001):
            got = single.allreduce(vector(RANK, count, np.float32), op=mpiring.ADASUM)
            assert bits(got) == bits(engine.allreduce(vector(RANK, count, np.float32), op=mpiring.ADASUM))


def test_no_message_is_longer_than_mpi_can_count(monkeypatch):
    monkeypatch.setattr("mpiring.engine.adasum.LIMIT", 1000)
    line = vector(RANK, 5001)
    for transfers in Adasum(COMM).combine(line, [2000, 3001]):
        while not transfers.Test():
            pass
    everyone = [vector(rank, 5001) for rank in EVERYONE]
    assert np.allclose(line, np.concatenate([expected([each[part] for each in everyone])
                                             for part in (slice(0, 2000), slice(2000, None))]), rtol=1e-12)


def test_bytes_that_are_sent():
    """Twice a power of two's part of the vector, besides dot products: halves, quarters, ... there and back again."""
    sent = []
    adasum = Adasum(COMM)
    transfers = adasum._transfers

    def counted(peer, given, taken):
        sent.append(0 if given is None else given.nbytes)
        return transfers(peer, given, taken)

    adasum._transfers = counted
    for pending in adasum.combine(np.ones(1 << 12), [1 << 12]):
        while not pending.Test():
            pass
    power, folded = 1 << adasum.levels, RANK < adasum.folded
    bytes_ = sum(nbytes for nbytes in sent if nbytes > 24)
    if folded and RANK % 2:
        assert bytes_ == 8 << 12
    else:
        assert bytes_ == (8 << 12) * 2 * (power - 1) // power + folded * (8 << 12)
        assert len(sent) == adasum.levels * (adasum.levels + 5) // 2 + 2 * folded


def test_parts():
    assert ops.ENGINE_NAMES["ADASUM"] is mpiring.ADASUM and repr(mpiring.ADASUM) == "mpiring.ADASUM"
    edges = [0, 5, 5, BLOCK + 9, 3 * BLOCK]
    for low, high in [(0, 3 * BLOCK), (3, 4), (5, BLOCK + 9), (BLOCK, 2 * BLOCK + 1)]:
        pieces = pieces_of(edges, low, high)
        assert [place for piece in pieces for place in range(piece.start, piece.stop)] == [*range(high - low)]
        assert all(edges[array] <= low + start < low + stop <= edges[array + 1] and stop - start <= BLOCK
                   for array, start, stop in pieces)
    part, = parts_of(Description("allreduce", ("float32",), ((10,),), "ADASUM"), 1 << 20)
    assert part.group and part.vector is None, "what is one vector has one dot product"
    assert factors(np.zeros((1, 3))).tolist() == [[1], [1]]
