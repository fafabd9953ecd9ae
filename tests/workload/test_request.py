from __future__ import annotations

import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.workload.request import WorkloadRequest


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_id": " "}, "MODEL_ID is empty"),
        ({"dtype": "float32"}, "--dtype float32 is not known"),
        ({"phase": "tune"}, "--phase tune is not known"),
        ({"weights": "mine"}, "--weights mine is not known"),
        ({"device": "tpu"}, "--device tpu is not a device"),
        ({"device": "cuda:x"}, "--device cuda:x is not a device"),
        ({"batch": 0}, "--batch 0 is less than 1"),
        ({"seq_len": 0}, "--seq-len 0 is less than 1"),
        ({"layers": -1}, "--layers -1 is less than 1"),
        ({"context": 0, "phase": "decode"}, "--context 0 is less than 1"),
        ({"context": 8}, "--context has no effect on --phase forward"),
        ({"context": 8, "phase": "generate"}, "--context has no effect on --phase generate"),
        ({"new_tokens": 8, "phase": "decode"}, "--new-tokens has no effect on --phase decode"),
        ({"new_tokens": 1, "phase": "generate"}, "--new-tokens 1 is a prefill"),
        ({"seq_len": 8, "phase": "decode"}, "--seq-len has no effect on a decode step"),
    ],
)
def test_wrong_options_are_usage_errors(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        WorkloadRequest(**{"model_id": "gpt2", **changes})
    assert caught.value.exit_code == 2
    assert caught.value.hint_text


@pytest.mark.parametrize(
    ("model_id", "factory"),
    [
        ("a/b.py:make", ("a/b.py", "make")),
        ("../x y/net.py:Net", ("../x y/net.py", "Net")),
        ("pack.mod:make", ("pack.mod", "make")),
        ("gpt2", None),
        ("Qwen/Qwen2.5-7B", None),
        ("./model.py", None),
    ],
)
def test_a_factory_is_told_from_an_id(model_id: str, factory: tuple[str, str] | None) -> None:
    assert WorkloadRequest(model_id=model_id).factory == factory
