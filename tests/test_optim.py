"""torch.optim: every optimizer and its forms over five steps, schedulers, averaged models, hooks, state_dict."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler, swa_utils

nn = torch.nn
pytestmark = pytest.mark.usefixtures("no_fallback")

# Those with sparse gradients or a closure have tests of their own.
PLAIN = {
    "SGD": {"lr": 0.1}, "Adam": {"lr": 0.01}, "AdamW": {"lr": 0.01}, "Adagrad": {"lr": 0.1}, "RMSprop": {"lr": 0.01},
    "Adamax": {"lr": 0.01}, "NAdam": {"lr": 0.01}, "RAdam": {"lr": 0.1}, "Adadelta": {"lr": 1.0},
    "Rprop": {"lr": 0.01}, "ASGD": {"lr": 0.01}, "Adafactor": {"lr": 0.01}, "Muon": {"lr": 0.01},
}
VARIANTS = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "dampening": 0.3}],
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1}, {"betas": (0.5, 0.6)}, {"decoupled_weight_decay": True}],
    "AdamW": [{"amsgrad": True}, {"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}],
    "RMSprop": [{"centered": True, "momentum": 0.5}, {"weight_decay": 0.1}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "Adadelta": [{"weight_decay": 0.1, "rho": 0.8}],
    "ASGD": [{"weight_decay": 0.1, "t0": 2}],
    "Adafactor": [{"weight_decay": 0.1}],
    "Muon": [{"nesterov": False}, {"weight_decay": 0.3}],
}
SHAPES = ((3, 4), (4,), ())


def accepts(kind: str, option: str) -> bool:
    return option in inspect.signature(getattr(torch.optim, kind)).parameters


def forms(kind: str) -> list[dict[str, bool]]:
    found: list[dict[str, bool]] = [{}]
    if accepts(kind, "foreach"):
        found += [{"foreach": True}, {"foreach": False}]
    if accepts(kind, "fused"):
        found.append({"fused": True})
    if accepts(kind, "capturable"):
        found += [{"capturable": True, "foreach": True}, {"capturable": True, "foreach": False}]
    if accepts(kind, "maximize"):
        found += [{"maximize": True, **f} for f in found[1:4]] or [{"maximize": True}]
    return found


CASES = [(kind, {**options, **extra, **form}) for kind, options in PLAIN.items()
         for extra in [{}, *VARIANTS.get(kind, [])]
         for form in (forms(kind) if not extra else forms(kind)[1:4] or [{}])]


def run(device: str, kind: str, options: dict, steps: int = 5, dtype=torch.float32) -> list[torch.Tensor]:
    if device == "cpu":  # the CPU has no capturable form, and it is the same arithmetic
        options = {k: v for k, v in options.items() if k != "capturable"}
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4, 2)) if kind == "Muon" else SHAPES
    parameters = [nn.Parameter(torch.randn(s, generator=generator).to(dtype).to(device)) for s in shapes]
    optimizer = getattr(torch.optim, kind)(parameters, **options)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype).to(device)
        optimizer.step()
        optimizer.zero_grad()
    state = [value.float().cpu() for p in parameters for _, value in sorted(optimizer.state[p].items())
             if isinstance(value, torch.Tensor)]
    return [p.detach().float().cpu() for p in parameters] + state


def test_every_optimizer_is_here():
    known = {name for name in dir(torch.optim) if inspect.isclass(getattr(torch.optim, name))} - {"Optimizer"}
    assert known == {*PLAIN, "LBFGS", "SparseAdam"}


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(
    f"{k}={x}" for k, x in v.items()))
def test_five_steps(kind, options):
    want, got = run("cpu", kind, options), run("tpu", kind, options)
    # Muon orthogonalises in bfloat16.
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if kind == "Muon" else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor"])
def test_bfloat16(kind):
    options = PLAIN[kind]
    torch.testing.assert_close(run("tpu", kind, options, dtype=torch.bfloat16),
                               run("cpu", kind, options, dtype=torch.bfloat16), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search):
    results = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(device)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(8, n, generator=generator).to(device) for n in (4, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)

        def closure(model=model, optimizer=optimizer, x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        results.append((losses, model.weight.detach().cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


def test_sparse_gradients_are_refused_clearly():
    embedding = nn.Embedding(5, 3, sparse=True).to("tpu")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)sparse"):
        embedding(torch.tensor([1, 2], device="tpu")).sum().backward()
        torch.optim.SparseAdam(list(embedding.parameters())).step()


def test_dense_gradients_given_to_sparse_adam():
    p = nn.Parameter(torch.ones(3, device="tpu"))
    p.grad = torch.ones(3, device="tpu")
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam([p]).step()


def lines(model, optimizer) -> list:
    return [g["lr"] if isinstance(g["lr"], float) else g["lr"].item() for g in optimizer.param_groups]


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.02, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor_rate", [False, True])
def test_schedules(name, tensor_rate):
    results = []
    for device in ("cpu", "tpu"):
        p = nn.Parameter(torch.ones(3, device=device))
        rate = torch.tensor(0.05, device=device) if tensor_rate else 0.05
        optimizer = torch.optim.SGD([p], lr=rate, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        rates = []
        for _ in range(6):
            loss = p.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if name == "ReduceLROnPlateau":
                schedule.step(1.0)
            else:
                schedule.step()
            rates += lines(p, optimizer)
        results.append((rates, p.detach().cpu()))
    torch.testing.assert_close(results[1], results[0])


def small(device: str, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 2)).to(device)


def without_batch(device: str) -> nn.Module:
    """Every gradient is far from 0, which optimizers divide by its own size."""
    return small(device, nn.LayerNorm)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def same(got: nn.Module, want: nn.Module) -> None:
    for (name, w), g in zip(want.state_dict().items(), got.state_dict().values()):
        torch.testing.assert_close(g.cpu(), w.cpu(), rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


AVERAGES = {
    "swa": {}, "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "ema one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.8)},
    "buffers too": {"avg_fn": swa_utils.get_ema_avg_fn(0.8), "use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_model(kind):
    models = []
    for device in ("cpu", "tpu"):
        model = small(device)
        average = swa_utils.AveragedModel(model, **AVERAGES[kind])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(4):
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        swa_utils.update_bn([x.to(device) for x in batches(3)], average)
        models.append(average)
    same(models[1], models[0])
    assert all(v.device.type == "tpu" for v in models[1].module.state_dict().values())


def test_tensor_hooks():
    results = []
    for device in ("cpu", "tpu"):
        model = small(device)
        seen = []
        model[0].weight.register_hook(lambda g, seen=seen: seen.append(g.sum().item()) or g * 3)
        handle = model[3].bias.register_hook(lambda g: g * 0)

        def accumulated(p, seen=seen):
            seen.append(p.grad.abs().sum().item())
            p.grad.mul_(0.5)

        model[3].weight.register_post_accumulate_grad_hook(accumulated)
        for turn, x in enumerate(batches(2)):
            if turn:
                handle.remove()
            hidden = model[:2](x.to(device))
            hidden.retain_grad()
            hidden.register_hook(lambda g: g + 1)
            model[2:](hidden).square().sum().backward()
        results.append((seen, hidden.grad.cpu(), [p.grad.cpu() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_optimizer_in_the_backward_pass():
    """One optimizer a parameter, stepping and freeing the gradient as soon as it is there."""
    models = []
    for device in ("cpu", "tpu"):
        model = small(device)
        optimizers = {p: torch.optim.Adam([p], lr=0.01, foreach=False, eps=1e-4) for p in model.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for x in batches(4):
            model(x.to(device)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        models.append(model)
    same(models[1], models[0])


def test_optimizer_hooks():
    p = nn.Parameter(torch.ones(2, device="tpu"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    order = []
    optimizer.register_step_pre_hook(lambda o, a, k: order.append("before"))
    optimizer.register_step_post_hook(lambda o, a, k: order.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "note": 1})
    p.grad = torch.ones(2, device="tpu")
    optimizer.step()
    assert order == ["before", "after"] and p.tolist() == [0, 0]
    assert optimizer.state_dict()["note"] == 1


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor"])
@pytest.mark.parametrize("there", [("cpu", "tpu"), ("tpu", "cpu")])
def test_state_dict_moves_between_devices(kind, there):
    """Three steps on one device, two on the other, against five on the CPU."""
    def steps(model, optimizer, device, xs):
        for x in xs:
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    options = {**PLAIN[kind], **({"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}),
               **({"eps": 1e-4} if kind in ("Adam", "AdamW", "NAdam") else {})}
    first, second = there
    reference = without_batch("cpu")
    steps(reference, getattr(torch.optim, kind)(reference.parameters(), **options), "cpu", batches(5))
    model = without_batch(first)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    steps(model, optimizer, first, batches(5)[:3])
    moved = without_batch(second)
    moved.load_state_dict(model.state_dict())
    continued = getattr(torch.optim, kind)(moved.parameters(), **options)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in continued.state.values():
        assert all(v.device.type == second for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step")
    steps(moved, continued, second, batches(5)[3:])
    same(moved, reference)


def test_parameter_groups_and_late_groups():
    models = []
    for device in ("cpu", "tpu"):
        model = without_batch(device)
        optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": [model[3].weight]}],
                                      lr=0.01, weight_decay=0.2, eps=1e-4)
        for turn, x in enumerate(batches(4)):
            if turn == 2:
                optimizer.add_param_group({"params": model[1].parameters(), "weight_decay": 0.0})
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    same(models[1], models[0])


def test_differentiable_optimizer():
    results = []
    for device in ("cpu", "tpu"):
        rate = torch.tensor(0.1, device=device, requires_grad=True)
        p = torch.ones(3, device=device, requires_grad=True)
        q = p.clone()
        q.grad = torch.full((3,), 0.5, device=device)
        torch.optim.SGD([q], lr=rate, differentiable=True, foreach=False).step()
        q.square().sum().backward()
        results.append((rate.grad.cpu(), p.grad.cpu()))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping(norm, foreach):
    results = []
    for device in ("cpu", "tpu"):
        model = small(device)
        model(batches(1)[0].to(device)).square().sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm, foreach=foreach)
        clipped = [p.grad.cpu().clone() for p in model.parameters()]
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        results.append((total.cpu(), clipped, [p.grad.cpu() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_zero_grad_keeps_or_drops():
    p = nn.Parameter(torch.ones(2, device="tpu"))
    p.sum().backward()
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    assert p.grad is None
