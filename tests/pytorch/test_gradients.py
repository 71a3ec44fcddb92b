"""Gradients through collectives: those of one process that computes with the tensors of all ranks, and Horovod's factors."""

import pytest
import torch

from ranks import COMM, EVERYONE, LAST, RANK, SIZE, normal

AVERAGE, SUM, MIN, MAX, PRODUCT = 0, 1, 3, 4, 5


def reduced(op, tensors):
    stacked = torch.stack([*tensors])
    return {AVERAGE: lambda: stacked.mean(0), SUM: lambda: stacked.sum(0), MIN: lambda: stacked.amin(0),
            MAX: lambda: stacked.amax(0), PRODUCT: lambda: stacked.prod(0)}[op]()


def single(forward, operands, weights):
    """Return this rank's gradient where one process computes all ranks' results and sums their weighted losses."""
    operands = [operand.clone().requires_grad_() for operand in operands]
    sum((result * weight).sum() for result, weight in zip(forward(operands), weights)).backward()
    return operands[RANK].grad


def parallel(forward, operand, weight):
    mine = operand.clone().requires_grad_()
    result = forward(mine)
    assert result.requires_grad
    (result * weight).sum().backward()
    return mine.grad


def check(hvd, forward, alone, shapes, weights, factor=1.0):
    operands = [normal(rank, *shape) for rank, shape in enumerate(shapes)]
    expected = factor * single(alone, operands, weights)
    torch.testing.assert_close(parallel(forward, operands[RANK], weights[RANK]), expected, rtol=1e-12, atol=1e-12)


def weights_like(shape):
    return [normal(rank, *shape, seed=7) for rank in EVERYONE]


@pytest.mark.parametrize("name", [None, "named"])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.25)], ids=str)
@pytest.mark.parametrize("op", [AVERAGE, SUM, MIN, MAX, PRODUCT])
def test_allreduce(hvd, op, factors, name):
    pre, post = factors
    check(hvd, lambda x: hvd.allreduce(x, op=op, prescale_factor=pre, postscale_factor=post, name=name),
          lambda xs: [post * reduced(op, [pre * x for x in xs])] * SIZE, [(3, 4)] * SIZE, weights_like((3, 4)))


@pytest.mark.parametrize("op", [AVERAGE, SUM, MIN, MAX, PRODUCT])
def test_grouped_allreduce(hvd, op):
    check(hvd, lambda x: sum(part.sum(0) for part in hvd.grouped_allreduce([x[:1], 2 * x[1:]], op=op, name="group")),
          lambda xs: [reduced(op, [x[:1] for x in xs]).sum(0) + reduced(op, [2 * x[1:] for x in xs]).sum(0)] * SIZE,
          [(3, 4)] * SIZE, weights_like((4,)))


@pytest.mark.parametrize("op", [MIN, MAX, PRODUCT])
@pytest.mark.parametrize("operands", [(0.0, 1.0, 2.0, 3.0), (0.0, 0.0, 1.0, 2.0), (2.0, 2.0, 2.0, 2.0), (5.0, 0.0, 0.0, 0.0)],
                         ids=str)
def test_ties_and_zeros(hvd, op, operands):
    """Ranks that tie share the gradient evenly, as torch.amax does; a product is derived at zero too."""
    xs = [torch.tensor([operands[rank % 4]], dtype=torch.float64, requires_grad=True) for rank in EVERYONE]
    reduced(op, xs).sum().backward()
    mine = xs[RANK].detach().clone().requires_grad_()
    (hvd.allreduce(mine, op=op) / SIZE).sum().backward()
    torch.testing.assert_close(mine.grad, xs[RANK].grad)


def test_allgather(hvd):
    """Averaged: as if the ranks' losses were."""
    total = sum(EVERYONE) + SIZE
    check(hvd, lambda x: hvd.allgather(x), lambda xs: [torch.cat([*xs])] * SIZE,
          [(rank + 1, 2) for rank in EVERYONE], weights_like((total, 2)), 1 / SIZE)


def test_grouped_allgather(hvd):
    check(hvd, lambda x: torch.cat(hvd.grouped_allgather([x, x[:1]], name="rows")),
          lambda xs: [torch.cat([*xs, *[x[:1] for x in xs]])] * SIZE,
          [(rank + 1, 2) for rank in EVERYONE], weights_like((sum(EVERYONE) + 2 * SIZE, 2)), 1 / SIZE)


@pytest.mark.parametrize("root", sorted({0, LAST}))
def test_broadcast(hvd, root):
    """Averaged on the root; zeros on the others, also where infinity goes back."""
    operands, weights = [normal(rank, 3) for rank in EVERYONE], weights_like((3,))
    expected = sum(weights) / SIZE if RANK == root else torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(parallel(lambda x: hvd.broadcast(x, root), operands[RANK], weights[RANK]), expected)
    got = parallel(lambda x: hvd.broadcast(x, root), operands[RANK], float("inf"))
    assert (got == (float("inf") if RANK == root else 0)).all()


def test_alltoall(hvd):
    check(hvd, lambda x: hvd.alltoall(x), lambda xs: [torch.cat([x[2 * rank:2 * rank + 2] for x in xs]) for rank in EVERYONE],
          [(2 * SIZE, 3)] * SIZE, weights_like((2 * SIZE, 3)))


def test_alltoall_with_splits(hvd):
    """Rank r sends p + 1 rows to rank p; the last row stays, and has no gradient."""
    begins = [sum(range(1, peer + 1)) for peer in EVERYONE]
    rows = sum(range(1, SIZE + 1)) + 1

    def alone(xs):
        return [torch.cat([x[begins[peer]:begins[peer] + peer + 1] for x in xs]) for peer in EVERYONE]

    weights = [normal(rank, SIZE * (rank + 1), 2, seed=7) for rank in EVERYONE]
    check(hvd, lambda x: hvd.alltoall(x, [peer + 1 for peer in EVERYONE], name="rows")[0], alone, [(rows, 2)] * SIZE, weights)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.25)], ids=str)
@pytest.mark.parametrize("op", [AVERAGE, SUM])
def test_reducescatter(hvd, op, factors):
    """Horovod's gradient is that of all ranks' losses summed, times the number of ranks; 2 N + 1 rows for N ranks."""
    pre, post = factors
    rows = [slice(2 * rank + min(rank, 1), 2 * rank + 3) for rank in EVERYONE]
    weights = [normal(rank, rows[rank].stop - rows[rank].start, 2, seed=7) for rank in EVERYONE]
    for call in (lambda x: hvd.reducescatter(x, op=op, prescale_factor=pre, postscale_factor=post),
                 lambda x: hvd.grouped_reducescatter([x], "part", op=op, prescale_factor=pre, postscale_factor=post)[0]):
        check(hvd, call, lambda xs: [post * reduced(op, [pre * x for x in xs])[part] for part in rows],
              [(2 * SIZE + 1, 2)] * SIZE, weights, SIZE)


def test_reducescatter_by_other_ops_has_none(hvd):
    result = hvd.reducescatter(torch.ones(SIZE, requires_grad=True), op=hvd.Max)
    with pytest.raises(NotImplementedError, match="reducescatter has gradients for"):
        result.sum().backward()


def test_gradients_of_gradients(hvd):
    """The loss of every rank is the sum of squares over all ranks: twice back is 2 N on each."""
    mine = normal(RANK, 4).requires_grad_()
    first, = torch.autograd.grad(hvd.allreduce(mine ** 2, op=hvd.Sum).sum(), mine, create_graph=True)
    torch.testing.assert_close(first, 2 * SIZE * mine)
    first.sum().backward()
    torch.testing.assert_close(mine.grad, torch.full((4,), 2.0 * SIZE, dtype=torch.float64))


def test_the_order_in_a_loss_does_not_matter(hvd):
    """Each rank puts its loss together in an order of its own."""
    xs = {name: torch.full((2,), RANK + 1.0, requires_grad=True) for name in "abcd"}
    results = {name: hvd.allreduce(x, name=name, op=hvd.Sum) for name, x in xs.items()}
    order = [*"abcd"][RANK % 4:] + [*"abcd"][:RANK % 4]
    sum(results[name].sum() * ord(name) for name in order).backward()
    for name, x in xs.items():
        assert (x.grad == SIZE * ord(name)).all(), name


def test_one_name_in_every_step(hvd):
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(3):
        y = hvd.allreduce(y, name="again", op=hvd.Sum)
    y.sum().backward()
    assert (x.grad == float(SIZE ** 3)).all()


def test_low_precision_and_complex(hvd):
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and (x.grad == SIZE).all()
    z = torch.full((2,), 1 + 2j, requires_grad=True)
    (hvd.allreduce(z, op=hvd.Product) * 1j).real.sum().backward()
    alone = [torch.full((2,), 1 + 2j, requires_grad=True) for _ in EVERYONE]
    (SIZE * torch.stack(alone).prod(0) * 1j).real.sum().backward()
    torch.testing.assert_close(z.grad, alone[RANK].grad)


def test_compression_is_gone_back_through(hvd):
    x = torch.ones(2, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
    assert x.grad.dtype == torch.float32 and (x.grad == SIZE).all()


def test_without_gradients(hvd):
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(torch.ones(2, requires_grad=True)).requires_grad
    assert not hvd.alltoall(torch.ones(SIZE, requires_grad=True), [1] * SIZE)[1].requires_grad


def test_in_a_process_set(hvd):
    if SIZE < 2:
        pytest.skip("one rank has no subset")
    some = hvd.add_process_set([*EVERYONE][1:])
    if some.included():
        x = torch.ones(LAST, 1, requires_grad=True)
        total = hvd.allreduce(x, op=hvd.Sum, process_set=some).sum()
        gathered = hvd.allgather(x, process_set=some).sum()
        rooted = hvd.broadcast(x, LAST, process_set=some).sum()
        part = hvd.reducescatter(x, op=hvd.Sum, process_set=some).sum()
        (total + gathered + rooted + part).backward()
        assert (x.grad == LAST + 1 + (RANK == LAST) + LAST).all()
    COMM.Barrier()
    assert hvd.remove_process_set(some)
