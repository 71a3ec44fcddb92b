"""Sizes as people write them: parsed, and sizes, times and rates written with a unit."""

from __future__ import annotations

import re
from collections.abc import Iterable

FACTORS = {"": 1, "B": 1, **{f"{letter}{end}": base ** power for power, letter in enumerate("KMGT", 1)
                             for end, base in (("", 1024), ("IB", 1024), ("B", 1000))}}


def parse_size(text: str) -> int:
    """Return bytes: 64K and 64KiB are 64 * 1024 (K, M, G, T), 160MB is 160,000,000 (KB, MB, GB, TB); else ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?(?:I?B)?)", text.strip().upper())
    if not match or match[2] not in FACTORS:
        raise ValueError(f"{text!r} is not a size such as 8, 64K, 64KiB (binary) or 160MB (decimal)")
    return round(float(match[1]) * FACTORS[match[2]]) if "." in match[1] else int(match[1]) * FACTORS[match[2]]


def parse_whole(text: str, least: int, most: int | None = None) -> int:
    """Return a whole number within bounds; ValueError for anything else."""
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ValueError(f"{text!r} is not a whole number from {least} on")
    if most is not None and int(text) > most:
        raise ValueError(f"{text!r} is too large: {most} is the most")
    return int(text)


TIMES = ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B"))
BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def seconds(value: float) -> str:
    """Write a time with three digits: 5.93 ms."""
    return _unit(value, TIMES)


def size(nbytes: float) -> str:
    """Write bytes in decimal units: 160 MB."""
    return _unit(nbytes, SIZES)


def rate(beta: float) -> str:
    """Write the s for each byte as a bandwidth: 18 GB/s."""
    return f"{_unit(1 / beta, SIZES)}/s" if beta else "no limit"


def binary(nbytes: float) -> str:
    """Write bytes in binary units where they are whole: 64 KiB; else as size does."""
    unit, name = next(((unit, name) for unit, name in BINARY if nbytes >= unit), BINARY[-1])
    return f"{nbytes / unit:g} {name}" if nbytes % unit == 0 and unit > 1 else size(nbytes)


def _unit(value: float, units: Iterable[tuple[float, str]]) -> str:
    """Write a value in the largest unit that makes it at least 1, with three digits."""
    units = list(units)
    smallest = units[-1] if value else next(entry for entry in units if entry[0] == 1)
    unit, name = next(((unit, name) for unit, name in units if value / unit >= 0.9995), smallest)
    scaled = value / unit
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f}".rstrip("0").rstrip(".") + f" {name}" if digits else f"{scaled:.0f} {name}"


def count(number: int, what: str) -> str:
    """Write a number of things: 1 round, 2 rounds."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
