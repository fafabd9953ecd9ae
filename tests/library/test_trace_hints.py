"""Hints: what a sequence of op names looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.library import trace_hints
from fusion_advisor.library.discover import BadReference, scaffold
from fusion_advisor.library.manifest import read_spec
from fusion_advisor.library.trace_hints import Resemblance, library_sequences, resemblance

RMSNORM = ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul")
KNOWN = {RMSNORM: "rmsnorm", ("silu", "mul"): "swiglu", ("mul", "silu"): "scale_silu", ("gelu",): "gelu_erf",
         ("mul", "neg", "cat", "mul", "add"): "rope"}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (RMSNORM, ("rmsnorm", True)),
        (("silu", "mul"), ("swiglu", True)),
        (("mul", "silu"), ("scale_silu", True)),
        (("neg", "mul", "cat", "mul", "add"), ("rope", True)),
        (("add", *RMSNORM), ("rmsnorm", False)),
        (("add", "silu", "mul"), ("swiglu", False)),
        (("add", "gelu", "add"), None),
        (("tanh", "mul"), None),
        ((), None),
    ],
)
def test_whole_then_shuffled_then_part(names, expected):
    wanted = None if expected is None else Resemblance(kernel=expected[0], is_whole=expected[1])
    assert resemblance(names, KNOWN) == wanted


def test_every_way_to_write_a_kernel_is_known_by_the_names_that_a_trace_shows(tmp_path: Path) -> None:
    scaffold("mine", tmp_path)
    known = library_sequences([tmp_path])
    assert known[RMSNORM] == "rmsnorm"
    assert known["add", *RMSNORM] == "add_rmsnorm"
    assert known["mul", "neg", "cat", "mul", "add"] == "rope"
    assert known["silu", "mul"] == "swiglu"
    assert known["add", "layer_norm"] == "add_layernorm"
    assert known["mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"] == "gelu_tanh"
    assert "mine" in known.values()


def test_dropout_is_known_by_the_names_that_torchs_own_has_in_a_trace() -> None:
    known = library_sequences()
    for names in (("bernoulli", "div", "mul"), ("dropout",)):  # on a CPU, on a GPU
        assert known[*names, "add"] == "dropout_add"
        assert known[*names, "add", "layer_norm"] == "dropout_add_layernorm"
    assert not any("seeded_dropout" in names for names in known)


def test_a_reference_that_does_not_run_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = scaffold("mine", tmp_path) / "reference.py"
    reference.write_text(reference.read_text().replace("return ", "raise ValueError('not today')\n    return ", 1))
    monkeypatch.setattr(trace_hints, "list_kernels", lambda kernel_dirs: (read_spec(tmp_path / "mine"),))
    with pytest.raises(BadReference, match="not today"):
        library_sequences([tmp_path])
