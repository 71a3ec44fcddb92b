"""Training by several ranks is training by one process on the whole batch; and the same on all ranks, and in every run."""

import hashlib

import pytest
import torch
from training import OPTIMIZERS, Needy, assert_close, loss_of, network, same_everywhere, train, weights

import mpiring.torch as front

from ranks import COMM, EVERYONE, RANK, SIZE

STEPS = 10

WAYS = {
    "plain": {},
    "predivided": {"gradient_predivide_factor": 3.0},
    "in one group": {"groups": 1},
    "in groups": {"groups": 3},
}


def pair(make, **options):
    """Return a model with a distributed optimizer, and the same one with a plain optimizer for one process."""
    model, alone = network(), network()
    return model, front.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options), alone, make(
        alone.parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_are_the_whole_batch(hvd, name, way):
    model, optimizer, alone, plain = pair(OPTIMIZERS[name], **WAYS[way])
    train(model, optimizer, range(STEPS))
    train(alone, plain, range(STEPS), EVERYONE)
    assert_close(model, alone)
    assert same_everywhere(model)


def test_sums_are_the_sum_of_losses(hvd):
    model, optimizer, alone, plain = pair(OPTIMIZERS["sgd"], op=front.Sum)
    train(model, optimizer, range(STEPS))
    for step in range(STEPS):
        plain.zero_grad()
        (SIZE * loss_of(alone, step, EVERYONE)).backward()
        plain.step()
    assert_close(model, alone)


def test_an_optimizer_that_needs_more_arguments(hvd):
    model, optimizer, alone, plain = pair(lambda params: Needy(params, 0.1, label="mine"))
    assert isinstance(optimizer, Needy) and optimizer.label == "mine"
    for step in range(STEPS):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            taker.zero_grad()
            loss_of(each, step, ranks).backward()
            taker.step(factor=0.5)
    assert optimizer.calls == STEPS
    assert_close(model, alone)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients(hvd, passes, set_to_none):
    model, optimizer, alone, plain = pair(OPTIMIZERS["adam"], backward_passes_per_step=passes)
    for step in range(STEPS):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            taker.zero_grad(set_to_none=set_to_none)
            for part in range(passes):
                (loss_of(each, passes * step + part, ranks) / passes).backward()
            taker.step()
    assert_close(model, alone)
    assert same_everywhere(model)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_with_closures(hvd, search):
    model, optimizer, alone, plain = pair(lambda params: torch.optim.LBFGS(params, lr=0.2, max_iter=5, line_search_fn=search))
    for step in range(4):
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            def closure(each=each, taker=taker, ranks=ranks, step=step):
                taker.zero_grad()
                loss = loss_of(each, step, ranks)
                loss.backward()
                return loss
            taker.step(closure)
    assert_close(model, alone, 1e-9)                     # rounding grows in the quotients of its history
    assert same_everywhere(model)


@pytest.mark.parametrize("returned", ["tensor", "float", "nothing"])
def test_a_closure_is_called_once_and_its_loss_reduced(hvd, returned):
    model, optimizer, alone, plain = pair(OPTIMIZERS["momentum"])
    for step in range(5):
        losses = []
        for each, taker, ranks in ((model, optimizer, (RANK,)), (alone, plain, EVERYONE)):
            def closure(each=each, taker=taker, ranks=ranks, step=step):
                taker.zero_grad()
                loss = loss_of(each, step, ranks)
                loss.backward()
                return {"tensor": loss, "float": loss.item(), "nothing": None}[returned]
            losses.append(taker.step(closure))
        assert type(losses[0]) is type(losses[1])
        assert returned == "nothing" or abs(torch.as_tensor(losses[0]).item() - torch.as_tensor(losses[1]).item()) < 1e-6
    assert_close(model, alone)


SETS = [ranks for ranks in ([*EVERYONE][::2], [*EVERYONE][SIZE // 2:], [SIZE - 1]) if ranks]


@pytest.mark.parametrize("ranks", SETS, ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_process_sets(hvd, ranks, passes):
    if ranks == [*EVERYONE]:
        process_set = hvd.global_process_set
    else:
        process_set = hvd.add_process_set(ranks)
    model, optimizer, alone, plain = pair(OPTIMIZERS["adam"], process_set=process_set, backward_passes_per_step=passes)
    members = ranks if RANK in ranks else (RANK,)        # others train alone
    for step in range(10):
        for each, taker, part in ((model, optimizer, (RANK,)), (alone, plain, members)):
            taker.zero_grad()
            for more in range(passes):
                loss_of(each, passes * step + more, part).backward()
            taker.step()
    assert_close(model, alone)
    if process_set is not hvd.global_process_set:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_all_ranks_hold_the_same_bits_after_100_steps(hvd, name):
    model = network(dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()))
    train(model, optimizer, range(100), dtype=torch.float32)
    assert same_everywhere(model)


def deep():
    """Make a network whose gradients go in several buckets, small ones among them."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 900), torch.nn.Tanh(),
                               torch.nn.Linear(900, 900), torch.nn.Tanh(), torch.nn.Linear(900, 3))


@pytest.mark.parametrize("options", [{}, {"groups": 4}, {"compression": front.Compression.fp16},
                                     {"backward_passes_per_step": 2}], ids=str)
def test_deterministic_runs_give_the_same_bits(hvd, monkeypatch, options):
    """Runs of one program, each with an engine of its own."""
    found = set()
    for _ in range(3):
        hvd.shutdown()
        with monkeypatch.context() as patch:
            patch.setenv("MPIRING_DETERMINISTIC", "1")
            hvd.init(process_sets="dynamic")
        assert front.basics.engine().settings.deterministic
        model = deep()
        optimizer = front.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)
        for step in range(6):
            optimizer.zero_grad()
            for part in range(options.get("backward_passes_per_step", 1)):
                loss_of(model, 2 * step + part, (RANK,), torch.float32).backward()
            optimizer.step()
        assert same_everywhere(model)
        found.add(hashlib.sha256(weights(model).numpy().tobytes()).hexdigest())
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert len(found) == 1
    assert len(set(COMM.allgather(frozenset(found)))) == 1


def test_two_models_and_optimizers_at_a_time(hvd):
    pairs = [pair(OPTIMIZERS[name]) for name in ("adam", "sgd")]
    for step in range(10):
        for number, (model, optimizer, alone, plain) in enumerate(pairs):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, 2 * step + number, (RANK,)).backward()
            loss_of(alone, 2 * step + number, EVERYONE).backward()
        for _, optimizer, _, plain in reversed(pairs):
            optimizer.step()
            plain.step()
    for model, _, alone, _ in pairs:
        assert_close(model, alone)


def test_one_model_in_two_optimizers(hvd):
    model, alone = network(), network()
    halves = [list(each.parameters()) for each in (model, alone)]
    optimizers = [front.DistributedOptimizer(torch.optim.Adam(halves[0][:3])),
                  front.DistributedOptimizer(torch.optim.SGD(halves[0][3:], lr=0.1))]
    plains = [torch.optim.Adam(halves[1][:3]), torch.optim.SGD(halves[1][3:], lr=0.1)]
    for step in range(10):
        for each, takers, ranks in ((model, optimizers, (RANK,)), (alone, plains, EVERYONE)):
            for taker in takers:
                taker.zero_grad()
            loss_of(each, step, ranks).backward()
            for taker in takers:
                taker.step()
    assert_close(model, alone)


def test_weights_used_twice(hvd):
    models = [torch.nn.Sequential(*network(), *network(1)[1:]) for _ in range(2)]
    for model in models:
        model[4], model[6] = torch.nn.Linear(16, 16).double(), model[2]
        model[4].load_state_dict(network(2)[2].state_dict())
        model[6].weight = model[2].weight
    train(models[0], front.DistributedOptimizer(torch.optim.SGD(models[0].parameters(), lr=0.1)), range(10))
    train(models[1], torch.optim.SGD(models[1].parameters(), lr=0.1), range(10), EVERYONE)
    assert_close(*models)
