"""The tool that measures a fused call times a call past dynamo, one through dynamo, and the parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fusion_advisor.fuse.direct.words import words_are_readable
from tools.call_overhead import CASES, measure, model_of, table


def test_a_case_is_measured_part_by_part():
    found = measure("mlp", 1, 2)
    assert found.modules == 6 and found.inputs == 5  # x, and weight and bias of two layers
    assert (found.words > 20) == words_are_readable()
    assert found.past_dynamo_us > 0 and found.through_dynamo_us > 0 and all(value > 0 for value in found.parts_us.values())
    lines = table([found]).splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    assert "guards of the call" in lines[0] and lines[2].startswith("| mlp, 1 layers |")


@pytest.fixture
def _no_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize("case", CASES)
def test_each_case_is_a_model_with_a_call(case):
    model, args, kwargs = model_of(case, 1)
    with torch.no_grad():
        assert model(*args, **kwargs) is not None
