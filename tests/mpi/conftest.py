"""The tests under mpirun: see spmd.py."""

from spmd import pytest_configure, pytest_pyfunc_call, pytest_report_header

__all__ = ["pytest_configure", "pytest_pyfunc_call", "pytest_report_header"]
