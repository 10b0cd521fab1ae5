"""A Pallas kernel as a PyTorch operator: softplus with its gradient, in a training step, and compiled for a chip.

    python examples/kernel.py [--topology v5e-1]

On virtual chips the kernel is interpreted; with libtpu installed it is also compiled for the chip that is named.
"""

import argparse

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from torch.tpu.pallas import jax_op

from torch_tpu import aot


def _forward(x, out):
    out[...] = jnp.maximum(x[...], 0) + jnp.log1p(jnp.exp(-jnp.abs(x[...])))


def _backward(x, grad, out):
    out[...] = grad[...] / (1 + jnp.exp(-x[...]))


def _call(kernel, *arrays):
    block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    rows, columns = arrays[0].shape
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((rows, columns), arrays[0].dtype),
                          grid=(rows // 8, columns // 128), in_specs=[block] * len(arrays), out_specs=block)(*arrays)


@jax.custom_vjp
def _softplus(x):
    return _call(_forward, x)


_softplus.defvjp(lambda x: (_softplus(x), x), lambda x, grad: (_call(_backward, x, grad),))


@jax_op("example::softplus")
def softplus(x: jax.Array) -> jax.Array:
    return _softplus(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 256), torch.nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(softplus(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e-1")
    given = parser.parse_args()

    torch.manual_seed(0)
    model = Model().to("tpu")
    step = torch.tpu.compile_step(model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
                                  loss=torch.nn.functional.mse_loss)
    x = torch.randn(64, 16, device="tpu")
    target = x.square().mean(1, keepdim=True)
    losses = [step(x, target).item() for _ in range(50)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    try:
        print(aot.compile(model, x, given.topology).report)
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    main()
