"""What the values of the bench's options may be, each parsed by a function of its own."""

from __future__ import annotations

import argparse
import os
import re

import numpy as np

from mpiring.runtime import ops
from mpiring.units import parse_size, parse_whole

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
          "longdouble", "complex64", "complex128", "clongdouble", "bfloat16")


def a_size(text: str) -> int:
    """Parse bytes such as 8, 64K, 16M or 1G; nothing that cannot be there."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise argparse.ArgumentTypeError(f"{text!r} is more than this machine's memory")
    return nbytes


def an_op(text: str) -> str:
    """Parse an op's name, in capitals or not."""
    if text.upper() not in ops.NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ops.NAMES)}")
    return text.upper()


def a_dtype(text: str) -> np.dtype:
    """Parse a dtype's name."""
    if text == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise argparse.ArgumentTypeError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(text)


def above_one(text: str) -> float:
    """Parse a number above 1."""
    if not re.fullmatch(r"\d*\.?\d+", text) or float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 1")
    return float(text)


def positive(text: str) -> int:
    """Parse a whole number from 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Parse a whole number from 0 on."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        return parse_whole(text, least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
