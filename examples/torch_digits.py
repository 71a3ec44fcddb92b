"""Train a convolutional network in PyTorch on all ranks, with Horovod's calls, and see how well it reads digits it has not seen.

    mpirun -np 4 python examples/torch_digits.py

On scikit-learn's digits, 8 x 8 pixels each. Every rank takes its share of the images; DistributedOptimizer averages the gradients
while others are computed.
"""

import argparse
import hashlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpiring.torch as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    load_digits = None

TESTS = 297


def main() -> None:
    """Train, check that all ranks hold the same weights, and say how good they are."""
    options = parse()
    hvd.init()
    if load_digits is None:
        sys.exit("This example needs scikit-learn: pip install 'mpiring[examples]'" if hvd.rank() == 0 else 1)
    training, tests = data()

    torch.manual_seed(hvd.rank())           # other weights and images on every rank, but all begin with rank 0's weights
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    train(model, optimizer, training, options)

    if len(set(hvd.allgather_object(digest(model)))) > 1:
        sys.exit(f"rank {hvd.rank()}: the ranks' weights differ")
    right = accuracy(model, tests)
    if hvd.rank() == 0:
        print(f"{hvd.size()} rank(s), all with the same weights bit for bit; held-out accuracy {right:.3f}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="times that all images are seen (default 8)")
    parser.add_argument("--batch-size", type=int, default=60, help="images in a batch, of all ranks together (default 60)")
    parser.add_argument("--lr", type=float, default=0.004, help="Adam's learning rate (default 0.004)")
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank that load images (default 0)")
    return parser.parse_args()


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return images and digits to learn from, and others to be tested with: in the same order on all ranks."""
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)[order] / 16
    digits = torch.from_numpy(digits)[order]
    return TensorDataset(images[TESTS:], digits[TESTS:]), TensorDataset(images[:TESTS], digits[:TESTS])


def network() -> nn.Module:
    """Return two convolutions and two layers, 28,000 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 44), nn.ReLU(), nn.Linear(44, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, training: TensorDataset, options: argparse.Namespace) -> None:
    """Go through all images some times, every rank through its share of them."""
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(training, max(1, options.batch_size // hvd.size()), sampler=sampler, num_workers=options.workers,
                        persistent_workers=options.workers > 0)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)            # shuffles anew
        total = 0.0
        for images, digits in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), digits)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total / len(loader)), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.3f}")


def accuracy(model: nn.Module, tests: TensorDataset) -> float:
    """Return the share of test images that the model reads rightly; every rank looks at some of them."""
    images, digits = tests[hvd.rank()::hvd.size()]
    with torch.no_grad():
        right = (model(images).argmax(1) == digits).sum()
    return hvd.allreduce(right, op=hvd.Sum).item() / len(tests)


def digest(model: nn.Module) -> str:
    """Return what tells weights apart that differ in a bit."""
    return hashlib.sha256(b"".join(weights.detach().numpy().tobytes() for weights in model.parameters())).hexdigest()


if __name__ == "__main__":
    main()
