"""DistributedOptimizer: everything else that scripts do with an optimizer. That its numbers are right, test_equality.py tells."""

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from training import OPTIMIZERS, Needy, assert_close, loss_of, network, same_everywhere, train, weights

from mpiring.runtime import memory

from ranks import COMM, COMPLEX, EVERYONE, FLOATS, LAST, RANK, SIZE, normal

several = pytest.mark.skipif(SIZE == 1, reason="one rank has nothing to reduce")


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def mean(rank_values):
    return sum(rank_values) / len(rank_values)


# ----------------------------------------------------------------- what it is

def test_is_of_the_optimizers_class_and_shares_what_it_has(hvd):
    plain = torch.optim.Adam(network().parameters(), lr=0.1)
    made = hvd.DistributedOptimizer(plain)
    assert isinstance(made, torch.optim.Adam) and type(made).__name__ == "Adam"
    assert made.param_groups is plain.param_groups and made.state is plain.state and made.defaults is plain.defaults
    assert repr(made) == repr(plain)
    assert made.backward_passes_per_step == 1


def test_wrong_arguments(hvd):
    model = network()
    pairs = list(model.named_parameters())
    for options, error, text in [
            ({"named_parameters": [*pairs, ("0.weight", pairs[1][1])]}, ValueError, "must be unique"),
            ({"named_parameters": pairs[1:]}, ValueError, "one or more model parameters were not named"),
            ({"named_parameters": model.parameters()}, ValueError, "should be a sequence of tuples"),
            ({"backward_passes_per_step": 0}, ValueError, "must be > 0"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "not supported with op != Average"),
            ({"groups": "all"}, ValueError, "non-negative integer or a list of list"),
            ({"groups": -1}, ValueError, "non-negative integer or a list of list"),
            ({"groups": [["0.weight"]]}, ValueError, "must consist of torch.Tensor"),
            ({"groups": [[pairs[0][1]], [pairs[0][1]]]}, ValueError, "can only appear once"),
            ({"op": 17}, ValueError, "op is 17")]:
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(sgd(model), **options)
    with pytest.raises(TypeError, match=r"not a torch\.optim\.Optimizer"):
        hvd.DistributedOptimizer(model)
    with pytest.raises(ValueError, match="DistributedOptimizer already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(model)))
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
        hvd.DistributedOptimizer(sgd(model), num_groups=2)


def test_before_init(hvd):
    hvd.shutdown()
    try:
        with pytest.raises(ValueError, match="not initialized"):
            hvd.DistributedOptimizer(sgd(network()))
    finally:
        hvd.init(process_sets="dynamic")


def test_copies_are_plain(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    train(model, optimizer, range(2))
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(made) is torch.optim.Adam
        assert made.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        made.step()
    twin = copy.deepcopy(model)
    loss_of(twin, 0).backward()                          # nor does a copied model have hooks
    train(model, optimizer, range(2))
    assert same_everywhere(model)


# ----------------------------------------------------------------- gradients are views

@several
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_that_stay(hvd, set_to_none):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    seen = None
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        if step:
            assert all((param.grad is None) == set_to_none for param in model.parameters())
        loss_of(model, step).backward()
        optimizer.synchronize()
        for name, param in model.named_parameters():
            expected = mean([torch.autograd.grad(loss_of(model, step, (rank,)), param)[0] for rank in EVERYONE])
            assert torch.allclose(param.grad, expected, rtol=0, atol=1e-14), name
            assert memory.find(param.grad.data_ptr()), "in memory that the node shares"
        places = [param.grad.data_ptr() for param in model.parameters()]
        assert seen in (None, places)
        seen = places
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("call", ["optimizer", "model", "both", "by hand"])
def test_every_way_to_zero_gradients(hvd, call):
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model, momentum=0.9)), sgd(alone, momentum=0.9)
    for step in range(4):
        if call in ("optimizer", "both"):
            optimizer.zero_grad(set_to_none=bool(step % 2))
        if call in ("model", "both"):
            model.zero_grad(set_to_none=not step % 2)
        if call == "by hand":
            for param in model.parameters():
                param.grad = None if step % 2 else torch.zeros_like(param)
        loss_of(model, step).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(alone, step, EVERYONE).backward()
        plain.step()
    assert_close(model, alone)


@several
def test_zero_grad_while_gradients_are_on_their_way(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for _ in range(2):
        loss_of(model, 0).backward()
        for arguments in ({}, {"set_to_none": True}, {"set_to_none": False}):
            with pytest.raises(AssertionError, match="This is prohibited as it can cause a race condition"):
                optimizer.zero_grad(**arguments)
        optimizer.step()
        optimizer.zero_grad()


@several
def test_gradients_that_change_on_their_way_are_noticed(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"call optimizer\.synchronize"):
        optimizer.step()
    train(model, optimizer, range(1, 3))                 # and it goes on
    assert same_everywhere(model)


def test_clipping_between_synchronize_and_step(hvd):
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        loss_of(alone, step, EVERYONE).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        plain.step()
    assert_close(model, alone)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_step_after_synchronize_warns_once_and_reduces_once(hvd, op):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=getattr(hvd, op))
    loss_of(model, 0).backward()
    optimizer.synchronize()
    before = weights(model)
    gradients = torch.cat([param.grad.reshape(-1).clone() for param in model.parameters()])
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert torch.allclose(weights(model), before - 0.1 * gradients, rtol=0, atol=1e-15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(2))


@several
def test_too_many_backward_passes(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=2)
    for step in range(2):
        loss_of(model, step).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        loss_of(model, 2).backward()
    optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    train(model, optimizer, range(2))
    assert optimizer.backward_passes_per_step == 1
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)


def test_fewer_backward_passes_than_said(hvd):
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=4), sgd(alone)
    for passes in (4, 1, 3):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(passes):
            loss_of(model, part).backward()
            loss_of(alone, part, EVERYONE).backward()
        optimizer.step()
        plain.step()
    assert_close(model, alone)


# ----------------------------------------------------------------- parameters of all kinds

@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_every_dtype(hvd, dtype):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3, 2), (), (0,), (5,))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        total = sum((param * (RANK + 1)).sum() for param in params)
        (total.real if dtype.is_complex else total).backward()
        optimizer.synchronize()
        for param in params:
            assert param.grad.dtype == dtype
            assert torch.allclose(param.grad, torch.full_like(param, (SIZE + 1) / 2))
        with optimizer.skip_synchronize():
            optimizer.step()


def test_dtypes_together(hvd):
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in [*FLOATS, *COMPLEX] * 2]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0, foreach=False), compression=hvd.Compression.bf16, groups=2)
    for _ in range(2):
        optimizer.zero_grad()
        sum((param.real if param.is_complex() else param).double().sum() * (RANK + 1) for param in params).backward()
        optimizer.step()
        assert all(torch.equal(param.grad, torch.full_like(param, (SIZE + 1) / 2)) for param in params)


def convolutions():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3, bias=False)).double()
    return model.to(memory_format=torch.channels_last)


def images(step, ranks):
    found = torch.cat([normal(rank, 2, 3, 7, 7, seed=step) for rank in ranks])
    return found.contiguous(memory_format=torch.channels_last)


def test_channels_last(hvd):
    model, alone = convolutions(), convolutions()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step in range(4):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            taker.zero_grad()
            (each(images(step, ranks)) ** 2).mean().backward()
            taker.step()
        for param, other in zip(model.parameters(), alone.parameters()):
            assert param.grad.stride() == param.stride() == other.grad.stride()
    assert_close(model, alone)


def test_a_model_that_changes_its_memory(hvd):
    """model.to() gives the gradients other memory behind the back of the optimizer."""
    model, alone = convolutions().to(memory_format=torch.contiguous_format), convolutions()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step in range(6):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            if each is model and step == 4:
                each.to(memory_format=torch.contiguous_format)
            taker.zero_grad(set_to_none=step >= 4)
            if each is model and step == 2:
                each.to(memory_format=torch.channels_last)
            (each(images(step, ranks)) ** 2).mean().backward()
            taker.step()
    assert_close(model, alone)


@several
def test_a_model_that_changes_its_dtype(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, range(1))
    model.float()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"parameter '4\.\w+' is float32 .* but was float64"):
        loss_of(model, 0, dtype=torch.float32).backward()


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "assigned"])
def test_gradients_that_are_not_contiguous(hvd, layout):
    param = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    if layout == "transposed":
        param = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64).t())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    mine = normal(RANK, 8, 6)
    part = {"transposed": lambda of: of[:3, :4].t(), "expanded": lambda of: of[:1, :3].expand(4, 3),
            "sliced": lambda of: of[::2, ::2], "assigned": lambda of: of[:4, :3]}[layout]
    expected = mean([part(normal(rank, 8, 6)) for rank in EVERYONE])
    for _ in range(2):
        optimizer.zero_grad()
        if layout == "assigned":
            param.grad = part(mine)
        else:
            param.backward(part(mine))
        optimizer.step()
        assert torch.allclose(param.grad, expected, rtol=0, atol=1e-14)
        assert torch.equal(mine, normal(RANK, 8, 6)), "what the caller has is not touched"


def test_gradients_with_a_graph(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")              # of a reference cycle
            loss_of(model, step).backward(create_graph=True)
        optimizer.step()
        assert not any(param.grad.requires_grad for param in model.parameters()) or SIZE == 1
    assert same_everywhere(model)


def test_no_gradient_on_some_ranks(hvd):
    model = torch.nn.ModuleList([network(0), network(1)])
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for step in range(4):
        used = [(rank + step) % 2 for rank in EVERYONE]
        expected = [mean([torch.autograd.grad(loss_of(model[half], step, (rank,)), param)[0] * (used[rank] == half)
                          for rank in EVERYONE]) for half in (0, 1) for param in model[half].parameters()]
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model[used[RANK]], step).backward()
        optimizer.step()
        if SIZE > 1:
            assert all(torch.allclose(param.grad, grad, rtol=0, atol=1e-14) for param, grad in zip(model.parameters(), expected))
        assert same_everywhere(model)


@several
def test_no_backward_at_all_on_some_ranks(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for step in range(3):
        before = weights(model)
        optimizer.zero_grad()
        everyones = [torch.autograd.grad(loss_of(model, step, (rank,)), list(model.parameters())) for rank in EVERYONE[:-1]]
        if RANK != LAST:
            loss_of(model, step).backward()
        optimizer.step()
        moved = torch.cat([sum(grads).reshape(-1) / SIZE for grads in zip(*everyones)])
        assert torch.allclose(weights(model), before - 0.1 * moved, rtol=0, atol=1e-14)


def test_frozen_and_thawed(hvd):
    """Some parameters are frozen from the start, others later on; all thaw, at any time."""
    def frozen(step):
        return {"0", "2"} if step < 2 else {"4"} if step < 4 else {"2"} if step < 5 else set()

    model, alone = network(), network()
    for each in (model, alone):
        each[0].requires_grad_(False)
        each[2].requires_grad_(False)
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)
    for step in range(8):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            if step % 2:
                taker.zero_grad()
            for name, param in each.named_parameters():
                param.requires_grad_(name.split(".")[0] not in frozen(step))
            if not step % 2:
                taker.zero_grad()
            loss_of(each, step, ranks).backward()
            taker.step()
        for param, other in zip(model.parameters(), alone.parameters()):
            assert (param.grad is None) == (other.grad is None)
        assert_close(model, alone)


@several
def test_a_frozen_parameters_gradient_is_its_own(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, range(1))
    frozen = model[0].weight
    frozen.requires_grad_(False)
    for step in range(1, 3):                             # without zero_grad, PyTorch goes on with the gradient that there is
        kept = frozen.grad.clone()
        loss_of(model, step).backward()
        optimizer.step()
        assert torch.equal(frozen.grad, kept)
    assert same_everywhere(model)


@several
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_frozen_on_some_ranks_only(hvd, compression):
    """A rank where a parameter is frozen has no gradient to give, but takes the others', or the weights would differ."""
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=getattr(hvd.Compression, compression))
    for step in range(4):
        before = weights(model)
        optimizer.zero_grad()
        moved = mean([torch.cat([grad.reshape(-1) * (rank > 0 or not step % 2 or not name.startswith("2.")) for (name, _), grad in
                                 zip(model.named_parameters(), torch.autograd.grad(loss_of(model, step, (rank,)),
                                                                                   list(model.parameters())))])
                      for rank in EVERYONE])
        model[2].requires_grad_(RANK > 0 or not step % 2)
        loss_of(model, step).backward()
        optimizer.step()
        model[2].requires_grad_(True)
        assert same_everywhere(model)
        assert torch.allclose(weights(model), before - 0.1 * moved, rtol=0, atol=1e-14 if compression == "none" else 1e-2)


def test_parameters_that_cannot_have_gradients(hvd):
    table = torch.nn.Parameter(torch.arange(4), requires_grad=False)
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), table], lr=0.1))
    train(model, optimizer, range(2))
    assert same_everywhere(model) and table.grad is None


class Words(torch.nn.Module):
    """An embedding whose gradient is sparse, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.table = torch.nn.Embedding(20, 3, sparse=True)
        self.layer = torch.nn.Linear(3, 1)
        self.double()

    def forward(self, words):
        return (self.layer(self.table(words)) ** 2).mean()


def words(step, ranks):
    return torch.cat([(torch.arange(4) * (rank + 2) + step) % 20 for rank in ranks])


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_sparse_gradients(hvd, as_dense, missing):
    model, alone = Words(), Words()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sparse_as_dense=as_dense)
    plain = sgd(alone)
    for step in range(4):
        have = [rank for rank in EVERYONE if not missing or rank % 2 == 0]
        optimizer.zero_grad()
        if RANK in have:
            model(words(step, (RANK,))).backward()
        optimizer.step()
        plain.zero_grad()
        (alone(words(step, have)) * len(have) / SIZE).backward()
        plain.step()
        if SIZE > 1:
            assert model.table.weight.grad.is_sparse is not as_dense
    assert_close(model, alone)
    assert same_everywhere(model)


@several
def test_sparse_gradients_frozen_on_some_ranks_only(hvd):
    model = Words()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for step in range(3):
        optimizer.zero_grad()
        model.table.weight.requires_grad_(RANK == 0)
        model(words(step, (RANK,))).backward()
        optimizer.step()
        assert same_everywhere(model)
    assert model.table.weight.grad.is_sparse


def test_sparse_gradients_summed(hvd):
    model = Words()
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([model.table.weight]), op=hvd.Sum)
    for step in range(2):
        expected = sum(torch.autograd.grad(model(words(step, (rank,))), model.table.weight)[0].to_dense() for rank in EVERYONE)
        optimizer.zero_grad()
        model(words(step, (RANK,))).backward()
        optimizer.step()
        assert torch.allclose(model.table.weight.grad.to_dense(), expected, rtol=0, atol=1e-14)


@several
def test_a_gradient_that_becomes_sparse_or_dense(hvd):
    model, alone = Words(), Words()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step, sparse in enumerate([True, False, True]):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            each.table.sparse = sparse
            taker.zero_grad()
            each(words(step, ranks)).backward()
            taker.step()
    assert_close(model, alone)


# ----------------------------------------------------------------- groups

def carried(optimizer):
    return [[slot.name for slot in carrier.slots] for carrier in optimizer._distribution.reducer.carriers]


@several
def test_groups_go_together(hvd):
    model = network()
    first, second = [model[0].weight, model[4].bias], [model[2].weight]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=[first, second])
    train(model, optimizer, range(2))
    assert sorted(map(sorted, carried(optimizer))) == [["0.bias", "2.bias", "4.weight"], ["0.weight", "4.bias"], ["2.weight"]]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=3)
    train(model, optimizer, range(2))
    assert sorted(map(sorted, carried(optimizer))) == [["0.bias", "0.weight"], ["2.bias", "2.weight"], ["4.bias", "4.weight"]]


@several
def test_buckets_are_bounded_and_in_the_order_of_backward(hvd):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(8)])
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 700)).sum().backward()
        optimizer.step()
    found = carried(optimizer)
    assert 2 < len(found) < 8
    layers = [int(name.split(".")[0]) for names in found for name in names]
    assert layers == sorted(layers, reverse=True)


@several
def test_a_model_larger_than_a_bucket_overlaps(hvd):
    """The first buckets are on their way before backward() is over."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(8)])
    optimizer = hvd.DistributedOptimizer(sgd(model))
    seen = []
    model[0].weight.register_hook(
        lambda _: seen.append(sum(carrier.handle is not None for carrier in optimizer._distribution.reducer.carriers)))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 700)).sum().backward()
        optimizer.step()
    assert seen[0] == 0 < seen[1] == seen[2], "in the first step buckets are not made yet"


# ----------------------------------------------------------------- groups of parameters, schedulers, states

def test_a_group_added_later(hvd):
    model, alone = network(), network()
    optimizers = [torch.optim.SGD(each[0].parameters(), lr=0.1) for each in (model, alone)]
    plain = optimizers[0]
    optimizers[0] = hvd.DistributedOptimizer(plain)
    for step in range(6):
        for each, taker, ranks in ((model, optimizers[0], (RANK,)), (alone, optimizers[1], EVERYONE)):
            if step == 2:
                taker.add_param_group({"params": each[2].parameters(), "lr": 0.2})
            if step == 4:                                # through the plain one, of which the groups are
                (plain if each is model else taker).add_param_group({"params": each[4].parameters()})
            each.zero_grad()
            loss_of(each, step, ranks).backward()
            taker.step()
    assert_close(model, alone)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_schedulers(hvd, before, loaded):
    """A learning-rate scheduler works, whether it was made before or after, and also when a state was loaded; and nobody warns."""
    def run(model, wrap, ranks):
        optimizer = sgd(model, momentum=0.9)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = wrap(optimizer)
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        rates = []
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, step, ranks).backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]

    model, alone = network(), network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, hvd.DistributedOptimizer, (RANK,))
        run(alone, lambda optimizer: optimizer, EVERYONE)
    assert_close(model, alone)


def test_a_scheduler_that_comes_too_early_warns(hvd):
    for before in (True, False):
        plain = sgd(network())
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 2) if before else None
        optimizer = hvd.DistributedOptimizer(plain)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()


def test_step_hooks_run_once(hvd):
    model = network()
    plain = sgd(model)
    called = []
    plain.register_step_pre_hook(lambda optimizer, args, kwargs: called.append(("before", optimizer)))
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append(("after", optimizer)))
    optimizer.load_state_dict(optimizer.state_dict())    # where PyTorch wraps step() again, if it is not marked
    train(model, optimizer, range(1))
    assert called == [("before", optimizer), ("after", optimizer)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_go_round(hvd, name):
    """A state goes from a distributed optimizer to a plain one, and back."""
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters())), OPTIMIZERS[name](alone.parameters())
    train(model, optimizer, range(3))
    train(alone, plain, range(3), EVERYONE)
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and ours["param_groups"] == theirs["param_groups"]
    plain.load_state_dict(ours)
    model2 = copy.deepcopy(model)
    optimizer2 = hvd.DistributedOptimizer(OPTIMIZERS[name](model2.parameters()))
    optimizer2.load_state_dict(theirs)
    optimizer.load_state_dict(pickle.loads(pickle.dumps(ours)))
    for each, taker, ranks in ((model, optimizer, (RANK,)), (model2, optimizer2, (RANK,)), (alone, plain, EVERYONE)):
        train(each, taker, range(3, 6), ranks)
    assert_close(model, alone)
    assert_close(model2, alone)


def test_steps_patched_by_the_user(hvd):
    model, alone = network(), network()
    calls = []
    made = []
    for each in (model, alone):
        optimizer = Needy(each.parameters(), 0.1, label="mine")
        step = optimizer.step
        optimizer.step = lambda *args, step=step, **kwargs: (calls.append(1), step(*args, **kwargs))[1]
        made.append(optimizer)
    train(model, hvd.DistributedOptimizer(made[0]), range(3))
    train(alone, made[1], range(3), EVERYONE)
    assert len(calls) == 6
    assert_close(model, alone)


# ----------------------------------------------------------------- GradScaler

@pytest.mark.parametrize("way", ["step", "synchronize, skip", "synchronize, unscale, skip", "synchronize"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(hvd, way, fused):
    """What is not finite on one rank makes all ranks skip the step, and lower the scale."""
    model, alone = network(dtype=torch.float32), network(dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler, other = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        spoilt = step in (1, 2)
        optimizer.zero_grad()
        loss = loss_of(model, step, (RANK,), torch.float32) * (float("inf") if spoilt and RANK == LAST else 1.0)
        before = weights(model)
        scaler.scale(loss).backward()
        if "synchronize" in way:
            optimizer.synchronize()
        if "unscale" in way:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if "skip" in way:
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
        assert len(caught) == (way == "synchronize" and not (spoilt and not fused))
        scaler.update()
        assert torch.equal(weights(model), before) is spoilt
        plain.zero_grad()
        other.scale(loss_of(alone, step, EVERYONE, torch.float32) * (float("inf") if spoilt else 1.0)).backward()
        other.step(plain)
        other.update()
        assert scaler.get_scale() == other.get_scale()
    assert set(COMM.allgather(scaler.get_scale())) == {256.0}
    assert_close(model, alone, 1e-5)
    assert same_everywhere(model)


# ----------------------------------------------------------------- errors, memory, joining

@several
def test_ranks_with_other_parameters(hvd):
    for make, text in ((lambda: [(3, 2)] + [(5,)] * (RANK == LAST), f"rank 0 has 1, rank {LAST} has 2"),
                       (lambda: [(3, 2 + (RANK == LAST))], rf"rank 0 has .*float32 \(3, 2\).* rank {LAST} has .*float32 \(3, 3\)")):
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in make()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
        sum(param.sum() for param in params).backward()
        with pytest.raises(hvd.HorovodInternalError, match=text):
            optimizer.step()
    train(model := network(), hvd.DistributedOptimizer(sgd(model)), range(2))


@several
def test_errors_come_out_of_backward_and_step(hvd):
    """While the engine is shut down by another rank: HorovodInternalError, wherever it is noticed."""
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, range(2))
    if RANK == LAST:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"shut the engine down|shut down"):
            train(model, optimizer, range(2))
        loss = loss_of(model, 0)
        with pytest.raises(hvd.HorovodInternalError, match=r"shut the engine down|shut down"):
            optimizer.zero_grad()
            loss.backward()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


def test_goes_on_with_another_engine(hvd):
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step in range(4):
        train(model, optimizer, [step])
        train(alone, plain, [step], EVERYONE)
        if step % 2:
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
    assert_close(model, alone)


@several
def test_a_compressor_that_raises(hvd):
    class Broken:
        @staticmethod
        def compress(tensor):
            raise OverflowError("not today")

        @staticmethod
        def decompress(tensor, ctx):
            return tensor

    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=Broken)
    loss_of(model, 0).backward()
    with pytest.raises(OverflowError, match="not today"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(OverflowError, match="not today"):
        loss_of(model, 0).backward()


def regions():
    gc.collect()
    return len(memory._REGIONS)


@several
def test_memory_goes_with_the_optimizer(hvd):
    model = network()
    train(model, hvd.DistributedOptimizer(sgd(model)), range(2))         # what the engine has for itself
    model.zero_grad()
    before = regions()
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.error_feedback(hvd.Compression.fp16))
        train(model, optimizer, range(3))
        assert regions() > before
        reducer = weakref.ref(optimizer._distribution.reducer)
        del optimizer
        model.zero_grad()
        assert regions() == before
        assert reducer() is None
    loss_of(model, 0).backward()                         # no hook is left
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())


@several
def test_gradients_outlive_the_optimizer(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, range(2))
    kept = [param.grad.clone() for param in model.parameters()]
    del optimizer
    gc.collect()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), kept))


@several
@pytest.mark.parametrize("at", [0, 2])
def test_joined_ranks_count_as_zeros(hvd, at):
    """A rank that has joined, from some step on or before any, adds nothing; averages are of all ranks all the same."""
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step in range(4):
        if RANK == LAST and step == at:
            break
        train(model, optimizer, [step])
    for step in range(4):
        have = EVERYONE if step < at else EVERYONE[:-1]
        plain.zero_grad()
        (loss_of(alone, step, have) * len(have) / SIZE).backward()
        plain.step()
    assert hvd.join() in EVERYONE
    if RANK != LAST:
        assert_close(model, alone)
    hvd.broadcast_(model[0].weight.data, 0)
    train(model, optimizer, range(4, 6))                 # together again


def test_size_one_is_plain(hvd):
    if SIZE == 1:
        optimizer = hvd.DistributedOptimizer(sgd(network()))
        assert optimizer._distribution.reducer is None
        loss_of(model := network(), 0).backward()
        optimizer.zero_grad()
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


# ----------------------------------------------------------------- Adasum

def adasum(vectors):
    """Combine vectors as the paper has it, in a binary tree."""
    while len(vectors) > 1:
        pairs = [vectors[place:place + 2] for place in range(0, len(vectors), 2)]
        vectors = [combined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return vectors[0]


def combined(one, other):
    dot = (one * other).sum()
    first, second = (one * one).sum(), (other * other).sum()
    return one * (1 - dot / (2 * first) if first else 1) + other * (1 - dot / (2 * second) if second else 1)


@pytest.mark.skipif(SIZE & (SIZE - 1) != 0, reason="in which order others combine is not a matter of this test")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_adasum_combines_steps(hvd, name):
    models = [network() for _ in EVERYONE]               # what every rank would do, in this process
    plains = [OPTIMIZERS[name](each.parameters()) for each in models]
    model = network()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), op=hvd.Adasum)
    for step in range(4):
        train(model, optimizer, [step])
        before = [param.detach().clone() for param in models[0].parameters()]
        for rank, (each, plain) in enumerate(zip(models, plains)):
            train(each, plain, [step], (rank,))
        after = [adasum([param.detach() - start for param in params])
                 for start, *params in zip(before, *(each.parameters() for each in models))]
        with torch.no_grad():
            for start, move, *params in zip(before, after, *(each.parameters() for each in models)):
                for param in params:
                    param.copy_(start + move)
    assert_close(model, models[0], 1e-10)
    assert same_everywhere(model)


def test_adasum_optimizer(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()), op=hvd.Adasum, backward_passes_per_step=2,
                                         compression=hvd.Compression.fp16)
    for _ in range(2):
        for _ in range(2):
            loss_of(model, 0).backward()
        if SIZE > 1:
            with pytest.raises(AssertionError, match="race condition"):
                optimizer.zero_grad()
            with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
                loss_of(model, 0).backward()
            with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
                pass
            optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(model)
    assert not np.isnan(weights(model).numpy()).any()
