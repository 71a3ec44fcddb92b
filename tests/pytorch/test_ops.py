"""Collectives on tensors: results are those of one process that has the tensors of all ranks."""

import gc
import random
import warnings

import numpy as np
import pytest
import torch

from ranks import COMM, COMPLEX, DTYPES, EVERYONE, FLOATS, INTEGERS, LAST, RANK, SIZE, all_attempt, everyones, same, values

AVERAGE, SUM, MIN, MAX, PRODUCT = 0, 1, 3, 4, 5

OPS = {"average": AVERAGE, "sum": SUM, "min": MIN, "max": MAX, "product": PRODUCT}


def means_something(op, dtype):
    return not (op in (MIN, MAX) and dtype.is_complex) and not (op == AVERAGE and dtype == torch.bool)


def reduced(op, tensors, prescale=1.0, postscale=1.0):
    """Return what one process makes of the tensors of some ranks; in the widest dtype, then rounded, integers toward zero."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([tensor.to(wide) * prescale for tensor in tensors])
    total = {AVERAGE: lambda: stacked.sum(0) / len(tensors), SUM: lambda: stacked.sum(0), MIN: lambda: stacked.amin(0),
             MAX: lambda: stacked.amax(0), PRODUCT: lambda: stacked.prod(0)}[op]() * postscale
    return (total.to(torch.int64) if dtype in INTEGERS else total).to(dtype)


# ----------------------------------------------------------------- every dtype

@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(hvd, dtype, op):
    mine = values(RANK, (7, 5), dtype)
    if not means_something(OPS[op], dtype):
        with pytest.raises(ValueError, match="has no meaning for dtype"):
            hvd.allreduce(mine, op=OPS[op])
        return
    expected = reduced(OPS[op], everyones((7, 5), dtype))
    close = dtype in FLOATS + COMPLEX and op == "average"                 # thirds are rounded
    for got in (hvd.allreduce(mine, op=OPS[op]), hvd.synchronize(hvd.allreduce_async(mine, op=OPS[op], name=f"{op} {dtype}")),
                hvd.grouped_allreduce([mine[0], mine], op=OPS[op])[1]):
        assert torch.allclose(got, expected) if close else same(got, expected)
        assert got.dtype == dtype
    assert same(mine, values(RANK, (7, 5), dtype)), "the operand is not touched"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(hvd, dtype):
    expected = reduced(SUM, everyones((7, 5), dtype))
    for call in (hvd.allreduce_, lambda tensor, op: hvd.synchronize(hvd.allreduce_async_(tensor, op=op)),
                 lambda tensor, op: hvd.grouped_allreduce_([tensor], op=op)[0],
                 lambda tensor, op: hvd.synchronize(hvd.grouped_allreduce_async_([tensor], op=op))[0]):
        mine = values(RANK, (7, 5), dtype)
        assert call(mine, op=hvd.Sum) is mine
        assert same(mine, expected)
    mine = values(RANK, (7, 5), dtype)
    assert hvd.broadcast_(mine, LAST) is mine and same(mine, values(LAST, (7, 5), dtype))
    mine = values(RANK, (7, 5), dtype)
    assert hvd.synchronize(hvd.broadcast_async_(mine, 0)) is mine and same(mine, values(0, (7, 5), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_moves_rows(hvd, dtype):
    parts = [values(rank, (rank + 1, 2), dtype) for rank in EVERYONE]
    gathered = torch.cat(parts)
    for got in (hvd.allgather(parts[RANK]), hvd.synchronize(hvd.allgather_async(parts[RANK], "rows")),
                *hvd.grouped_allgather([parts[RANK]] * 2), *hvd.synchronize(hvd.grouped_allgather_async([parts[RANK]], "rows"))):
        assert same(got, gathered)
    everyone = everyones((2 * SIZE, 3), dtype)
    mine = everyone[RANK]
    for got in (hvd.broadcast(mine, LAST), hvd.synchronize(hvd.broadcast_async(mine, LAST, "root"))):
        assert same(got, everyone[LAST]) and got.data_ptr() != mine.data_ptr()
    exchanged = torch.cat([tensor[2 * RANK:2 * RANK + 2] for tensor in everyone])
    for got in (hvd.alltoall(mine), hvd.synchronize(hvd.alltoall_async(mine, name="swap"))):
        assert same(got, exchanged)
    rows = reduced(SUM, everyone)[2 * RANK:2 * RANK + 2]
    for got in (hvd.reducescatter(mine, op=hvd.Sum), hvd.synchronize(hvd.reducescatter_async(mine, "part", hvd.Sum)),
                *hvd.grouped_reducescatter([mine] * 2, op=hvd.Sum),
                *hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=hvd.Sum))):
        assert same(got, rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["average", "sum", "product"])
def test_factors(hvd, dtype, op):
    options = {"op": OPS[op], "prescale_factor": 2.0, "postscale_factor": 0.5}
    mine, expected = values(RANK, (SIZE, 3), dtype), reduced(OPS[op], everyones((SIZE, 3), dtype), 2.0, 0.5)
    if op == "average" and dtype == torch.int32:         # truncated by the mean already
        expected = (reduced(AVERAGE, everyones((SIZE, 3), dtype), 2.0).double() * 0.5).int()
    assert torch.allclose(hvd.allreduce(mine, **options), expected)
    assert torch.allclose(hvd.grouped_allreduce([mine], **options)[0], expected)
    assert torch.allclose(hvd.reducescatter(mine, **options), expected[RANK:RANK + 1])
    assert torch.allclose(hvd.allreduce_(mine.clone(), **options), expected)
    assert torch.allclose(hvd.allreduce(mine.requires_grad_() if dtype in FLOATS else mine, **options), expected)


# ----------------------------------------------------------------- every shape and layout

@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_shapes(hvd, shape):
    mine = torch.full(shape, RANK + 1.0)
    total = torch.full(shape, SIZE * (SIZE + 1) / 2)
    assert same(hvd.allreduce(mine, op=hvd.Sum), total)
    assert same(hvd.grouped_allreduce([mine], op=hvd.Sum)[0], total)
    assert same(hvd.broadcast(mine, LAST), torch.full(shape, float(SIZE)))
    assert same(hvd.allreduce_(mine, op=hvd.Sum), total)
    if shape:
        assert same(hvd.allgather(mine), torch.cat([total] * SIZE))


LAYOUTS = {"slice": lambda tensor: tensor[::2, 1:], "transposed": lambda tensor: tensor.t(),
           "column": lambda tensor: tensor[:, 1], "expanded": lambda tensor: tensor[0].expand(4, -1),
           "channels_last": lambda tensor: tensor.reshape(2, SIZE + 1, 2, 3).to(memory_format=torch.channels_last)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(hvd, layout, dtype):
    """Horovod refuses tensors that are not contiguous."""
    everyone = [LAYOUTS[layout](tensor) for tensor in everyones((2 * SIZE + 2, 6), dtype)]
    mine, before = everyone[RANK], everyone[RANK].clone()
    assert not mine.is_contiguous()
    total = reduced(SUM, everyone)
    assert same(hvd.allreduce(mine, op=hvd.Sum), total)
    assert same(hvd.allgather(mine), torch.cat(everyone))
    assert same(hvd.broadcast(mine, LAST), everyone[LAST])
    assert same(mine, before)
    if layout == "expanded":
        with pytest.raises(ValueError, match="share memory"):
            hvd.allreduce_(mine)
    else:
        strides = mine.stride()
        assert same(hvd.allreduce_(mine, op=hvd.Sum), total) and mine.stride() == strides
        assert same(hvd.broadcast_(mine, LAST), total)


def test_conjugate_views(hvd):
    mine = values(RANK, (4,), torch.complex64)
    expected = reduced(SUM, everyones((4,), torch.complex64)).conj().resolve_conj()
    assert same(hvd.allreduce(mine.conj(), op=hvd.Sum), expected)
    assert same(hvd.allreduce(mine.conj().imag, op=hvd.Sum), expected.imag)        # which has the mark of a negative
    for marked in (mine.conj(), mine.conj().imag):
        with pytest.raises(ValueError, match="cannot be written to in place"):
            hvd.allreduce_(marked)


def test_large(hvd):
    """More than is fused at a time, and more than one piece."""
    mine = torch.arange(1_500_000, dtype=torch.float32).remainder(7) + RANK
    assert same(hvd.allreduce(mine, op=hvd.Sum), reduced(SUM, [mine - RANK + rank for rank in EVERYONE]))


def test_parameters_and_tensors_with_gradients(hvd):
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(RANK)
    assert hvd.broadcast_(layer.weight, LAST) is layer.weight
    assert (layer.weight == LAST).all() and layer.weight.requires_grad and layer.weight.is_leaf
    assert not hvd.synchronize(hvd.allreduce_async(layer.weight)).requires_grad


def test_splits(hvd):
    """Rank r sends r + 2 p rows, modulo 4, to rank p, and keeps one row back."""
    counts = [(RANK + 2 * peer) % 4 for peer in EVERYONE]
    mine = torch.cat([torch.full((rows, 2), 100 * RANK + peer) for peer, rows in enumerate(counts)] + [torch.zeros(1, 2)]).long()
    received = [(peer + 2 * RANK) % 4 for peer in EVERYONE]
    expected = torch.cat([torch.full((rows, 2), 100 * peer + RANK) for peer, rows in enumerate(received)]).long()
    for splits in (counts, tuple(counts), torch.tensor(counts, dtype=torch.int32)):
        for got in (hvd.alltoall(mine, splits), hvd.synchronize(hvd.alltoall_async(mine, splits, "splits"))):
            rows, found = got
            assert same(rows, expected) and same(found, torch.tensor(received, dtype=torch.int32))


@pytest.mark.parametrize("rows", [1, 5, 2 * SIZE + 1])
def test_uneven_rows(hvd, rows):
    """The first ranks get one row more."""
    everyone = everyones((rows, 2), torch.float64)
    expected = torch.from_numpy(np.array_split(reduced(SUM, everyone).numpy(), SIZE)[RANK])
    assert same(hvd.reducescatter(everyone[RANK], op=hvd.Sum), expected)


# ----------------------------------------------------------------- sparse

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_sparse(hvd, op, dtype):
    def of(rank):
        indices = torch.tensor([[row % 4 for row in range(rank + 1)], [0] * (rank + 1)])
        return torch.sparse_coo_tensor(indices, torch.full((rank + 1, 3), -rank - 4, dtype=dtype), (4, 2, 3), check_invariants=True)

    wait = hvd.sparse_allreduce_async(of(RANK), "sparse", OPS[op])
    assert callable(wait)
    got = wait()
    assert got.is_sparse and got.shape == (4, 2, 3) and got.dtype == dtype
    assert got._nnz() == sum(rank + 1 for rank in EVERYONE) and (SIZE == 1 or not got.is_coalesced())
    values = [of(rank).to_dense() for rank in EVERYONE]
    if op == "sum":
        assert same(got.to_dense(), sum(values))
    elif dtype == torch.int64:
        assert same(got.to_dense(), sum(torch.div(tensor, SIZE, rounding_mode="trunc") for tensor in values)), "toward zero"
    else:
        torch.testing.assert_close(got.to_dense(), sum(values) / SIZE)
    assert wait() is None, "as for a handle"


def test_sparse_wants_sparse(hvd):
    with pytest.raises(ValueError, match="sparse_coo"):
        hvd.sparse_allreduce_async(torch.ones(3), "x", hvd.Sum)
    with pytest.raises(ValueError, match="op is 3"):
        hvd.sparse_allreduce_async(torch.ones(3).to_sparse(), "x", hvd.Min)


# ----------------------------------------------------------------- handles and names

def test_handles_are_numbers(hvd):
    handles = [hvd.allreduce_async(torch.ones(3), name="a"), hvd.allreduce_async_(torch.ones(3), name="b"),
               hvd.grouped_allreduce_async([torch.ones(3)]), hvd.grouped_allreduce_async_([torch.ones(3)]),
               hvd.allgather_async(torch.ones(3)), hvd.grouped_allgather_async([torch.ones(3)]),
               hvd.broadcast_async(torch.ones(3), 0), hvd.broadcast_async_(torch.ones(3), 0),
               hvd.alltoall_async(torch.ones(SIZE)), hvd.reducescatter_async(torch.ones(3)),
               hvd.grouped_reducescatter_async([torch.ones(3)])]
    assert all(type(handle) is int for handle in handles) and len(set(handles)) == len(handles)
    for handle in handles:
        while not hvd.poll(handle):
            pass
        assert hvd.poll(handle) is True
        assert hvd.synchronize(handle) is not None
        assert hvd.synchronize(handle) is None, "it was consumed"
        with pytest.raises(ValueError, match=f"handle {handle} is of no operation"):
            hvd.poll(handle)


@pytest.mark.parametrize("handle", [-1, 10**9, None, "x"], ids=str)
def test_unknown_handles(hvd, handle):
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="of no operation"):
        hvd.poll(handle)


@pytest.mark.skipif(SIZE < 2, reason="one rank waits for nobody")
def test_poll_waits_for_nobody(hvd):
    handle = hvd.allreduce_async(torch.ones(2), name="late") if RANK else None
    COMM.Barrier()
    if RANK:
        assert hvd.poll(handle) is False
    COMM.Barrier()
    handle = handle if RANK else hvd.allreduce_async(torch.ones(2), name="late")
    assert (hvd.synchronize(handle) == 1).all()


def test_results_are_lists_or_tensors(hvd):
    tensors = (torch.ones(2), torch.ones(3))
    for got in (hvd.grouped_allreduce(tensors), hvd.grouped_allreduce_(tensors), hvd.grouped_allgather(tensors),
                hvd.grouped_reducescatter(tensors), hvd.synchronize(hvd.grouped_allreduce_async(tensors)),
                hvd.synchronize(hvd.grouped_allreduce_async_(tensors)), hvd.synchronize(hvd.grouped_allgather_async(tensors))):
        assert type(got) is list and len(got) == 2
    assert hvd.grouped_allreduce_(tensors)[1] is tensors[1]
    assert isinstance(hvd.alltoall(torch.ones(SIZE)), torch.Tensor)
    assert type(hvd.alltoall(torch.ones(SIZE), [1] * SIZE)) is tuple
    assert hvd.barrier() is None


def test_an_operation_keeps_its_tensors(hvd):
    """The tensor is gone before the operation is over."""
    COMM.Barrier()
    handles = [hvd.allreduce_async(torch.full((50_000,), float(RANK + index)), name=f"kept {index}", op=hvd.Sum)
               for index in random.Random(RANK).sample(range(20), 20)]
    gc.collect()
    junk = [torch.zeros(50_000) for _ in range(20)]
    found = sorted(float(hvd.synchronize(handle)[-1]) for handle in handles)
    assert found == [sum(EVERYONE) + index * SIZE for index in range(20)] and junk


def test_names_pair_and_not_the_order(hvd):
    order = random.Random(RANK).sample(range(30), 30)
    handles = {index: hvd.allreduce_async(torch.full((index + 1,), float(index)), name=f"n{index}", op=hvd.Sum) for index in order}
    for index in random.Random(-RANK).sample(range(30), 30):
        assert same(hvd.synchronize(handles[index]), torch.full((index + 1,), float(index * SIZE)))


def test_unnamed_ones_pair_by_order(hvd):
    handles = [hvd.allreduce_async(torch.tensor(float(index)), op=hvd.Sum) for index in range(300)]
    assert [float(hvd.synchronize(handle)) for handle in handles] == [float(index * SIZE) for index in range(300)]


def test_one_name_for_several_kinds(hvd):
    handles = [hvd.allreduce_async(torch.ones(2), name="one", op=hvd.Sum), hvd.allgather_async(torch.ones(2), name="one"),
               hvd.broadcast_async(torch.ones(2), 0, name="one"), hvd.grouped_allreduce_async([torch.ones(2)], name="one"),
               hvd.alltoall_async(torch.ones(SIZE), name="one"), hvd.reducescatter_async(torch.ones(2), name="one"),
               hvd.grouped_allgather_async([torch.ones(2)], name="one"),
               hvd.grouped_reducescatter_async([torch.ones(2)], name="one")]
    assert (hvd.synchronize(handles[0]) == SIZE).all()
    assert all(hvd.synchronize(handle) is not None for handle in handles[1:])


@pytest.mark.skipif(SIZE < 2, reason="one rank's operations may be over at once")
@pytest.mark.parametrize("call", ["allreduce_async", "allgather_async", "reducescatter_async", "alltoall_async",
                                  "grouped_allreduce_async", "grouped_allgather_async"])
def test_a_name_on_its_way(hvd, call):
    operand = [torch.ones(SIZE)] if call.startswith("grouped") else torch.ones(SIZE)
    COMM.Barrier()
    handle = getattr(hvd, call)(operand, name="twice") if RANK == 0 else None
    if RANK == 0:
        with pytest.raises(ValueError, match=r"twice.* is on its way already"):
            getattr(hvd, call)(operand, name="twice")
    COMM.Barrier()
    handle = handle if RANK == 0 else getattr(hvd, call)(operand, name="twice")
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(getattr(hvd, call)(operand, name="twice")) is not None


# ----------------------------------------------------------------- wrong arguments, on one rank alone

SPARSE = torch.ones(2).to_sparse()

WRONG = {
    "list": ("allreduce", ([1.0],), {}, TypeError, "tensor is of type list"),
    "array": ("allgather_async", (np.ones(2),), {}, TypeError, "tensor is of type ndarray"),
    "sparse": ("allreduce", (SPARSE,), {}, ValueError, "layout torch.sparse_coo"),
    "sparse broadcast": ("broadcast_", (SPARSE, 0), {}, ValueError, "layout torch.sparse_coo"),
    "meta": ("allreduce", (torch.ones(2, device="meta"),), {}, ValueError, "on meta is not supported"),
    "mean of bool": ("allreduce", (torch.ones(2).bool(),), {}, ValueError, "op AVERAGE has no meaning for dtype bool"),
    "complex minimum": ("allreduce_async", (torch.ones(2, dtype=torch.complex64),), {"op": MIN}, ValueError, "op MIN has no"),
    "op": ("allreduce", (torch.ones(2),), {"op": 17}, ValueError, "op is 17, not"),
    "op's type": ("reducescatter", (torch.ones(2),), {"op": "Sum"}, ValueError, "op is 'Sum', not"),
    "both": ("allreduce", (torch.ones(2),), {"op": SUM, "average": True}, ValueError, "average and op"),
    "name": ("allreduce", (torch.ones(2),), {"name": 5}, TypeError, "name is of type int"),
    "prescale": ("allreduce", (torch.ones(2),), {"prescale_factor": "x"}, TypeError, "prescale is of type str"),
    "postscale": ("reducescatter_async", (torch.ones(2),), {"postscale_factor": None}, TypeError, "postscale"),
    "process set": ("allreduce", (torch.ones(2),), {"process_set": 0}, TypeError, "process_set is of type int"),
    "root": ("broadcast", (torch.ones(2), SIZE), {}, ValueError, f"root {SIZE}"),
    "root in place": ("broadcast_async_", (torch.ones(2), -1), {}, ValueError, "root -1"),
    "root's type": ("broadcast_", (torch.ones(2), None), {}, TypeError, "root"),
    "no rows to gather": ("allgather", (torch.tensor(1.0),), {}, ValueError, "no dimensions"),
    "no rows to exchange": ("alltoall", (torch.tensor(1.0),), {}, ValueError, "no dimensions"),
    "no rows to scatter": ("reducescatter", (torch.tensor(1.0),), {}, ValueError, "no dimensions"),
    "no rows in a group": ("grouped_allgather", ([torch.ones(1), torch.tensor(1.0)],), {}, ValueError, "no dimensions"),
    "splits' sum": ("alltoall", (torch.ones(SIZE), [2] * SIZE), {}, ValueError, "splits"),
    "splits' number": ("alltoall", (torch.ones(SIZE + 1), [1] * (SIZE + 1)), {}, ValueError, "splits"),
    "splits' dtype": ("alltoall", (torch.ones(SIZE), torch.ones(SIZE, dtype=torch.int64)), {}, ValueError, "torch.int64"),
    "splits' shape": ("alltoall", (torch.ones(SIZE), torch.ones(SIZE, 1, dtype=torch.int32)), {}, ValueError, "2 dimensions"),
    "splits' type": ("alltoall_async", (torch.ones(SIZE), [1.0] * SIZE), {}, ValueError, "splits"),
    "negative splits": ("alltoall", (torch.ones(SIZE), [-1] * SIZE), {}, ValueError, "splits"),
    "group": ("grouped_allreduce", (torch.ones(2),), {}, TypeError, "tensors is of type Tensor"),
    "empty group": ("grouped_allreduce", ([],), {}, ValueError, "tensors is empty"),
    "empty group of rows": ("grouped_reducescatter_async", ([],), {}, ValueError, "tensors is empty"),
    "group's member": ("grouped_allgather_async", ([torch.ones(1), 1],), {}, TypeError, "tensor is of type int"),
    "one tensor twice": ("grouped_allreduce_", ([torch.ones(2)[:1].expand(1)] * 2,), {}, ValueError, "outs"),
}


@pytest.mark.parametrize("method, arguments, options, error, match", WRONG.values(), ids=list(WRONG))
def test_wrong_arguments(hvd, request, method, arguments, options, error, match):
    """Nothing was sent, so the name is good for what all ranks submit afterwards."""
    name = request.node.name
    if RANK == LAST:
        with pytest.raises(error, match=match) as caught:
            getattr(hvd, method)(*arguments, **{"name": name, **options})
        assert type(caught.value) is error
    assert (hvd.allreduce(torch.ones(3), name=name, op=hvd.Sum) == SIZE).all()
    assert len(hvd.grouped_allgather([torch.ones(1)] * 2, name=name)) == 2


@pytest.mark.skipif(SIZE < 2, reason="one rank shares out any number of rows")
def test_rows_that_cannot_be_shared_out(hvd):
    with pytest.raises(ValueError, match=f"array has {SIZE + 1} rows"):
        hvd.alltoall(torch.ones(SIZE + 1))
    assert hvd.alltoall(torch.ones(SIZE)).shape == (SIZE,)


def test_the_old_argument(hvd):
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert (hvd.allreduce(torch.ones(2), False) == SIZE).all()
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert (hvd.allreduce_(torch.ones(2), True) == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (hvd.grouped_allreduce([torch.ones(2)])[0] == 1).all(), "the mean, if nothing is said"


# ----------------------------------------------------------------- ranks that disagree

def mine_or(last, others):
    return last if RANK == LAST else others


DISAGREE = {
    "shape": lambda hvd: hvd.allreduce(torch.ones(mine_or(3, 2)), name="x"),
    "dimensions": lambda hvd: hvd.allreduce(torch.ones(mine_or((2, 1), (2,))), name="x"),
    "dtype": lambda hvd: hvd.allreduce(torch.ones(2, dtype=mine_or(torch.float64, torch.float32)), name="x"),
    "op": lambda hvd: hvd.allreduce(torch.ones(2), name="x", op=mine_or(hvd.Sum, hvd.Max)),
    "prescale": lambda hvd: hvd.allreduce(torch.ones(2), name="x", prescale_factor=mine_or(2.0, 1.0)),
    "postscale": lambda hvd: hvd.reducescatter(torch.ones(2), name="x", postscale_factor=mine_or(2.0, 1.0)),
    "root": lambda hvd: hvd.broadcast(torch.ones(2), mine_or(LAST, 0), name="x"),
    "root in place": lambda hvd: hvd.broadcast_(torch.ones(2), mine_or(LAST, 0), name="x"),
    "rows' length": lambda hvd: hvd.allgather(torch.ones(2, mine_or(2, 3)), name="x"),
    "rows' dtype": lambda hvd: hvd.alltoall(torch.ones(SIZE, dtype=mine_or(torch.int8, torch.uint8)), name="x"),
    "scattered shape": lambda hvd: hvd.reducescatter(torch.ones(mine_or(4, 5)), name="x"),
    "group's member": lambda hvd: hvd.grouped_allreduce([torch.ones(2), torch.ones(mine_or(3, 4))], name="x"),
    "group's length": lambda hvd: hvd.grouped_allreduce([torch.ones(2)] * mine_or(3, 2), name="x"),
    "gathered group": lambda hvd: hvd.grouped_allgather([torch.ones(2, mine_or(2, 3)), torch.ones(2)], name="x"),
    "kind, unnamed": lambda hvd: hvd.allgather(torch.ones(2)) if RANK == LAST else hvd.broadcast(torch.ones(2), 0),
    "precision": lambda hvd: hvd.allreduce(torch.ones(2, dtype=mine_or(torch.float16, torch.bfloat16)), name="x"),
}


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
@pytest.mark.parametrize("case", DISAGREE)
def test_ranks_disagree(hvd, case):
    """An error on every rank, and the engine goes on, also with that name."""
    for kind, text in all_attempt(lambda: DISAGREE[case](hvd)):
        assert kind == "HorovodInternalError", text
        assert "rank" in text
    assert (hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum) == SIZE).all()
    assert hvd.grouped_allgather([torch.ones(1, 2)], name="x")[0].shape == (SIZE, 2)


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
def test_a_failed_handle_is_consumed(hvd):
    handle = hvd.allreduce_async(torch.ones(RANK + 1), name="x")
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(handle)
    assert isinstance(caught.value, RuntimeError) and type(caught.value.__cause__).__name__ == "MismatchError"
    assert hvd.synchronize(handle) is None


# ----------------------------------------------------------------- meetings

def test_join(hvd):
    """Rank r has r + 1 batches; those that have none left add zeros, and count in the mean."""
    for step in range(RANK + 1):
        left = SIZE - step
        assert torch.allclose(hvd.allreduce(torch.ones(3), name=f"batch {step}"), torch.tensor(left / SIZE))
        assert same(hvd.grouped_allreduce([torch.ones(2, dtype=torch.bfloat16)], name=f"{step}", op=hvd.Sum)[0],
                    torch.full((2,), left, dtype=torch.bfloat16))
    last = hvd.join()
    assert type(last) is int and COMM.allgather(last) == [LAST] * SIZE
    assert hvd.join() in EVERYONE
    assert (hvd.allgather(torch.ones(1)) == 1).all(), "all are back"


@pytest.mark.skipif(SIZE < 2, reason="one rank waits for nobody")
@pytest.mark.parametrize("call", ["allgather", "broadcast", "alltoall", "reducescatter", "barrier"])
def test_joined_ranks_bring_no_rows(hvd, call):
    waits = {"broadcast": lambda: hvd.broadcast(torch.ones(2), LAST), "barrier": hvd.barrier}.get(
        call, lambda: getattr(hvd, call)(torch.ones(SIZE)))
    if RANK:
        with pytest.raises(hvd.HorovodInternalError, match="join"):
            waits()
    assert hvd.join() in EVERYONE
    assert (hvd.allreduce(torch.ones(2)) == 1).all()


def test_barrier(hvd):
    flags = hvd.allgather(torch.tensor([RANK]))
    hvd.barrier()
    hvd.barrier(hvd.global_process_set)
    hvd.barrier(process_set=hvd.global_process_set)
    assert flags.tolist() == [*EVERYONE]


# ----------------------------------------------------------------- compression

class Halved:
    """A user's own: sends half of each number, in float64."""

    @staticmethod
    def compress(tensor):
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, dtype):
        return tensor.to(dtype) * 2


def test_compression(hvd):
    mine, expected = values(RANK, (2 * SIZE, 2), torch.float32), reduced(SUM, everyones((2 * SIZE, 2), torch.float32))
    assert same(hvd.allreduce(mine, None, None, Halved, hvd.Sum), expected)
    assert same(hvd.grouped_allreduce([mine], None, None, Halved, hvd.Sum)[0], expected)
    assert same(hvd.reducescatter(mine, None, Halved, hvd.Sum), expected[2 * RANK:2 * RANK + 2])
    assert same(hvd.grouped_reducescatter([mine], None, Halved, hvd.Sum)[0], expected[2 * RANK:2 * RANK + 2])
    assert same(hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum), expected)
