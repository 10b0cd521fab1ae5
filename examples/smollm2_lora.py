"""Fine-tunes SmolLM2-135M with LoRA by Transformers' Trainer, on the tpu device and on the CPU: the same losses.

    python examples/smollm2_lora.py [--steps 6]

Needs peft. Exit code 0 when the curves agree and the loss falls.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from smollm2 import weights
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

TEXT = ("The French Bread Law states that a traditional baguette is made of wheat flour, water, salt and yeast. "
        "It is made where it is sold, and it is never frozen. ")


def losses(rows: list[dict[str, torch.Tensor]], steps: int, use_cpu: bool) -> list[float]:
    """The training loss of each step."""
    folder, file = weights()
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):  # the Trainer refuses what came from a GGUF file
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict())
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(output_dir=output, max_steps=steps, per_device_train_batch_size=2,
                                      learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1,
                                      save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=use_cpu)
        trainer = Trainer(model=adapted, args=arguments, train_dataset=rows, data_collator=default_data_collator)
        trainer.train()
        print(f"trained on {trainer.model.device}")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    folder, file = weights()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ids = torch.tensor(tokenizer(TEXT * 4)["input_ids"])[:128].view(4, 32)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    on_tpu, on_cpu = losses(rows, args.steps, False), losses(rows, args.steps, True)
    print("tpu", *(f"{loss:.4f}" for loss in on_tpu))
    print("cpu", *(f"{loss:.4f}" for loss in on_cpu))
    apart = max(abs(a - b) for a, b in zip(on_tpu, on_cpu))
    print(f"largest difference {apart:.1e}")
    return 0 if apart < 1e-2 and on_tpu[-1] < on_tpu[0] else 1


if __name__ == "__main__":
    raise SystemExit(main())
