"""What ``generate`` passes the model in its steps."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.workload.generate import fixed_step
from tests import tiny


@pytest.mark.parametrize("tokens", [1, 5, 63, 64])
def test_a_decode_step_on_a_static_cache_is_found_for_prompts_that_fill_a_cache(tokens):
    model, _ = tiny.qwen2()
    step = fixed_step(model, {"input_ids": torch.randint(1, 200, (2, tokens))}, model_id="tiny")
    assert step["input_ids"].shape == (2, 1)
