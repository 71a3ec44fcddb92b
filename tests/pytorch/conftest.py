"""The tests of the PyTorch front under mpirun: see spmd.py. Without PyTorch they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from spmd import pytest_configure, pytest_pyfunc_call, pytest_report_header

__all__ = ["pytest_configure", "pytest_pyfunc_call", "pytest_report_header"]

_found = find_spec("torch")

INSTALLED = _found is not None and _found.origin is not None
"""Whether there is PyTorch, and not just a directory of that name on the path."""

os.environ.setdefault("MPIRING_TIMEOUT", "30")           # what waits for ever is an error within a test's time

if INSTALLED:
    import torch

    torch.set_num_threads(1)                             # the other cores belong to other ranks


class _Skipped(pytest.Module):
    """A module that cannot be imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("PyTorch is not installed: pip install 'mpiring[torch]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the modules where there is no PyTorch for them to import."""
    return None if INSTALLED else _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="module")
def hvd() -> Iterator[ModuleType]:
    """Give mpiring.torch, begun, with process sets that may change."""
    import mpiring.torch as hvd

    hvd.init(process_sets="dynamic")
    yield hvd
    hvd.shutdown()
