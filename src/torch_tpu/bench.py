"""torch-tpu bench: a short self test of a machine: transfers, HBM, products, dispatch, and decode of a small model.

The figures are medians of a few rounds on whatever else the machine does; on virtual chips they are the CPU's. Of
several chips the first is measured, since a process drives one; benchmarks/collectives.py measures what is between.
"""

from __future__ import annotations

import argparse
import json
import platform as host
import statistics
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the figures as JSON: bytes, seconds, FLOP/s, tokens/s")
    parser.add_argument("--quick", action="store_true", help="small sizes, where only whether it works is asked")


def run(given: argparse.Namespace) -> int:
    """0: everything ran and is right; 1: something failed or gave wrong numbers."""
    found = measure(given.quick)
    print(json.dumps(found, indent=2) if given.json else text(found))
    return 1 if found["problems"] else 0


def measure(quick: bool = False) -> dict[str, Any]:
    """The figures, by name: bytes a second, FLOP/s, seconds, tokens a second; `problems` is what went wrong."""
    import jax
    import torch

    from .runtime import client

    running = client.get()
    found: dict[str, Any] = {
        "versions": {"python": host.python_version(), "torch": torch.__version__, "jax": jax.__version__},
        "platform": "virtual chips" if running.platform.virtual else running.platform.name,
        "device": torch.tpu.get_device_name(), "chips": torch.tpu.device_count(),  # type: ignore[attr-defined]
        "problems": []}
    parts: dict[str, Callable[[bool], dict[str, float]]] = {
        "transfer": _transfer, "hbm": _hbm, "products": _products, "dispatch": _dispatch, "decode": _decode}
    for name, part in parts.items():
        try:
            found[name] = part(quick)
        except Exception as error:
            found["problems"].append(f"{name}: {type(error).__name__}: {error}")
    if not found["problems"] and found["products"].pop("wrong") > 0.02:
        found["problems"].append("products: results differ from the CPU's by more than 2 %")
    found["peaks"] = _peaks(found["device"]) if not running.platform.virtual else {}
    return found


def _seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a call whose result is waited for; the first two, which compile, do not count."""
    import torch

    times = []
    for _ in range(ROUNDS + 2):
        begin = time.perf_counter()
        kept = call()
        torch.tpu.synchronize()  # type: ignore[attr-defined]
        times.append(time.perf_counter() - begin)
        del kept
    return statistics.median(times[2:])


def _transfer(quick: bool) -> dict[str, float]:
    import torch

    value = torch.ones((1 << 20) if quick else (64 << 20), dtype=torch.uint8)
    there = value.to("tpu")
    return {"to_device": value.numel() / _seconds(lambda: value.to("tpu")),
            "to_host": value.numel() / _seconds(lambda: (there + 0).cpu())}


def _hbm(quick: bool) -> dict[str, float]:
    import torch

    value = torch.ones((1 << 18) if quick else (64 << 20), device="tpu")
    return {"read_and_write": 2 * value.nbytes / _seconds(lambda: value * 1.5)}


def _products(quick: bool) -> dict[str, float]:
    """FLOP/s by dtype, and the relative error against the CPU."""
    import torch

    size = 256 if quick else 4096 if not _virtual() else 1024
    found = {}
    for name in ("bfloat16", "float32"):
        a = torch.randn(size, size, device="tpu").to(getattr(torch, name))
        found[name] = 2 * size**3 / _seconds(lambda a=a: a @ a)  # type: ignore[misc]
    a = torch.randn(256, 256)
    wanted, got = a @ a, (a.to("tpu") @ a.to("tpu")).cpu()
    return {**found, "wrong": float((wanted - got).norm() / wanted.norm())}


def _dispatch(quick: bool) -> dict[str, float]:
    """Seconds of a small operator: until Python goes on, and until its result is on the host."""
    import torch

    a, count = torch.ones(8, device="tpu"), 100

    def many() -> Any:
        b = a
        for _ in range(count):
            b = b + a
        return b

    return {"operator": _seconds(many) / count, "round_trip": _seconds(lambda: (a + a).cpu())}


def _decode(quick: bool) -> dict[str, float]:
    """Tokens a second of a model of SmolLM2-135M's shape with random weights; needs Transformers."""
    import torch

    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError:
        return {}
    layers, tokens = (1, 8) if quick else (30, 64)
    settings = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
                           num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, bos_token_id=0,
                           eos_token_id=None)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).to("tpu").eval()
    ids = torch.ones(1, 16, dtype=torch.int64, device="tpu")

    def generate(count: int) -> float:
        begin = time.perf_counter()
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                              do_sample=False, cache_implementation="static", pad_token_id=0)
        assert made.shape[1] == 16 + count
        made.cpu()
        return time.perf_counter() - begin

    size = float(sum(each.numel() for each in model.parameters()))
    first = generate(tokens)
    whole, one = (statistics.median(generate(count) for _ in range(3)) for count in (tokens, 1))
    return {"tokens_s": (tokens - 1) / max(whole - one, 1e-9), "first_call_s": first, "parameters": size}


def _virtual() -> bool:
    from .runtime import client

    return bool(client.get().platform.virtual)


def _peaks(device: str) -> dict[str, float]:
    """Published rates of the chip, by the generation in the device's name."""
    from .aot import GENERATIONS

    known = {"v4": "v4", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v6 lite": "v6e", "v6e": "v6e", "7x": "v7x"}
    name = next((generation for part, generation in known.items() if part in device.lower()), "")
    if not name:
        return {}
    return {"flops": GENERATIONS[name].flops, "hbm": GENERATIONS[name].bandwidth}


def text(found: dict[str, Any]) -> str:
    """One screen, to paste into a report of a problem."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    lines = [f"torch-tpu bench: {found['chips']} x {found['device']} ({found['platform']}); {versions}"]
    peaks = found["peaks"]

    def of_peak(value: float, name: str) -> str:
        return f" ({100 * value / peaks[name]:.0f} % of the chip's)" if name in peaks else ""

    def line(name: str, value: str) -> None:
        lines.append(f"  {name:<24}{value}")

    if part := found.get("transfer"):
        line("host to device", f"{part['to_device'] / 1e9:,.2f} GB/s")
        line("device to host", f"{part['to_host'] / 1e9:,.2f} GB/s")
    if part := found.get("hbm"):
        rate = part["read_and_write"]
        line("memory, read and write", f"{rate / 1e9:,.1f} GB/s{of_peak(rate, 'hbm')}")
    for name, rate in found.get("products", {}).items():
        if name != "wrong":
            line(f"products, {name}", f"{rate / 1e12:,.3f} TFLOP/s"
                 + (of_peak(rate, "flops") if name == "bfloat16" else ""))
    if part := found.get("dispatch"):
        line("an operator", f"{part['operator'] * 1e6:,.1f} us")
        line("an operator and back", f"{part['round_trip'] * 1e6:,.1f} us")
    if part := found.get("decode"):
        line(f"decode, {part['parameters'] / 1e6:.0f} M numbers",
             f"{part['tokens_s']:,.1f} tokens/s (random weights, bfloat16, batch 1; the first call took "
             f"{part['first_call_s']:.1f} s)")
    elif "decode" in found:
        line("decode", "not measured: transformers is not installed")
    lines += [f"  problem: {each}" for each in found["problems"]] or ["  everything ran, and its numbers are right"]
    return "\n".join(lines)
