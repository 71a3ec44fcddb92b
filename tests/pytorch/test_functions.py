"""Parameters, optimizer state and objects, from one rank to all or from all to all."""

import copy
import importlib.util
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

from ranks import COMM, DTYPES, EVERYONE, LAST, RANK, SIZE, all_attempt, normal, same, values

CLOUDPICKLE = importlib.util.find_spec("cloudpickle") is not None


def network(seed=RANK):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))


def agree(tensors):
    """Tell whether all ranks have the same tensors."""
    mine = pickle.dumps([(tensor.dtype, tensor.shape, tensor.detach().cpu().numpy().tobytes()) for tensor in tensors])
    return len(set(COMM.allgather(mine))) == 1


# ----------------------------------------------------------------- parameters

@pytest.mark.parametrize("root", sorted({0, LAST}))
@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list of pairs", "parameters"])
def test_broadcast_parameters(hvd, form, root):
    model, wanted = network(), network(root)
    given = {"state_dict": model.state_dict, "named_parameters": model.named_parameters,
             "list of pairs": lambda: [*model.named_parameters()], "parameters": lambda: [*model.parameters()]}[form]()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    assert hvd.broadcast_parameters(given, root_rank=root) is None
    for mine, other in zip(model.parameters(), wanted.parameters()):
        assert same(mine.detach(), other.detach()) and mine.requires_grad
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def tensors_of(rank):
    return {**{str(dtype): values(rank, (3, 4, 2), dtype) for dtype in DTYPES},
            "scalar": torch.tensor(rank), "none": torch.ones(0, 3), "transposed": normal(rank, 3, 4).T,
            "strided": normal(rank, 6, 4)[::2, 1:3],
            "channels last": normal(rank, 2, 3, 4, 5).to(memory_format=torch.channels_last)}


def test_any_order_any_dtype_and_any_layout(hvd):
    mine, wanted = tensors_of(RANK), tensors_of(LAST)
    names = [*mine][RANK % 3:] + [*mine][:RANK % 3]
    hvd.broadcast_parameters({name: mine[name] for name in names}, LAST)
    for name, tensor in mine.items():
        assert same(tensor, wanted[name]), name
    assert mine["channels last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("wrong", [None, 3, torch.ones(3), {"a": torch.ones(2), "b": 3}, [("a", None)], ["ab"],
                                   {"s": torch.ones(2).to_sparse()}], ids=lambda wrong: str(wrong)[:20])
def test_wrong_parameters(hvd, wrong):
    with pytest.raises(ValueError, match=r"params|tensor"):
        hvd.broadcast_parameters(wrong, 0)
    hvd.barrier()


def test_ranks_that_disagree_about_parameters(hvd):
    if SIZE > 1:
        mine = {"a": torch.full((3,), float(RANK)), "b": torch.zeros(3 if RANK else 4), "c": torch.full((2,), float(RANK))}
        found = all_attempt(lambda: hvd.broadcast_parameters(mine, LAST))
        assert all(kind == "HorovodInternalError" and "'broadcast.parameter.b': ranks disagree" in text for kind, text in found)
        assert (mine["a"] == LAST).all() and (mine["c"] == LAST).all()
    with pytest.raises(ValueError, match=f"root {SIZE} is not one of the ranks"):
        hvd.broadcast_parameters({"a": torch.ones(3)}, SIZE)


# ----------------------------------------------------------------- objects

class Own:
    """An object of a class."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Own and other.value == self.value

    __hash__ = None


OBJECTS = [None, 0, {"rank": [1, (2, 3)]}, "text" * 1000, b"", Own([1, 2]), np.arange(3)]


@pytest.mark.parametrize("obj", OBJECTS, ids=lambda obj: str(obj)[:20])
@pytest.mark.parametrize("name", [None, "a name"])
def test_objects(hvd, obj, name):
    got = hvd.broadcast_object(obj if RANK == LAST else threading.Lock(), LAST, name)
    assert np.array_equal(got, obj) if isinstance(obj, np.ndarray) else got == obj
    assert RANK != LAST or got is obj
    everyones = hvd.allgather_object((RANK, obj, "x" * 1000 * RANK), name)
    assert [rank for rank, *_ in everyones] == [*EVERYONE]
    assert all(np.array_equal(one, obj) and len(text) == 1000 * rank for rank, one, text in everyones)


def test_tensors_in_objects(hvd):
    got = hvd.broadcast_object({"a": normal(RANK, 3, 4)})["a"]
    assert same(got, normal(0, 3, 4))
    model = hvd.broadcast_object(network() if RANK == 0 else None)
    assert agree(model.state_dict().values())
    assert all(same(got, normal(rank, 2)) for rank, got in enumerate(hvd.allgather_object(normal(RANK, 2))))


@pytest.mark.skipif(not CLOUDPICKLE, reason="cloudpickle is not installed")
def test_functions_are_objects(hvd):
    root = RANK
    assert hvd.broadcast_object(lambda: root + 5, LAST)() == LAST + 5
    assert [function() for function in hvd.allgather_object(lambda: root)] == [*EVERYONE]


def test_what_cannot_be_pickled(hvd):
    """An error on every rank, none of which goes on waiting."""
    found = all_attempt(lambda: hvd.broadcast_object(threading.Lock() if RANK == LAST else None, LAST))
    assert found[LAST][0] == "TypeError" and "pickle" in found[LAST][1]
    assert all(kind == "HorovodInternalError" and f"rank {LAST} has failed: TypeError: cannot pickle" in text
               for kind, text in found[:LAST])
    found = all_attempt(lambda: hvd.allgather_object(threading.Lock() if RANK == LAST else RANK))
    assert found[LAST][0] == "TypeError"
    assert all(kind == "HorovodInternalError" and f"rank {LAST} could not pickle" in text for kind, text in found[:LAST])
    assert hvd.broadcast_object(RANK, LAST) == LAST and hvd.allgather_object(RANK) == [*EVERYONE]


def test_wrong_roots(hvd):
    for root in (-1, SIZE):
        with pytest.raises(ValueError, match=f"root {root} is not one of the ranks"):
            hvd.broadcast_object(1, root)


def test_a_large_object(hvd):
    data = np.full(20_000_000, RANK, np.uint8)
    assert (hvd.broadcast_object(data, LAST) == LAST).all()
    assert [part[0] for part in hvd.allgather_object(data[:3_000_000 + RANK])] == [*EVERYONE]


def test_process_sets(hvd):
    for ranks in dict.fromkeys([(LAST,), tuple(EVERYONE)[::2], tuple(EVERYONE)[SIZE // 2:]]):
        if len(ranks) == SIZE:
            continue
        made, root = hvd.add_process_set(ranks), ranks[-1]
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1 + RANK, momentum=0.9)
        if made.included():
            assert hvd.broadcast_object(RANK, root, process_set=made) == root
            assert hvd.allgather_object(RANK, process_set=made) == [*ranks]
            hvd.broadcast_parameters(model.state_dict(), root, process_set=made)
            assert same(model[0].weight.detach(), network(root)[0].weight.detach())
            hvd.broadcast_optimizer_state(optimizer, root, process_set=made)
            assert optimizer.param_groups[0]["lr"] == 0.1 + root
        else:
            calls = {"broadcast_object": lambda made=made: hvd.broadcast_object(1, root, process_set=made),
                     "allgather_object": lambda made=made: hvd.allgather_object(1, process_set=made),
                     "broadcast": lambda made=made, model=model: hvd.broadcast_parameters(
                         model.state_dict(), root, process_set=made),
                     "broadcast_optimizer_state": lambda made=made, optimizer=optimizer: hvd.broadcast_optimizer_state(
                         optimizer, root, process_set=made)}
            for name, call in calls.items():
                with pytest.raises(ValueError, match=f"{name} on rank {RANK}: this rank is not part of"):
                    call()
        hvd.remove_process_set(made)


# ----------------------------------------------------------------- optimizers

RATE = 0.001 * (1 + RANK)

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, RATE),
    "momentum": lambda params: torch.optim.SGD(params, RATE, momentum=0.9, nesterov=True, weight_decay=0.1 * RANK),
    "Adam": lambda params: torch.optim.Adam(params, RATE, betas=(0.5, 0.9 + 0.01 * RANK), amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, RATE, weight_decay=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, RATE),
    "RMSprop": lambda params: torch.optim.RMSprop(params, RATE, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, RATE),
    "tensor lr": lambda params: torch.optim.Adam(params, torch.tensor(RATE)),
}


def train(model, optimizer, steps, seed=RANK):
    for step in range(steps):
        optimizer.zero_grad()
        model(normal(seed, 2, 3, 6, 6, seed=step).float()).square().sum().backward()
        optimizer.step()


def described(optimizer):
    """Return state and options as something to compare."""
    def plain(value):
        if isinstance(value, torch.Tensor):
            return "tensor", value.dtype, tuple(value.shape), value.stride(), value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
    return plain(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [lambda rank, root: 2 if rank == root else 0, lambda rank, root: 0 if rank == root else 2,
                                   lambda rank, root: rank + 1, lambda rank, root: 0],
                         ids=["root alone has state", "the root has none", "all have", "none has"])
def test_broadcast_optimizer_state(hvd, name, steps):
    root = LAST
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, steps(RANK, root))
    groups, state = [*optimizer.param_groups], optimizer.state
    before, wanted = [param.detach().clone() for param in model.parameters()], COMM.bcast(described(optimizer), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    assert described(optimizer) == wanted
    assert all(map(same, before, [param.detach() for param in model.parameters()])), "no step is taken"
    assert all(one is other for one, other in zip(groups, optimizer.param_groups)) and optimizer.state is state
    hvd.broadcast_parameters(model.state_dict(), root)
    train(model, optimizer, 2, seed=0)
    assert agree(model.parameters())


def test_groups_extra_state_and_frozen_parameters(hvd):
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5 + RANK, "tags": ["a", RANK]},
                                   {"params": model[3].parameters(), "note": {"rank": RANK}}], 0.1)
    train(model, optimizer, 1 + RANK)
    shared = torch.full((3,), float(RANK))
    optimizer.state[model[3].bias].update(extra=("text", [RANK, shared]), again=shared, own=model[3].weight,
                                          odd=torch.ones(1).expand(4))
    optimizer.state["counts"] = {"steps": RANK}
    if RANK:
        optimizer.param_groups[1]["mine alone"] = 3
    hvd.broadcast_optimizer_state(optimizer, 0)
    first, second = optimizer.param_groups
    assert (first["lr"], first["tags"], second["note"], optimizer.state["counts"]) == (0.5, ["a", 0], {"rank": 0}, {"steps": 0})
    assert "mine alone" not in second and second["params"][0] is model[3].weight
    state = optimizer.state[model[3].bias]
    assert state["extra"][0] == "text" and state["extra"][1][0] == 0 and state["extra"][1][1] is state["again"]
    assert same(state["again"], torch.zeros(3)) and state["own"] is model[3].weight and same(state["odd"], torch.ones(4))
    assert model[0].weight not in optimizer.state and agree([state["exp_avg"]])


def test_memory_formats_are_kept(hvd):
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, RANK == 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_a_scheduler_goes_on_from_the_roots_place(hvd):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1 + RANK, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    hvd.broadcast_optimizer_state(optimizer, 0)
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_checkpoint_that_the_root_has_loaded(hvd):
    source, model = network(7), network()
    trained = torch.optim.Adam(source.parameters(), 0.3)
    train(source, trained, 3, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    if RANK == LAST:
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=LAST, model=model)
    assert described(optimizer) == described(trained)


def test_a_distributed_optimizer(hvd):
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01 + RANK), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["lr"] == 0.01 and agree(model.parameters())


def test_wrong_optimizers(hvd):
    model = network()
    with pytest.raises(ValueError, match=r"LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with pytest.raises(TypeError, match=r"of type dict, not a torch\.optim\.Optimizer"):
        hvd.broadcast_optimizer_state({}, 0)
    if SIZE > 1:
        some = [*model.parameters()][:2 if RANK == LAST else None]
        found = all_attempt(lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(some, 0.1), 0))
        text = f"the numbers of parameters in the optimizer's groups differ: rank 0 has [6], rank {LAST} has [2]"
        assert set(found) == {("ValueError", f"broadcast_optimizer_state: {text}")}
        kind = torch.optim.Adam if RANK == LAST else torch.optim.SGD
        found = all_attempt(lambda: hvd.broadcast_optimizer_state(kind(model.parameters(), 0.1), 0))
        text = f"the optimizers differ: rank 0 has SGD, rank {LAST} has Adam"
        assert set(found) == {("ValueError", f"broadcast_optimizer_state: {text}")}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model[0].weight]["odd"] = torch.ones(3).to_sparse() if RANK == LAST else 0
    found = all_attempt(lambda: hvd.broadcast_optimizer_state(optimizer, LAST))
    assert found[LAST][0] == "ValueError" and all(kind == "HorovodInternalError" and f"rank {LAST} has failed" in text
                                                  for kind, text in found[:LAST])
    hvd.barrier()


def test_before_init(hvd):
    hvd.shutdown()
    model = network()
    calls = [lambda: hvd.broadcast_parameters(model.state_dict(), 0), lambda: hvd.broadcast_object(1),
             lambda: hvd.allgather_object(1), lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), 0.1), 0)]
    for call in calls:
        with pytest.raises(ValueError, match="not initialized"):
            call()
    hvd.init(process_sets="dynamic")
