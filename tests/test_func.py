"""torch.func, forward-mode and higher-order differentiation, custom functions, checkpointing: against the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

nn = torch.nn
pytestmark = pytest.mark.usefixtures("no_fallback")


def check(fn, *args, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """fn on device copies against fn on the CPU, whose attention has forward-mode formulas in its plain form only."""
    with sdpa_kernel(SDPBackend.MATH):
        want = pytree.tree_leaves(fn(*args))
    got = pytree.tree_leaves(fn(*pytree.tree_map_only(torch.Tensor, lambda t: t.to("tpu"), args)))
    assert len(want) == len(got)
    for w, g in zip(want, got):
        assert g.device.type == "tpu"
        torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=rtol, atol=atol)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ones(value):
    return pytree.tree_map(torch.ones_like, value)


X, W = randn(3, 4), randn(5, 4)

SIMPLE = {
    "grad": lambda x, w: grad(lambda x: F.gelu(x @ w.t()).sum())(x),
    "vmap": lambda x, w: vmap(lambda row: F.linear(row, w).softmax(-1))(x),
    "vmap in chunks": lambda x, w: vmap(lambda row: F.linear(row, w), chunk_size=2)(x),
    "vmap of grad": lambda x, w: vmap(grad(lambda row: F.linear(row, w).tanh().sum()))(x),
    "vmap of operators": lambda x, w: (vmap(lambda r: r.sort()[0])(x), vmap(lambda r: r.cumsum(0))(x),
                                       vmap(lambda r: torch.where(r > 0, r, 0.0))(x), vmap(torch.max)(x),
                                       vmap(lambda r, i: r[i])(x, torch.tensor([0, 1, 2], device=x.device))),
    "vjp": lambda x, w: vjp(lambda x: (x @ w.t()).sin(), x)[1](torch.ones(3, 5, device=x.device)),
    "jvp": lambda x, w: jvp(lambda x, w: F.silu(x @ w.t()), (x, w), (ones(x), ones(w))),
    "jacrev": lambda x, w: jacrev(lambda x: (x @ w.t()).sin())(x),
    "jacfwd": lambda x, w: jacfwd(lambda x: (x @ w.t()).sin())(x),
    "hessian": lambda x, w: hessian(lambda x: (x.exp() * (x @ w.t()).sum()).sum())(x),
    "linearize": lambda x, w: linearize(torch.sin, x)[1](ones(x)),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_transforms(name):
    check(SIMPLE[name], X, W)


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8), nn.Linear(8, 2)), (3, 4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.AvgPool2d(2)), (2, 2, 8, 8)),
    "pool": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)), (2, 2, 8, 8)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)), (3, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (2, 3, 8)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_functional_call(kind):
    make, shape = MODULES[kind]

    def run(x):
        torch.manual_seed(1)
        module = make().to(x.device)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

        def loss(p, x):
            return functional_call(module, (p, buffers), (x,)).square().sum()

        return (grad(loss)(parameters, x), vmap(grad(loss), in_dims=(None, 0))(parameters, torch.stack([x, x * 2])),
                jvp(lambda p: loss(p, x), (parameters,), (ones(parameters),)))

    check(run, randn(*shape))


def test_ensemble():
    def run(x):
        torch.manual_seed(0)
        models = [nn.Linear(4, 2).to(x.device) for _ in range(3)]
        parameters, buffers = stack_module_state(models)
        return vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)

    check(run, X)


def attention(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def _dual(q, k, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attention(forward_ad.make_dual(q, ones(q)), k, v, is_causal=True)).tangent


def _double(q, k, v):
    q = q.clone().requires_grad_()
    first, = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    return torch.autograd.grad(first.square().sum(), q)


ATTENTION = {
    "jvp": lambda q, k, v: jvp(lambda *a: attention(*a, is_causal=True), (q, k, v), (ones(q), k, v)),
    "dual numbers": _dual,
    "vmap": lambda q, k, v: vmap(attention)(q, k, v),
    "vmap over the query": lambda q, k, v: vmap(attention, in_dims=(0, None, None))(torch.stack([q, q + 1]), k, v),
    "vmap with a mask": lambda q, k, v: vmap(lambda q, k, v, m: attention(q, k, v, attn_mask=m))(
        q, k, v, (torch.arange(25, device=q.device).view(5, 5) % 3 != 1).expand(2, 2, 5, 5)),
    "vmap of grad": lambda q, k, v: vmap(grad(lambda *a: attention(*a).square().sum(), (0, 1, 2)))(q, k, v),
    "grouped heads": lambda q, k, v: jvp(lambda q: attention(q, k[:, :1], v[:, :1], enable_gqa=True), (q,), (ones(q),)),
    "jacfwd": lambda q, k, v: jacfwd(lambda q: attention(q, k, v))(q),
    "hessian": lambda q, k, v: hessian(lambda q: attention(q, k, v).square().sum())(q),
    "double backward": _double,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    check(ATTENTION[name], *(torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)))


def recurrent(kind: str, device: torch.device, **options):
    torch.manual_seed(1)
    return getattr(nn, kind)(4, 3, batch_first=True, bidirectional=True, **options).to(device)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_double_backward_of_recurrent_layers(kind):
    def run(x):
        module = recurrent(kind, x.device)
        x = x.clone().requires_grad_()
        first = torch.autograd.grad(module(x)[0].square().sum(), [x, module.weight_hh_l0], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *module.parameters()])
        return first, second

    check(run, randn(2, 3, 4))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_under_transforms(kind):
    def run(x):
        module = recurrent(kind, x.device)
        parameters = dict(module.named_parameters())

        def loss(p, x):
            return functional_call(module, p, (x,))[0].square().sum()

        return grad(loss)(parameters, x), grad(lambda x: grad(loss, 1)(parameters, x).square().sum())(x)

    check(run, randn(2, 3, 4))


@pytest.mark.parametrize("kind", ["GRU", "RNN"])  # the CPU's LSTM has no forward-mode formula
def test_forward_mode_of_recurrent_layers(kind):
    def run(x):
        module = recurrent(kind, x.device)
        return jvp(lambda x: module(x)[0], (x,), (ones(x),))

    check(run, randn(2, 3, 4))


def test_forward_mode_of_lstm_is_the_reverse_mode():
    module = recurrent("LSTM", torch.device("tpu"))
    x = randn(2, 3, 4).to("tpu")

    def run(x):
        return module(x)[0].sum((0, 1))

    torch.testing.assert_close(jacfwd(run)(x).cpu(), jacrev(run)(x).cpu(), rtol=1e-4, atol=1e-5)


def test_packed_sequence_double_backward():
    def run(x):
        module = recurrent("LSTM", x.device)
        x = x.clone().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True)
        first, = torch.autograd.grad(module(packed)[0].data.square().sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)

    check(run, randn(2, 3, 4))


DOUBLE = {
    "conv2d": (lambda x: F.conv2d(x, x[:, :, :2, :2] * 2).pow(3), (2, 2, 5, 5)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True).pow(3), (5, 4)),
    "layer norm": (lambda x: F.layer_norm(x, (4,)).pow(3), (5, 4)),
    "group norm": (lambda x: F.group_norm(x, 2).pow(3), (3, 4, 2)),
    "max pool": (lambda x: F.max_pool2d(x, 2).pow(3), (1, 2, 4, 4)),
    "softmax": (lambda x: x.softmax(-1).pow(3), (3, 4)),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2], device=x.device)), (3, 4)),
    "embedding": (lambda x: F.embedding(torch.tensor([0, 1, 0], device=x.device), x).pow(3), (3, 4)),
    "inverse": (lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3, device=x.device)), (3, 3)),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_double_backward(name):
    fn, shape = DOUBLE[name]

    def run(x):
        x = x.clone().requires_grad_()
        first, = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)

    check(run, randn(*shape))


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient * 3 * x * x

    @staticmethod
    def jvp(ctx, tangent):
        x, = ctx.saved_tensors
        return tangent * 3 * x * x


class Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        values, order = x.sort(dim)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        ctx.dim = dim
        return values, order

    @staticmethod
    def backward(ctx, gradient, _):
        order, = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(ctx.dim, order, gradient), None


def test_custom_function():
    check(lambda x: (vmap(Cube.apply)(x), vmap(grad(lambda r: Cube.apply(r).sum()))(x),
                     jvp(Cube.apply, (x,), (ones(x),)), jacrev(Cube.apply)(x), jacfwd(Cube.apply)(x),
                     hessian(lambda x: Cube.apply(x).sum())(x)), X)

    def run(x):
        x = x.clone().requires_grad_()
        values, order = Sorted.apply(x, 1)
        return order, torch.autograd.grad((values * torch.arange(4, device=x.device)).sum(), x)

    check(run, X)


def test_linear_algebra_under_transforms():
    def run(a):
        a = a @ a.mT + torch.eye(3, device=a.device)
        return (grad(lambda a: torch.linalg.inv(a).sum() + torch.linalg.det(a) + torch.linalg.cholesky(a).sum()
                     + torch.linalg.solve(a, a[0]).sum())(a),
                vmap(torch.linalg.inv)(torch.stack([a, a * 2])), jvp(torch.linalg.inv, (a,), (ones(a),)),
                hessian(lambda a: torch.linalg.slogdet(a)[1])(a))

    check(run, randn(3, 3))


def test_random_numbers_under_vmap():
    x = torch.zeros(3, 4, device="tpu")
    different = vmap(lambda r: r + torch.rand(4, device="tpu"), randomness="different")(x)
    same = vmap(lambda r: r + torch.rand(4, device="tpu"), randomness="same")(x)
    assert len(different.unique()) == 12
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda r: r + torch.rand(4, device="tpu"))(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replays_dropout(reentrant):
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 5)).to("tpu")

    def run(forward):
        torch.manual_seed(3)
        model.zero_grad()
        x = torch.ones(3, 5, device="tpu", requires_grad=True)
        y = forward(x)
        y.square().sum().backward()
        torch.rand(1, device="tpu")
        return [y.detach(), x.grad, *(p.grad for p in model.parameters()), torch.rand(4, device="tpu")]

    want = run(model)
    for got in (run(lambda x: checkpoint(model, x, use_reentrant=reentrant)),
                run(lambda x: checkpoint_sequential(model, 2, x, use_reentrant=reentrant))):
        for w, g in zip(want, got):
            assert torch.equal(w.cpu(), g.cpu())


@pytest.mark.parametrize("fn", [torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, a[0]),
                                lambda a: grad(lambda a: torch.linalg.inv(a).sum())(a)])
def test_compiled_linear_algebra_is_one_graph_and_still_raises(fn):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="tpu")
    a = randn(3, 3)
    a = a @ a.mT + torch.eye(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        got = compiled(a.to("tpu"))
    torch.testing.assert_close(got.cpu(), fn(a), rtol=1e-3, atol=1e-4)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(3, 3, device="tpu"))
    torch._dynamo.reset()
