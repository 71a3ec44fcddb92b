"""Horovod's small functions, for the programs that import them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

TORCH = "torch"


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether there is an interface for a framework: for PyTorch there is."""
    if ext_base_name != TORCH:
        return False
    try:
        import mpiring.torch  # noqa: F401
    except ImportError:
        return False
    return True


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if there is no interface for a framework. `ext_name` as Horovod has it: horovod.torch."""
    name = ext_name.removeprefix("horovod.")
    if not extension_available(name):
        raise ImportError(f"mpiring has no {ext_name}, or what it needs is not installed")


@cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether a framework sees a GPU."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Tell whether MPI can be used: always."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """Tell whether gloo can be used: never."""
    return False


def nccl_built(verbose: bool = False) -> bool:
    """Tell whether NCCL can be used: never."""
    return False


def ddl_built(verbose: bool = False) -> bool:
    """Tell whether IBM's DDL can be used: never."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Tell whether Intel's oneCCL can be used: never."""
    return False


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the time of a block; those that are None are left alone."""
    new = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return a function of (op, average) that gives the op meant."""
    from mpiring.torch.mpi_ops import handle_average_backwards_compatibility

    return handle_average_backwards_compatibility


def num_rank_is_power_2(num_rank: int) -> bool:
    """Tell whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741 (Horovod's name)
    """Cut a list into n parts, as even as can be, the first ones longer by one."""
    least, more = divmod(len(l), n)
    edges = [index * least + min(index, more) for index in range(n + 1)]
    return [l[start:stop] for start, stop in zip(edges, edges[1:])]


def is_iterable(x: Any) -> bool:
    """Tell whether one can iterate over an object."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: mpiring is not compiled for one version of a framework."""


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare the first three numbers of two versions."""
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> list[int]:
    parts = version.partition("+")[0].split(".")[:3]
    digits = ["".join(char for char in part if char.isdigit()) for part in parts]
    return [int(part or 0) for part in digits + ["0"] * (3 - len(parts))]
