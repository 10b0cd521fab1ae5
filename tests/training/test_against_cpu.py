"""Training on the device, step by step against the CPU: the same code, data and initial weights.

The 50-step runs are those of docs/training.md: pytest tests/training -k fifty -s prints its figures, and with -m slow
those of SmolLM2.
"""

from __future__ import annotations

import functools
import time

import pytest
import recipes
import torch

from training import assert_same_weights, difference, train

WAYS = [pytest.param(False, id="eager"), pytest.param(True, id="compiled")]
pytestmark = pytest.mark.usefixtures("no_fallback")

SMALL = {
    "gpt": recipes.gpt,
    "gpt, checkpointed": lambda: recipes.gpt(save=True),
    "resnet, float64": lambda: recipes.resnet(torch.float64),
    "lstm": recipes.lstm,
    "gpt, bf16": lambda: recipes.gpt(autocast=torch.bfloat16),
    "gpt, fp16 scaled": lambda: recipes.gpt(autocast=torch.float16, scaler=True),
}
# Six steps amplify a difference of 1e-7 in the residual network's weights to 2e-3 of a loss, and fifty to 2e-1, on the
# CPU alone as well: float32 is compared over three steps, float64 over all.
SHORT = {"resnet": recipes.resnet}
LONG = SMALL
LARGE = {"SmolLM2": recipes.smollm2, "SmolLM2, bf16": lambda: recipes.smollm2(torch.bfloat16)}
RECIPES = SMALL | SHORT | LARGE
# Relative difference of a loss that a run may show: float32 differs by the order of sums, half precision by roundings.
BOUNDS = {"resnet, float64": 1e-9, "gpt, bf16": 1e-2, "gpt, fp16 scaled": 3e-3, "SmolLM2, bf16": 3e-2}


@functools.lru_cache(maxsize=1)
def on_cpu(name, steps):
    """The recipe, the CPU's run of it, and how long that took; the eager and the compiled test share it."""
    recipe = RECIPES[name]()
    begin = time.perf_counter()
    return recipe, train(recipe, "cpu", steps), time.perf_counter() - begin


def check(name, steps, bound, compiled):
    recipe, want, cpu_s = on_cpu(name, steps)
    between = time.perf_counter()
    got = train(recipe, "tpu", steps, compiled=compiled)
    found = difference(want, got)
    print(f"| {name} | {'compiled' if compiled else 'eager'} | {steps} | {want.losses[0]:.4f} | {want.losses[-1]:.4f} "
          f"| {got.losses[-1]:.4f} | {found:.1e} | {cpu_s:.0f} s / {time.perf_counter() - between:.0f} s |")
    assert found < bound
    assert got.compiled_late == 0, "a program was compiled after the third step"
    assert got.scale == want.scale
    return want, got


# The name is the outer loop, so that on_cpu keeps one run at a time.
@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", SMALL)
def test_few_steps(name, compiled):
    want, got = check(name, 6, BOUNDS.get(name, 1e-4), compiled)
    if name not in BOUNDS:
        assert_same_weights(want.model, got.model, rtol=2e-2, atol=2e-3)
    if want.average is not None and name not in BOUNDS:
        assert_same_weights(want.average, got.average, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", SHORT)
def test_three_steps(name, compiled):
    check(name, 3, 1e-5, compiled)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", LONG)
def test_fifty_steps(name, compiled):
    got = check(name, 50, BOUNDS.get(name, 1e-3), compiled)[1]
    if name.startswith("gpt"):
        assert got.losses[-1] < 0.9 * got.losses[0]


@pytest.mark.parametrize("compiled", [pytest.param(False, id="eager", marks=pytest.mark.slow), WAYS[1]])
@pytest.mark.parametrize("name", ["SmolLM2", pytest.param("SmolLM2, bf16", marks=pytest.mark.slow)])
def test_smollm2_few_steps(name, compiled):
    check(name, 2, BOUNDS.get(name, 1e-3), compiled)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", LARGE)
def test_smollm2_fifty_steps(name, compiled):
    got = check(name, 50, BOUNDS.get(name, 1e-3), compiled)[1]
    assert sum(got.losses[-10:]) < 0.9 * sum(got.losses[:10])
