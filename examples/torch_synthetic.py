"""Measure how many images a second a network learns from, on images made of noise: the benchmark that Horovod's users know.

    mpirun -np 2 python examples/torch_synthetic.py --model resnet --batch-size 16

Nothing is downloaded. Other models than those here are torchvision's, if that is installed. Ranks that share a node's cores should
share them out: OMP_NUM_THREADS=1, for as many ranks as cores.
"""

import argparse
import sys
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import mpiring.torch as hvd

CLASSES = 1000


def main() -> None:
    """Measure, and say images a second: of a rank, and of all."""
    options = parse()
    hvd.init()
    cuda = torch.cuda.is_available() and not options.no_cuda
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    device, kind = (torch.device("cuda"), "GPU") if cuda else (torch.device("cpu"), "CPU")
    model, pixels = made(options.model)
    step = training_step(model.to(device), torch.randn(options.batch_size, 3, pixels, pixels, device=device), options)

    log(f"Model: {options.model}")
    log(f"Batch size: {options.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(step, number=options.num_warmup_batches)
    log("Running benchmark...")
    rates = torch.empty(options.num_iters, dtype=torch.float64)
    for number in range(options.num_iters):
        seconds = timeit.timeit(step, number=options.num_batches_per_iter)
        rates[number] = options.batch_size * options.num_batches_per_iter / seconds
        log(f"Iter #{number}: {rates[number]:.1f} img/sec per {kind}")
    mean, spread = rates.mean().item(), 1.96 * rates.std(correction=0).item()
    log(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    wire = parser.add_mutually_exclusive_group()
    wire.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit floats")
    wire.add_argument("--bf16-allreduce", action="store_true", help="send gradients as bfloat16")
    parser.add_argument("--model", default="resnet", help=f"{', '.join(MODELS)}, or one of torchvision's")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a rank's batch")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches before any is timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches that are timed together")
    parser.add_argument("--num-iters", type=int, default=10, help="how often that is done")
    parser.add_argument("--no-cuda", action="store_true", help="use no GPU")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum instead of their average")
    return parser.parse_args()


def training_step(model: nn.Module, images: torch.Tensor, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that learns from the images once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if options.use_adasum else hvd.size()))
    compression = (hvd.Compression.fp16 if options.fp16_allreduce else
                   hvd.Compression.bf16 if options.bf16_allreduce else hvd.Compression.none)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression,
                                         op=hvd.Adasum if options.use_adasum else hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    target = torch.randint(CLASSES, (len(images),), device=images.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), target).backward()
        optimizer.step()

    return step


def log(line: str) -> None:
    """Print on the first rank."""
    if hvd.rank() == 0:
        print(line, flush=True)


# Models

def made(name: str) -> tuple[nn.Module, int]:
    """Return a model, and the pixels that its images are wide and high."""
    if name in MODELS:
        return MODELS[name](), 32
    try:
        from torchvision import models
    except ImportError:
        models = None
    if not hasattr(models, name):
        wanted = "torchvision is not installed" if models is None else "torchvision has none of this name"
        sys.exit(f"model {name}: not one of {', '.join(MODELS)}, and {wanted}" if hvd.rank() == 0 else 1)
    return getattr(models, name)(), 224


def mlp() -> nn.Module:
    """Return three layers, 9 million weights: much to exchange for little to compute."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(),
                         nn.Linear(1024, CLASSES))


def cnn() -> nn.Module:
    """Return three convolutions: little to exchange for what they compute."""
    sizes = 3, 32, 64, 128
    layers = [nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for into, out in zip(sizes, sizes[1:])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, into: int, out: int, stride: int):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
                                   nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Identity() if into == out else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False),
                                                                      nn.BatchNorm2d(out))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return what comes out."""
        return F.relu(self.inner(images) + self.around(images))


def resnet() -> nn.Module:
    """Return a residual network of 20 layers for small images, 65 tensors of weights."""
    sizes = 16, 16, 16, 16, 32, 32, 32, 64, 64, 64
    blocks = [Block(into, out, 1 if into == out else 2) for into, out in zip(sizes, sizes[1:])]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


MODELS = {"resnet": resnet, "cnn": cnn, "mlp": mlp}

if __name__ == "__main__":
    main()
