"""Causal masks: every spelling is one triangle, nothing is read under it, and only the same triangle is the same kernel."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.triton.backend import compile_for
from fusion_advisor.ir.causal_mask import order_of
from fusion_advisor.library.match import find_match, structure
from fusion_advisor.library.patterns import library_patterns
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.lowered import check, lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
INF = float("inf")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def ones(x):
    return torch.ones(x.shape[-2:], dtype=torch.bool)


def more_keys(x):
    return x.shape[-1] - x.shape[-2]


MASKS = {
    "tril": lambda x: ones(x).tril(more_keys(x)),
    "not triu": lambda x: ~ones(x).triu(more_keys(x) + 1),
    "not triu, logically": lambda x: torch.logical_not(torch.triu(ones(x), more_keys(x) + 1)),
    "not not tril": lambda x: ~~ones(x).tril(more_keys(x)),
    "columns up to": lambda x: torch.arange(x.shape[-1]) <= torch.arange(more_keys(x), x.shape[-1])[:, None],
    "rows from": lambda x: torch.arange(more_keys(x), x.shape[-1])[:, None] >= torch.arange(x.shape[-1]),
    "rows after": lambda x: torch.arange(more_keys(x) + 1, x.shape[-1] + 1)[:, None] > torch.arange(x.shape[-1])[None],
    "columns before": lambda x: torch.arange(x.shape[-1]) < torch.arange(x.shape[-2])[:, None] + more_keys(x) + 1,
    "not columns after": lambda x: ~(torch.arange(x.shape[-1]) > torch.arange(x.shape[-2])[:, None] + more_keys(x)),
}
SHAPES = [(2, 3, 5, 7), (2, 3, 6, 6), (4, 9), (2, 1, 7), (3, 7, 1), (2, 7, 5)]


def causal(mask, *, is_fill=False, scale=0.3):
    def function(x):
        scaled = x * scale
        return torch.softmax(scaled.masked_fill(~mask(x), -INF) if is_fill else torch.where(mask(x), scaled, -INF), -1)

    return function


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_fill", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_every_spelling_is_right(name, is_fill, shape):
    check(causal(MASKS[name], is_fill=is_fill), torch.randn(shape))


@pytest.mark.parametrize("diagonal", [-9, -2, -1, 0, 1, 3, 9])
@pytest.mark.parametrize("name", ["tril", "triu"])
def test_a_triangle_of_numbers(name, diagonal):
    check(lambda x: getattr(torch, name)(x, diagonal) * 2 + x, torch.randn(2, 5, 7))
    check(lambda x: x + getattr(torch, name)(torch.full((5, 7), 3.0), diagonal), torch.randn(2, 5, 7))


def test_other_comparisons_of_places_stay_right():
    check(lambda x: torch.where(torch.arange(7) * 2 <= torch.arange(5)[:, None], x, 0.0), torch.randn(5, 7))
    check(lambda x: torch.where(torch.arange(7) == torch.arange(5)[:, None], x, 0.0), torch.randn(5, 7))
    check(lambda x: torch.where(torch.arange(7) < 4, x, 0.0), torch.randn(5, 7))


def test_all_spellings_and_lengths_are_one_structure():
    forms = {
        structure(lower_function(causal(mask, is_fill=is_fill), torch.randn(shape))[0].program).text
        for mask in MASKS.values()
        for is_fill in (False, True)
        for shape in SHAPES[:2]
    }
    assert len(forms) == 1


def test_the_library_kernel_is_found_for_its_own_triangle_alone():
    for shape in SHAPES[:3]:
        found = find_match(lower_function(causal(MASKS["tril"]), torch.randn(shape))[0].program, library_patterns()[0])
        assert found is not None and found.kernel == "causal_softmax" and dict(found.constants) == {"scale": 0.3}
    others = {
        "one more": lambda x: ones(x).tril(more_keys(x) + 1),
        "one less": lambda x: ones(x).tril(more_keys(x) - 1),
        "the other side": lambda x: ones(x).triu(more_keys(x)),
        "from the top left": lambda x: ones(x).tril(),
    }
    for mask in others.values():
        found = find_match(lower_function(causal(mask), torch.randn(2, 5, 7))[0].program, library_patterns()[0])
        assert found is None
    plain = lower_function(lambda x: torch.softmax(x * 0.3, -1), torch.randn(2, 5, 7))[0].program
    assert find_match(plain, library_patterns()[0]) is None or find_match(plain, library_patterns()[0]).kernel != "causal_softmax"


@pytest.mark.parametrize(("shape", "read"), [((2, 6, 6), 2 * 21), ((2, 5, 7), 2 * (3 + 4 + 5 + 6 + 7)), ((4, 9), 6 + 7 + 8 + 9)])
def test_what_the_mask_hides_is_neither_read_nor_counted(shape, read):
    program = lower_function(causal(MASKS["tril"]), torch.randn(shape))[0].program
    load = next(value for value in program.values if value.op == "load")
    assert order_of(program, load.guard) is not None
    assert program.operands[0].element_count == read
    assert program.moved_bytes == 4 * (read + torch.Size(shape).numel())


def test_what_is_wanted_elsewhere_is_read_whole():
    def function(x):
        return torch.where(MASKS["tril"](x), x, 0.0).sum(-1, keepdim=True) + x

    program = check(function, torch.randn(5, 7))
    assert all(value.guard is None for value in program.values)
    assert program.operands[0].element_count == 35


def test_a_growing_cache_of_keys_compiles_no_new_kernel():
    programs = [lower_function(causal(MASKS["tril"]), torch.randn(2, 5, keys))[0].program for keys in (7, 8, 100)]
    for backend in ("triton", "cuda", "cpp"):
        assert len({backend_of(backend).render(p, HEADER, tuning=Tuning(), fast_math=False).entry for p in programs}) == 1


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 16, 16), (3, 8, 24), (1, 2, 16408)])
@pytest.mark.parametrize("backend", ["cpp", "cuda"])
def test_kernels_compute_it(tmp_path, backend, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    # What lies under the mask must not show.
    x[..., 0, shape[-1] - shape[-2] + 1 :] = float("nan")
    program = lower_function(causal(MASKS["tril"]), x)[0].program
    rendered = backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.zeros_like(x)
    if backend == "cuda":
        cuda_on_host.run(rendered, program, [x], [out], tmp_path)
    else:
        backend_of(backend).build(rendered, tmp_path / "k.cpp").bind(program)(x, out)
    expected = causal(MASKS["tril"])(x.double())
    torch.testing.assert_close(out.double(), expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


def visible(x):
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(more_keys(x))


def filled(number):
    return lambda x: torch.softmax((x * 0.3).masked_fill(~visible(x), number), -1)


HIDING = {
    "softmax": filled(-INF),
    "a finite fill": filled(-1e4),
    "masked, then scaled": lambda x: torch.softmax(torch.where(visible(x), x, -INF) * 0.3, -1),
    "log": lambda x: torch.log_softmax(torch.where(visible(x), x, -INF), -1),
    "sum": lambda x: torch.where(visible(x), x, 0.5).sum(-1),
    "smallest": lambda x: torch.where(visible(x), x, 2.0).amin(-1),
    "softmax, then all scores": lambda x: filled(-INF)(x) + x.relu(),
}
WHOLE_PACKS = {"softmax": 3, "a finite fill": 3, "masked, then scaled": 3, "log": 3, "sum": 1, "smallest": 1}
"""Passes that treat a hidden pack as one number; of the rest one adds scores that are not hidden."""


def with_edges(shape, dtype, device="cpu"):
    """Scores of which the last row sees a NaN, the one before an infinity, and the one before that nothing finite."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[..., -1, 0], x[..., -2, 0], x[..., -3, :] = float("nan"), INF, -INF
    return x


@needs_compiler
def test_packs_that_the_mask_hides_are_what_their_columns_are(tmp_path):
    bf16 = torch.bfloat16
    cases = [(name, shape, bf16, 0) for name in HIDING for shape in ((2, 24, 24), (1, 24, 16))]  # in the second rows see nothing
    cases += [("softmax", (16, 32), torch.float32, 0), ("softmax", (16, 32), bf16, 1)]  # packs of one column
    launches, expected = [], []
    for name, shape, dtype, width in cases:
        x, function = with_edges(shape, dtype), HIDING[name]
        program = lower_function(function, x)[0].program
        rendered = backend_of("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
        assert rendered.source.count("// the mask hides all of the pack") == WHOLE_PACKS.get(name, 2)
        out = torch.full_like(function(x), 7)
        launches.append(cuda_on_host.Launch(rendered=rendered, program=program, inputs=[x], outputs=[out], width=width))
        expected.append(function(x.double()))
    cuda_on_host.run_all(launches, tmp_path)
    for case, launch, want in zip(cases, launches, expected, strict=True):
        got, limit = launch.outputs[0].double(), 2e-2 if case[2] == bf16 else 1e-5
        words = functools.partial("{}: {}".format, case)
        torch.testing.assert_close(got, want, rtol=limit, atol=1e-6, equal_nan=True, msg=words)


@pytest.mark.gpu
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("shape", [(2, 512, 512), (3, 64, 2048), (1, 24, 16)])
def test_hidden_packs_on_the_device(tmp_path, name, shape):
    x = with_edges(shape, torch.bfloat16, "cuda")
    program = lower_function(HIDING[name], x)[0].program
    rendered = backend_of("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.full_like(HIDING[name](x), 7)
    backend_of("cuda").build(rendered, tmp_path / "k.cu").bind(program)(x, out)
    torch.testing.assert_close(out.double(), HIDING[name](x.double()), rtol=2e-2, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", [(3, 512, 2048), (3, 64, 20480)])
def test_triton_reads_16_bytes_at_a_time_under_the_mask(shape, monkeypatch):
    import triton

    seen, real = [], triton.compile

    def remember(*args, **named):
        seen.append(real(*args, **named))
        return seen[-1]

    monkeypatch.setattr(triton, "compile", remember)
    program = lower_function(causal(MASKS["tril"]), torch.empty(shape, dtype=torch.bfloat16))[0].program
    compile_for(program, backend_of("triton").render(program, HEADER, tuning=Tuning(), fast_math=False), 90)
    loads = [line for line in seen[0].asm["ptx"].splitlines() if "ld.global" in line]
    assert loads and all(".v4.b32" in line for line in loads)
