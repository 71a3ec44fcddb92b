"""Compression: what tensors travel as, and what of it comes back."""

import gc
import weakref

import pytest
import torch
from training import network, same_everywhere, train, weights

from ranks import COMPLEX, EVERYONE, INTEGERS, RANK, SIZE, normal


def casts(hvd):
    return {torch.float16: hvd.Compression.fp16, torch.bfloat16: hvd.Compression.bf16}


def test_none(hvd):
    tensor = normal(RANK, 5)
    small, ctx = hvd.Compression.none.compress(tensor)
    assert small is tensor
    assert hvd.Compression.none.decompress(small, ctx) is tensor


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_casts_and_back(hvd, narrow, dtype):
    tensor = normal(RANK, 5, 7).to(dtype)
    small, ctx = casts(hvd)[narrow].compress(tensor)
    assert small.dtype == narrow
    back = casts(hvd)[narrow].decompress(small, ctx)
    assert back.dtype == dtype
    assert torch.equal(back, tensor.to(narrow).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *INTEGERS, *COMPLEX], ids=str)
def test_leaves_what_cannot_be_narrower(hvd, dtype):
    for compression in casts(hvd).values():
        tensor = torch.ones(3, dtype=dtype)
        small, ctx = compression.compress(tensor)
        assert small is tensor
        assert compression.decompress(small, ctx).dtype == dtype


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_allreduce(hvd, narrow):
    got = hvd.allreduce(torch.full((4,), RANK + 0.5), op=hvd.Sum, compression=casts(hvd)[narrow])
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.full((4,), sum(rank + 0.5 for rank in EVERYONE)))


def test_base_class_does_nothing(hvd):
    from mpiring.torch.compression import Compressor
    for function in (Compressor.compress, Compressor.decompress):
        with pytest.raises(NotImplementedError):
            function(torch.ones(1), *([None] if function is Compressor.decompress else []))


def test_wrong_compressions(hvd):
    for wrong in (None, "fp16", torch.float16):
        with pytest.raises(TypeError, match="no functions compress and decompress"):
            hvd.Compression.error_feedback(wrong)
        with pytest.raises(TypeError, match="no functions compress and decompress"):
            hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), lr=0.1), compression=wrong)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_error_feedback_loses_nothing_in_the_long_run(hvd, narrow):
    compression = hvd.Compression.error_feedback(casts(hvd)[narrow])
    tensor = torch.tensor([1 + 2 ** -12, 3.0, -1 - 2 ** -13], dtype=torch.float64)
    total = torch.zeros_like(tensor)
    for _ in range(4096):
        total += compression.decompress(*compression.compress(tensor))
    assert (total / 4096 - tensor).abs().max() < 2 ** -18
    plain = casts(hvd)[narrow]
    assert (plain.decompress(*plain.compress(tensor)) - tensor).abs().max() > 2 ** -14, "which a cast alone does not"


def test_error_feedback_forgets_what_is_not_finite(hvd):
    compression = hvd.Compression.error_feedback(hvd.Compression.fp16)
    tensor = torch.tensor([1e6, 1.0, float("nan"), -float("inf")])
    compression.compress(tensor)
    tensor[:] = torch.tensor([2.0, 1.0, 3.0, 4.0])
    assert torch.equal(compression.compress(tensor)[0].float(), tensor)


def test_error_feedback_forgets_tensors(hvd):
    compression = hvd.Compression.error_feedback(hvd.Compression.bf16)
    tensor = torch.full((3,), 1.001)
    compression.compress(tensor)
    (lost,) = [weakref.ref(value) for value in compression._lost.values()]
    del tensor
    gc.collect()
    assert lost() is None


class Signs:
    """A compression of a user's: the sign, and one size for the whole."""

    calls = 0

    @classmethod
    def compress(cls, tensor):
        cls.calls += 1
        return torch.sign(tensor) * tensor.abs().mean(), tensor.shape

    @staticmethod
    def decompress(tensor, ctx):
        assert tensor.shape == ctx
        return tensor


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_users_own(hvd, wrapped):
    model = network()
    compression = hvd.Compression.error_feedback(Signs) if wrapped else Signs
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression)
    before, Signs.calls = weights(model), 0
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        loss = [((model(normal(rank, 4, 6, seed=step))) ** 2).mean() for rank in EVERYONE]
        every = [torch.autograd.grad(each, list(model.parameters()), retain_graph=True) for each in loss]
        gradients.append(every)
        loss[RANK].backward()
        optimizer.step()
        if step == 0 and SIZE > 1:
            for place, param in enumerate(model.parameters()):
                expected = sum(Signs.compress(grads[place])[0] for grads in every) / SIZE
                assert torch.allclose(param.grad, expected, rtol=0, atol=1e-12)
    assert Signs.calls >= (3 * 6 if SIZE > 1 else 0)
    assert same_everywhere(model)
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feedback", [False, True])
def test_whole_buckets_are_as_single_gradients(hvd, narrow, feedback):
    """The optimizer casts many gradients at once: what comes out is what casting one after the other gives."""
    models = [network(dtype=torch.float32) for _ in range(2)]
    kind = casts(hvd)[narrow]
    for model, groups in zip(models, (None, 6)):
        compression = hvd.Compression.error_feedback(kind) if feedback else kind
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression, groups=groups)
        train(model, optimizer, range(5), dtype=torch.float32)
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert same_everywhere(models[0])


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_trains_as_without(hvd, narrow):
    plain, small, fed = (network(dtype=torch.float32) for _ in range(3))
    kind = casts(hvd)[narrow]
    for model, compression in ((plain, hvd.Compression.none), (small, kind), (fed, hvd.Compression.error_feedback(kind))):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), compression=compression)
        train(model, optimizer, range(40), dtype=torch.float32)
        assert same_everywhere(model)
    errors = [(weights(model) - weights(plain)).norm().item() for model in (small, fed)]
    if SIZE > 1:
        assert 0 < errors[1] < errors[0] < 0.1
