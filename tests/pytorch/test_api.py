"""The names of mpiring.torch and their signatures: those of horovod.torch, so that positional arguments mean the same."""

import importlib
import inspect
import os
import subprocess
import sys

import pytest

import mpiring.torch
from mpiring.torch import mpi_ops

ALLREDUCE = "tensor, average=None, name=None, {}op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=ALL"
REDUCESCATTER = "tensor, name=None, {}op=0, process_set=ALL, prescale_factor=1.0, postscale_factor=1.0"
PLAIN, SMALL = "", "compression=NONE, "


def grouped(signature: str) -> str:
    return signature.replace("tensor,", "tensors,")


SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "", "is_initialized": "", "stop_timeline": "", "mpi_threads_supported": "", "mpi_enabled": "", "mpi_built": "",
    "gloo_enabled": "", "gloo_built": "", "nccl_built": "", "ddl_built": "", "ccl_built": "", "cuda_built": "", "rocm_built": "",
    "size": "", "local_size": "", "cross_size": "", "rank": "", "local_rank": "", "cross_rank": "",
    "start_timeline": "file_path, mark_cycles=False",
    "allreduce": ALLREDUCE.format(SMALL), "allreduce_async": ALLREDUCE.format(PLAIN),
    "allreduce_": ALLREDUCE.format(PLAIN), "allreduce_async_": ALLREDUCE.format(PLAIN),
    "grouped_allreduce": grouped(ALLREDUCE.format(SMALL)), "grouped_allreduce_async": grouped(ALLREDUCE.format(PLAIN)),
    "grouped_allreduce_": grouped(ALLREDUCE.format(PLAIN)), "grouped_allreduce_async_": grouped(ALLREDUCE.format(PLAIN)),
    "sparse_allreduce_async": "tensor, name, op, process_set=ALL",
    "allgather": "tensor, name=None, process_set=ALL", "allgather_async": "tensor, name=None, process_set=ALL",
    "grouped_allgather": "tensors, name=None, process_set=ALL", "grouped_allgather_async": "tensors, name=None, process_set=ALL",
    "broadcast": "tensor, root_rank, name=None, process_set=ALL",
    "broadcast_async": "tensor, root_rank, name=None, process_set=ALL",
    "broadcast_": "tensor, root_rank, name=None, process_set=ALL",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=ALL",
    "alltoall": "tensor, splits=None, name=None, process_set=ALL",
    "alltoall_async": "tensor, splits=None, name=None, process_set=ALL",
    "reducescatter": REDUCESCATTER.format(SMALL), "reducescatter_async": REDUCESCATTER.format(PLAIN),
    "grouped_reducescatter": grouped(REDUCESCATTER.format(SMALL)),
    "grouped_reducescatter_async": grouped(REDUCESCATTER.format(PLAIN)),
    "poll": "handle", "synchronize": "handle", "join": "device=-1", "barrier": "process_set=ALL",
    "ProcessSet": "ranks_or_comm", "add_process_set": "process_set", "remove_process_set": "process_set",
    "broadcast_parameters": "params, root_rank", "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=ALL", "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=NONE, backward_passes_per_step=1, op=0, "
                            "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=ALL",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
}

OTHERS = ["Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "HorovodInternalError", "global_process_set"]

MORE = {"broadcast_parameters": 1, "broadcast_optimizer_state": 1, "allgather_object": 1, "SyncBatchNorm": 1}
"""Arguments that these may have after Horovod's: a process set."""


def shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    if default is mpiring.torch.global_process_set:
        return f"{parameter.name}=ALL"
    return f"{parameter.name}=NONE" if default is mpiring.torch.Compression.none else f"{parameter.name}={default!r}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature(name):
    parameters = list(inspect.signature(getattr(mpiring.torch, name)).parameters.values())
    expected = SIGNATURES[name].split(", ") if SIGNATURES[name] else []
    assert [shown(parameter) for parameter in parameters[:len(expected)]] == expected
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters[:len(expected)])
    more = parameters[len(expected):]
    assert len(more) <= MORE.get(name, 0)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in more)


def test_the_names_are_these_and_no_others():
    assert sorted(mpiring.torch.__all__) == sorted([*SIGNATURES, *OTHERS])
    assert len(mpiring.torch.__all__) == 66
    assert all(hasattr(mpiring.torch, name) for name in mpiring.torch.__all__)
    assert not hasattr(mpiring.torch, "elastic")


def test_what_is_in_mpi_ops_alone():
    for name in ("is_homogeneous", "handle_average_backwards_compatibility", "_basics", "_handle_map"):
        assert hasattr(mpi_ops, name) and name not in mpiring.torch.__all__
    for name in mpi_ops.__all__:
        assert hasattr(mpi_ops, name)
    assert mpi_ops._basics.rank == mpiring.torch.rank


def test_the_ops_are_plain_numbers():
    hvd = mpiring.torch
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert ops == [0, 1, 2, 3, 4, 5] and all(type(op) is int for op in ops)


def test_the_error_is_a_runtime_error():
    assert mpiring.torch.HorovodInternalError.__mro__[1] is RuntimeError


def test_every_public_function_says_what_it_does():
    for name in SIGNATURES:
        assert inspect.getdoc(getattr(mpiring.torch, name)), name


def test_without_pytorch_a_sentence_says_so():
    """In a process of its own, in which torch cannot be imported."""
    code = ("import sys; sys.modules['torch'] = None\n"
            "try:\n    import mpiring.torch\nexcept ImportError as error:\n    print(error)\n")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI", "PMI", "PRTE", "PMIX"))}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    assert "needs PyTorch" in ended.stdout and "mpiring[torch]" in ended.stdout, ended


def test_a_module_for_each_name():
    assert importlib.import_module("mpiring.torch.compression").Compression is mpiring.torch.Compression
