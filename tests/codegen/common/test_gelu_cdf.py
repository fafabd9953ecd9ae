"""GELU in 16-bit kernels: every spelling is recognised, nothing else is, and the short functions are as good as they say."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
import torch

from fusion_advisor.codegen.common.gelu_cdf import with_cdfs
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.triton.backend import assembly_for
from fusion_advisor.library.discover import list_kernels, load_kernel
from fusion_advisor.library.patterns import lower_reference
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases import programs as p
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = [spec.name for spec in list_kernels() if re.search(r"gelu_(erf|tanh)|geglu", spec.name)]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def lowered(name, dtype="bfloat16"):
    """A kernel's Programs, one for each of its references."""
    kernel = load_kernel(name)
    sizes = dict(kernel.spec.check[0].sizes)
    for _, function in kernel.references:
        yield next(lower_reference(kernel.spec, function, sizes, dtype=getattr(torch, dtype))).program


def render(program, backend="cuda"):
    return backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)


def test_there_are_kernels_with_gelu():
    assert len(NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_is_one_multiplication(name):
    op = "normal_cdf" if "erf" in name else "tanh_cdf"
    for program in lowered(name):
        values = with_cdfs(program).values
        found = [number for number, value in enumerate(values) if value.op == op]
        assert len(found) == 1
        assert sum(value.op == "mul" and set(value.args) == {found[0], *values[found[0]].args} for value in values) == 1
        for backend, written in (("cuda", ("erfc(", "sigmoid_16bit(")), ("triton", ("erfc(", "sigmoid_16bit("))):
            source = render(program, backend).source
            assert f"{op}_16bit(" in source
            assert not [function for function in written if function in source]


def changed(program, old, new):
    """The Program with one constant instead of another."""
    values = tuple(replace(v, constant=new) if v.op == "const" and v.constant == old else v for v in program.values)
    assert values != program.values
    return replace(program, values=values)


def gradient(approximate, dtype, rows=64, *, with_bias=False):
    """GELU's gradient, and what a bias before it gets of it."""

    def function(g, x):
        found = torch.ops.aten.gelu_backward(g, x, approximate=approximate)
        return (found, found.sum(0)) if with_bias else found

    return lower_function(function, *(torch.zeros(rows, 2048, dtype=dtype) for _ in range(2)))[0].program


@pytest.mark.parametrize(("approximate", "op"), [("tanh", "tanh_cdf"), ("none", "normal_cdf")])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_the_gradient_has_one_distribution_function_and_no_other(approximate, op, dtype):
    for backend in ("cuda", "triton"):
        source = render(gradient(approximate, dtype), backend).source
        assert source.count(f"{op}_16bit(") == 2  # its definition and one call
        assert not [other for other in ("tanh(", "tanhf(", "erfc(", "erff(", "sigmoid_16bit(") if other in source]


@pytest.mark.parametrize(("approximate", "most"), [("tanh", (8, 8)), ("none", (16, 0))])
def test_the_gradients_functions_on_a_gpu(approximate, most):
    """For each of a thread's 8 elements: 2 to a power and a root, or 2 to a power for the function and for its density."""
    program = gradient(approximate, torch.bfloat16, rows=4096)
    ptx = assembly_for(program, render(program, "triton"), 90)["ptx"]
    assert (ptx.count("ex2.approx"), ptx.count("rsqrt.approx")) == most
    assert "div." not in ptx


@pytest.mark.parametrize(("approximate", "op"), [("tanh", "tanh_cdf"), ("none", "normal_cdf")])
def test_partial_sums_of_16_bit_results_need_no_more_digits(approximate, op):
    """A bias's gradient is added up in float32 over launches and then rounded: its elements are as good as they have to be."""
    for dtype in DTYPES.values():
        program = gradient(approximate, dtype, rows=4096, with_bias=True)
        partial = render(program, "triton").parts[0]
        assert f"{op}_16bit(" in partial.source
        assert ("e-06" in partial.source) == (dtype == torch.float16 and op == "normal_cdf")  # the finer polynomial
    assert f"{op}_16bit(" not in render(gradient(approximate, torch.float32, rows=4096, with_bias=True), "triton").parts[0].source


def test_what_is_nearly_gelu_is_left_alone():
    erf, tanh = next(lowered("gelu_erf")), next(lowered("gelu_tanh"))
    scaled = next(lowered("scale_gelu_erf"))
    nearly = [changed(erf, 0.5, 0.25), changed(tanh, 0.044715, 0.0447), changed(scaled, 0.35, 0.7)]
    nearly += [next(lowered("quick_gelu")), next(lowered("silu")), next(lowered("gelu_erf", "float32"))]
    for program in nearly:
        assert with_cdfs(program) == program


def test_a_distribution_function_with_another_user_stays():
    program = next(lowered("gelu_erf"))
    number = next(n for n, value in enumerate(program.values) if value.op == "erfc")
    both = replace(program, stores=(*program.stores, replace(program.stores[0], value=number)))
    values = with_cdfs(both).values
    assert values[number].op == "erfc"


def coefficients(source):
    """Those of the polynomial in a rendered helper, highest power first."""
    body = source[source.index("normal_cdf_16bit(") : source.index("tail =")]
    first, *rest = re.findall(r"power = .*", body)
    found = [first, *rest]
    return [float(re.sub(r"\s", "", re.findall(r"[-+]? ?\d[\d.]*(?:e-\d+)?", line)[-1])) for line in found]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_normal_distribution_is_as_near_as_its_comment_says(dtype):
    program = next(lowered("gelu_erf", dtype))
    cuda, triton = (coefficients(render(program, backend).source) for backend in ("cuda", "triton"))
    assert cuda == triton
    assert len(cuda) == 8
    assert cuda[0] < 0
    x = torch.linspace(-13.3, 13.3, 200_001, dtype=torch.float32)
    power = torch.full_like(x, cuda[0])
    for factor in cuda[1:]:  # a fused multiply-add rounds once
        power = (power.double() * x.double().abs() + torch.tensor(factor, dtype=torch.float32).double()).float()
    tail = torch.exp2(power.double())
    off = (torch.where(x < 0, tail, 1 - tail) / (0.5 * torch.erfc(-x.double() * 0.5**0.5)) - 1).abs()
    if dtype == "float16":
        assert off[x >= -5.7].max() < 6e-6
    else:
        assert off[x >= -5.7].max() < 3e-4
        assert off.max() < 3e-3


EDGES = [0.0, -0.0, 1e-40, -1e-40, 3e-5, -3e-5, 4.0, -4.0, 20.0, -20.0, 6e4, -6e4, torch.inf, -torch.inf, torch.nan, 1.0]


@needs_compiler
def test_edges_are_eagers(tmp_path):
    """Nothing, tiny, huge, infinite and no numbers, and everything between -8 and 8 to half a unit and a little."""
    launches, wanted = [], []
    for name, approximate in (("gelu_erf", "none"), ("gelu_tanh", "tanh")):
        for dtype in DTYPES.values():
            extreme = torch.finfo(dtype)
            values = [*EDGES, extreme.max, extreme.min, extreme.tiny, -extreme.tiny]
            x = torch.cat([torch.tensor(values), torch.linspace(-8, 8, 2028)]).to(dtype)
            program = next(lowered(name, str(dtype).removeprefix("torch.")))
            program = sized(program, 2048)
            out = torch.empty_like(x)
            launches.append(cuda_on_host.Launch(rendered=CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False),
                                                program=program, inputs=[x], outputs=[out]))  # fmt: skip
            wanted.append(torch.nn.functional.gelu(x.double(), approximate=approximate))
    cuda_on_host.run_all(launches, tmp_path)
    for launch, want in zip(launches, wanted, strict=True):
        got = launch.outputs[0]
        assert torch.equal(torch.isnan(got), torch.isnan(want))
        assert torch.equal(torch.isinf(got), torch.isinf(want.to(got.dtype)))
        finite = torch.isfinite(got)
        unit = torch.finfo(got.dtype)
        near = (got.double() - want)[finite].abs() <= 0.53 * unit.eps * want[finite].abs() + unit.smallest_normal * unit.eps
        assert bool(near[want[finite].abs() > 1e-7].all())
        assert bool((torch.signbit(got) == torch.signbit(want))[finite].all())


def sized(program, size):
    """A flat Program of another size."""
    operands = tuple(replace(operand, element_count=size) for operand in program.operands)
    return replace(program, dims=(size,), operands=operands)


@needs_compiler
def test_late_loads_change_nothing(tmp_path):
    program = p.add_layernorm(5, 40, "bfloat16")
    rendered = CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    early = replace(rendered, source=rendered.source.replace("#define LATE 1", "#define LATE 0"))
    assert early.source != rendered.source
    generator = torch.Generator().manual_seed(0)
    shapes = [(40,) if o.element_count == 40 else (5, 40) for o in program.operands]
    inputs = [
        torch.randn(s, generator=generator).bfloat16() for s, o in zip(shapes, program.operands, strict=True) if not o.is_output
    ]
    results = []
    launches = []
    for one in (rendered, early):
        outputs = [torch.zeros(5, 40, dtype=torch.bfloat16) for o in program.operands if o.is_output]
        launches.append(cuda_on_host.Launch(rendered=one, program=program, inputs=inputs, outputs=outputs))
        results.append(outputs)
    cuda_on_host.run_all(launches, tmp_path)
    assert all(bool(out.any()) for out in results[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
