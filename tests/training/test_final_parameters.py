"""`final_parameters.to_bytes`: tensors as bytes of a safetensors file."""

import ctypes
import gc

import pytest
import torch
from safetensors.torch import load

from topotrain.core.model.safetensors_layout import NAMES
from topotrain.training.final_parameters import from_bytes, to_bytes


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits."""
    size = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 2 if dtype is torch.bool else 100, (size,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_each_dtype_comes_back_as_it_was(name: str) -> None:
    dtype = getattr(torch, name)
    held = {"byte": of(torch.uint8, 3), "matrix": of(dtype, 2, 3), "none": of(dtype, 0, 4), "one": of(dtype)}
    found = from_bytes(to_bytes(held), "state")
    assert found.keys() == held.keys()
    for key, tensor in held.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_others_read_the_bytes() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    assert torch.equal(load(to_bytes({"weight": weight}))["weight"], weight)


def test_tensors_of_many_sizes_leave_no_class_behind() -> None:
    """A worker writes its state in each epoch, and the text in it has another length again and again."""

    def classes() -> int:
        gc.collect()
        kinds = (type(ctypes.c_ubyte * 1), type(ctypes.POINTER(ctypes.c_ubyte)))
        return sum(type(found) in kinds for found in gc.get_objects())

    to_bytes({"text": torch.zeros(1, dtype=torch.uint8)})
    before = classes()
    for size in range(2, 52):
        to_bytes({"text": torch.zeros(size, dtype=torch.uint8)})
    assert classes() <= before  # those of earlier tests may go meanwhile
