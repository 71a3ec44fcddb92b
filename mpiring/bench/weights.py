"""Whether models that were trained apart hold the same weights."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING
from zlib import crc32

from mpi4py import MPI

if TYPE_CHECKING:
    from torch import nn

TOLERANCE, ROUNDED, FLOOR = 0.01, 0.25, 0.1
"""How far a tensor may end from DDP's, as a share of the way that training has moved it, or of FLOOR of the model's way if that is
more; ROUNDED: where gradients have gone as bfloat16. Well above what rounding does (0.0002, with bfloat16 0.12, in 30 steps), and
well below what a lost or wrong average does."""


def checked(models: dict[str, nn.Module], right: nn.Module, start: nn.Module, rounded: tuple[str, ...],
            comm: MPI.Comm) -> dict[str, tuple[int, str]]:
    """Count each model's tensors that differ from rank 0's in a bit, or from the right ones by more than rounding does; collective.

    start: the model before the first step; rounded: the names of the models whose gradients have been compressed.
    """
    return {name: _together(_far(model, right, start, ROUNDED if name in rounded else TOLERANCE) | _other_bits(model, comm), comm)
            for name, model in models.items()}


def _far(model: nn.Module, right: nn.Module, start: nn.Module, tolerance: float) -> dict[str, str]:
    """Return the names of the tensors that are too far from the right ones; NaN is."""
    return {name: f"off DDP's by {share:.2g} of its way" for name, share in distances(model, right, start).items()
            if not share <= tolerance}


def distances(model: nn.Module, right: nn.Module, start: nn.Module) -> dict[str, float]:
    """Return by name how far a model's tensors are from the right ones, as a share of the way from the start to those.

    Both are root mean squares over the elements. A tensor that has hardly moved is judged by the way of the whole model: some, such
    as the biases of attention's keys, move by nothing but rounding.
    """
    tensors = [dict(each.named_parameters()) for each in (model, right, start)]
    ways = {name: float((tensors[1][name] - tensors[2][name]).detach().norm()) for name in tensors[0]}
    counts = {name: tensor.numel() for name, tensor in tensors[0].items()}
    least = FLOOR * sqrt(sum(way ** 2 for way in ways.values()) / sum(counts.values()))
    return {name: _share(float((tensors[0][name] - tensors[1][name]).detach().norm()), max(way, least * sqrt(counts[name])))
            for name, way in ways.items()}


def _share(apart: float, way: float) -> float:
    return apart / way if way else float("inf") if apart else 0.0


def _other_bits(model: nn.Module, comm: MPI.Comm) -> dict[str, str]:
    """Return the names of the tensors whose bits are not rank 0's."""
    bits = {name: crc32(tensor.detach().numpy()) for name, tensor in model.named_parameters()}
    first = comm.bcast(bits)
    return {name: "not the same bits as on rank 0" for name in bits if bits[name] != first[name]}


def _together(wrong: dict[str, str], comm: MPI.Comm) -> tuple[int, str]:
    """Return how many tensors are wrong on some rank, and the first rank's first."""
    found = comm.allgather(wrong)
    places = (f"rank {rank}, tensor {name!r}: {text}" for rank, told in enumerate(found) for name, text in told.items())
    return len(set().union(*found)), next(places, "")
