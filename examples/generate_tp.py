"""Generates text with a model split over the chips: python examples/launch.py, or torchrun --nproc-per-node=2 ..."""

import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

name = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M")
world = int(os.environ["WORLD_SIZE"])

tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=world)).eval()
inputs = tokenizer("The capital of France is", return_tensors="pt")
with torch.no_grad():
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False, cache_implementation="static")
if int(os.environ["RANK"]) == 0:
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
torch.distributed.destroy_process_group()
