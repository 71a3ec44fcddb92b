"""Two process sets, each of which trains a network of its own at the same time: mpirun -np 4 python examples/process_sets.py.

The first half of the ranks learns at one rate, the other half at another one. Then all ranks together look whose network is the
better one, and go on with it. It learns a function of two numbers, which the program makes itself.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mpiring.torch as hvd

RATES = 0.01, 0.0001
STEPS, BATCH = 200, 64


def main() -> None:
    """Train two networks, and tell all ranks which is the better one."""
    hvd.init(process_sets="dynamic")
    if hvd.size() < 2:
        sys.exit("This example needs two ranks: mpirun -np 2 python examples/process_sets.py")
    half = hvd.size() // 2
    sets = [hvd.add_process_set(list(range(half))), hvd.add_process_set(list(range(half, hvd.size())))]
    number = int(hvd.rank() >= half)
    mine = sets[number]

    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    for name, weights in model.state_dict().items():     # the first rank of the set gives them: root_rank is its number among all
        hvd.broadcast_(weights, root_rank=mine.ranks[0], name=name, process_set=mine)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=RATES[number]),
                                         named_parameters=model.named_parameters(), process_set=mine)
    loss = train(model, optimizer, mine)

    losses = hvd.allgather(torch.tensor([loss]))         # of all ranks; those of one set hold the same
    best = losses.argmin().item()
    hvd.broadcast_parameters(model.state_dict(), root_rank=best)
    assert loss_of(model, *examples(1000, seed=-1)) == losses[best]
    if hvd.rank() == 0:
        for each, rate in zip(sets, RATES):
            print(f"ranks {each.ranks} learned at rate {rate}: loss {losses[each.ranks[0]]:.4f}")
        print(f"all ranks go on with the network of rank {best}")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mine: hvd.ProcessSet) -> float:
    """Train on other examples in every step and on every rank, and return the loss on examples that all ranks have."""
    for step in range(STEPS):
        optimizer.zero_grad()
        points, values = examples(BATCH, seed=step * hvd.size() + hvd.rank())
        F.mse_loss(model(points), values).backward()
        optimizer.step()                                 # with the gradients' average in the process set
    loss = loss_of(model, *examples(1000, seed=-1))
    spread = [hvd.allreduce(torch.tensor(loss), op=op, process_set=mine) for op in (hvd.Min, hvd.Max)]
    assert spread[0] == spread[1], f"rank {hvd.rank()}: the weights of the ranks {mine.ranks} differ"
    return loss


def loss_of(model: nn.Module, points: torch.Tensor, values: torch.Tensor) -> float:
    """Return how far off a model is."""
    with torch.no_grad():
        return F.mse_loss(model(points), values).item()


def examples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points, and the function's values there."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    return points, (points[:, :1] * points[:, 1:]).sin()


if __name__ == "__main__":
    main()
