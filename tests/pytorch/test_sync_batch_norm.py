"""SyncBatchNorm: what PyTorch's BatchNorm makes of the whole batch, on every rank's part of it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from ranks import EVERYONE, LAST, RANK, SIZE, all_attempt, normal

SHAPES = {2: (), 3: (5,), 4: (3, 4), 5: (2, 3, 2)}
"""By dimensions of the input, those behind the channels."""

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CHANNELS = 6
BATCHES = {"even": lambda rank: 4, "uneven": lambda rank: 3 + 2 * rank, "one empty": lambda rank: 0 if rank == LAST else 3}


def assert_near(got, expected, atol=1e-10, rtol=0.0):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.allclose(got.detach(), expected.detach(), rtol, atol), (got - expected).abs().max()


def batch(rank, rows, dims=4, seed=0, dtype=torch.float64):
    """Return some rows of a rank, with mean and variance of their own."""
    return ((normal(rank, rows, CHANNELS, *SHAPES[dims], seed=seed) + rank) * (1 + 0.5 * rank) - 0.7).to(dtype)


def pair(hvd, dims=4, dtype=torch.float64, process_set=None, **options):
    """Return PyTorch's layer for the whole batch, and the other one, with the same parameters."""
    plain = PLAIN[dims](CHANNELS, **options).to(dtype)
    if plain.affine:
        nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(plain.bias, generator=torch.Generator().manual_seed(2))
    synced = hvd.SyncBatchNorm(CHANNELS, **options, **({"process_set": process_set} if process_set else {})).to(dtype)
    synced.load_state_dict(plain.state_dict())
    return plain, synced


def weights(like):
    """Return numbers to make a loss of, so that gradients differ from place to place."""
    return torch.arange(like.numel(), dtype=like.dtype).reshape(like.shape).sin()


def mine_of(whole, rows, ranks=EVERYONE):
    """Return this rank's part of a whole batch."""
    return whole.split([rows(rank) for rank in ranks])[[*ranks].index(RANK)]


def compare(hvd, plain, synced, parts, grads, ranks=EVERYONE, process_set=None, wants=True):
    """Go forward and back on both, and see that outputs, gradients and running statistics agree."""
    rows = {rank: len(part) for rank, part in zip(ranks, parts)}.get
    whole = torch.cat(parts).requires_grad_(wants)
    mine = parts[[*ranks].index(RANK)].clone().requires_grad_(wants)
    expected, got = plain(whole), synced(mine)
    assert_near(got, mine_of(expected, rows, ranks))
    grad = torch.cat(grads)
    if expected.requires_grad:
        (expected * grad).sum().backward()
        (got * mine_of(grad, rows, ranks)).sum().backward()
    if wants:
        assert_near(mine.grad, mine_of(whole.grad, rows, ranks))
    for name, parameter in plain.named_parameters():
        summed = hvd.allreduce(synced.get_parameter(name).grad, op=hvd.Sum, process_set=process_set or hvd.global_process_set)
        assert_near(summed, parameter.grad, 1e-10, 1e-10)
    for buffer, other in zip(plain.buffers(), synced.buffers()):
        assert_near(other, buffer)


def whole_batch(rows, dims, seed=0):
    parts = [batch(rank, rows(rank), dims, seed) for rank in EVERYONE]
    return parts, [weights(part) + rank for rank, part in enumerate(parts)]


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dims", SHAPES)
def test_as_one_process(hvd, dims, rows):
    if SIZE == 1 and not rows(0):
        pytest.skip("there is no batch")
    plain, synced = pair(hvd, dims)
    for step in range(3):
        plain.zero_grad(), synced.zero_grad()
        compare(hvd, plain, synced, *whole_batch(rows, dims, step))
    assert hvd.allgather(synced.running_var[None]).unique(dim=0).shape[0] == 1, "all ranks have the same bits"
    assert synced.num_batches_tracked == 3
    plain.eval(), synced.eval()
    mine = batch(RANK, 5, dims)
    assert_near(synced(mine), plain(mine))


@pytest.mark.parametrize("options", [{"momentum": None}, {"momentum": 0.0}, {"affine": False}, {"track_running_stats": False},
                                     {"affine": False, "track_running_stats": False}, {"eps": 0.5}], ids=str)
def test_options(hvd, options):
    plain, synced = pair(hvd, **options)
    for step in range(3):
        plain.zero_grad(), synced.zero_grad()
        compare(hvd, plain, synced, *whole_batch(BATCHES["uneven"], 4, step))
    plain.eval(), synced.eval()
    mine = batch(RANK, 5)                                # without running statistics: by this rank's batch alone
    assert_near(synced(mine), plain(mine))


def test_where_the_input_needs_no_gradient(hvd):
    plain, synced = pair(hvd)
    compare(hvd, plain, synced, *whole_batch(BATCHES["uneven"], 4), wants=False)


def test_frozen_parameters(hvd):
    plain, synced = pair(hvd)
    plain.weight.requires_grad_(False), synced.weight.requires_grad_(False)
    synced.bias = plain.bias = None
    parts, grads = whole_batch(BATCHES["even"], 4)
    whole, mine = torch.cat(parts).requires_grad_(), parts[RANK].clone().requires_grad_()
    (plain(whole) * torch.cat(grads)).sum().backward()
    (synced(mine) * grads[RANK]).sum().backward()
    assert_near(mine.grad, mine_of(whole.grad, BATCHES["even"]))
    assert synced.weight.grad is None


def test_without_gradients(hvd):
    plain, synced = pair(hvd)
    with torch.no_grad():
        parts, _ = whole_batch(BATCHES["uneven"], 4)
        assert_near(synced(parts[RANK]), mine_of(plain(torch.cat(parts)), BATCHES["uneven"]))
    assert_near(synced.running_var, plain.running_var)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(hvd, dtype):
    """Of 16 bits: computed in float32, whatever the dtype of the parameters."""
    plain, synced = pair(hvd)
    synced.to(dtype if dtype == torch.float32 else torch.float32)
    parts = [batch(rank, 4, dtype=dtype) for rank in EVERYONE]
    whole, mine = torch.cat(parts).double().requires_grad_(), parts[RANK].clone().requires_grad_()
    expected, got = plain(whole), synced(mine)
    near = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    assert got.dtype == dtype
    assert_near(got.double(), mine_of(expected, BATCHES["even"]), near, near)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert mine.grad.dtype == dtype and synced.weight.grad.dtype == torch.float32
    assert_near(mine.grad.double(), mine_of(whole.grad, BATCHES["even"]), near * 5, near)
    assert_near(synced.running_mean.double(), plain.running_mean, near, near)
    half = copy.deepcopy(synced).to(dtype)
    assert half(parts[RANK]).dtype == dtype


def test_channels_last_stays_channels_last(hvd):
    plain, synced = pair(hvd)
    parts, grads = whole_batch(BATCHES["even"], 4)
    compare(hvd, plain, synced, [part.to(memory_format=torch.channels_last) for part in parts], grads)
    mine = parts[RANK].to(memory_format=torch.channels_last).requires_grad_()
    got = synced(mine)
    got.sum().backward()
    assert got.is_contiguous(memory_format=torch.channels_last) and mine.grad.is_contiguous(memory_format=torch.channels_last)


def test_large_means_do_not_hide_the_variance(hvd):
    plain, synced = pair(hvd)
    parts = [batch(rank, 4) + 1e4 for rank in EVERYONE]
    assert_near(synced(parts[RANK]), mine_of(plain(torch.cat(parts)), BATCHES["even"]), 1e-5)
    constant = torch.full((2, CHANNELS, 3, 3), 1e3, dtype=torch.float64)
    assert torch.isfinite(synced(constant)).all()


def test_in_a_network_that_is_used_twice_before_going_back(hvd):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)).double()
    synced = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    parts = [normal(rank, 3 + rank, 3, 8, 8) for rank in EVERYONE]
    others = [normal(rank, 2, 3, 8, 8, seed=1) for rank in EVERYONE]
    (plain(torch.cat(parts)).square().sum() + plain(torch.cat(others)).exp().sum()).backward()
    (synced(parts[RANK]).square().sum() + synced(others[RANK]).exp().sum()).backward()
    for mine, whole in zip(synced.parameters(), plain.parameters()):
        assert_near(hvd.allreduce(mine.grad, op=hvd.Sum), whole.grad, 1e-9, 1e-9)


def test_numerical_gradient(hvd):
    _, synced = pair(hvd, 2)
    synced.track_running_stats = False
    mine, before = batch(RANK, 3, 2).requires_grad_(), copy.deepcopy(synced.state_dict())
    (synced(mine) * weights(mine)).sum().backward()
    step = 1e-6
    for owner in EVERYONE:                               # the loss of all ranks, moved by one element of one rank's batch
        losses = []
        for sign in (1, -1):
            moved = mine.detach().clone()
            moved[1, 2] += sign * step * (owner == RANK)
            losses.append(hvd.allreduce((synced(moved) * weights(moved)).sum(), op=hvd.Sum))
        if owner == RANK:
            assert abs((losses[0] - losses[1]) / (2 * step) - mine.grad[1, 2]) < 1e-6
    assert all(torch.equal(now, before[name]) for name, now in synced.state_dict().items()), "nothing is tracked"


def test_process_sets(hvd):
    ranks = [0, LAST] if SIZE > 2 else [LAST]
    if SIZE == 1:
        pytest.skip("there is but one set of one rank")
    made = hvd.add_process_set(ranks)
    if made.included():
        plain, synced = pair(hvd, process_set=made)
        parts = [batch(rank, 3 + rank) for rank in ranks]
        compare(hvd, plain, synced, parts, [weights(part) for part in parts], ranks, made)
    else:
        with pytest.raises(ValueError, match=f"SyncBatchNorm on rank {RANK}: this rank is not part of"):
            hvd.SyncBatchNorm(CHANNELS, process_set=made).double()(batch(RANK, 3))
    hvd.remove_process_set(made)


@pytest.mark.parametrize("last", sorted({0, LAST}))
def test_who_has_joined_counts_for_nothing(hvd, last):
    if RANK == last:
        plain, synced = pair(hvd)
        mine, other = batch(RANK, 4).requires_grad_(), batch(RANK, 4).requires_grad_()
        for synced_out, out in [(synced(mine), plain(other)) for _ in range(2)]:
            assert_near(synced_out, out)
            (synced_out * weights(out)).sum().backward()
            (out * weights(out)).sum().backward()
        assert_near(mine.grad, other.grad)
    assert hvd.join() == last


def test_convert(hvd):
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 4), shared), "b": shared, "c": shared, "none": None,
                           "deep": nn.Sequential(nn.Sequential(nn.BatchNorm2d(5, eps=0.1, momentum=None))),
                           "bare": nn.BatchNorm3d(2, affine=False, track_running_stats=False).eval(),
                           "instance": nn.InstanceNorm2d(3), "torch": nn.SyncBatchNorm(7)})
    state, before = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert [type(model[name]) for name in ("b", "c", "bare", "torch")] == [hvd.SyncBatchNorm] * 4
    assert type(model["a"][1]) is type(model["deep"][0][0]) is hvd.SyncBatchNorm and type(model["instance"]) is nn.InstanceNorm2d
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert model["b"].running_mean is model["a"][1].running_mean is shared.running_mean
    assert (model["deep"][0][0].eps, model["deep"][0][0].momentum) == (0.1, None)
    assert model["bare"].weight is None and model["bare"].running_mean is None and not model["bare"].training
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3).double())
    assert type(alone) is hvd.SyncBatchNorm and alone.weight.dtype == torch.float64 and alone.affine and alone.track_running_stats
    again = pickle.loads(pickle.dumps(copy.deepcopy(alone)))
    assert again(normal(RANK, 2, 3, 2, 2)).shape == (2, 3, 2, 2)
    with pytest.raises(ValueError, match="LazyBatchNorm2d does not know its number of features yet"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))


def test_wrong_inputs(hvd):
    synced = hvd.SyncBatchNorm(CHANNELS)
    for shape in [(CHANNELS,), (3, CHANNELS + 1), (3, CHANNELS + 1, 2)]:
        with pytest.raises(ValueError, match=rf"the input is of shape \({CHANNELS},|\(3, {CHANNELS + 1}"):
            synced(torch.zeros(shape))


def test_one_value_per_channel(hvd):
    """Of all ranks together: an error on all of them. Of one rank alone it is fine."""
    rows = 1 if RANK == 0 else 0
    found = all_attempt(lambda: hvd.SyncBatchNorm(CHANNELS)(torch.zeros(rows, CHANNELS)))
    assert {kind for kind, _ in found} == {"ValueError"}
    if SIZE > 1:
        got = hvd.SyncBatchNorm(CHANNELS)(torch.full((1, CHANNELS), float(RANK)))
        assert torch.isfinite(got).all() and (got.abs().sum() > 0 or RANK * 2 == LAST)
        assert hvd.SyncBatchNorm(CHANNELS)(torch.zeros(0, CHANNELS, 3)).shape == (0, CHANNELS, 3)


def test_before_init(hvd):
    hvd.shutdown()
    synced = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="not initialized"):
        synced(torch.zeros(3, CHANNELS))
    assert synced.eval()(torch.zeros(3, CHANNELS)).shape == (3, CHANNELS)
    hvd.init(process_sets="dynamic")
