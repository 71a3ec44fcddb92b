"""The parts of the training's bench that need no ranks: its command line, its arithmetic, its models, its rows and what it says."""

import importlib.util

import numpy as np
import pytest
from mpi4py import MPI

from mpiring.bench import options, training, weights
from mpiring.bench.training import ALONE, BF16, DDP, HOROVOD, ITERATIONS, MPIRING, OVERHEAD, Table, TrainingResult

WHY = "PyTorch is not installed (extra 'torch')"


@pytest.fixture
def with_torch(monkeypatch):
    """Let the command line find PyTorch, installed or not."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "torch" else find(name))


def parsed(*argv):
    return options.parse(list(argv), quiet=True)


@pytest.mark.usefixtures("with_torch")
def test_cases_by_default_in_order_and_by_name():
    assert parsed().training is None and (parsed().warmup_iters, parsed("--engine").warmup_iters) == (6, 6)
    every = parsed("--training")
    assert (every.training, every.maxbytes, every.warmup_iters) == (["mlp", "resnet", "transformer", "overhead"], 512 << 20, 3)
    chosen = parsed("--training", "overhead,mlp", "-e", "1M", "-w", "0", "-n", "7")
    assert (chosen.training, chosen.maxbytes, chosen.warmup_iters, chosen.iters) == (["overhead", "mlp"], 1 << 20, 0, 7)


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("argv, words", [
    (["--training", "resent"], "argument --training: unknown case 'resent' (did you mean 'resnet'?); known: mlp, resnet, "
     "transformer, overhead"),
    (["--training", "mlp,mlp"], "argument --training: the same name twice"),
    (["--training", "--engine"], "argument --training: its cases leave no choice of --engine"),
    (["--training", "--inplace"], "argument --training: its cases leave no choice of --inplace"),
    (["--training", "-d", "float64"], "argument --training: its cases leave no choice of --datatype"),
    (["--training", "--peers"], "argument --training: its cases leave no choice of --peers"),
    (["--training", "--work", "5"], "argument --work: is for --engine overlap"),
])
def test_wrong_command_lines(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(argv, quiet=False)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_without_pytorch_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        options.parse(["--training"], quiet=False)
    assert caught.value.code == 2
    assert "argument --training: needs PyTorch: pip install 'mpiring[torch]'" in capsys.readouterr().err


def test_help_names_cases_subjects_and_columns(capsys):
    with pytest.raises(SystemExit):
        options.parse(["--help"], quiet=False)
    text = capsys.readouterr().out
    columns = ("samples/s", "exposed_ms", "ofddp%", "xddp", "us/tensor", "same_weights")
    assert set(columns) < set(Table().heading().split())
    for name in (*ITERATIONS, ALONE, MPIRING, BF16, DDP, HOROVOD, *columns):
        assert any(line.startswith(f"  {name} ") for line in text.splitlines()), name


TURNS = {ALONE: np.array([100., 110, 90]), MPIRING: np.array([140., 130, 150]), BF16: np.array([120., 115, 125]),
         DDP: np.array([180., 260, 165])}


def test_what_a_subjects_times_say():
    found, place = training.result("mlp", MPIRING, TURNS, 14, 4000, 64, (2, "there"))
    assert place == "there"
    assert found == TrainingResult("mlp", MPIRING, 14, 4000, {"median": 140.0, "min": 130.0, "p99": 149.8}, 457142.86, 40.0, 0.5,
                                   round(180 / 140, 4), None, 2)       # by turns 1.29, 2, 1.1


def test_alone_has_nothing_to_compare():
    found, _ = training.result(OVERHEAD, ALONE, TURNS, 10, 4000, 64, (None, ""))
    assert (found.exposed_us, found.exposed_share, found.ddp_ratio, found.us_per_tensor, found.wrong) == (None,) * 5
    assert found.samples_per_s == 640000


def test_what_a_tensor_costs_is_the_difference_of_the_least_times():
    found, _ = training.result(OVERHEAD, BF16, TURNS, 10, 4000, 64, (0, ""))
    assert found.us_per_tensor == (115 - 90) / 10


def test_no_share_of_what_is_not_exposed():
    hidden = TURNS | {DDP: np.array([99., 98, 97])}
    found, _ = training.result("mlp", MPIRING, hidden, 10, 4000, 64, (0, ""))
    assert (found.exposed_us, found.exposed_share) == (40, None)


def test_a_row_stands_under_its_heading():
    table = Table()
    for subject, wrong, cells in ((ALONE, None, ["-", "-", "-", "-", "-"]), (MPIRING, 0, ["0.04", "50.0", "1.29", "4.00", "yes"]),
                                  (DDP, 1, ["0.08", "100.0", "1.00", "7.50", "no"])):
        found, _ = training.result(OVERHEAD, subject, TURNS, 10, 102228128, 64, (wrong, ""))
        line, = table.rows(found)
        assert len(line) == len(table.heading()) and line.split()[-5:] == cells
        assert line.split()[:4] == [OVERHEAD, subject, "10", "102228128"]


def test_the_summary_is_of_mpiring():
    results = [training.result(case, subject, TURNS, 10, 400, 64, (0, ""))[0] for case in ("mlp", OVERHEAD) for subject in TURNS]
    found = training.summary(results)
    assert found[0] == {"case": "mlp", "subject": MPIRING, "ddp_ratio": 1.2857, "exposed_share": 0.5, "us_per_tensor": None}
    assert training.summary_lines(found) == [
        "mlp by mpiring: a step is 1.29 times as fast as DDP's, with 50% of its exposed communication",
        "mlp by bf16: a step is 1.50 times as fast as DDP's, with 25% of its exposed communication",
        "overhead by mpiring: 4.0 us a tensor and step more than alone",
        "overhead by bf16: 2.5 us a tensor and step more than alone"]
    assert training.summary([]) == training.summary_lines([]) == []


@pytest.fixture
def models():
    """The module of models, with one thread for all that they do."""
    torch = pytest.importorskip("torch", reason=WHY)
    torch.set_num_threads(1)
    from mpiring.bench import models

    return models


def test_the_models_are_those_that_the_command_line_knows(models):
    assert list(models.CASES) == list(ITERATIONS)


@pytest.mark.parametrize("name, tensors, weights", [("mlp", 14, 25129960), ("resnet", 161, 25557032),
                                                    ("transformer", 100, 26244096), (OVERHEAD, 161, 1288)])
def test_models_are_as_large_as_the_help_says(models, name, tensors, weights):
    import torch

    case = models.CASES[name]
    with torch.device("meta"):
        counts = [tensor.numel() for tensor in case.make(case.width).parameters()]
    assert (len(counts), sum(counts)) == (tensors, weights)


@pytest.mark.parametrize("name, most", [("mlp", 1 << 20), ("resnet", 4 << 20), ("transformer", 1 << 20), (OVERHEAD, 1 << 20)])
def test_narrow_models_fit_begin_alike_and_take_their_batches(models, name, most):
    import torch
    from torch.nn.functional import cross_entropy

    case = models.CASES[name]
    model, again = case.model(most), case.model(most)
    nbytes = sum(tensor.nbytes for tensor in model.parameters())
    assert nbytes <= most and (nbytes > most // 4 or name == OVERHEAD)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert len(list(model.parameters())) == len(list(case.make(case.width).parameters()))
    inputs, classes = case.batch(case.samples, torch.Generator().manual_seed(1))
    cross_entropy(model(inputs), classes).backward()
    assert len(inputs) == case.samples and all(tensor.grad is not None for tensor in model.parameters())


def test_models_have_the_tensors_of_resnet50(models):
    from mpiring.analysis import gradients

    ours = sorted(tensor.numel() for tensor in models.resnet(64).parameters())
    assert ours == sorted(gradient.count for gradient in gradients.load("resnet50").gradients)


def test_every_rank_has_batches_of_its_own(models):
    case = models.CASES["mlp"]
    first, again, second = (training._batches(case, rank) for rank in (0, 0, 1))
    assert all(one[0].equal(other[0]) for one, other in zip(first, again))
    assert not any(one[0].equal(other[0]) for one, other in zip(first, second))


@pytest.fixture
def trio(models):
    """Return three models: where training began, where it should have come to, and one that has come there as well."""
    import torch

    start, right, model = (models.CASES["mlp"].model(1 << 16) for _ in range(3))
    with torch.no_grad():
        for each in (right, model):
            for tensor in each.parameters():
                tensor += 0.01
    return start, right, model


def test_distances_are_shares_of_the_way(trio):
    import torch

    start, right, model = trio
    assert set(weights.distances(model, right, start).values()) == {0.0}
    with torch.no_grad():
        model[0].bias.copy_(start[0].bias)             # left behind
        model[2].weight += 0.001
        model[2].bias[0] = float("nan")
    found = weights.distances(model, right, start)
    assert found["0.bias"] == pytest.approx(1, rel=1e-3) and found["2.weight"] == pytest.approx(0.1, rel=1e-3)
    assert np.isnan(found["2.bias"]) and found["0.weight"] == 0


def test_tensors_that_hardly_move_are_judged_by_the_way_of_all(trio):
    import torch

    start, right, model = trio
    with torch.no_grad():
        right[0].bias.copy_(start[0].bias + 1e-6)
        model[0].bias.copy_(start[0].bias)
    assert weights.distances(model, right, start)["0.bias"] == pytest.approx(1e-3, rel=0.05)


def test_what_has_not_moved_at_all_is_infinitely_far_or_right(trio):
    import torch

    start, _, model = trio
    assert set(weights.distances(start, start, start).values()) == {0.0}
    assert set(weights.distances(model, start, start).values()) == {np.inf}
    with torch.no_grad():
        model[0].bias.copy_(start[0].bias)
    assert weights.distances(model, start, start)["0.bias"] == 0


def test_wrong_tensors_are_counted_and_the_first_is_named(trio):
    import torch

    start, right, model = trio
    by = {name: training.Replica(name, each, each, None) for name, each in ((ALONE, start), (MPIRING, model), (DDP, right))}
    assert training._compared(list(by.values()), start, MPI.COMM_SELF) == {MPIRING: (0, ""), DDP: (0, "")}
    with torch.no_grad():
        model[0].bias += 0.01
        model[2].weight[0, 0] = float("nan")
    found = training._compared(list(by.values()), start, MPI.COMM_SELF)
    assert found == {MPIRING: (2, "rank 0, tensor '0.bias': off DDP's by 1 of its way"), DDP: (0, "")}


def test_compression_may_round(trio):
    import torch

    start, right, model = trio
    with torch.no_grad():
        model[0].bias += 0.001
    for name, wrong in ((MPIRING, 1), (BF16, 0), (HOROVOD, 1)):
        replicas = [training.Replica(name, model, model, None), training.Replica(DDP, right, right, None)]
        assert training._compared(replicas, start, MPI.COMM_SELF)[name][0] == wrong


class TwoRanks:
    """A comm of which this is rank 1, and rank 0 holds other bits of one tensor."""

    rank = 1

    def __init__(self, name):
        self.name = name

    def bcast(self, bits):
        return bits | {self.name: bits[self.name] ^ 1}


def test_other_bits_are_found(trio):
    assert weights._other_bits(trio[0], TwoRanks("2.bias")) == {"2.bias": "not the same bits as on rank 0"}


@pytest.mark.parametrize("text, told", [
    (None, ""),
    ("raise OSError('libmpi.so.12: cannot open')", "# horovod left out: OSError: libmpi.so.12: cannot open"),
    ("init = shutdown = lambda: None\nrank = lambda: 3\nsize = lambda: 4", "# horovod left out: it does not find MPI's ranks"),
    ("init = shutdown = lambda: None\nrank = lambda: 0\nsize = lambda: 1", ""),
])
def test_horovod_takes_part_where_it_works(text, told, monkeypatch, tmp_path):
    import sys
    from contextlib import ExitStack

    if text is not None:
        (tmp_path / "horovod").mkdir()
        (tmp_path / "horovod" / "__init__.py").touch()
        (tmp_path / "horovod" / "torch.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    lines = []
    with ExitStack() as undo:
        found = training._horovod(MPI.COMM_SELF, lambda line, flush: lines.append(line), undo)
    assert (found is not None) == (text is not None and not told)
    assert lines == ([told] if told else [])
    for name in ("horovod", "horovod.torch"):
        sys.modules.pop(name, None)
