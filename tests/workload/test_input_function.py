from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion_advisor.errors import BadInputFunction, FactoryFailed, UsageError
from fusion_advisor.workload import load as load_module
from fusion_advisor.workload.device import out_of_memory
from fusion_advisor.workload.load import LoadedWorkload, load_workload
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.smoke_run import first_call
from tests.workload.hub_server import write_config

CODE = """
import torch

def one():
    return torch.arange(10).view(2, 5)

def several():
    return (torch.arange(12).view(3, 4), None, torch.ones(3, 4, dtype=torch.int64))

def named():
    ids = torch.randint(0, 50, (2, 6))
    return {"input_ids": ids, "attention_mask": torch.ones(2, 6), "use_cache": False}

def number():
    return 7

def nothing():
    return {}

def no_tensor():
    return {"input_ids": [1, 2, 3]}

def bad_keys():
    return {1: torch.ones(3, 4)}

def model_too():
    return torch.nn.Linear(4, 2), torch.ones(3, 4)

def broken():
    raise ValueError("no such file")

def needs(size):
    return torch.ones(size)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    write_config(tmp_path / "m")
    return tmp_path


def load(name: str, **changes: object) -> LoadedWorkload:
    asked = {"model_id": "./m", "input": f"mine.py:{name}", "device": "cpu", "offline": True, **changes}
    return load_workload(WorkloadRequest(**asked))


def test_one_tensor_is_the_first_argument(here: Path) -> None:
    loaded = load("one")
    assert torch.equal(loaded.args[0], torch.arange(10).view(2, 5)) and not loaded.kwargs
    assert (loaded.record.batch, loaded.record.seq_len) == (2, 5)
    assert [name for name, _ in loaded.record.inputs] == ["input_ids"]
    first_call(loaded)


def test_a_tuple_is_positional(here: Path) -> None:
    loaded = load("several")
    assert [type(value) for value in loaded.args] == [torch.Tensor, type(None), torch.Tensor]
    assert loaded.record.batch == 3


def test_a_dict_is_keywords_and_takes_seed_and_dtype(here: Path) -> None:
    first, again, other = load("named"), load("named"), load("named", seed=1)
    assert torch.equal(first.kwargs["input_ids"], again.kwargs["input_ids"])
    assert not torch.equal(first.kwargs["input_ids"], other.kwargs["input_ids"])
    half = load("named", dtype="bf16")
    assert (half.kwargs["attention_mask"].dtype, half.kwargs["input_ids"].dtype) == (torch.bfloat16, torch.int64)
    assert half.kwargs["use_cache"] is False
    first_call(half)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("number", "must be a tensor, a tuple or a dict, not a int"),
        ("nothing", "there is no tensor in what it returned"),
        ("no_tensor", "there is no tensor in what it returned"),
        ("bad_keys", "must be argument names, not 1"),
        ("model_too", "it returned a model (Linear) among them"),
        ("absent", "mine.py has no `absent`"),
        ("needs", "`needs` needs the arguments size"),
    ],
)
def test_what_is_no_input_is_told_before_a_model_is_built(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, detail: str
) -> None:
    monkeypatch.setattr(load_module, "build_random", lambda *_, **__: pytest.fail("the model was built first"))
    with pytest.raises(BadInputFunction) as caught:
        load(name)
    assert detail in str(caught.value)
    assert (caught.value.code, caught.value.exit_code) == ("FA310", 2)
    assert "returns a tensor, a tuple or a dict" in caught.value.hint_text


def test_what_it_raises_is_located(here: Path) -> None:
    with pytest.raises(FactoryFailed) as caught:
        load("broken")
    assert "`mine.py:broken` raised ValueError: no such file" in str(caught.value)
    assert caught.value.note_text == "at mine.py:30"
    with pytest.raises(BadInputFunction, match=r"there is no file other\.py"):
        load("one", input="other.py:one")


def test_what_does_not_fit_needs_smaller_inputs_of_the_users() -> None:
    request = WorkloadRequest(model_id="gpt2", input="mine.py:one")
    error = out_of_memory(stage="profiling", device=torch.device("cpu"), request=request, error=MemoryError())
    assert error.hint_text == "try smaller example inputs"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seq_len": 8}, "--seq-len has no effect with --input"),
        ({"batch": 2}, "--batch has no effect with --input"),
        ({"phase": "prefill"}, "--phase has no effect with --input"),
        ({"phase": "decode"}, "--phase has no effect with --input"),
        ({"model_id": "mine.py:pair"}, "--input has no effect on `mine.py:pair`"),
        ({"input": "mine.py"}, "--input mine.py names no function"),
    ],
)
def test_what_it_contradicts(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        WorkloadRequest(**{"model_id": "gpt2", "input": "mine.py:one", **changes})
