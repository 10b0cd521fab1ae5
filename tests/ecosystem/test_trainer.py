"""Transformers' Trainer with default arguments, against the CPU; a resumed training is the uninterrupted one."""

from __future__ import annotations

import pytest
import torch
from tiny import ids, llama
from transformers import Trainer, TrainingArguments

ROWS = [{"input_ids": row, "labels": row} for row in ids(16, 8)]


def train(folder, resume=None, dropout=0.0, **arguments):
    model = llama(attention_dropout=dropout)
    given = TrainingArguments(output_dir=folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1,
                              save_steps=2, report_to=[], disable_tqdm=True, learning_rate=1e-3, **arguments)
    trainer = Trainer(model=model, args=given, train_dataset=ROWS, eval_dataset=ROWS[:8])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    trainer = train(tmp_path_factory.mktemp("cpu"), use_cpu=True)
    return losses(trainer), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"fp16": True}, {"gradient_checkpointing": True},
                                       {"torch_compile": True}], ids=lambda a: next(iter(a), "defaults"))
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_the_losses_are_the_cpus(tmp_path, on_the_cpu, arguments):
    trainer = train(tmp_path, **arguments)
    assert trainer.args.device == torch.device("tpu", 0)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"tpu"}
    assert trainer.optimizer.param_groups[0]["fused"]
    tolerance = 5e-2 if "16" in next(iter(arguments), "") else 1e-4
    want, evaluated = on_the_cpu
    torch.testing.assert_close(losses(trainer), want, rtol=tolerance, atol=tolerance)
    assert abs(trainer.evaluate()["eval_loss"] - evaluated) < tolerance * 10
    assert len(trainer.predict(ROWS[:4]).predictions) > 0


def test_a_resumed_training_draws_the_same_dropout(tmp_path):
    whole = train(tmp_path / "whole", dropout=0.3)
    resumed = train(tmp_path / "resumed", dropout=0.3, resume=tmp_path / "whole" / "checkpoint-2")
    assert torch.equal(losses(whole), losses(resumed))
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter.cpu(), resumed.model.state_dict()[name].cpu()), name
