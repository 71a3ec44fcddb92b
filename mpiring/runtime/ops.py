"""The operations: what each MPI.Op does to arrays, and for which dtypes it means something.

One table for all: MPI's own rules (MPI-4.1, section 6.9.2), with bool added as NumPy has it. Results are NumPy's, NaN and signed
zero included, because NumPy (or CuPy) computes them; the MPI library sees bytes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpiring.runtime import halves

NUMBERS = "biufc"
ORDERED = "biuf"
INTEGERS = "biu"


class _Average:
    """mpiring.AVERAGE: the sum divided by the number of ranks; integers are divided in float64 and truncated toward zero."""

    def __repr__(self) -> str:
        return "mpiring.AVERAGE"


AVERAGE = _Average()


class _Adasum:
    """mpiring.ADASUM: adds gradients as far as they are orthogonal, and averages them as far as they are parallel.

    For allreduces of the engine, of float16, bfloat16, float32 and float64, each array for itself: two vectors a and b become
    (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, and those of more ranks are combined in pairs.

    Source: S. Maleki et al., "Scaling distributed training with adaptive summation", arXiv:2006.02924, 2020.
    """

    def __repr__(self) -> str:
        return "mpiring.ADASUM"


ADASUM = _Adasum()

ADASUM_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Operation:
    """An op in terms of arrays: the name of the ufunc that does it, and the dtype kinds that it is for."""

    name: str
    ufunc: str
    kinds: str
    average: bool = False
    user: MPI.Op | None = None

    @property
    def commutes(self) -> bool:
        """Whether operands may change places."""
        return self.user is None or self.user.is_commutative

    def combine(self, xp, dtype: np.dtype) -> Callable[[object, object, object], object]:
        """Return the function (left, right, out) that reduces two arrays of module `xp`; `out` may be one of them."""
        if self.user is None:
            ufunc = getattr(xp, self.ufunc)
            if self.ufunc in ("maximum", "minimum"):     # of three operands, NumPy wants the last one by keyword
                return lambda left, right, out: ufunc(left, right, out=out)
            return halves.combine(self, dtype) if xp is np else ufunc
        return _user_combine(self.user, mpi_type(dtype))


_TABLE = (
    (MPI.SUM, Operation("SUM", "add", NUMBERS)),
    (MPI.PROD, Operation("PROD", "multiply", NUMBERS)),
    (MPI.MAX, Operation("MAX", "maximum", ORDERED)),
    (MPI.MIN, Operation("MIN", "minimum", ORDERED)),
    (MPI.LAND, Operation("LAND", "logical_and", INTEGERS)),
    (MPI.LOR, Operation("LOR", "logical_or", INTEGERS)),
    (MPI.LXOR, Operation("LXOR", "logical_xor", INTEGERS)),
    (MPI.BAND, Operation("BAND", "bitwise_and", INTEGERS)),
    (MPI.BOR, Operation("BOR", "bitwise_or", INTEGERS)),
    (MPI.BXOR, Operation("BXOR", "bitwise_xor", INTEGERS)),
)
_AVERAGE = Operation("AVERAGE", "add", "iufc", average=True)

NAMES: dict[str, object] = {operation.name: op for op, operation in _TABLE} | {"AVERAGE": AVERAGE}
"""The ops by name, for command lines."""

ENGINE_NAMES = {**NAMES, "ADASUM": ADASUM}
"""The ops by name of the engine's allreduces, which can go on with zeros for a rank's data."""


def find(op: object, dtype: np.dtype) -> Operation:
    """Return what `op` does to arrays of `dtype`; TypeError where it is no op, or has no meaning for the dtype."""
    operation = _lookup(op)
    if kind(dtype) not in operation.kinds:
        known = ", ".join(_KIND_NAMES[letter] for letter in operation.kinds)
        raise TypeError(f"op {operation.name} has no meaning for dtype {dtype} (it is for {known})")
    if operation.user is not None:
        mpi_type(dtype)
    return operation


def _lookup(op: object) -> Operation:
    if isinstance(op, _Average):
        return _AVERAGE
    if isinstance(op, _Adasum):
        raise TypeError("op is mpiring.ADASUM, which is for allreduces of the engine alone (mpiring.Engine.allreduce_async)")
    if not isinstance(op, MPI.Op):
        raise TypeError(f"op is of type {type(op).__name__}, not an MPI.Op or mpiring.AVERAGE")
    if op == MPI.OP_NULL:
        raise ValueError("op is MPI.OP_NULL: was it freed?")
    for known, operation in _TABLE:
        if op == known:
            return operation
    if op.is_predefined:
        name = next((name for name in ("MAXLOC", "MINLOC", "REPLACE", "NO_OP") if op == getattr(MPI, name)), "given")
        raise TypeError(f"op {name} has no meaning for plain numbers; known: {', '.join(NAMES)}, and ops made with MPI.Op.Create")
    return Operation("user", "", NUMBERS, user=op)


_INTS, _WIDE_INTS, _REALS, _COMPLEX = "bhilqBHILQ", "ilqILQ", "fdg", "FDG"

NATIVE_AGREES = {
    # Open MPI's sums of 8 and 16 bits saturate where it has vector instructions for them, and wrap in the remainder.
    "SUM": _WIDE_INTS + _REALS + _COMPLEX,
    "AVERAGE": _WIDE_INTS + _REALS + _COMPLEX,
    # Products of complex numbers with an infinite part: C finds infinity where NumPy multiplies out and finds NaN.
    "PROD": _INTS + _REALS,
    # Of floats, all libraries lose a NaN that not all ranks have, MPICH on some ranks and not on others; zeros keep another sign.
    "MAX": _INTS,
    "MIN": _INTS,
    "LAND": _INTS,
    "LOR": _INTS,
    "LXOR": _INTS,
    "BAND": _INTS,
    "BOR": _INTS,
    "BXOR": _INTS,
}
"""For each op the dtypes, as NumPy's letters, whose results the MPI libraries and NumPy agree about: the same bits, but that floats
are summed in another order. Not bool, for which MPI has the logical ops alone, nor float16, which it would round at every step.

Of a NaN they agree where it is, but not about its sign and payload, which can differ between ranks with MPICH and Intel MPI.
"""


def native_agrees(operation: Operation, dtype: np.dtype) -> bool:
    """Tell whether the MPI library's own collectives may stand in for NumPy: a user's op is the library's to call in any case."""
    if operation.user is not None:
        return _has_mpi_type(dtype)
    return dtype.isnative and dtype.char in NATIVE_AGREES[operation.name]


_KIND_NAMES = {"b": "bool", "i": "signed integers", "u": "unsigned integers", "f": "floats", "c": "complex numbers"}


def kind(dtype: np.dtype) -> str:
    """Return the dtype's kind, one of 'biufc', or '' for what is not numeric. ml_dtypes' floats count as floats."""
    if dtype.kind in NUMBERS:
        return dtype.kind
    return "f" if halves.is_float(dtype) else ""


def divide(xp, dtype: np.dtype, size: int) -> Callable[[object], object]:
    """Return the function that divides an array by `size` in place, making no temporary array.

    Integers are divided in float64 and truncated toward zero, 16-bit floats in float32, others in their own dtype.
    """
    by = np.float32(size) if halves.is_narrow(dtype) else size
    return lambda array: xp.true_divide(array, by, array, casting="unsafe")


def mpi_type(dtype: np.dtype) -> MPI.Datatype:
    """Return MPI's own datatype for a NumPy dtype; TypeError where it has none."""
    if not _has_mpi_type(dtype):
        raise TypeError(f"MPI has no datatype for dtype {dtype}; user ops and algorithm='native' need one")
    return MPI.Datatype.fromcode(dtype.char)


def _has_mpi_type(dtype: np.dtype) -> bool:
    try:
        return dtype.isnative and MPI.Datatype.fromcode(dtype.char) != MPI.DATATYPE_NULL
    except ValueError:
        return False


def _user_combine(op: MPI.Op, datatype: MPI.Datatype) -> Callable[[object, object, object], object]:
    """Let MPI call the user's function: it reduces into its second argument, so a right operand that is not `out` is copied."""

    def combine(left, right, out):
        result = right if out is right else right.copy()
        op.Reduce_local([np.ascontiguousarray(left), left.size, datatype], [result, result.size, datatype])
        if out is not right:
            np.copyto(out, result)

    return combine
