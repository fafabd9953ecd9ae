"""The user's request: model, phase and shapes, before anything is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fusion_advisor.errors import UsageError

DTYPES = ("auto", "fp32", "fp16", "bf16")
PHASES = ("forward", "prefill", "decode", "generate", "train")
WEIGHTS = ("auto", "hub", "local", "random")

# A factory's right side is a Python name, its left side a dotted module or a .py file; hub ids never hold a colon.
_FACTORY = re.compile(r"(?P<place>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """A model and the shape to run it in; plain fields only, so it can be written to and read from JSON.

    Attributes:
        model_id: Hub id, local directory, ``package.module:factory`` or ``file.py:factory``.
        revision: Branch, tag or commit on the Hub.
        dtype: ``auto`` takes the configuration's 16-bit dtype on CUDA and fp32 everywhere else.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        batch: Examples per step.
        seq_len: Tokens per example; None takes a default below the model's maximum.
        input: ``file.py:function`` or ``package.module:function`` that returns the inputs of a step, in place of those that are
            made from the configuration.
        phase: ``forward``: one pass, all logits. ``prefill``: one pass over the prompt, logits of the last token only. Neither
            fills a cache: the cost of writing it is left out. ``decode``: one token on top of a static cache that holds
            ``context`` tokens. ``generate``: a prompt of ``seq_len`` tokens and ``new_tokens`` more through ``model.generate``.
            ``train``: forward, loss and backward in ``train()`` mode.
        context: Tokens that the cache holds before a ``decode`` step; None takes 512, or what the model has room for.
        new_tokens: Tokens that ``generate`` makes; None takes 32.
        layers: Keep only that many layers, for a quick look.
        seed: Of weights and inputs.
        weights: ``auto`` takes what there is and the record says which; the others insist.
        tp: ``auto`` splits the model over the ranks by its own plan; None leaves it whole on each.
        trust_remote_code: Whether Python code that a model repository ships may run.
        offline: Never ask the Hub.
    """

    model_id: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 1
    seq_len: int | None = None
    input: str | None = None
    phase: str = "forward"
    context: int | None = None
    new_tokens: int | None = None
    layers: int | None = None
    seed: int = 0
    weights: str = "auto"
    tp: str | None = None
    trust_remote_code: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.model_id.strip():
            raise UsageError(detail="MODEL_ID is empty", help="pass a Hub id, a directory or FILE.py:factory")
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--phase", self.phase, PHASES)
        _one_of("--weights", self.weights, WEIGHTS)
        if self.tp not in (None, "auto"):
            raise UsageError(detail=f"--tp {self.tp} is not known", help="use auto, or leave it out")
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(detail=f"--device {self.device} is not a device", help="use auto, cpu, cuda or cuda:N")
        _at_least_one("--batch", self.batch)
        _at_least_one("--seq-len", self.seq_len)
        _at_least_one("--layers", self.layers)
        _at_least_one("--context", self.context)
        _only_with("--context", self.context, self.phase, "decode")
        _only_with("--new-tokens", self.new_tokens, self.phase, "generate")
        if self.new_tokens is not None and self.new_tokens < 2:
            raise UsageError(
                detail="--new-tokens 1 is a prefill and no decode step", help="pass --new-tokens 2 or more, or --phase prefill"
            )
        if self.phase == "decode" and self.seq_len is not None:
            raise UsageError(detail="--seq-len has no effect on a decode step of one token", help="use --context")
        if self.input is not None:
            self._check_input()

    def _check_input(self) -> None:
        if self.factory is not None:
            raise UsageError(detail=f"--input has no effect on `{self.model_id}`", help="the factory returns its own inputs")
        if self.input_function is None:
            raise UsageError(detail=f"--input {self.input} names no function", help="write FILE.py:name or package.module:name")
        others = {
            "--seq-len": self.seq_len is not None,
            "--batch": self.batch != 1,
            "--phase": self.phase not in ("forward", "train"),
        }
        for option, is_set in others.items():
            if is_set:
                raise UsageError(
                    detail=f"{option} has no effect with --input {self.input}", help="the function decides it: leave one out"
                )

    @property
    def factory(self) -> tuple[str, str] | None:
        """(file or module, attribute) if the id names a factory."""
        return _place_and_name(self.model_id)

    @property
    def input_function(self) -> tuple[str, str] | None:
        """(file or module, attribute) of ``input``."""
        return None if self.input is None else _place_and_name(self.input)


def _place_and_name(text: str) -> tuple[str, str] | None:
    found = _FACTORY.fullmatch(text)
    return (found["place"], found["name"]) if found else None


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(detail=f"{option} {value} is not known", help=f"use {', '.join(allowed[:-1])} or {allowed[-1]}")


def _at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(detail=f"{option} {value} is less than 1", help=f"pass {option} 1 or more")


def _only_with(option: str, value: int | None, phase: str, wanted: str) -> None:
    if value is not None and phase != wanted:
        raise UsageError(detail=f"{option} has no effect on --phase {phase}", help=f"use --phase {wanted}, or leave it out")
