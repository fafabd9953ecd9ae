from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.errors import AdvisorError, BadFactory, FactoryFailed, UsageError
from fusion_advisor.workload.load import LoadedWorkload, load_workload
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.weight_packing import has_room

CODE = """
import torch
from torch import nn

def tensor():
    return nn.Linear(4, 2), torch.ones(3, 4)

def several():
    return nn.Bilinear(4, 4, 2), [torch.ones(3, 4), torch.ones(3, 4)]

def named():
    return nn.Linear(4, 2), {"input": torch.randn(3, 4)}

def broken():
    x = 1
    raise ValueError("two lines\\nthe last one")

def broken_inside_torch():
    return nn.Linear(4, 2)(torch.ones(3, 5)), None

def needs(size):
    return None

def only_model():
    return nn.Linear(4, 2)

def swapped():
    return torch.ones(3, 4), nn.Linear(4, 2)

def projections():
    model = nn.ModuleDict({name: nn.Linear(16, 16, dtype=torch.bfloat16) for name in "qkv"})
    model["head"] = nn.Linear(8, 13, bias=False, dtype=torch.bfloat16)
    return model, torch.ones(1)

def number():
    return nn.Linear(4, 2), 7

def bad_keys():
    return nn.Linear(4, 2), {1: torch.ones(3, 4)}

something = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    return tmp_path


def load(model_id: str, **changes: object) -> LoadedWorkload:
    return load_workload(WorkloadRequest(**{"model_id": model_id, "device": "cpu", **changes}))


def fails(kind: type[AdvisorError], code: str, exit_code: int, model_id: str) -> AdvisorError:
    with pytest.raises(kind) as caught:
        load(model_id)
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    return caught.value


@pytest.mark.parametrize(("name", "inputs"), [("tensor", 1), ("several", 2), ("named", 1)])
def test_every_form_of_inputs_runs(here: Path, name: str, inputs: int) -> None:
    workload = load(f"net.py:{name}")
    assert workload.model(*workload.args, **workload.kwargs).shape == (3, 2)
    assert len(workload.record.inputs) == inputs
    assert (workload.record.weights, workload.record.batch, workload.record.dtype) == ("user", 3, "fp32")
    assert not workload.model.training


def test_a_factory_s_model_in_train_mode_is_set_to_eval_and_said_so(here: Path) -> None:
    assert load("net.py:named").notes == ("`net.py:named` returned a model in train() mode; it was set to eval()",)
    assert load("net.py:named", phase="train").notes == ()
    (here / "ready.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)\n")
    assert load("ready.py:make").notes == ()


def test_a_factory_is_seeded_and_cast(here: Path) -> None:
    first, again = load("net.py:named"), load("net.py:named")
    assert torch.equal(first.kwargs["input"], again.kwargs["input"])
    assert torch.equal(first.model.weight, again.model.weight)
    half = load("net.py:named", dtype="bf16")
    assert half.model(**half.kwargs).dtype == torch.bfloat16
    assert half.record.dtype == "bf16"


def test_a_factory_s_weights_are_laid_out_for_merged_and_padded_gemms(here: Path) -> None:
    model = load("net.py:projections").model
    storages = {model[name].weight.untyped_storage().data_ptr() for name in "qkv"}
    assert len(storages) == 1
    assert has_room(model["head"].weight, 16)
    trained = load("net.py:projections", phase="train").model
    assert len({trained[name].weight.untyped_storage().data_ptr() for name in "qkv"}) == 3


def test_modules_and_neighbours_are_found(here: Path) -> None:
    package = here / "pack_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "made.py").write_text("def make():\n    import neighbour_of_mine\n    return neighbour_of_mine.make()\n")
    (here / "neighbour_of_mine.py").write_text("import torch\ndef make():\n    return torch.nn.ReLU(), torch.ones(2)\n")
    before = list(sys.path)
    assert load("pack_of_mine.made:make").record.parameter_count == 0
    assert sys.path == before


def test_an_exception_is_located_in_the_users_file(here: Path) -> None:
    error = fails(FactoryFailed, "FA302", 4, "net.py:broken")
    assert str(error) == "`net.py:broken` raised ValueError: the last one"
    assert error.note_text == "at net.py:16"
    assert isinstance(error.__cause__, ValueError)
    assert fails(FactoryFailed, "FA302", 4, "net.py:broken_inside_torch").note_text == "at net.py:19"


def test_a_file_that_cannot_be_imported(here: Path) -> None:
    (here / "syntax.py").write_text("x = 1\ndef f(:\n")
    assert fails(FactoryFailed, "FA302", 4, "syntax.py:f").note_text == "at syntax.py:2"
    (here / "lacks.py").write_text("import a_module_nobody_has\n")
    error = fails(FactoryFailed, "FA302", 4, "lacks.py:f")
    assert "No module named 'a_module_nobody_has'" in str(error)
    assert error.note_text == "at lacks.py:1"
    assert "a_module_nobody_has" in str(fails(FactoryFailed, "FA302", 4, "lacks:f"))


@pytest.mark.parametrize(
    ("model_id", "detail"),
    [
        ("none.py:f", "there is no file none.py"),
        ("no_package.here:f", "there is no module `no_package`"),
        ("net.py:tensr", "net.py has no `tensr`; it has `tensor`"),
        ("net.py:something", "`something` is a int, not a function"),
        ("net.py:needs", "`needs` needs the arguments size"),
        ("net.py:only_model", "it must return (model, example_inputs), it returned a Linear"),
        ("net.py:swapped", "its first value is a Tensor, not an nn.Module"),
        ("net.py:number", "example_inputs must be a tensor, a tuple or a dict, not a int"),
        ("net.py:bad_keys", "the keys of example_inputs must be argument names, not 1"),
    ],
)
def test_wrong_factories(here: Path, model_id: str, detail: str) -> None:
    error = fails(BadFactory, "FA305", 2, model_id)
    assert detail in str(error)
    assert "returns (model, example_inputs)" in error.hint_text


def test_options_without_effect_are_usage_errors(here: Path) -> None:
    for option in ({"seq_len": 4}, {"batch": 2}, {"layers": 1}, {"weights": "random"}, {"phase": "prefill"}):
        with pytest.raises(UsageError, match="has no effect"):
            load("net.py:tensor", **option)
