"""Tensors as arrays and back, over the same memory."""

import sys
import warnings

import numpy as np
import pytest
import torch

from mpiring.torch import tensors
from mpiring.torch.tensors import array_of, stream_of, tensor_of

from ranks import DTYPES, values

WIDER = [*DTYPES, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", WIDER, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)], ids=str)
def test_there_and_back(dtype, shape):
    tensor = values(1, shape, torch.float32).to(dtype)
    array = array_of(tensor)
    assert isinstance(array, np.ndarray) and array.shape == shape
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.astype(np.complex128).tolist() == tensor.to(torch.complex128).tolist()
    back = tensor_of(array)
    assert back.dtype == dtype and back.shape == shape and (0 in shape or back.stride() == tensor.stride())
    assert back.data_ptr() == tensor.data_ptr()
    if tensor.numel():
        array[...] = 1
        assert set(tensor.to(torch.complex128).flatten().tolist()) == {1}, "written through"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:, 0], lambda x: x[1].expand(3, -1),
                                  lambda x: x.reshape(1, 2, 2, 6).to(memory_format=torch.channels_last)])
def test_strides(view, dtype):
    tensor = view(values(0, (4, 6), dtype))
    array = array_of(tensor, in_place=True)
    assert array.strides == tuple(stride * tensor.itemsize for stride in tensor.stride())
    assert array.ctypes.data == tensor.data_ptr()
    assert torch.equal(tensor_of(array), tensor) and tensor_of(array).stride() == tensor.stride()


def test_gradients_stay_behind():
    parameter = torch.nn.Parameter(torch.ones(3))
    array = array_of(parameter, in_place=True)
    array += 1
    assert parameter.tolist() == [2, 2, 2] and parameter.requires_grad and parameter.is_leaf
    assert not tensor_of(array).requires_grad
    assert array_of(parameter * 2).tolist() == [4, 4, 4]


def test_marks_are_resolved_or_refused():
    tensor = torch.tensor([1 + 2j])
    assert array_of(tensor.conj()).tolist() == [1 - 2j]
    assert array_of(tensor.conj().imag).tolist() == [-2]
    for marked in (tensor.conj(), tensor.conj().imag):
        with pytest.raises(ValueError, match="resolve_conj"):
            array_of(marked, in_place=True)


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def half():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ones(2, dtype=torch.complex32)


@pytest.mark.parametrize("make, match", [
    (lambda: torch.ones(2).to_sparse(), "layout torch.sparse_coo"), (lambda: torch.ones(2, 2).to_sparse_csr(), "sparse_csr"),
    (lambda: torch.ones(2, device="meta"), "on meta is not supported"), (half, "dtype torch.complex32"), (quantized, "quantized")],
    ids=["coo", "csr", "meta", "complex half", "quantized"])
def test_what_has_no_such_memory(make, match):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                  # sparse CSR is in beta
        tensor = make()
    with pytest.raises(ValueError, match=match):
        array_of(tensor)


@pytest.mark.parametrize("other", [None, 1.0, [1.0], np.ones(2)], ids=repr)
def test_what_is_no_tensor(other):
    with pytest.raises(TypeError, match=f"tensor is of type {type(other).__name__}, not a torch.Tensor"):
        array_of(other)


def test_without_ml_dtypes(monkeypatch):
    tensors._dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ValueError, match=r"bfloat16 need ml_dtypes: pip install 'mpiring\[torch\]'"):
        array_of(torch.ones(2, dtype=torch.bfloat16))
    assert array_of(torch.ones(2)).tolist() == [1, 1]


class _Cuda:
    """Stands in for CuPy."""

    class cuda:
        ExternalStream = staticmethod(lambda pointer, device: ("stream", pointer, device))


def test_streams(monkeypatch):
    """Work on a CUDA tensor is ordered with PyTorch's current stream of its device; elsewhere nothing is to be done."""
    with stream_of(torch.ones(1)) as nothing:
        assert nothing is None
    monkeypatch.setattr(tensors, "_cupy", lambda: _Cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 100 + device}))

    class OnGpu(torch.Tensor):
        device = torch.device("cuda:1")

    assert stream_of(torch.ones(1).as_subclass(OnGpu)) == ("stream", 101, 1)
