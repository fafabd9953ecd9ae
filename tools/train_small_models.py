"""Train the two small models of ``tests/data/trained``: ``python -m tools.train_small_models [FOLDER]``.

A byte-level Llama learns sentences of a small grammar and the licence of this repository; a ViT learns ten kinds of drawings.
Both the text and the drawings are made here, from seeds, so that nothing is downloaded. The weights are stored in fp32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "data" / "trained"
SYMBOLS = 128
"""Vocabulary of the language model: a token is an ASCII byte."""
WINDOW = 128
"""Tokens of a training window; the model's positions go to twice as many."""
SIDE = 24
"""Pixels of a drawing's side."""
CLASSES = ("circle", "disc", "square", "cross", "diagonal cross", "rows", "columns", "diagonals", "checks", "triangle")
HELD_OUT = 1000
"""Seeds from here on are never trained on."""

NOUNS = ("kernel", "launch", "tensor", "row", "block", "thread", "graph", "norm", "guard", "chain")
VERBS = {"reads": "read", "writes": "written", "sums": "summed", "scales": "scaled", "checks": "checked", "copies": "copied"}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How one model came about.

    Attributes:
        name: ``lm`` or ``classifier``.
        parameters: number of weights.
        steps: of the optimiser.
        seconds: of training.
        first_loss: cross entropy of the first step, in nats.
        last_loss: mean cross entropy of the last fifty steps, in nats.
        score: ``perplexity`` or ``accuracy`` on data that was not trained on.
        chance: what a model scores that has learned nothing.
    """

    name: str
    parameters: int
    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    score: float
    chance: float


def sentences(seed: int, count: int) -> str:
    """Make text of a grammar: statements in two voices, and sums.

    Args:
        seed: of the choices; ``HELD_OUT`` and above are not trained on.
        count: of sentences.
    """
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        kind = choose.randrange(3)
        if kind == 0:
            first, second = choose.sample(NOUNS, 2)
            found.append(f"The {first} {choose.choice(list(VERBS))} {choose.choice(NUMBERS)} {second}s.")
        elif kind == 1:
            first, second = choose.sample(NOUNS, 2)
            found.append(f"Each {first} is {choose.choice(list(VERBS.values()))} by the {second}.")
        else:
            left, right = choose.randrange(1, 10), choose.randrange(1, 10)
            found.append(f"{left} and {right} make {left + right}.")
    return " ".join(found) + " "


def encode(text: str) -> torch.Tensor:
    """Return text as int64 tokens of shape (length,); characters outside ASCII are left out."""
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """Return tokens of shape (length,) as text."""
    return bytes(tokens.tolist()).decode("ascii")


def drawings(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw images with noise.

    Args:
        seed: of what is drawn; ``HELD_OUT`` and above are not trained on.
        count: of images.

    Returns:
        fp32 images of shape (count, 1, 24, 24) and int64 labels of shape (count,), numbers into ``CLASSES``.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(CLASSES), count)
    images = np.stack([_draw(rng, CLASSES[label]) for label in labels])
    return torch.from_numpy(images[:, None].astype(np.float32)), torch.from_numpy(labels.astype(np.int64))


def _draw(rng: np.random.Generator, name: str) -> np.ndarray[Any, Any]:
    down, across = np.mgrid[0:SIDE, 0:SIDE].astype(np.float64)
    y, x = down - rng.uniform(9, 14), across - rng.uniform(9, 14)
    size, width = rng.uniform(5, 8), rng.uniform(0.9, 1.5)
    period, phase = rng.uniform(4, 6), rng.uniform(0, 6)
    radius, box = np.hypot(x, y), np.maximum(abs(x), abs(y))
    shape = {
        "circle": abs(radius - size) < width,
        "disc": radius < size,
        "square": abs(box - size) < width,
        "cross": (np.minimum(abs(x), abs(y)) < width) & (box < size),
        "diagonal cross": (np.minimum(abs(x - y), abs(x + y)) < 1.4 * width) & (box < size),
        "rows": (down + phase) % period < period / 2,
        "columns": (across + phase) % period < period / 2,
        "diagonals": (down + across + phase) % (1.4 * period) < 0.7 * period,
        "checks": ((down + phase) % period < period / 2) ^ ((across + phase) % period < period / 2),
        "triangle": (abs(x) < (y + size) / 2) & (y < size),
    }[name]
    ink = rng.uniform(0.7, 1.3) * shape
    return np.asarray(ink + rng.normal(0, 0.25, ink.shape))


def language_model() -> torch.nn.Module:
    """Make the language model: a Llama of three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def classifier() -> torch.nn.Module:
    """Make the classifier: a ViT of two layers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]
        image_size=SIDE, patch_size=4, num_channels=1, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_labels=len(CLASSES), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def load(name: str, folder: Path = FOLDER) -> torch.nn.Module:
    """Load a trained model in fp32, ready for inference.

    Args:
        name: ``lm`` or ``classifier``.
        folder: where its weights are.
    """
    from safetensors.torch import load_file

    model = {"lm": language_model, "classifier": classifier}[name]()
    missing = model.load_state_dict(load_file(folder / f"{name}.safetensors"), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    return model.eval()


def perplexity(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Return exp of the mean cross entropy in fp64 of the next token.

    Args:
        model: a language model.
        tokens: int64, of shape (batch, length).
    """
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    return math.exp(cross_entropy(logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten()).item())


def windows(text: str, count: int) -> torch.Tensor:
    """Cut the start of a text into (count, WINDOW) tokens."""
    return encode(text)[: count * WINDOW].view(count, WINDOW)


def train_language_model(steps: int = 1200, batch: int = 16) -> tuple[torch.nn.Module, Trained]:
    """Train the language model on the grammar and the licence."""
    torch.manual_seed(0)
    model = language_model()
    licence = " ".join((ROOT / "LICENSE").read_text().split())
    text = encode(sentences(0, 6000) + licence)
    generator = torch.Generator().manual_seed(1)

    def loss(_: int) -> torch.Tensor:
        starts = torch.randint(0, len(text) - WINDOW, (batch,), generator=generator)
        tokens = torch.stack([text[start : start + WINDOW] for start in starts.tolist()])
        logits = model(input_ids=tokens, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    first, last, seconds = _optimise("lm", model, loss, steps, 3e-3)
    score = perplexity(model.eval(), windows(sentences(HELD_OUT, 200), 32))
    return model, _trained("lm", model, steps, (first, last, seconds), score, SYMBOLS)


def train_classifier(steps: int = 700, batch: int = 64) -> tuple[torch.nn.Module, Trained]:
    """Train the classifier on drawings."""
    torch.manual_seed(0)
    model = classifier()

    def loss(step: int) -> torch.Tensor:
        images, labels = drawings(step % HELD_OUT, batch)
        return cross_entropy(model(pixel_values=images).logits, labels)

    first, last, seconds = _optimise("classifier", model, loss, steps, 2e-3)
    images, labels = drawings(HELD_OUT, 1000)
    with torch.no_grad():
        score = (model.eval()(pixel_values=images).logits.argmax(-1) == labels).float().mean().item()
    return model, _trained("classifier", model, steps, (first, last, seconds), score, 1 / len(CLASSES))


def _optimise(name: str, model: torch.nn.Module, loss: Any, steps: int, rate: float) -> tuple[float, float, float]:
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=rate, total_steps=steps)
    started, seen = time.perf_counter(), []
    for step in range(steps):
        found = loss(step)
        optimiser.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        seen.append(found.item())
        if step % 100 == 0 or step == steps - 1:
            print(f"{name}: step {step}, loss {found.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    last = seen[-50:]
    return seen[0], sum(last) / len(last), time.perf_counter() - started


def _trained(
    name: str, model: torch.nn.Module, steps: int, losses: tuple[float, float, float], score: float, chance: float
) -> Trained:
    first, last, seconds = losses
    return Trained(
        name=name, parameters=sum(parameter.numel() for parameter in model.parameters()), steps=steps, seconds=round(seconds),
        first_loss=round(first, 4), last_loss=round(last, 4), score=round(score, 4), chance=chance,
    )  # fmt: skip


def save(folder: Path, model: Any, trained: Trained) -> None:
    """Write a model's weights and configuration."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shared: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in shared:  # the head is the embedding
            weights[name] = tensor.contiguous()
        shared.add(tensor.data_ptr())
    save_file(weights, folder / f"{trained.name}.safetensors")
    (folder / f"{trained.name}.json").write_text(json.dumps(model.config.to_diff_dict(), indent=2, sort_keys=True) + "\n")


def readme(lm: Trained, labels: Trained, size_bytes: int) -> str:
    """Say in words how the models came about."""
    import transformers

    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"numpy {np.__version__}"
    )
    return f"""# Two small trained models

`python -m tools.train_small_models` made these files. It draws the images and writes the sentences itself, from fixed seeds; the
licence of this repository is the only other text. The weights are ours, under the repository's licence, in fp32:
{size_bytes:,} bytes together.

| Model | Weights | Steps | Seconds | First loss | Last loss | On data that was not trained on | Chance |
|---|---|---|---|---|---|---|---|
| `lm`: a byte-level Llama, three layers | {lm.parameters:,} | {lm.steps} | {lm.seconds:.0f} | {lm.first_loss} | {lm.last_loss} \
| perplexity {lm.score} | {lm.chance:.0f} |
| `classifier`: a ViT of two layers, ten kinds of drawings | {labels.parameters:,} | {labels.steps} | {labels.seconds:.0f} \
| {labels.first_loss} | {labels.last_loss} | accuracy {labels.score:.1%} | {labels.chance:.0%} |

Losses are cross entropies in nats. Trained on {torch.get_num_threads()} CPU threads ({platform.machine()}), with {versions}.

`tests/hostile/test_trained.py` compares what these models say before and after `fusion_advisor.apply`.
"""


def main(arguments: list[str]) -> int:
    """Train both models and write them down."""
    folder = Path(arguments[0]) if arguments else FOLDER
    found = []
    for train in (train_classifier, train_language_model):
        model, trained = train()
        save(folder, model, trained)
        print(json.dumps(dataclasses.asdict(trained)), flush=True)
        found.append(trained)
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "README.md").write_text(readme(found[1], found[0], size_bytes))
    print(f"{size_bytes:,} bytes in {folder}")
    return int(size_bytes >= 2 * 10**6)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
