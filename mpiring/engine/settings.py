"""What an engine can be told: by arguments, else by MPIRING_ variables, else by those of Horovod, in their own units."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpiring.units import parse_size

FUSION_THRESHOLD = 4 << 20
"""Bytes that are fused into one exchange at most."""

CYCLE_TIME = 5e-4
"""Seconds in which further operations may join the first one, unless somebody waits for it already."""


@dataclass(frozen=True)
class Settings:
    """An engine's settings; those that shape what ranks do together are rank 0's on all of them."""

    fusion_threshold: int = FUSION_THRESHOLD
    cycle_time: float = CYCLE_TIME
    deterministic: bool = False
    timeline: str = ""
    stall_seconds: float = 60.0
    timeout: float = 300.0


def agree(given: Mapping[str, Any], comm: Any) -> Settings:
    """Read the settings; take over rank 0's fusion threshold, cycle time and deterministic. Collective.

    Raises what `read` does, on all ranks, naming the rank where something is wrong.
    """
    found: Any = None
    try:
        found = read(given)
    except (TypeError, ValueError) as error:
        found = error
    everybody = comm.allgather(found)
    for rank, other in enumerate(everybody):
        if isinstance(other, Exception):
            raise type(other)(f"rank {rank}: {other}")
    first = everybody[0]
    return replace(found, fusion_threshold=first.fusion_threshold, cycle_time=first.cycle_time, deterministic=first.deterministic)


def read(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings: arguments that are not None, then the environment, then the defaults. ValueError names what is wrong."""
    found: dict[str, Any] = {}
    for field in fields(Settings):
        if given.get(field.name) is not None:
            found[field.name] = _checked(field.name, field.name, given[field.name])
            continue
        for variable, parse in VARIABLES[field.name]:
            text = environ.get(variable, "").strip()
            if text and (value := _parsed(variable, text, parse)) is not None:
                found[field.name] = _checked(field.name, variable, value)
                break
    return Settings(**found)


def _parsed(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}, not {_MEANING[parse]}") from None


def _checked(name: str, source: str, value: Any) -> Any:
    kind, meaning = _KINDS.get(name, (float, "a number of seconds"))
    try:
        value = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{source} is {value!r}, of type {type(value).__name__}, not {meaning}") from None
    if kind in (operator.index, float) and not 0 <= value < float("inf"):
        raise ValueError(f"{source} is {value!r}: it must be 0 or more, and finite")
    return value


def _truth(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(value)
    return bool(value)


_KINDS = {"fusion_threshold": (operator.index, "a whole number of bytes"), "deterministic": (_truth, "True or False"),
          "timeline": (os.fspath, "a file's name")}


def _milliseconds(text: str) -> float:
    return float(text) / 1e3


def _flag(text: str) -> bool:
    known = {"0": False, "1": True, "false": False, "true": True}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _never(text: str) -> float | None:
    """Switch the stall check off where Horovod's variable says so."""
    return 0.0 if _flag(text) else None


def _name(text: str) -> str | None:
    """Return a file's name; Horovod's DYNAMIC says that there is none yet."""
    return None if text == "DYNAMIC" else text


_MEANING = {parse_size: "a number of bytes such as 65536, 512K or 4M", _milliseconds: "a number of milliseconds",
            _flag: "0 or 1", _never: "0 or 1", float: "a number of seconds", _name: "a file's name"}

VARIABLES: dict[str, tuple[tuple[str, Callable[[str], Any]], ...]] = {
    "fusion_threshold": (("MPIRING_FUSION_THRESHOLD", parse_size), ("HOROVOD_FUSION_THRESHOLD", parse_size)),
    "cycle_time": (("MPIRING_CYCLE_TIME", _milliseconds), ("HOROVOD_CYCLE_TIME", _milliseconds)),
    "deterministic": (("MPIRING_DETERMINISTIC", _flag),),
    "timeline": (("MPIRING_TIMELINE", _name), ("HOROVOD_TIMELINE", _name)),
    "stall_seconds": (("MPIRING_STALL_SECONDS", float), ("HOROVOD_STALL_CHECK_DISABLE", _never),
                      ("HOROVOD_STALL_CHECK_TIME_SECONDS", float)),
    "timeout": (("MPIRING_TIMEOUT", float), ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", float)),
}
"""The environment variables of each setting, the first one that is set counts, with what reads them."""
