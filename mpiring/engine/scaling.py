"""Copy an array times a factor, as Horovod scales: integers in float64, truncated toward zero, 16-bit floats in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiring.runtime import halves


def scale(xp: Any, target: Any, source: Any, factor: float) -> None:
    """Write source * factor into target, which may be the source; both have one shape and dtype."""
    by = np.float32(factor) if halves.is_narrow(target.dtype) else float(factor)
    xp.multiply(source, by, target, casting="unsafe")
