"""A mask inside a sum of exponentials: ``mask ? fill : x`` is what the row's maximum is subtracted from, not its last part."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.lowering.lower import CannotLower
from fusion_advisor.verify.special_inputs import special_inputs
from tests.hostile.special_cases import result_for
from tests.kernel_cases.cuda_on_host import Launch, run_all
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def logsumexp(x, mask):
    return torch.logsumexp(x.masked_fill(mask, -1.25), dim=-1)


def cases():
    for cols in (1, 40, 5000):
        x = torch.randn(31, cols, generator=torch.Generator().manual_seed(cols))
        for mask in (torch.tensor(True), torch.tensor(False), torch.rand(31, cols) < 0.5):
            yield x, mask


def test_in_cpp(tmp_path):
    for number, given in enumerate(cases()):
        lowered, ops = lower_function(logsumexp, *given)
        rendered = CppBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        arguments, output = result_for(lowered, ops, given)
        output = output.reshape(-1)[: len(given[0])].clone()
        CppBackend().build(rendered, tmp_path / f"kernel{number}.cpp").bind(lowered.program)(*arguments, output)
        torch.testing.assert_close(output, logsumexp(*given))


def test_in_cuda_on_the_host(tmp_path):
    launches, wanted = [], []
    for given in cases():
        lowered, ops = lower_function(logsumexp, *given)
        rendered = CudaBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        arguments, output = result_for(lowered, ops, given)
        output = output.reshape(-1)[: len(given[0])].clone()
        launches.append(Launch(rendered=rendered, program=lowered.program, inputs=arguments, outputs=(output,)))
        wanted.append(logsumexp(*given))
    run_all(launches, tmp_path)
    for launch, want in zip(launches, wanted, strict=True):
        torch.testing.assert_close(launch.outputs[0], want, rtol=1e-5, atol=1e-4)


def test_a_mask_of_one_element_is_tried_both_ways():
    sets = dict(special_inputs([torch.randn(4, 3), torch.tensor(False)], 0, is_in_place=False))
    assert sets["mask all true"][1].item() is True and sets["mask all false"][1].item() is False
    assert "another mask" not in "".join(sets)


def test_a_cat_of_nothing_is_refused():
    with pytest.raises(CannotLower, match="all empty"):
        lower_function(lambda x, y: torch.cat([x, y]), torch.empty(0), torch.empty(0))
