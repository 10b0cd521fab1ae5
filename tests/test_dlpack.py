"""torch_tpu.to_jax and from_jax: the same memory, and values that stay what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_tpu
from torch_tpu.runtime import dtypes
from torch_tpu.tensor import buffer


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", dtypes.supported(), ids=str)
def test_every_dtype_both_ways(dtype):
    tensor = torch.tensor([0, 1, 2, 3]).to(dtype).to("tpu")
    array = torch_tpu.to_jax(tensor)
    assert isinstance(array, jax.Array) and array.shape == (4,) and array.dtype == dtypes.to_numpy(dtype)
    assert address(array) == address(buffer.of(tensor).array())
    back = torch_tpu.from_jax(array)
    assert back.dtype == dtype and back.device == torch.device("tpu", 0)
    assert address(buffer.of(back).array()) == address(array)
    assert back.cpu().to(torch.complex64).tolist() == tensor.cpu().to(torch.complex64).tolist()


def test_arrays_are_values():
    tensor = torch.arange(4.0).to("tpu")
    array = torch_tpu.to_jax(tensor)
    for _ in range(2):
        tensor.add_(1)
    assert array.tolist() == [0, 1, 2, 3] and tensor.tolist() == [2, 3, 4, 5]
    source = jnp.arange(4.0)
    made = torch_tpu.from_jax(source)
    made.mul_(10)
    made.mul_(10)
    assert source.tolist() == [0, 1, 2, 3] and made.tolist() == [0, 100, 200, 300]


def test_views_are_copied():
    tensor = torch.arange(12.0).view(3, 4).to("tpu")
    assert torch_tpu.to_jax(tensor.t()).tolist() == tensor.t().tolist()
    assert torch_tpu.to_jax(tensor[1:, ::2]).tolist() == tensor[1:, ::2].tolist()
    assert torch_tpu.to_jax(tensor.view(2, 6)).shape == (2, 6)
    assert torch_tpu.to_jax(torch.tensor([1 + 2j], device="tpu").conj()).tolist() == [1 - 2j]


def test_jax_computes_on_it():
    tensor = torch.randn(4, 4).to("tpu")
    result = torch_tpu.from_jax(jax.jit(lambda a: jnp.sin(a) @ a)(torch_tpu.to_jax(tensor)))
    torch.testing.assert_close(result.cpu(), tensor.cpu().sin() @ tensor.cpu(), rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"takes a tensor on tpu, got a tensor on cpu"):
        torch_tpu.to_jax(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"tensor\.detach\(\)"):
        torch_tpu.to_jax(torch.ones(1, device="tpu", requires_grad=True))
    with pytest.raises(TypeError, match=r"takes a jax\.Array, got a ndarray"):
        torch_tpu.from_jax(np.ones(2))
    with pytest.raises(TypeError, match="tracing"):
        jax.jit(lambda a: torch_tpu.from_jax(a))(jnp.ones(2))
    with pytest.raises(TypeError, match="no PyTorch counterpart"):
        torch_tpu.from_jax(jnp.ones(2, jnp.int4))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ValueError, match="deleted"):
        torch_tpu.from_jax(gone)


def test_dlpack_is_refused():
    tensor = torch.ones(2, device="tpu")
    with pytest.raises(BufferError, match=r"torch_tpu\.to_jax"):
        np.from_dlpack(tensor)
    with pytest.raises(BufferError, match=r"torch_tpu\.to_jax"):
        torch.from_dlpack(tensor)
    assert np.from_dlpack(torch.ones(2)).tolist() == [1, 1]


def test_the_users_jax_is_left_alone():
    torch.ones(2, dtype=torch.float64, device="tpu") + 1
    assert jnp.arange(3).dtype == jnp.int32 and not jax.config.jax_enable_x64


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'to_numpy'"):
        _ = torch_tpu.to_numpy
