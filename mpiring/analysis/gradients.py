"""Gradients of known models, in the order in which backward yields them: the last layer first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mpiring.algorithms.registry import unknown

FOLDER = Path(__file__).parent / "models"


class Gradient(NamedTuple):
    """A tensor's name, its number of float32 elements, and the seconds that backward takes from the one before it to it."""

    name: str
    count: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Its bytes, as float32."""
        return 4 * self.count


@dataclass(frozen=True)
class Model:
    """A model's gradients, and the device, batch and source of their times."""

    name: str
    about: str
    device: str
    batch: int
    source: str
    gradients: tuple[Gradient, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, as float32."""
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def seconds(self) -> float:
        """Seconds of backward."""
        return sum(gradient.seconds for gradient in self.gradients)


def known() -> list[str]:
    """List the models."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@lru_cache(maxsize=8)
def load(name: str) -> Model:
    """Return a model by name; ValueError names the nearest one and lists all."""
    if name not in known():
        raise ValueError(unknown("model", name, known()))
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return Model(**{**data, "gradients": tuple(Gradient(*row) for row in data["gradients"])})
