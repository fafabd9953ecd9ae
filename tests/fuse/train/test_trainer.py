"""transformers' Trainer and peft's adapters train a fused model as they train a plain one: no step falls back.

The model is fused at the first step, as ``docs/python.md`` shows. Trainer has then switched checkpoints and autocast on, so they
are verified with it.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers

import fusion_advisor as fa
from tests.fuse.train.test_models import BATCH, batch, gpt2
from tests.fuse.train.test_trained_model import OPTIONS

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate: pip install '.[trainer]'")
pytestmark = pytest.mark.slow

STEPS = 6
WAYS = {
    "plain": {},
    "accumulated gradients": {"gradient_accumulation_steps": 2},
    "checkpoints": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}


class FusedTrainer(transformers.Trainer):
    """Fuses the model at its first step, with the arguments of that step."""

    fused = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.fused is None:
            is_counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            counted = {"num_items_in_batch": num_items_in_batch} if is_counted else {}
            self.fused = fa.apply(self.model, inputs | counted, **OPTIONS)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def rows():
    found = [batch("gpt2", number, range(BATCH)) for number in range(6)]
    return [{name: one[name][row] for name in ("input_ids", "labels")} for one in found for row in range(BATCH)]


def in_order(batch_rows):
    return transformers.default_data_collator(batch_rows)


def turned(batch_rows):
    return in_order(batch_rows[::-1])


def train(model, folder, *, kind=transformers.Trainer, collate=in_order, **way):
    """Losses of some steps of Trainer, and Trainer itself."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=STEPS, logging_steps=1, learning_rate=3e-3,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, **way,
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=rows(), data_collator=collate)
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]), trainer


def train_three(model, folder, **way):
    """Train fused, plain, and plain with other rounding; the first stays as near to the second as the third.

    In fp32 each batch of the third has its rows turned around. In bf16 that rounds nothing otherwise, so the third is in fp32.
    """
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        ours, trainer = train(model, folder, kind=FusedTrainer, **way)
    rounded = {"collate": turned, **way} if "bf16" not in way else {}
    (theirs, _), (band, _) = train(plain, folder, **way), train(other, folder, **rounded)
    assert len(theirs) == STEPS and theirs[-1] < theirs[0]
    assert ((ours - theirs).abs() <= 5 * (band - theirs).abs().max() + 1e-5 * theirs).all(), (ours - theirs, band - theirs)
    assert trainer.fused.launches > 0 and not trainer.fused.fallbacks
    trainer.fused.revert()
    torch.compiler.reset()


@pytest.mark.parametrize("way", WAYS)
def test_trainer_trains_a_fused_model(way, tmp_path):
    torch.manual_seed(0)
    train_three(gpt2().train(), tmp_path, **WAYS[way])


def test_another_call_than_trainers_own_is_not_what_it_runs(tmp_path):
    """A model that was fused before Trainer got it runs its own ops and says why: other arguments, or checkpoints."""
    torch.manual_seed(0)
    model = gpt2().train()
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    fused = fa.apply(model, batch("gpt2", 0, range(BATCH)), **OPTIONS)
    with pytest.warns(UserWarning, match="fusion-advisor runs the original ops"):
        ours, _ = train(model, tmp_path, gradient_checkpointing=True)
    assert torch.equal(ours, train(plain, tmp_path, gradient_checkpointing=True)[0])
    assert fused.launches == 0 and sum(fused.fallbacks.values()) == STEPS
    fused.revert()
    torch.compiler.reset()


@pytest.mark.parametrize("way", ["plain", "checkpoints"])
def test_adapters_of_peft_on_a_frozen_base(way, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[trainer]'")
    torch.manual_seed(0)
    form = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.0, init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), form).train()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    train_three(model, tmp_path, **WAYS[way])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 8
