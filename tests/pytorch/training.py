"""What the tests of optimizers share: small models, batches of which every rank has a part, training with and without ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch._dynamo

from ranks import COMM, EVERYONE, RANK, normal

ROWS = 4
"""Of a rank in a batch."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


class Needy(torch.optim.Optimizer):
    """An optimizer whose constructor needs more than parameters, and which keeps something outside of its groups."""

    def __init__(self, params: Any, scale: float, *, label: str):
        super().__init__(params, {"lr": scale})
        self.label, self.calls = label, 0

    @torch.no_grad()
    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * factor)
        return None if closure is None else closure()


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """Make a small network, the same on all ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(),
                               torch.nn.Linear(16, 3)).to(dtype)


def batch(step: int, ranks: Sequence[int] = EVERYONE, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of some ranks."""
    whole = torch.cat([normal(rank, ROWS, 9, seed=step) for rank in ranks]).to(dtype)
    return whole[:, :6], whole[:, 6:]


def loss_of(model: torch.nn.Module, step: int, ranks: Sequence[int] = (RANK,), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the mean square error on the batches of some ranks."""
    inputs, targets = batch(step, ranks, dtype)
    return ((model(inputs) - targets) ** 2).mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int],
          ranks: Sequence[int] = (RANK,), dtype: torch.dtype = torch.float64) -> None:
    """Train a model on the batches of some ranks."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, ranks, dtype).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters side by side."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def assert_close(model: torch.nn.Module, other: torch.nn.Module, within: float = 1e-12) -> None:
    """See that two models have the same weights, but for rounding."""
    difference = (weights(model) - weights(other)).abs().max().item()
    assert difference <= within, difference


def same_everywhere(model: torch.nn.Module) -> bool:
    """Tell whether all ranks have the same bits."""
    found = COMM.allgather(bytes(weights(model).view(torch.uint8).numpy()))
    return len(set(found)) == 1
