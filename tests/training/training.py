"""One training loop, the same lines for the CPU and the device, and the comparison of two runs."""

from __future__ import annotations

import copy
import math

import torch
from recipes import Recipe, Run
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def programs() -> int:
    stats = torch.tpu.compiler.stats()
    return stats.compiled + stats.loaded


def train(recipe: Recipe, device: str, steps: int, *, compiled: bool = False) -> Run:
    # Without allow_rnn, torch.compile leaves the callers of nn.LSTM eager, on every device.
    with torch._dynamo.config.patch(allow_rnn=True):
        return _train(recipe, device, steps, compiled)


def _train(recipe: Recipe, device: str, steps: int, compiled: bool) -> Run:
    model = copy.deepcopy(recipe.model).to(device).train()
    forward = torch.compile(model, backend="tpu", fullgraph=True) if compiled else model
    optimizer = recipe.optimizer(model.parameters())
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    average = None
    if recipe.ema:
        average = AveragedModel(model, device=device, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4) if recipe.scaler else None
    batches, losses, known = recipe.batches(), [], programs()
    for step in range(steps):
        total = 0.0
        for _ in range(recipe.accumulate):
            data, targets = next(batches)
            with torch.autocast(device, recipe.autocast or torch.bfloat16, enabled=recipe.autocast is not None):
                loss = forward(data.to(device), targets.to(device)) / recipe.accumulate
            (scaler.scale(loss) if scaler else loss).backward()
            total = total + loss.detach()
        if scaler:
            scaler.unscale_(optimizer)
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if average:
            average.update_parameters(model)
        losses.append(total.item())
        if step == 2:
            known = programs()
    late = programs() - known if steps > 3 else 0
    return Run(losses, model, average, late, scaler.get_scale() if scaler else None)


def difference(want: Run, got: Run) -> float:
    """The largest relative difference of two runs' losses at the same step."""
    assert len(want.losses) == len(got.losses) and all(map(math.isfinite, want.losses + got.losses))
    return max(abs(g - w) / abs(w) for w, g in zip(want.losses, got.losses))


def assert_same_weights(want: torch.nn.Module, got: torch.nn.Module, rtol: float, atol: float) -> None:
    wanted = want.state_dict()
    for name, value in got.state_dict().items():
        assert value.device.type == "tpu", name
        torch.testing.assert_close(value.cpu(), wanted[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
