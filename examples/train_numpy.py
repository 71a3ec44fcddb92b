"""Train a neural network in NumPy on all ranks: data-parallel, gradients summed by mpiring's engine while others are computed.

    mpirun -np 4 python examples/train_numpy.py

One hidden layer, on scikit-learn's digits. Every rank takes its part of every batch. Backward yields the last layer's gradients
first: each is handed to the engine as soon as it exists, and awaited only when all are needed. The weights come out as on one rank,
but for rounding.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

import mpiring

try:
    from sklearn.datasets import load_digits
except ImportError:
    load_digits = None

PIXELS, HIDDEN, DIGITS = 64, 48, 10
SHAPES = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, DIGITS), (DIGITS,))


def main() -> None:
    """Train, check that all ranks hold the same weights, and say how good they are."""
    options = parse()
    comm = MPI.COMM_WORLD
    if load_digits is None:
        sys.exit("This example needs scikit-learn: pip install 'mpiring[examples]'" if comm.rank == 0 else 1)
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pixels, digits, tests = pixels[order] / 16, digits[order], 297

    weights = train(pixels[tests:], digits[tests:], options, comm)

    if len(set(comm.allgather(weights.tobytes()))) > 1:
        sys.exit(f"rank {comm.rank}: the ranks' weights differ")
    if comm.rank == 0:
        right = np.mean(forward(weights, pixels[:tests])[1].argmax(axis=1) == digits[:tests])
        print(f"{comm.size} rank(s), all with the same weights bit for bit; test accuracy {right:.3f}")
        if options.save_weights:
            np.savez(options.save_weights, weights=weights)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="times that all images are seen (default 20)")
    parser.add_argument("--batch", type=int, default=50, help="images in a batch, of all ranks together (default 50)")
    parser.add_argument("--rate", type=float, default=0.3, help="learning rate (default 0.3)")
    parser.add_argument("--save-weights", metavar="FILE", help="write the weights to FILE.npz")
    return parser.parse_args()


def train(pixels: np.ndarray, digits: np.ndarray, options: argparse.Namespace, comm: MPI.Comm) -> np.ndarray:
    """Return the weights after gradient descent; every rank goes through the same batches, and sees its part of each."""
    random = np.random.default_rng(1)       # the same on all ranks, so they begin alike and shuffle alike
    weights = np.concatenate([(random.standard_normal(shape) / np.sqrt(shape[0]) * (len(shape) > 1)).ravel() for shape in SHAPES])
    with mpiring.Engine(comm) as engine:
        for _ in range(options.epochs):
            order = random.permutation(len(digits))
            for start in range(0, len(order), options.batch):
                batch = order[start:start + options.batch]
                mine = batch[comm.rank::comm.size]
                step = options.rate / len(batch)
                # Sums over images, not means: an average of the ranks' means would be wrong where their parts differ in size.
                handles = {layer: engine.allreduce_async(gradient, gradient, name=f"layer {layer}")
                           for layer, gradient in backward(weights, pixels[mine], digits[mine])}
                for layer, handle in handles.items():
                    layers(weights)[layer] -= step * engine.synchronize(handle)
    return weights


def backward(weights: np.ndarray, pixels: np.ndarray, digits: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each layer's number, and its gradient of the cross entropy, summed over some images (or none); the last layer first."""
    hidden, odds = forward(weights, pixels)
    odds[np.arange(len(digits)), digits] -= 1
    yield 3, odds.sum(axis=0)
    yield 2, hidden.T @ odds
    _, _, out, _ = layers(weights)
    back = odds @ out.T * (1 - hidden ** 2)
    yield 1, back.sum(axis=0)
    yield 0, pixels.T @ back


def forward(weights: np.ndarray, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer's values and the odds of each digit, a row an image."""
    into, into_bias, out, out_bias = layers(weights)
    hidden = np.tanh(pixels @ into + into_bias)
    scores = hidden @ out + out_bias
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def layers(vector: np.ndarray) -> list[np.ndarray]:
    """Return views of a flat vector in the layers' shapes: what is written to them is in the vector."""
    edges = np.cumsum([np.prod(shape) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(vector, edges[:-1]), SHAPES)]


if __name__ == "__main__":
    main()
