"""Keeps torch.compile out of what exchanges between ranks: it breaks its graphs there, and runs these functions as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)


def eager(function: _Function) -> _Function:
    """Mark a function as not to be traced, nor what it calls.

    As torch.compiler.disable, which takes seconds at import, for it loads the compiler. Where PyTorch has not got these parts of
    it (they are not public), a function that calls this one cannot be compiled.
    """
    function._torchdynamo_disable = True                 # where a traced function calls it
    function._torchdynamo_disable_msg = "mpiring exchanges data between ranks here"
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))     # for all else
    except (ImportError, AttributeError, TypeError):
        pass
    return function
