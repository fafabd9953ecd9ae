"""What two trained models say before `apply`, after it, and after `revert`: text and labels that mean something.

`tools.train_small_models` trained them: a byte-level Llama and a ViT, both far better than chance. In fp32 what they say must not
change. In bf16 eager is off from fp32 itself, and the fused model may be no further from fp32 than eager is.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import cross_entropy

import fusion_advisor as fa
from fusion_advisor.fuse.plan.options import Budgets
from tools import train_small_models as trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]

SENTENCES = trained.sentences(trained.HELD_OUT, 200)
WINDOWS = trained.windows(SENTENCES, 32)
CHARACTERS = 200
IMAGES, LABELS = trained.drawings(trained.HELD_OUT, 512)
BATCH = 64
SLACK = 1.1
"""Of a distance that is a mean over tens of thousands of numbers, each rounded another way."""


@dataclass(frozen=True)
class Said:
    """What a language model says: logits of all windows, and the text that it writes by itself."""

    logits: torch.Tensor
    text: str

    @property
    def losses(self):
        """Cross entropies of the next token in nats, one for each place, in fp64."""
        flat = self.logits[:, :-1].double().flatten(0, 1)
        return cross_entropy(flat, WINDOWS[:, 1:].flatten(), reduction="none")

    @property
    def perplexity(self):
        return math.exp(self.losses.mean().item())


def speak(model, characters=CHARACTERS):
    """Call a model on one shape only: a batch of one window."""
    with torch.no_grad():
        logits = [model(input_ids=window[None], use_cache=False).logits.float() for window in WINDOWS]
        written = WINDOWS[0]
        for _ in range(characters):
            window = written[-trained.WINDOW :].clone()  # with the strides of the call that was verified
            ahead = model(input_ids=window[None], use_cache=False).logits[0, -1].argmax()
            written = torch.cat([written, ahead[None]])
    return Said(torch.cat(logits), trained.decode(written[trained.WINDOW :]))


def classify(model, dtype):
    """Logits of all drawings in fp32."""
    with torch.no_grad():
        return torch.cat([model(pixel_values=batch.to(dtype)).logits.float() for batch in IMAGES.split(BATCH)])


def fused(model, inputs):
    """Nothing is decided by time, so no time is spent on steps."""
    return fa.apply(model, inputs, keep="verified", runs=2, warmup=1, steps=1, compile=False, budgets=Budgets(wall_s=0.02))


@dataclass(frozen=True)
class Three:
    """What was said before, with the kernels in place, and after they were taken out; and the launches in between."""

    before: object
    during: object
    after: object
    launches: int


def three(model, inputs, say):
    before = say(model)
    fast = fused(model, inputs)
    during, launches = say(model), fast.launches
    assert not fast.fallbacks, fast.fallbacks
    fast.revert()
    return Three(before, during, say(model), launches)


@pytest.fixture(scope="module")
def spoken():
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = {"input_ids": WINDOWS[:1], "use_cache": False}
        characters = CHARACTERS if dtype == torch.float32 else 0  # rounded otherwise, a text soon goes another way
        found[dtype] = three(trained.load("lm").to(dtype), inputs, lambda model, count=characters: speak(model, count))
    return found


@pytest.fixture(scope="module")
def classified():
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = {"pixel_values": IMAGES[:BATCH].to(dtype)}
        found[dtype] = three(trained.load("classifier").to(dtype), inputs, lambda model, dtype=dtype: classify(model, dtype))
    return found


def is_same_text(before, after):
    """The rule in fp32: perplexity, text, and each place's loss in nats. Kernels move a loss by 2e-6, twice the eps by 1e-3."""
    is_near = (before.losses - after.losses).abs().max() < 1e-4
    return is_near and math.isclose(before.perplexity, after.perplexity, rel_tol=1e-6) and before.text == after.text


def is_as_near(fused, eager, exact):
    """The rule in bf16: root mean square of what differs from fp32."""
    return (fused - exact).double().square().mean().sqrt() <= SLACK * (eager - exact).double().square().mean().sqrt()


def agreement(logits, exact):
    return (logits.argmax(-1) == exact.argmax(-1)).double().mean().item()


def test_the_models_have_learned(spoken, classified):
    assert spoken[torch.float32].before.perplexity < 2 < trained.SYMBOLS
    assert agreement(classified[torch.float32].before, torch.nn.functional.one_hot(LABELS)) > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_were_launched_and_taken_out(dtype, spoken, classified):
    assert spoken[dtype].launches >= len(WINDOWS) + len(spoken[dtype].during.text)
    assert classified[dtype].launches >= len(IMAGES) // BATCH
    assert torch.equal(spoken[dtype].before.logits, spoken[dtype].after.logits)
    assert spoken[dtype].before.text == spoken[dtype].after.text
    assert torch.equal(classified[dtype].before, classified[dtype].after)


def test_perplexity_and_greedy_text_are_the_same_in_fp32(spoken):
    said = spoken[torch.float32]
    assert len(said.before.text) == CHARACTERS
    assert is_same_text(said.before, said.during)


def test_labels_are_the_same_in_fp32(classified):
    assert agreement(classified[torch.float32].during, classified[torch.float32].before) == 1.0


def test_the_language_model_in_bf16_is_as_near_to_fp32_as_eager(spoken):
    exact, said = spoken[torch.float32].before, spoken[torch.bfloat16]
    assert is_as_near(said.during.logits, said.before.logits, exact.logits)
    assert is_as_near(said.during.losses, said.before.losses, exact.losses)


def test_the_classifier_in_bf16_is_as_near_to_fp32_as_eager(classified):
    exact, said = classified[torch.float32].before, classified[torch.bfloat16]
    assert is_as_near(said.during, said.before, exact)
    assert agreement(said.during, exact) >= agreement(said.before, exact)


def with_eps(model, factor):
    """A model whose norms have another eps, as a kernel would that bound the constant wrongly."""
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, getattr(module, name) * factor)
    return model


def test_a_wrong_eps_is_seen(spoken, classified):
    exact, said = spoken[torch.float32].before, spoken[torch.bfloat16]
    assert not is_same_text(exact, speak(with_eps(trained.load("lm"), 2)))
    wrong = speak(with_eps(trained.load("lm").to(torch.bfloat16), 100), 0)
    assert not is_as_near(wrong.logits, said.before.logits, exact.logits)
    assert not is_as_near(wrong.losses, said.before.losses, exact.losses)
    exact, said = classified[torch.float32].before, classified[torch.bfloat16]
    wrong = classify(with_eps(trained.load("classifier").to(torch.bfloat16), 1e9), torch.bfloat16)
    assert not is_as_near(wrong, said.before, exact)
    assert agreement(classify(with_eps(trained.load("classifier"), 1e9), torch.float32), exact) < 1
