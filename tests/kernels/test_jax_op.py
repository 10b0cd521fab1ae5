"""torch.tpu.pallas.jax_op: JAX functions as torch operators, against CPU PyTorch."""

from __future__ import annotations

import copy
import enum
import gc
import pickle
import subprocess
import sys
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch.nn import functional as F

from conftest import compare, compare_grad
from torch_tpu.runtime import executable

jax_op = torch.tpu.pallas.jax_op


@jax_op("tests::rms_norm")
def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def torch_rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, weight.shape, weight, eps)


def _double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


@jax_op("tests::double")
def double(x: torch.Tensor) -> torch.Tensor:
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0] // 8,),
                          in_specs=[block], out_specs=block)(x)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(4, 128), torch.randn(128)


def test_eager(inputs):
    x, weight = inputs
    got = rms_norm(x.to("tpu"), weight.to("tpu"), 1e-3)
    assert got.device.type == "tpu"
    torch.testing.assert_close(got.cpu(), torch_rms_norm(x, weight, 1e-3))
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-3), torch_rms_norm(x, weight, 1e-3))  # CPU tensors


def test_views_and_strides(inputs):
    x, weight = inputs
    got = rms_norm(x.t().contiguous().to("tpu").t()[1:3], weight.to("tpu"))
    torch.testing.assert_close(got.cpu(), torch_rms_norm(x[1:3], weight))


def test_pallas_is_interpreted():
    x = torch.randn(16, 128)
    for place in ("cpu", "tpu"):
        torch.testing.assert_close(double(x.to(place)).cpu(), x * 2)
    compiled = torch.compile(lambda x: double(x + 1) - 1, fullgraph=True)
    torch.testing.assert_close(compiled(x.to("tpu")).cpu(), (x + 1) * 2 - 1)


def test_pallas_of_users_is_left_alone():
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        jax.block_until_ready(double.__wrapped__(jnp.ones((8, 128))))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient(inputs, compiled):
    ours = torch.compile(rms_norm, fullgraph=True) if compiled else rms_norm
    compare_grad(lambda x, w: (ours if x.device.type == "tpu" else torch_rms_norm)(x, w).square(), *inputs)


def test_one_graph(inputs):
    x, weight = (each.to("tpu") for each in inputs)
    before = len(executable.STATISTICS.graphs)
    compiled = torch.compile(lambda x, w: rms_norm(F.relu(x), w) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight).cpu(), torch_rms_norm(F.relu(inputs[0]), inputs[1]) + 1)
    assert len(executable.STATISTICS.graphs) == before + 1
    assert torch.tpu.fallback_report() == {}


def test_nothing_is_computed_twice(inputs):
    """The backward operator takes what the forward gave; inputs and outputs are not among it a second time."""
    calls = []

    @jax_op("tests::counted")
    def counted(x: jax.Array, w: jax.Array) -> jax.Array:
        calls.append(1)
        return jnp.exp(x @ w)

    x = torch.randn(4, 8, device="tpu", requires_grad=True)
    w = torch.randn(8, 8, device="tpu")
    out = counted(x, w)
    assert len({each.data_ptr() for each in out.grad_fn.saved_tensors} - {t.data_ptr() for t in (x, w, out)}) == 0
    out.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), out.detach().cpu() @ w.cpu().t())
    traces = len(calls)
    counted(x, w).sum().backward()
    assert len(calls) == traces


def test_custom_vjp_is_respected():
    @jax.custom_vjp
    def straight(x):
        return jnp.round(x)

    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, grad: (grad * 3,))

    @jax_op("tests::straight")
    def op(x: jax.Array) -> jax.Array:
        return straight(x)

    x = torch.tensor([0.4, 1.6], device="tpu", requires_grad=True)
    op(x).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_second_derivative(inputs):
    def penalty(fn, x, weight):
        grad, = torch.autograd.grad(fn(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    x, weight = inputs
    got = penalty(rms_norm, x.to("tpu").requires_grad_(), weight.to("tpu"))
    torch.testing.assert_close(got.cpu(), penalty(torch_rms_norm, x.requires_grad_(), weight), rtol=1e-4, atol=1e-4)


def test_torch_func(inputs):
    x, weight = torch.randn(3, 4, 128), inputs[1]

    def norm(x, weight):
        return (rms_norm if x.device.type == "tpu" else torch_rms_norm)(x, weight)

    compare(lambda x, w: torch.vmap(lambda each: norm(each, w))(x), x, weight)
    compare(lambda x, w: torch.vmap(torch.vmap(lambda each: norm(each, w)))(x), x, weight)
    compare(lambda x, w: torch.vmap(torch.func.grad(lambda each: norm(each, w).square().sum()))(x), x, weight,
            rtol=1e-4, atol=1e-4)
    compare(lambda x, w: torch.func.jacrev(lambda each: norm(each, w))(x[0, 0]), x, weight, rtol=1e-4, atol=1e-4)


def test_opcheck(inputs):
    x, weight = (each.requires_grad_() for each in inputs)
    torch.library.opcheck(rms_norm.overload, (x, weight))
    torch.library.opcheck(rms_norm.overload, (x.detach().to("tpu").requires_grad_(), weight.to("tpu")),
                          test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


class Mode(enum.Enum):
    ADD = 1
    SUB = 2


@jax_op("tests::arguments")
def arguments(x: jax.Array, others: list[jax.Array], bias: jax.Array | None, mode: Mode = Mode.ADD,
              which: Literal["a", "b"] = "a", dims: list[int] | None = None, kind: torch.dtype | None = None, *,
              flag: bool = False) -> tuple[jax.Array, jax.Array]:
    total = sum(others, x) if mode is Mode.ADD else x - sum(others)
    if bias is not None:
        total = total + bias
    return (total * (2 if which == "b" else 1)).astype(kind or x.dtype), total.sum(tuple(dims or (0,)), keepdims=flag)


def test_every_kind_of_argument():
    x = torch.randn(3, 4)

    def check(ours, wanted, **kwargs):
        place = x.to("tpu")
        got = ours(place, [place, place * 2], kwargs.pop("bias", None), **kwargs)
        for g, w in zip(got, wanted, strict=True):
            torch.testing.assert_close(g.cpu(), w)

    for ours in (arguments, torch.compile(arguments, fullgraph=True)):
        check(ours, (x * 4, (x * 4).sum(0)))
        check(ours, (x * 4 + 1, (x * 4 + 1).sum(0)), bias=torch.ones(4, device="tpu"))
        check(ours, (x * -4, (x * -2).sum((0, 1), keepdim=True)), mode=Mode.SUB, which="b", dims=[0, 1], flag=True)
        check(ours, ((x * 4).half(), (x * 4).sum(0)), kind=torch.float16)
    assert "str mode" in str(arguments.overload._schema)


def test_gradients_of_lists_and_optionals():
    def loss(ours):
        x, y, b = (torch.full((2, 2), v, device="tpu", requires_grad=True) for v in (1.0, 2.0, 3.0))
        out, total = ours(x, [y, y], b)
        (out.sum() + 2 * total.sum()).backward()
        return [each.grad.tolist() for each in (x, y, b)]

    wanted = [[[3, 3]] * 2, [[6, 6]] * 2, [[3, 3]] * 2]
    assert loss(arguments) == wanted and loss(torch.compile(arguments, fullgraph=True)) == wanted


def test_list_results_and_integers():
    @jax_op("tests::pieces")
    def pieces(x: jax.Array, index: jax.Array, count: int) -> list[jax.Array]:
        return [*jnp.split(x[index], count), jnp.arange(count)]

    x, index = torch.randn(6, 2), torch.tensor([3, 2, 1, 0])
    got = pieces(x.to("tpu"), index.to("tpu"), 2)
    torch.testing.assert_close([each.cpu() for each in got], [*x[index].split(2), torch.arange(2, dtype=torch.int32)])


def test_widths():
    @jax_op("tests::plus")
    def plus(x: jax.Array) -> jax.Array:
        return x + 1

    @jax_op("tests::wide", x64=True)
    def wide(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x) + jnp.arange(x.shape[0])

    assert plus(torch.tensor([1, 2], device="tpu")).dtype == torch.int32
    for place in ("cpu", "tpu"):
        with pytest.raises((TypeError, RuntimeError, NotImplementedError), match="x64=True"):
            plus(torch.ones(2, dtype=torch.float64, device=place))
        x = torch.tensor([1e9, 1], dtype=torch.float64, device=place)
        assert wide(x).dtype == torch.float64 and wide(x).tolist() == [1e9, 1e9 + 2]
    assert jnp.arange(2).dtype == jnp.int32


@pytest.mark.filterwarnings("ignore:torch_tpu. the same code")
def test_mutated_arguments():
    @jax_op("tests::append", mutates={"cache": 0})
    def append(cache: jax.Array, new: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
        cache = jax.lax.dynamic_update_slice(cache, new[None], (at, 0))
        return cache, cache.sum()

    for place in ("cpu", "tpu"):
        cache = torch.zeros(4, 2, device=place)
        total = append(cache, torch.ones(2, device=place), 1)
        assert total.item() == 2 and cache.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
        append(cache[2:], torch.ones(2, device=place), 0)
        assert cache.sum().item() == 4

    def step(cache, new):
        cache.add_(1)
        total = append(cache, new, 0)
        return total, cache * 2

    eager, compiled = torch.zeros(2, 2, device="tpu"), torch.zeros(2, 2, device="tpu")
    wanted = step(eager, torch.ones(2, device="tpu"))
    got = torch.compile(step, fullgraph=True)(compiled, torch.ones(2, device="tpu"))
    torch.testing.assert_close([g.cpu() for g in (*got, compiled)], [w.cpu() for w in (*wanted, eager)])
    with pytest.raises(RuntimeError, match="has no gradient"):
        append(torch.zeros(2, 2, device="tpu"), torch.ones(2, device="tpu", requires_grad=True), 0)


def test_donation():
    @jax_op("tests::consume", donate_argnums=0)
    def consume(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    x = torch.ones(1 << 20, device="tpu")
    y = torch.ones(1 << 20, device="tpu")
    gc.collect()
    before = torch.tpu.memory_allocated()
    out = consume(x, y)
    assert out[0].item() == 2 and torch.tpu.memory_allocated() == before
    with pytest.raises(RuntimeError, match="0 bytes"):
        x.sum().item()
    part = torch.ones(4, 2, device="tpu")
    assert consume(part[1:2], part[1:2]).tolist() == [[2, 2]] and part.sum().item() == 8  # a part keeps its memory
    w = torch.ones(4, device="tpu", requires_grad=True)
    consume(w, w).sum().backward()
    assert w.grad.tolist() == [2] * 4 and w.tolist() == [1] * 4


def test_without_gradient():
    @jax_op("tests::frozen", gradient=False)
    def frozen(x: jax.Array) -> jax.Array:
        return x * 2

    x = torch.ones(2, device="tpu", requires_grad=True)
    out = frozen(x)
    assert out.requires_grad and frozen(x.detach()).tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match="tests::frozen has no gradient"):
        out.sum().backward()

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * 7 * x

    frozen.register_autograd(backward, setup_context=save)
    frozen(x).sum().backward()
    assert x.grad.tolist() == [7, 7]
    x.grad = None
    torch.compile(frozen, fullgraph=True)(x).sum().backward()
    assert x.grad.tolist() == [7, 7]


def test_defined_again():
    def make(factor):
        @jax_op("tests::again")
        def again(x: jax.Array) -> jax.Array:
            return x * factor

        return again

    x = torch.ones(2, device="tpu")
    for factor in (2, 3):
        op = make(factor)
        assert op(x).tolist() == [factor, factor]
        assert torch.ops.tests.again(x).tolist() == [factor, factor]
        assert torch.compile(lambda x, op=op: op(x), fullgraph=True)(x).tolist() == [factor, factor]


def test_generate():
    """Part of the programs that generate captures."""
    transformers = pytest.importorskip("transformers")

    class Norm(torch.nn.Module):
        def __init__(self, other):
            super().__init__()
            self.weight = other.weight

        def forward(self, x):
            return rms_norm(x, self.weight, 1e-6)

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=100)).eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    wanted = model.generate(tokens, max_new_tokens=8, do_sample=False)
    model.model.norm = Norm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm = Norm(layer.input_layernorm)
    before = len(executable.STATISTICS.graphs)
    got = model.to("tpu").generate(tokens.to("tpu"), max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert torch.equal(got.cpu(), wanted)
    assert [each.name for each in executable.STATISTICS.graphs[before:]] == ["LlamaForCausalLM.prefill",
                                                                             "LlamaForCausalLM.decode"]


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.op = rms_norm


def test_copies_and_pickles():
    assert copy.deepcopy(Holder()).op is rms_norm and pickle.loads(pickle.dumps(Holder())).op is rms_norm


def test_symbolic_sizes(inputs):
    weight = inputs[1].to("tpu")
    compiled = torch.compile(rms_norm, dynamic=True, fullgraph=True)
    for rows in (2, 5, 9):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(compiled(x.to("tpu"), weight).cpu(), torch_rms_norm(x, inputs[1]))


def test_training_step(inputs):
    def train(norm, place, step_of):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(inputs[1].clone().to(place))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x):
            loss = norm(x, weight).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = step_of(step)
        return [run(inputs[0].to(place)).item() for _ in range(3)]

    wanted = train(torch_rms_norm, "cpu", lambda step: step)
    assert train(rms_norm, "tpu", torch.tpu.compile_step) == pytest.approx(wanted)


def test_fused_mode(inputs):
    x, weight = (each.to("tpu") for each in inputs)
    before = torch.tpu.set_eager_mode("fused")
    try:
        for _ in range(3):
            got = rms_norm(x + 1, weight) * 2
            torch.testing.assert_close(got.cpu(), torch_rms_norm(inputs[0] + 1, inputs[1]) * 2)
    finally:
        torch.tpu.set_eager_mode(before)


def test_mesh_of_one_chip(inputs):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("x",))
    spec = jax.sharding.PartitionSpec

    @jax_op("tests::meshed", mesh=mesh, input_partition_specs=(spec("x", None), spec()),
            output_partition_specs=spec("x", None))
    def meshed(x: jax.Array, w: jax.Array, eps: float = 1e-6) -> jax.Array:
        return rms_norm.__wrapped__(x, w, eps) + jax.lax.psum(jnp.zeros(()), "x")

    x, weight = inputs
    torch.testing.assert_close(meshed(x.to("tpu"), weight.to("tpu")).cpu(), torch_rms_norm(x, weight))
    with pytest.raises(ValueError, match="names the axis 'y'"):
        jax_op("tests::wrong", rms_norm.__wrapped__, mesh=mesh, input_partition_specs=(spec("y"), spec()))
    with pytest.raises(ValueError, match="give mesh="):
        jax_op("tests::wrong", rms_norm.__wrapped__, input_partition_specs=(spec(), spec()))


def _unannotated(x):
    return x


def _no_return(x: jax.Array):
    return x


def _strange(x: dict) -> jax.Array:
    return x


def _placed(x: jax.Array, device: str) -> jax.Array:
    return x


def _many(*x: jax.Array) -> jax.Array:
    return x[0]


@pytest.mark.parametrize("fn, message", [
    (_unannotated, "parameter 'x' has no annotation"), (_no_return, "no return annotation"),
    (_strange, "annotated <class 'dict'>"), (_placed, "use another"), (_many, "list\\[jax.Array\\]")])
def test_wrong_functions(fn, message):
    with pytest.raises(TypeError, match=message):
        jax_op("tests::wrong", fn)


def test_wrong_definitions():
    with pytest.raises(ValueError, match="namespace::name"):
        jax_op("wrong", rms_norm.__wrapped__)
    with pytest.raises(ValueError, match="choose another"):
        jax_op("aten::wrong", rms_norm.__wrapped__)
    with pytest.raises(ValueError, match="position of no tensor"):
        jax_op("tests::wrong", rms_norm.__wrapped__, donate_argnums=2)
    with pytest.raises(ValueError, match="no tensor parameter"):
        jax_op("tests::wrong", rms_norm.__wrapped__, mutates={"eps": 0})
    with pytest.raises(ValueError, match="result 1"):
        jax_op("tests::wrong", rms_norm.__wrapped__, mutates={"x": 1})


def test_wrong_calls(inputs):
    with pytest.raises(RuntimeError, match="missing"):
        rms_norm(inputs[0].to("tpu"))
    with pytest.raises(ValueError, match="broadcasting") as raised:
        rms_norm(inputs[0].to("tpu"), torch.ones(3, device="tpu"))
    assert raised.value.__notes__[-1].endswith("function of tests::rms_norm, called with float32[4, 128], float32[3]")
    with pytest.raises(RuntimeError, match="same device"):
        rms_norm(inputs[0].to("tpu"), inputs[1])


def test_importing_is_light():
    code = ("import sys, torch; torch.tpu.pallas; import torch_tpu._internal.pallas; assert 'jax' not in sys.modules; "
            "assert torch.tpu.pallas.jax_op and 'jax' in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
