"""Begin, end, and who is where, as methods of an object."""

from typing import Any

from mpiring.torch.basics import _basics


class HorovodBasics:
    """The methods that horovod.torch has as functions, of the one job that this process is part of."""

    def __init__(self, *_: Any):
        """Make another name for it. Horovod wants the path of a C library here, which mpiring has not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_basics, name)
