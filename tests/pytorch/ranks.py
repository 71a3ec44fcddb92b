"""What the tests of the PyTorch front share: who this is, values of every rank, and how a call ended on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

COMM = MPI.COMM_WORLD.Dup()
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1
EVERYONE = range(SIZE)

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a rank's tensor of numbers from 0 to 3, whose sums and products are exact in every dtype."""
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    found = torch.randint(0, 4, [*shape], generator=chance)
    if dtype.is_complex:
        found = torch.complex(found.double(), torch.randint(0, 4, [*shape], generator=chance).double())
    return found.to(dtype)


def everyones(shape: Sequence[int], dtype: torch.dtype, ranks: Sequence[int] = EVERYONE) -> list[torch.Tensor]:
    """Return the tensors of some ranks."""
    return [values(rank, shape, dtype) for rank in ranks]


def normal(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a rank's normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank), dtype=torch.float64)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, in dtype and shape too."""
    assert isinstance(got, torch.Tensor)
    return (got.dtype, got.shape) == (expected.dtype, expected.shape) and torch.equal(got, expected)


def attempt(call: Callable[[], Any]) -> Exception | None:
    """Return what a call raised, None if nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None


def all_attempt(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return the type and the words of what a call raised on each rank."""
    error = attempt(call)
    return COMM.allgather((type(error).__name__, str(error)))
