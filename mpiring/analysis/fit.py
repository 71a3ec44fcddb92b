"""Alpha, beta and gamma of a machine, from the times that a bench wrote; and how well they foretell times left out of the fit.

Least squares on log(predicted / measured), so that a short call counts as much as a long one and only ratios matter; the unknowns
are logarithms as well, so none can fall below zero. Gauss-Newton with Marquardt's damping goes down from the start, and from
where a coarse search, one unknown at a time over powers of ten, leads; the better end counts. A weak pull to the start settles
what the times do not.
Source: D. W. Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", SIAM J. Appl. Math. 11 (1963).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpiring.algorithms.registry import ALGORITHMS, Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.analysis.cost import setting_for, simulate
from mpiring.analysis.machines import Level, Machine

PULL = 1e-3
"""Weight of the pull to the start: a factor of e away from it counts as much as a time that is 0.1 % off."""

DECADES = 10.0 ** np.array([-3, -2, -1, -0.5, 0.5, 1, 2, 3])
SMALLEST = 1e-9
"""Seconds that stand for an alpha of 0 at the start, for there is no logarithm of it."""


class Point(NamedTuple):
    """One measured time, in seconds; bytes as the bench counts them."""

    collective: str
    algorithm: str
    nbytes: int
    dtype: str
    seconds: float


class Bench(NamedTuple):
    """What a bench wrote: its points of algorithms that the registry has, and where it ran."""

    points: tuple[Point, ...]
    ranks: int
    nodes: int
    ranks_per_node: int


class Prediction(NamedTuple):
    """A point and what the fitted machine says; error: predicted / measured - 1. held_out: it was not part of the fit."""

    point: Point
    measured: float
    predicted: float
    error: float
    held_out: bool


@dataclass(frozen=True)
class Fit:
    """A fitted machine and its predictions. Errors are absolute, relative to the measured time, of the points held out."""

    machine: Machine
    points: tuple[Prediction, ...]

    @property
    def judged(self) -> list[Prediction]:
        """The points held out; all, where none was."""
        return [point for point in self.points if point.held_out] or list(self.points)

    @property
    def median_error(self) -> float:
        """The median of the errors."""
        return median(abs(point.error) for point in self.judged)

    @property
    def worst_error(self) -> float:
        """The largest error."""
        return max(abs(point.error) for point in self.judged)

    @property
    def ranking(self) -> dict[tuple[str, int, str], tuple[list[str], list[str]]]:
        """For each collective, bytes and dtype: the algorithms from the fastest on, as measured and as predicted."""
        groups: dict[tuple[str, int, str], list[Prediction]] = {}
        for entry in self.points:
            groups.setdefault((entry.point.collective, entry.point.nbytes, entry.point.dtype), []).append(entry)
        return {key: tuple([entry.point.algorithm for entry in sorted(group, key=by)] for by in (_measured, _predicted))
                for key, group in sorted(groups.items())}


def _measured(entry: Prediction) -> float:
    return entry.measured


def _predicted(entry: Prediction) -> float:
    return entry.predicted


def read_bench(path: str | Path) -> Bench:
    """Read the JSON that `python -m mpiring.bench --json` writes; what the registry does not have (native, own files) is left out.

    Raises ValueError, with the file's name, for a file that is unreadable, of another kind, or without such points.
    """
    try:
        data = json.loads(Path(path).read_text())
        environment, results = data["environment"], data["results"]
        place = [_whole(environment[key]) for key in ("ranks", "nodes", "ranks_per_node")]
        points = [_point(result) for result in results]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path}: not a bench's JSON: key {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a bench's JSON: {error}") from None
    if not points:
        raise ValueError(f"{path}: no results")
    known = tuple(point for point in points if (point.collective, point.algorithm) in ALGORITHMS)
    if not known:
        others = ", ".join(sorted({point.algorithm for point in points}))
        raise ValueError(f"{path}: no result of an algorithm of the registry, only of {others}")
    return Bench(known, *place)


def _point(result: dict[str, Any]) -> Point:
    seconds = float(result["time_us"]["median"]) * 1e-6
    if not 0 < seconds < float("inf"):
        raise ValueError(f"a median of {result['time_us']['median']!r} us")
    return Point(str(result["collective"]), str(result["algorithm"]), _whole(result["bytes"], 0), str(result["dtype"]), seconds)


def _whole(value: object, least: int = 1) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} where a number from {least} on is expected")
    return value


def shape_of(bench: Bench) -> Machine:
    """Return a machine of a bench's shape, with figures to start a fit from.

    One node: one level. Several: a level in the node, if it has several ranks, and a network with one NIC for each node, where
    what two nodes send each other at the same time may be slower than what they send to others.
    """
    gamma, name = {"default": 1e-10}, "fitted"
    if bench.nodes == 1:
        return Machine(name, (Level("node", None, 2e-6, 2e-10),), gamma, bench.ranks)
    node = Level("node", bench.ranks_per_node, 2e-6, 2e-10)
    network = Level("network", None, 2e-5, 1e-9, ranks_per_port=bench.ranks_per_node, pair=0.75e-9)
    return Machine(name, (node, network), gamma, bench.ranks)


def fit(points: Sequence[Point], shape: Machine, *, hold_out: Iterable[str | int] | None = None,
        setting: Callable[[Algorithm, int], Setting] | None = None) -> Fit:
    """Fit alpha, beta and pair of every level that joins ranks, and gamma, to measured times; start from `shape`.

    hold_out: names of algorithms and sizes in bytes that stay out of the fit and judge it; left out, every second size of each
    algorithm. setting: (algorithm, bytes) -> the setting that was measured; left out, the one for `shape`. A gamma of 0 stays 0;
    where there are several, they keep their ratios.

    Raises ValueError where no point is left to fit, or hold_out names what is not there.
    """
    model = _Model(shape, points, setting or (lambda algorithm, nbytes: setting_for(algorithm, nbytes, shape, shape.ranks)))
    held = _held_out(points, hold_out)
    fitted = model.machine(_solve(model, [index for index, out in enumerate(held) if not out]))
    predicted = [model.seconds(index, fitted) for index in range(len(points))]
    return Fit(fitted, tuple(Prediction(point, point.seconds, seconds, seconds / point.seconds - 1, out)
                             for point, seconds, out in zip(points, predicted, held)))


def _held_out(points: Sequence[Point], hold_out: Iterable[str | int] | None) -> list[bool]:
    if hold_out is None:
        sizes: dict[tuple[str, ...], set[int]] = {}
        for point in points:
            sizes.setdefault(_series(point), set()).add(point.nbytes)
        second = {(key, nbytes) for key, found in sizes.items() for nbytes in sorted(found)[1::2]}
        held = [(_series(point), point.nbytes) in second for point in points]
    else:
        wanted = set(hold_out)
        if missing := wanted - {point.algorithm for point in points} - {point.nbytes for point in points}:
            raise ValueError(f"hold_out: no point has the algorithm or the size {', '.join(sorted(map(repr, missing)))}")
        held = [bool({point.algorithm, point.nbytes} & wanted) for point in points]
    if all(held):
        raise ValueError("no point is left to fit" if points else "no points")
    return held


def _series(point: Point) -> tuple[str, ...]:
    return point.collective, point.algorithm, point.dtype


class _Model:
    """A machine as a function of its unknowns: factors, as logarithms, on the figures of the start."""

    def __init__(self, shape: Machine, points: Sequence[Point], setting: Callable[[Algorithm, int], Setting]):
        self.start, self.points = shape, points
        self.levels = [index for index, level in enumerate(shape.levels) if level.group != 1]
        self.pairs = [index for index in self.levels if shape.levels[index].pair]
        self.unknowns = 2 * len(self.levels) + len(self.pairs) + any(shape.gamma.values())
        algorithms = [ALGORITHMS[point.collective, point.algorithm] for point in points]
        self.settings = [(algorithm, setting(algorithm, point.nbytes)) for algorithm, point in zip(algorithms, points)]

    def machine(self, factors: np.ndarray) -> Machine:
        levels = list(self.start.levels)
        for alpha, beta, index in zip(factors[0::2], factors[1::2], self.levels):
            level = levels[index]
            levels[index] = replace(level, alpha=max(level.alpha, SMALLEST) * exp(alpha), beta=level.beta * exp(beta),
                                    bus=level.bus and level.bus * exp(beta), sources={})
        for pair, index in zip(factors[2 * len(self.levels):], self.pairs):         # goes with beta, or its slope would be lost
            start, level = self.start.levels[index], levels[index]
            levels[index] = replace(level, pair=start.pair * level.beta / start.beta * exp(pair))
        scale = exp(factors[-1]) if any(self.start.gamma.values()) else 1
        return replace(self.start, levels=tuple(levels), gamma={name: gamma * scale for name, gamma in self.start.gamma.items()},
                       sources={"alpha, beta, gamma": "fitted to measured times"})

    def seconds(self, index: int, machine: Machine) -> float:
        (algorithm, setting), point = self.settings[index], self.points[index]
        return simulate(algorithm, point.nbytes, machine, setting=setting, dtype=point.dtype).seconds

    def residuals(self, factors: np.ndarray, which: list[int]) -> np.ndarray:
        """Return log(predicted / measured) of points, and how far the unknowns are from the start."""
        machine = self.machine(factors)
        ratios = [max(self.seconds(index, machine), 1e-12) / self.points[index].seconds for index in which]
        return np.concatenate([np.log(ratios), PULL * factors])


def _solve(model: _Model, which: list[int]) -> np.ndarray:
    """Return the unknowns that fit the chosen points best."""
    def residuals(factors: np.ndarray) -> np.ndarray:
        return model.residuals(factors, which)

    start = np.zeros(model.unknowns)
    bottoms = [_descend(residuals, factors) for factors in (start, _search(residuals, start))]      # either can miss the valley
    return min(bottoms, key=lambda factors: _square(residuals(factors)))


Residuals = Callable[[np.ndarray], np.ndarray]


def _search(residuals: Residuals, factors: np.ndarray) -> np.ndarray:
    """Try powers of ten on one unknown at a time, while that helps: where an unknown matters little, its slope says nothing."""
    best = _square(residuals(factors))
    for _ in range(4):
        before = best
        for index in range(len(factors)):
            tries = [_moved(factors, index, step) for step in np.log(DECADES)]
            squares = [_square(residuals(entry)) for entry in tries]
            if min(squares) < best:
                best = min(squares)
                factors = tries[squares.index(best)]
        if best > 0.9 * before:
            break
    return factors


def _descend(residuals: Residuals, factors: np.ndarray) -> np.ndarray:
    """Go down by damped Gauss-Newton steps until they gain nothing."""
    found, damping = residuals(factors), 1e-3
    for _ in range(40):
        slopes = np.stack([(residuals(_moved(factors, index, 1e-4)) - found) / 1e-4 for index in range(len(factors))], axis=1)
        while damping < 1e6:
            step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(factors)), -slopes.T @ found)
            tried = factors + np.clip(step, -2, 2)
            there = residuals(tried)
            if _square(there) < _square(found):
                break
            damping *= 10
        else:
            return factors
        gain = 1 - _square(there) / _square(found)
        factors, found, damping = tried, there, damping / 10
        if gain < 1e-6:
            break
    return factors


def _moved(factors: np.ndarray, index: int, step: float) -> np.ndarray:
    moved = factors.copy()
    moved[index] += step
    return moved


def _square(values: np.ndarray) -> float:
    return float(values @ values)
