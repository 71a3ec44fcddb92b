"""What --training trains: models of about 25 million weights on small random inputs, and weights with next to no work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

CLASSES = 1000

NARROWEST = 8
"""The width below which no model goes."""

Batch = tuple[Tensor, Tensor]
"""Inputs, and the classes that they belong to."""


class Case(NamedTuple):
    """One of the models. make: builds it of some width; batch: draws so many samples."""

    make: Callable[[int], nn.Module]
    width: int
    samples: int
    batch: Callable[[int, torch.Generator], Batch]

    def model(self, most: int) -> nn.Module:
        """Build the model from seed 0: half as wide, and half again, until it has no more than so many bytes."""
        width = self.width
        while width > NARROWEST and _nbytes(self.make, width) > most:
            width //= 2
        torch.manual_seed(0)
        return self.make(width)


def _nbytes(make: Callable[[int], nn.Module], width: int) -> int:
    """Return the bytes of a model's parameters, without making them."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in make(width).parameters())


def mlp(width: int) -> nn.Module:
    """Seven layers: 14 tensors, few and large."""
    hidden = [layer for _ in range(5) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(1024, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


class Bottleneck(nn.Module):
    """Three convolutions around which the input goes too; the first block of a stage has a convolution on that way."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        around = [nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)]
        self.downsample = nn.Sequential(*(around if before != 4 * width else []))
        nn.init.zeros_(self.bn3.weight)     # Goyal et al. 2017, 5.1; else what rounding changes grows tenfold in every step

    def forward(self, images: Tensor) -> Tensor:
        """Return what the next block takes."""
        inner = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(images))))))
        return torch.relu(self.bn3(self.conv3(inner)) + self.downsample(images))


def resnet(width: int) -> nn.Module:
    """ResNet-50: 161 tensors, most of them small (He et al., Deep Residual Learning, 2015, table 1)."""
    stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    blocks, before = [], width
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            blocks.append(Bottleneck(before, width << stage, 2 if stage and not index else 1))
            before = 4 * (width << stage)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class Transformer(nn.Module):
    """Tokens in, the next token's class out: eight encoder blocks, 100 tensors."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, norm_first=True,
                                                               activation="gelu", batch_first=True) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the classes' scores after each token, classes in the second place."""
        found = self.embedding(tokens)
        for block in self.blocks:
            found = block(found)
        return self.head(self.norm(found)).transpose(1, 2)


class Tiny(nn.Module):
    """161 tensors that one product uses: a step is little more than what each tensor costs."""

    def __init__(self, width: int):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(161))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return as many classes' scores as there are inputs."""
        return inputs * torch.cat(list(self.weights))


def numbers(count: int, draw: torch.Generator) -> Batch:
    """Draw inputs and classes for Tiny's narrowest."""
    return torch.randn(count, 161 * NARROWEST, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def vectors(count: int, draw: torch.Generator) -> Batch:
    """Draw vectors and their classes."""
    return torch.randn(count, 1024, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def images(count: int, draw: torch.Generator) -> Batch:
    """Draw images of 32 x 32 points and their classes."""
    return torch.randn(count, 3, 32, 32, generator=draw), torch.randint(CLASSES, (count,), generator=draw)


def sentences(count: int, draw: torch.Generator) -> Batch:
    """Draw sequences of 32 tokens, each with the token that follows."""
    tokens = torch.randint(CLASSES, (count, 33), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


CASES = {
    "mlp": Case(mlp, 2048, 32, vectors),
    "resnet": Case(resnet, 64, 16, images),
    "transformer": Case(Transformer, 512, 4, sentences),
    "overhead": Case(Tiny, NARROWEST, 1, numbers),
}
"""By the names that the command line knows."""
