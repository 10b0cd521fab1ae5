"""TRL: SFTTrainer with an adapter, with the CPU's losses."""

from __future__ import annotations

import pytest
import torch
import torchvision_import  # noqa: F401
from tiny import ids, llama
from vocabulary import tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")


def train(folder, use_cpu):
    torch.manual_seed(3)
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in ids(8, 8)])
    settings = trl.SFTConfig(output_dir=folder, max_steps=3, per_device_train_batch_size=2, report_to=[],
                             logging_steps=1, learning_rate=1e-2, max_length=16, bf16=False, use_cpu=use_cpu,
                             disable_tqdm=True, dataloader_pin_memory=False)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(model=llama(), args=settings, train_dataset=rows, processing_class=tokenizer(),
                             peft_config=adapter)
    trainer.train()
    return trainer, torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.filterwarnings("ignore")  # TRL's and Transformers' own deprecations
def test_supervised_fine_tuning(tmp_path):
    trainer, got = train(tmp_path / "tpu", use_cpu=False)
    assert trainer.args.device == torch.device("tpu", 0)
    assert {p.device.type for p in trainer.model.parameters()} == {"tpu"}
    torch.testing.assert_close(got, train(tmp_path / "cpu", use_cpu=True)[1], rtol=1e-3, atol=1e-3)
