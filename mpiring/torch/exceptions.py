"""What goes wrong beyond this process: one type of error, as scripts written for Horovod expect it."""

from __future__ import annotations

from types import TracebackType


class HorovodInternalError(RuntimeError):
    """An operation failed on every rank that waits for it: ranks disagree, one is missing or has failed, or has shut down."""


class translated:
    """A context in which the engine's RuntimeErrors become HorovodInternalError, with the same words."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, RuntimeError) and not issubclass(kind, _OTHERS):
            raise HorovodInternalError(str(error)) from error


_OTHERS = (HorovodInternalError, NotImplementedError, RecursionError)
"""RuntimeErrors that are not news from other ranks."""
