"""Activations behind linears: which ones a GEMM's epilogue could compute, and what must stop it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.passes.gemm_epilogue import find_epilogue_sites

ROWS, WIDTH = 80, 16
pytestmark = pytest.mark.usefixtures("cpu_epilogue")


class Behind(nn.Module):
    """A function behind a linear."""

    def __init__(self, function, *, bias=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(WIDTH, 24, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.function(self.linear(x))


class Addmm(nn.Module):
    """GPT-2's Conv1D in front of a GELU."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 24)), nn.Parameter(torch.randn(24))

    def forward(self, x):
        return functional.gelu(torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:-1], 24))


def found(model, *inputs, chains=(), device="cpu", **how):
    """Find the sites of a model's one region; every call is compared with what it would replace."""
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), inputs or (torch.randn(4, ROWS // 4, WIDTH),), {}).regions
        graph = region.graph.graph
        named = [(kernel, tuple(node for node in graph.nodes if pick(node))) for kernel, pick in chains]
        sites, refusals = find_epilogue_sites(graph, named, device, **how)
        values = torch.fx.Interpreter(region.graph, garbage_collect_values=False)
        values.run(*region.example_args)
        for site in sites if device == "cpu" and not how else ():
            result = site.call()(*(values.env[node] for node in site.operands))
            expected = values.env[site.result]
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            assert result.stride() == expected.stride()
            assert site.members[0] is site.product and site.members[-1] is site.result
    return sites, refusals


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functional.relu, "linear_relu"),
        (torch.relu, "linear_relu"),
        (functional.gelu, "linear_gelu_erf"),
        (lambda y: functional.relu(y.view(ROWS, 24)), "linear_relu"),
        (lambda y: functional.relu(y.flatten(0, 1)).view(2, 40, 24) + 1, "linear_relu"),
    ],
)
def test_an_activation_that_alone_reads_a_linear_is_found(function, name):
    sites, refusals = found(Behind(function))
    assert [site.name for site in sites] == [name] and refusals == []


def test_gpt_2_s_linears_are_found():
    sites, _ = found(Addmm())
    assert [(site.name, len(site.members)) for site in sites] == [("addmm_gelu_erf", 3)]
    assert [site.name for site in found(Addmm(), torch.randn(1, 4, WIDTH))[0]] == ["addmm_gelu_erf"]


def test_a_chain_that_a_gelu_kernel_computes_is_one_and_any_other_keeps_its_ops():
    model = Behind(lambda y: 0.5 * y * (1 + torch.erf(y / 2**0.5)))
    assert found(model) == ([], [])

    def ops(node):
        return node.op == "call_function" and node.name.rstrip("_0123456789") in ("mul", "add", "erf", "div")

    def of_two(node):
        return node.name in ("relu", "mul")

    (site,), _ = found(model, chains=[("gelu_erf", ops)])
    assert site.activation == "gelu_erf" and len(site.members) >= 5
    assert found(model, chains=[("mul_erf_1a2b", ops)]) == ([], [])
    assert found(Behind(lambda y: functional.relu(y) * 2), chains=[("relu_mul_1a2b", of_two)]) == ([], [])
    assert len(found(Behind(functional.relu), chains=[("relu_1a2b", of_two)])[0]) == 1


@pytest.mark.parametrize(
    "model",
    [
        Behind(lambda y: functional.relu(y) + y),
        Behind(lambda y: functional.relu(y).add_(y)),
        Behind(functional.silu),
        Behind(functional.relu, bias=False),
        Behind(lambda y: functional.relu(y.transpose(0, 1))),
        Behind(lambda y: functional.relu(y[:, 1:])),
        Behind(lambda y: functional.relu(y.double())),
        Behind(lambda y: functional.relu(y + 1)),
    ],
)
def test_what_must_stop_it(model):
    assert found(model) == ([], [])


@pytest.mark.parametrize(("is_on", "count", "refused"), [(False, 1, ["autocast"]), (True, 2, [])])
def test_between_the_switches_of_autocast_it_is_refused_and_between_its_casts_it_is_not(is_on, count, refused):
    class Casting(Behind):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
                y = super().forward(x)
            return functional.relu(self.linear(y.float()[:, :WIDTH]))

    sites, refusals = found(Casting(functional.relu), torch.randn(ROWS, WIDTH))
    assert len(sites) == count and [refusal.split(",")[0] for refusal in refusals] == refused


class Writing(nn.Module):
    """What the linear has read is written to before its activation runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + 1
        y = self.linear(x)
        x[:2].mul_(2)
        return functional.relu(y) + x


def test_an_operand_that_is_written_to_in_between_stops_it():
    assert found(Writing()) == ([], [])


def test_a_linear_on_few_rows_is_a_gemv_kernel_s():
    assert found(Behind(functional.relu), torch.randn(64, WIDTH)) == ([], [])
    assert len(found(Behind(functional.relu), torch.randn(65, WIDTH))[0]) == 1


def test_another_gelu_is_refused_by_name():
    sites, refusals = found(Behind(lambda y: functional.gelu(y, approximate="tanh")))
    assert sites == [] and refusals == ["the model goes through gelu_tanh, the epilogue's is gelu_erf"]
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    sites, refusals = found(Behind(functional.gelu, dtype=torch.bfloat16), x, device="cuda")
    assert sites == [] and refusals == ["the model goes through gelu_erf, the epilogue's is gelu_tanh; --fast-math allows it"]


def test_fast_math_takes_one_gelu_for_the_other_in_16_bits():
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    (site,), refusals = found(Behind(functional.gelu, dtype=torch.bfloat16), x, device="cuda", fast_math=True)
    assert (site.name, refusals) == ("linear_gelu_erf", [])
    sites, refusals = found(Behind(functional.gelu), device="cuda", fast_math=True)
    assert sites == [] and len(refusals) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_gelu_of_float32_is_refused(dtype):
    model = Behind(lambda y: functional.gelu(y, approximate="tanh"), dtype=dtype)
    sites, refusals = found(model, torch.randn(ROWS, WIDTH, dtype=dtype), device="cuda")
    is_float32 = dtype is torch.float32
    assert (len(sites), len(refusals)) == ((0, 1) if is_float32 else (1, 0))
    assert not is_float32 or "ten times" in refusals[0]


def test_relu_in_float32_is_not_refused():
    sites, refusals = found(Behind(functional.relu), device="cuda")
    assert len(sites) == 1 and refusals == []


def test_elsewhere_nothing_is_looked_for():
    assert found(Behind(functional.relu), device="mps") == ([], [])
