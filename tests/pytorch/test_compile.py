"""torch.compile around calls of mpiring.torch: graphs break there, the numbers are those of the program that is not compiled."""

import copy

import pytest
import torch
import torch._dynamo
from training import assert_close, batch, loss_of, network, same_everywhere, weights

from ranks import EVERYONE, RANK, SIZE

STEPS = range(3)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")     # PyTorch's, as it traces


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", **options)


@pytest.fixture(autouse=True)
def usable_afterwards(hvd):
    yield
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def mean(tensors):
    return sum(tensors) / SIZE


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_whole_step(hvd, op):
    """Zeroing, forward, backward with its hooks, and the optimizer."""
    def train(wrap):
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
                                             op=getattr(hvd, op))

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        return model, [step(*batch(number, (RANK,))) for number in STEPS]

    (plain, losses), (model, found) = train(lambda function: function), train(compiled)
    assert same_everywhere(model)
    assert_close(model, plain)
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=0, atol=1e-12)


def test_step_alone_with_a_closure_that_calls_a_compiled_model(hvd):
    model, alone = network(), network()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, inner = compiled(optimizer.step), torch.compile(model, backend="eager")

    def closure(each, taker, number, ranks):
        taker.zero_grad()
        loss = loss_of(each, number, ranks)
        loss.backward()
        return loss

    for number in STEPS:
        loss = step(lambda number=number: closure(inner, optimizer, number, (RANK,)))
        other = plain.step(lambda number=number: closure(alone, plain, number, EVERYONE))
        assert abs(loss.item() - other.item()) < 1e-12
    assert_close(model, alone)


def test_operations(hvd):
    def function(tensor):
        total = hvd.allreduce(tensor * 2, op=hvd.Sum, name="sum") + 1
        rows = hvd.allgather(total[:1] + hvd.rank(), name="rows")
        handle = hvd.broadcast_async(rows * (hvd.rank() + 1), 0, name="given")
        return torch.cat([total, hvd.synchronize(handle)]) * 2

    given = torch.arange(6.0).reshape(2, 3) + RANK
    call = compiled(function)
    for _ in STEPS:
        assert torch.equal(call(given), function(given))


def test_gradients_through_operations(hvd):
    def function(tensor):
        return (hvd.allreduce(torch.sin(tensor), op=hvd.Sum, name="sum") ** 2).sum()

    given = torch.linspace(0, 1, 5, dtype=torch.float64) + RANK
    call, grads = compiled(function), []
    for each in (call, call, function):
        tensor = given.clone().requires_grad_()
        each(tensor).backward()
        grads.append(tensor.grad)
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[2])


def test_sync_batch_norm(hvd):
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    hvd.broadcast_parameters(model.state_dict(), 0)
    twin = copy.deepcopy(model)
    call = compiled(model)
    for number in STEPS:
        loss_of(call, number).backward()
        loss_of(twin, number).backward()
    for one, other in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)
    assert_close(model, twin)


def test_a_graph_that_may_not_break(hvd):
    """PyTorch's error says where, and nothing is sent."""
    def function(tensor):
        return hvd.allreduce(tensor) + 1

    with pytest.raises(Exception, match="mpiring exchanges data between ranks here"):
        compiled(function, fullgraph=True)(torch.ones(3))


def test_synchronize_in_a_step(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    before = weights(model)
    everyones = [torch.autograd.grad(loss_of(model, 0, (rank,)), list(model.parameters())) for rank in EVERYONE]

    def step(inputs, targets):
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()

    compiled(step)(*batch(0, (RANK,)))
    moved = torch.cat([mean(grads).clamp(-0.01, 0.01).reshape(-1) for grads in zip(*everyones)])
    assert torch.allclose(weights(model), before - 0.1 * moved, rtol=0, atol=1e-14)
