"""Whatever a forward returns: its tensors are found, compared, and integers and booleans compared exactly."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.errors import NoTensorOutput
from fusion_advisor.fuse.live.model_check import check_whole_model, named_tensors
from fusion_advisor.workload.load import describe_live


@dataclasses.dataclass
class Out:
    y: torch.Tensor
    count: int = 3
    rest: typing.Any = None


class Pair(typing.NamedTuple):
    y: torch.Tensor
    other: object


OUTPUTS = {
    "dataclass": Out,
    "dataclass in a tuple": lambda y: (3, Out(y * 2, rest={"a": [y]})),
    "named tuple": lambda y: Pair(y, None),
    "nested": lambda y: {"a": [y, {"b": None, "s": "text"}], "i": 3},
    "sparse": lambda y: (y.relu().to_sparse(), torch.nested.nested_tensor([y, y[:1] * 2])),
    "booleans": lambda y: (y > 0.5, y < 0.2),
    "integers": lambda y: (y * 10).to(torch.int64),
    "one integer": lambda y: y.argmax(),
    "no element": lambda y: (y[:0], y),
    "no element at all": lambda y: y[:0],
}


class Model(torch.nn.Module):
    def __init__(self, made):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)
        self.made = made

    def forward(self, x):
        return self.made(torch.sigmoid(self.lin(x)))


def checked(model, x, offset):
    loaded = describe_live(model, (x,))
    twin = Model(lambda y: model.made(y + offset)).eval()
    twin.lin = model.lin
    with torch.no_grad():
        return check_whole_model(loaded, lambda: model(x), lambda: twin(x), Written())


@pytest.mark.parametrize("kind", OUTPUTS)
def test_equal_results_pass_and_others_do_not(kind):
    torch.manual_seed(0)
    model, x = Model(OUTPUTS[kind]).eval(), torch.randn(4, 8)
    assert checked(model, x, 0.0).is_passed
    if kind not in ("one integer", "no element at all"):
        assert not checked(model, x, 0.3).is_passed


def test_tensors_in_a_dataclass_have_names():
    y = torch.zeros(2)
    assert [name for name, _ in named_tensors(Out(y, rest=[y]))] == ["y", "rest.0"]


@pytest.mark.parametrize("made", [lambda y: None, lambda y: 3, lambda y: "text"])
def test_a_model_that_returns_no_tensor_is_refused(made):
    with pytest.raises(NoTensorOutput, match="returns no tensor") as refused:
        fa.apply(Model(made).eval(), (torch.randn(4, 8),), warmup=1, runs=3)
    assert refused.value.code == "FA315" and refused.value.hint_text


def test_every_compilers_words_are_read_whatever_their_encoding():
    """All calls of subprocess that read text replace what is no UTF-8."""
    from pathlib import Path

    calls = [
        f"{path.name}: {line.strip()}"
        for path in Path(fa.__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "text=True" in line and 'errors="replace"' not in line
    ]
    assert not calls
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.write(2, b'Fehler \\xfc')"], capture_output=True, text=True, errors="replace",
        check=True, env=os.environ,
    )  # fmt: skip
    assert done.stderr.startswith("Fehler")
