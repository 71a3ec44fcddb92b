"""The bench of training: steps of a model by mpiring.torch, by PyTorch's own DDP over gloo, and with no synchronisation at all.

PyTorch is imported where a step is measured, not before: the command line and the arithmetic do without.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiring.bench import peers
from mpiring.bench.report import cell, time_of
from mpiring.bench.timing import interleaved
from mpiring.bench.weights import checked

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpiring.bench.models import Batch, Case

ALONE, MPIRING, BF16, DDP, HOROVOD = "alone", "mpiring", "bf16", "ddp", "horovod"
"""Subjects: no synchronisation; mpiring.torch's DistributedOptimizer, without and with compression to bfloat16; the peers."""

OVERHEAD = "overhead"

ITERATIONS = {"mlp": 10, "resnet": 10, "transformer": 10, OVERHEAD: 100}
"""The cases, and how often one is measured where -n says nothing."""

LEARNING_RATE = 1e-4
"""Small, so that what rounding changes in one step does not grow in the next ones: weights can be compared at the end."""


@dataclass
class TrainingResult:
    """One subject of one case. Times in microseconds.

    exposed_us: its median less the median alone; exposed_share: of DDP's; ddp_ratio: the median over all turns of DDP's time over
    this one's; us_per_tensor: the least time less the least alone, over the tensors; wrong: tensors that are not the same on all
    ranks, or not DDP's.
    """

    case: str
    subject: str
    tensors: int
    bytes: int
    time_us: dict[str, float]
    samples_per_s: float
    exposed_us: float | None
    exposed_share: float | None
    ddp_ratio: float | None
    us_per_tensor: float | None
    wrong: int | None

    @property
    def label(self) -> str:
        """The case and the subject."""
        return f"{self.case} by {self.subject}"


class Table:
    """The printed table of the training's cases."""

    def heading(self) -> str:
        """Return the heading."""
        return (f"{'case':>11} {'subject':>9} {'tensors':>7} {'bytes':>10} {'median_ms':>9} {'min_ms':>8} {'p99_ms':>8} "
                f"{'samples/s':>9} {'exposed_ms':>10} {'ofddp%':>6} {'xddp':>5} {'us/tensor':>9} {'same_weights':>12}")

    def rows(self, result: TrainingResult) -> list[str]:
        """Return a result as a row."""
        exposed = None if result.exposed_us is None else result.exposed_us / 1e3
        share = None if result.exposed_share is None else 100 * result.exposed_share
        same = "-" if result.wrong is None else "no" if result.wrong else "yes"
        times = [result.time_us[key] / 1e3 for key in ("median", "min", "p99")]
        return [f"{result.case:>11} {result.subject:>9} {result.tensors:>7} {result.bytes:>10} {times[0]:>9.2f} {times[1]:>8.2f} "
                f"{times[2]:>8.2f} {result.samples_per_s:>9.1f} {cell(exposed, 10, '.2f')} {cell(share, 6, '.1f')} "
                f"{cell(result.ddp_ratio, 5, '.2f')} {cell(result.us_per_tensor, 9, '.2f')} {same:>12}"]


class Replica(NamedTuple):
    """What one subject trains on this rank: the model, the model as it is called, and its optimizer."""

    name: str
    model: nn.Module
    called: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batches: Iterator[Batch]) -> Callable[[], None]:
        """Return the call that trains on the next batch."""
        from torch.nn.functional import cross_entropy

        def run() -> None:
            inputs, classes = next(batches)
            self.optimizer.zero_grad()
            cross_entropy(self.called(inputs), classes).backward()
            self.optimizer.step()

        return run


def measure(chosen: argparse.Namespace, where: dict[str, Any], comm: MPI.Comm,
            say: Callable) -> Iterator[tuple[TrainingResult, str]]:
    """Yield the results of all cases, each with the place of its first wrong tensor."""
    import mpiring.torch as ours
    from mpiring.bench.models import CASES

    with ExitStack() as undo:
        undo.enter_context(peers.gloo(comm))
        ours.init(comm)
        undo.callback(ours.shutdown)
        theirs = _horovod(comm, say, undo)
        for name in chosen.training:
            yield from _measured(name, CASES[name], subjects(ours, theirs), chosen, comm)


def _horovod(comm: MPI.Comm, say: Callable, undo: ExitStack) -> Any:
    """Return Horovod, initialised, where it is installed and knows these ranks; else None."""
    if importlib.util.find_spec("horovod") is None:
        return None
    try:
        import horovod.torch as theirs

        theirs.init()
        undo.callback(theirs.shutdown)
        problem = "" if (theirs.rank(), theirs.size()) == (comm.rank, comm.size) else "it does not find MPI's ranks"
    except Exception as error:      # whatever an installation that does not work raises
        problem = f"{type(error).__name__}: {error}"
    if told := next(filter(None, comm.allgather(problem)), ""):
        say(f"# {HOROVOD} left out: {told}", flush=True)
        return None
    return theirs


def subjects(ours: Any, theirs: Any) -> dict[str, Callable]:
    """Return by name what makes of a model and its optimizer those that are stepped."""
    from torch.nn.parallel import DistributedDataParallel

    # without the broadcasts of the statistics of normalisations, which the others do not do either; PyTorch 2.13 has renamed it
    known = signature(DistributedDataParallel).parameters
    without = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}

    def by(module: Any, compression: str = "none") -> Callable:
        return lambda model, optimizer: (model, module.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=getattr(module.Compression, compression)))

    def ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **without), optimizer

    found = {ALONE: lambda model, optimizer: (model, optimizer), MPIRING: by(ours), BF16: by(ours, BF16), DDP: ddp}
    return found | ({HOROVOD: by(theirs)} if theirs else {})


def _measured(name: str, case: Case, makers: dict[str, Callable], chosen: argparse.Namespace,
              comm: MPI.Comm) -> Iterator[tuple[TrainingResult, str]]:
    """Train by all subjects, step by step in turn, each from the same weights on the same batches, and compare the weights."""
    batches = _batches(case, comm.rank)
    replicas = []
    for subject, make in makers.items():
        model = case.model(chosen.maxbytes)
        optimizer = _sgd(model)
        replicas.append(Replica(subject, model, *make(model, optimizer)))
    times = interleaved([replica.step(cycle(batches)) for replica in replicas], lambda: None, chosen.warmup_iters,
                        chosen.iters or ITERATIONS[name], chosen.agg_iters, comm) * 1e6
    wrong = _compared(replicas, case.model(chosen.maxbytes), comm) if chosen.check else {}
    shapes = list(replicas[0].model.parameters())
    turns = dict(zip(makers, times))
    for subject in makers:
        yield result(name, subject, turns, len(shapes), sum(tensor.nbytes for tensor in shapes), comm.size * case.samples,
                     wrong.get(subject, (None, "")))


def _compared(replicas: list[Replica], start: nn.Module, comm: MPI.Comm) -> dict[str, tuple[int, str]]:
    """Check the weights of all replicas that have been synchronised."""
    models = {replica.name: replica.model for replica in replicas if replica.name != ALONE}
    return checked(models, models[DDP], start, (BF16,), comm)


def _batches(case: Case, rank: int) -> list[Batch]:
    """Draw the batches that a rank's steps use in turn."""
    import torch

    draw = torch.Generator().manual_seed(1 + rank)
    return [case.batch(case.samples, draw) for _ in range(4)]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def result(case: str, subject: str, turns: dict[str, np.ndarray], tensors: int, nbytes: int, samples: int,
           wrong: tuple[int | None, str]) -> tuple[TrainingResult, str]:
    """Return what a subject's microseconds of all turns say beside the others', and the place of what is wrong."""
    medians = {name: float(np.median(times)) for name, times in turns.items()}
    mine, speed = turns[subject], round(samples / medians[subject] * 1e6, 2)
    if subject == ALONE:
        return TrainingResult(case, subject, tensors, nbytes, time_of(mine), speed, None, None, None, None, wrong[0]), wrong[1]
    exposed, theirs = (medians[name] - medians[ALONE] for name in (subject, DDP))
    share = round(exposed / theirs, 4) if theirs > 0 else None
    ratio = round(float(np.median(turns[DDP] / mine)), 4)
    cost = round(float(mine.min() - turns[ALONE].min()) / tensors, 3) if case == OVERHEAD else None
    return TrainingResult(case, subject, tensors, nbytes, time_of(mine), speed, round(exposed, 3), share, ratio, cost,
                          wrong[0]), wrong[1]


def summary(results: list[TrainingResult]) -> list[dict[str, Any]]:
    """Return of each case what it says of mpiring beside DDP."""
    return [{"case": result.case, "subject": result.subject, "ddp_ratio": result.ddp_ratio, "exposed_share": result.exposed_share,
             "us_per_tensor": result.us_per_tensor} for result in results if result.subject in (MPIRING, BF16)]


def summary_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the summary as lines for people."""
    return [f"{entry['case']} by {entry['subject']}: {_words(entry)}" for entry in found]


def _words(entry: dict[str, Any]) -> str:
    if entry["us_per_tensor"] is not None:
        return f"{entry['us_per_tensor']:.1f} us a tensor and step more than alone"
    share = entry["exposed_share"]
    rest = "" if share is None else f", with {share:.0%} of its exposed communication"
    return f"a step is {entry['ddp_ratio']:.2f} times as fast as DDP's{rest}"
