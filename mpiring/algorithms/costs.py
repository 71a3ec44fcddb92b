"""Cost lines: formulas that a person can read and that can be computed, from one text."""

from __future__ import annotations

from fractions import Fraction

from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import ceil_log2, floor_log2

SYMBOLS = {
    "n": "ranks",
    "log": "log2 n, rounded up",
    "p": "the largest power of two that is not above n",
    "lg": "log2 p",
    "f": "1 if n is no power of two, else 0",
    "h": "log2(n-1), rounded down",
    "k": "pieces of the pipeline",
    "r": "rings",
    "H": "nodes",
    "M": "ranks of the largest node",
    "s": "ranks below the root's busiest child in a binomial tree",
    "b": "bits set in the numbers from 1 to n-1, about n log2(n) / 2",
}


class Cost:
    """A formula in SYMBOLS, such as Cost("2*(n-1)/n"); called with a Setting, or a number of ranks, it gives a Fraction.

    A single rank costs nothing, whatever the formula says.
    """

    def __init__(self, text: str):
        self.text = text
        self._code = compile(text, "cost line", "eval")

    def __call__(self, setting: Setting | int) -> Fraction:
        """Compute the formula."""
        setting = setting if isinstance(setting, Setting) else Setting(setting)
        if setting.size == 1:
            return Fraction(0)
        values = {name: Fraction(_VALUES[name](setting)) for name in self._code.co_names if name in _VALUES}
        return Fraction(eval(self._code, {"__builtins__": {}, "min": min, "max": max}, values))

    def __str__(self) -> str:
        return self.text.replace("*(", "(").replace("*", " ")


def _busiest(setting: Setting) -> int:
    """Return the ranks of the largest block below the root, where the last block may be short."""
    top = ceil_log2(setting.size) - 1
    return max(setting.size - (1 << top), 1 << top >> 1)


_VALUES = {
    "n": lambda setting: setting.size,
    "log": lambda setting: ceil_log2(setting.size),
    "p": lambda setting: 1 << floor_log2(setting.size),
    "lg": lambda setting: floor_log2(setting.size),
    "f": lambda setting: int(setting.size & (setting.size - 1) != 0),
    "h": lambda setting: floor_log2(setting.size - 1),
    "k": lambda setting: setting.pieces,
    "r": lambda setting: len(setting.all_rings),
    "H": lambda setting: len(setting.members),
    "M": lambda setting: setting.largest,
    "s": _busiest,
    "b": lambda setting: sum(number.bit_count() for number in range(setting.size)),
}
