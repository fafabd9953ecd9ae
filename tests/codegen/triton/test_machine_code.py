"""What Triton makes of kernels for a GPU that need not be here: no branches where all rows wait, no detours between threads."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend, assembly_for
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.patterns import lower_reference
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")


def lowered(name, dtype="bfloat16", **sizes):
    kernel = load_kernel(name)
    return next(lower_reference(kernel.spec, kernel.references[0][1], sizes, dtype=getattr(torch, dtype))).program


def render(program):
    return TritonBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)


def ptx(program):
    return assembly_for(program, render(program), 90)["ptx"]


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "softmax"])
@pytest.mark.parametrize("rows", [1, 4096])
def test_a_row_waits_for_no_rounded_division(name, rows):
    code = ptx(lowered(name, R=rows, C=3584))
    assert "div.rn" not in code and "rcp.rn" not in code and "bra" not in code


def test_a_mean_of_two_halves_takes_none_either():
    assert "div.rn" not in ptx(lowered("qk_norm_rope", B=1, H=32, S=2048, D=128))


def test_a_softmax_in_float32_divides():
    code = ptx(lowered("softmax", "float32", R=512, C=1024))
    assert "div.rn" in code or "rcp.rn" in code


def rounded_fma(a, b, c):
    """A product of two float32 numbers is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def mean_of(ulps):
    """The helper, with a reciprocal that is so far off."""

    def inverse_of(count):
        inverse = 1.0 / count
        return torch.where(inverse.isfinite(), (inverse.view(torch.int32) + ulps).view(torch.float32), inverse)

    body = re.search(r"def mean_of.*?return [^\n]*\n", render(lowered("rmsnorm", R=8, C=64)).source, re.DOTALL)[0]
    names = {"tl": SimpleNamespace(fma=rounded_fma, where=torch.where, abs=torch.abs), "inverse_of": inverse_of}
    exec(body.replace("1.0 / count", "inverse_of(count)"), names)
    return names["mean_of"]


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_a_mean_is_what_a_division_gives_although_its_reciprocal_is_not(ulps):
    counts = torch.tensor([1, 3, 7, 96, 768, 1000, 3584, 4096, 16383, 50257], dtype=torch.float32)[:, None]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1, 4000, generator=generator).bfloat16().float() * 100
    assert torch.equal(mean_of(ulps)(numbers * counts, counts), (numbers * counts / counts))  # rows of equal numbers lose nothing
    totals = torch.randn(1, 4000, generator=generator) * 1e4
    found, wanted = mean_of(ulps)(totals, counts), totals / counts
    assert (found == wanted).float().mean() > 0.999
    torch.testing.assert_close(found, wanted, rtol=2**-23, atol=0)
    edges = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, 3e38, -3e38, 1e-30]])
    torch.testing.assert_close(mean_of(ulps)(edges, counts), edges / counts, rtol=2**-23, atol=0, equal_nan=True)
    assert mean_of(ulps)(torch.zeros(1, 1), torch.zeros(1, 1)).isnan().all()


def erfc(ulps):
    """The helper for float32, with roots that are so far off."""

    def rsqrt(x):
        return (torch.rsqrt(x).view(torch.int32) + ulps).view(torch.float32)

    def own(x):
        return torch.erfc(x)

    body = re.search(r"def erfc.*?return [^\n]*\n", render(program_of(own, torch.float32)).source, re.DOTALL)[0]
    functions = {"fma": rounded_fma, "where": torch.where, "abs": torch.abs, "exp2": torch.exp2, "rsqrt": rsqrt}
    names = {"tl": SimpleNamespace(**functions), "torch": torch}
    exec(re.sub(r"(?<=, )(-?\d[\d.e-]+)(?=[,)])", r"torch.tensor(\1)", body), names)  # a product of two numbers needs two tensors
    return names["erfc"]


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_an_erfc_is_good_to_4_ulp_although_its_reciprocals_are_not(ulps):
    x = torch.cat([torch.linspace(-6, 9.19, 400_001), torch.linspace(-0.01, 0.01, 10_001)])
    wanted = torch.special.erfc(x.double())
    ulp = torch.tensor(2.0).double() ** (wanted.abs().log2().floor() - 23)
    assert ((erfc(ulps)(x) - wanted).abs() / ulp).max() < 4
    edges = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 20.0, -20.0, 3e38])
    torch.testing.assert_close(erfc(ulps)(edges), torch.special.erfc(edges), rtol=3e-7, atol=0, equal_nan=True)


def test_gelu_in_float32_divides_nothing():
    code = ptx(program_of(torch.nn.functional.gelu, torch.float32))
    assert "div." not in code and "rcp." not in code


def test_a_tanh_of_16_bits_takes_one_power_and_one_root():
    """Softcap, 8 elements a thread."""
    code = ptx(lowered("softcap", R=2048, C=4096))
    assert (code.count("ex2.approx"), code.count("rsqrt.approx"), code.count("div.")) == (8, 8, 0)
    assert "tanh_16bit" not in render(lowered("softcap", "float32", R=2048, C=4096)).source


def program_of(function, *dtypes):
    return lower_function(function, *(torch.zeros(512, 1024, dtype=dtype) for dtype in dtypes))[0].program


@pytest.mark.parametrize("function", [torch.tanh, torch.expm1, torch.log1p])
def test_a_function_of_16_bits_is_good_to_1e_5_of_itself(function):
    def own(x):  # tracing asks for a function of Python's
        return function(x)

    name = f"{function.__name__}_16bit"
    source = render(program_of(own, torch.bfloat16)).source
    body = re.search(rf"def {name}.*?return [^\n]*\n", source, re.DOTALL)[0]
    names = {"tl": SimpleNamespace(**{one: getattr(torch, one) for one in ("rsqrt", "exp2", "exp", "log", "where", "abs")})}
    exec(body, names)
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.linspace(-0.1, 0.1, 20_001), torch.logspace(-38, -1, 500)])
    wanted = function(x.double())
    is_number = (x != 0) & wanted.isfinite()
    assert ((names[name](x) - wanted) / wanted)[is_number].abs().max() < 1e-5
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, -1.0])
    found = names[name](edges)
    torch.testing.assert_close(found, function(edges), rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[:2], function(edges).signbit()[:2])
    assert name not in render(program_of(own, torch.float32)).source


@pytest.mark.parametrize(
    "function", [lambda x, y: x / y, lambda x, y: x / y.sum(-1, keepdim=True), lambda x, y: (x * x).sqrt() + y]
)
def test_divisions_and_roots_of_16_bits_have_no_slow_path(function):
    code = ptx(program_of(function, torch.bfloat16, torch.bfloat16))
    assert not re.search(r"(div|rcp|sqrt)\.rn", code)
    assert re.search(r"(div|rcp|sqrt)\.rn", ptx(program_of(function, torch.float32, torch.float32)))


@pytest.mark.parametrize("function", [lambda x, y: torch.round(x / y), lambda x, y: torch.where(x / y > 0.5, x, y)])
def test_a_quotient_that_decides_something_is_rounded(function):
    assert "div.rn" in ptx(program_of(function, torch.bfloat16, torch.bfloat16))


NARROW = {
    "qk_norm_rope": {"B": 1, "H": 32, "S": 2048, "D": 128},  # Qwen3
    "rmsnorm": {"R": 65536, "C": 128},
    "layernorm": {"R": 100352, "C": 96},  # ConvNeXt's first stage
    "rope": {"B": 1, "H": 16, "S": 2048, "D": 256},  # Gemma
    "qkv_heads_grouped": {"B": 1, "S": 512, "K": 4, "D": 128},  # Qwen2.5-7B
}


@pytest.mark.parametrize("name", NARROW)
def test_what_narrow_rows_share_lies_in_threads_as_they_do(name):
    """Nothing is moved between threads through shared memory, and all that is read is read 16 bytes at a time."""
    program = lowered(name, **NARROW[name])
    assembly = assembly_for(program, render(program), 90)
    assert "convert_layout" not in assembly["ttgir"]
    assert "bar.sync" not in assembly["ptx"] and "st.shared" not in assembly["ptx"]
    assert set(re.findall(r"(?:ld|st)\.global\S*", assembly["ptx"])) == {"ld.global.v4.b32", "st.global.v4.b32"}


def test_wide_rows_read_what_they_share_once():
    """Where a row fills all threads with 16 bytes each, a second row of a tile finds what they share in registers."""
    code = ptx(lowered("add_layernorm", R=100352, C=384))
    assert len(re.findall(r"ld\.global", code)) == 2 * 2 + 2


def test_a_single_row_in_a_tile_of_several_still_compiles():
    """A row that every row of the tile would write."""
    program = lowered("rmsnorm", R=1, C=64)
    rendered = TritonBackend().render(program, HEADER, tuning=Tuning(block_rows=4, num_warps=4), fast_math=False)
    assert assembly_for(program, rendered, 90)["cubin"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cross_entropy", {"R": 2048, "V": 50257}),
        ("log_softmax", {"R": 2048, "C": 50257}),
        ("groupnorm", {"B": 4, "G": 32, "K": 11, "H": 63, "W": 63}),
    ],
)
def test_single_elements_are_grouped_inside_of_threads(name, sizes):
    """Rows that start anywhere are read by element: only what a row comes to is exchanged between threads, as for other rows."""
    code = ptx(lowered(name, **sizes))
    assert not re.search(r"ld\.global\S*\.v\d\.b(16|32)", code)
    assert len(re.findall(r"shfl\.sync", code)) == 2 * (5 + 3)  # of a warp's lanes, and of eight warps
    aligned = {"cross_entropy": {"R": 2048, "V": 50304}, "log_softmax": {"R": 2048, "C": 50304}}.get(
        name, sizes | {"H": 64, "W": 64}
    )
    vectors = ptx(lowered(name, **aligned))
    assert code.count("shfl.sync") == vectors.count("shfl.sync") and code.count("bar.sync") == vectors.count("bar.sync")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [lambda x, m: torch.where(m, x, 0.0), lambda x, m: torch.where(m, x, 0.0).softmax(-1)])
def test_a_mask_of_bytes_lies_in_threads_as_what_it_masks_does(function, dtype):
    """A thread would read 16 of its bytes at once, twice or four times as many elements as of the other tensor."""
    assembly = assembly_for(program_of(function, dtype, torch.bool), render(program_of(function, dtype, torch.bool)), 90)
    assert "convert_layout" not in assembly["ttgir"]
    assert "v4.b32" in assembly["ptx"]


def test_no_more_bytes_are_read_at_once_than_a_row_has():
    """Rows of 4 that start 16 apart: 8 neighbours would be those of two rows."""

    def function(x, m):
        return torch.where(m[:, :4], x[:, :4], 0.0).softmax(-1)

    inputs = torch.zeros(4096, 16, dtype=torch.bfloat16), torch.zeros(4096, 16, dtype=torch.bool)
    program = lower_function(function, *inputs)[0].program
    widths = re.findall(r"ld\.global\S*", assembly_for(program, render(program), 90)["ptx"])
    assert widths and not any("64" in width or "v4" in width for width in widths)


def test_what_is_gathered_by_column_is_no_run_of_bytes():
    inputs = torch.zeros(64, 512, dtype=torch.uint8), torch.zeros(512, dtype=torch.int64), torch.zeros(64, 512)
    program = lower_function(lambda m, ids, x: m[:, ids] * x, *inputs)[0].program
    assert "max_contiguous" not in render(program).source
