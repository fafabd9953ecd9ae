"""Triton kernels for many sizes: one source is right at all of them, and few machine codes serve them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend, assembly_for, load_source
from fusion_advisor.codegen.triton.launch import launch_of, variant_of
from tests.kernel_cases import programs as p
from tests.kernel_cases.open_cases import CASES, two_ropes

KERNEL_CASES = Path(__file__).parents[2] / "kernel_cases"
HEADER = Header(title="case", summary="a test", origin="generated from the chain")


def render(first, *elsewhere, tuning=None):
    return TritonBackend().render(first, HEADER, tuning=tuning or Tuning(), fast_math=False, elsewhere=elsewhere)


def rendered_case(name):
    case = CASES[name]
    return render(*(case.at(*sizes) for sizes in case.rendered), tuning=case.tuning)


def test_one_source_is_right_at_every_size_in_the_interpreter(tmp_path):
    """Bound to each, and by the launch that the file ends in."""
    environment = {**os.environ, "PYTHONPATH": str(KERNEL_CASES.parents[1])}
    command = [sys.executable, str(KERNEL_CASES / "interpret_open.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * sum(len(case.launched) for case in CASES.values())
    assert not {name: far for name, far in found.items() if not far <= 1}


@pytest.mark.parametrize("name", CASES)
def test_what_varies_is_neither_a_constant_nor_specialized(name):
    rendered, case = rendered_case(name), CASES[name]
    assert rendered.open_arguments.names == tuple(case.opened.split())
    assert rendered.open_arguments.multiples == tuple(case.multiples.split())
    entry = rendered.source[rendered.source.rindex("\n@triton.jit") :]
    decorator, signature = entry.split("\ndef ")[0], entry[: entry.index("):\n")]
    assert re.findall(r'"(\w+)"', decorator) == [one for one in case.opened.split() if one not in case.multiples.split()]
    constants = set(re.findall(r"(\w+): tl.constexpr", signature))
    assert constants.isdisjoint(case.opened.split())
    assert "INDEX" in constants
    head = " ".join(line.removeprefix("# ") for line in rendered.source.split("\n\nimport")[0].splitlines())
    assert f"Serves any sizes: {case.opened.replace(' ', ', ')} " in head


@pytest.mark.parametrize("name", CASES)
def test_any_sizes_of_a_range_make_the_same_source(name):
    case = CASES[name]
    programs = [case.at(*sizes) for sizes in case.rendered]
    assert render(*programs, tuning=case.tuning) == render(*reversed(programs), tuning=case.tuning)


@pytest.mark.parametrize("name", CASES)
def test_constants_are_launched_in_the_order_of_the_signature(name, tmp_path):
    """Launchers pass them by position; the interpreter, by name, would not notice."""
    rendered, case = rendered_case(name), CASES[name]
    kernel = getattr(load_source(rendered, tmp_path / "kernel.py"), rendered.entry)
    for sizes in case.launched:
        program = case.at(*sizes)
        shape, integers = launch_of(calls_of(program, flatten_rows=False), rendered)
        names = [*(name for name, _ in integers), *shape.constants]
        assert [one.name for one in kernel.params][len(program.operands) :] == names


def test_without_other_sizes_a_kernel_is_what_it_was():
    for name, case in CASES.items():
        program = case.at(*case.rendered[0])
        alone = render(program, tuning=case.tuning)
        assert render(program, program, tuning=case.tuning) == alone, name  # the same sizes again
        assert rendered_case(name).entry != alone.entry, name
        assert "do_not_specialize" not in alone.source
        assert "ALIGNED" not in alone.source
        assert not alone.open_arguments.names
    batches = render(p.rope(2, 3, 5, 16), p.rope(7, 3, 5, 16))  # the outermost size is no argument
    assert batches == render(p.rope(2, 3, 5, 16))


def test_programs_of_other_layouts_are_no_other_sizes():
    with pytest.raises(ValueError, match="several layouts"):
        render(p.softmax(5, 24), p.softmax(5, 24, is_causal=True))


FAMILIES = {
    "flat": (lambda batch, seq: p.gelu_tanh((batch * seq,), "bfloat16"), 2),
    "bias": (lambda batch, seq: p.bias_gelu_erf(batch * seq, 3072, "bfloat16"), 1),
    "rope": (lambda batch, seq: p.rope(batch, 32, seq, 128, "bfloat16"), 2),
    "two_ropes": (two_ropes, 3),
    "rmsnorm": (lambda batch, seq: p.rmsnorm(batch * seq, 4096, "bfloat16"), 1),
    "narrow_rows": (lambda batch, seq: p.rmsnorm(batch * seq * 32, 128, "bfloat16"), 2),
    "softmax": (lambda batch, seq: p.softmax(batch * 12 * seq, seq, "bfloat16"), 14),
    "open_cols": (lambda batch, seq: p.bias_gelu_erf(batch * 12, seq, "bfloat16"), 10),
    "transposed": (lambda batch, seq: p.transposed_add(batch * 8, seq, "bfloat16"), 15),
}
"""Programs at a batch and a length, and how many machine codes serve all of both."""
CORNERS = ((2, 2), (16, 4096), (3, 11), (5, 13))


def random_sizes(*, is_log):
    number = random.Random(0)
    lengths = (int(2 ** number.uniform(1, 12)) if is_log else number.randint(2, 4096) for _ in range(300))
    return [(number.randint(2, 16), length) for length in lengths]


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_few_machine_codes_serve_300_sizes(name, is_log):
    at, most = FAMILIES[name]
    rendered = render(*(at(*corner) for corner in CORNERS))
    assert len({variant_of(at(*sizes), rendered) for sizes in random_sizes(is_log=is_log)}) <= most


def test_a_kernel_for_one_size_takes_machine_code_for_each():
    at, _ = FAMILIES["rope"]
    rendered = render(at(2, 2))
    assert len({variant_of(at(*sizes), rendered) for sizes in random_sizes(is_log=False)}) > 250


@pytest.mark.parametrize("name", ["rope", "softmax", "two_ropes", "group_norm"])
def test_predicted_machine_codes_are_tritons(name, tmp_path):
    """Triton's own word on each argument tells two launches apart exactly where the prediction does."""
    jit = pytest.importorskip("triton.runtime.jit")
    case = CASES[name]
    for rendered in (rendered_case(name), render(case.at(*case.rendered[0]))):
        kernel = getattr(load_source(rendered, tmp_path / "kernel.py"), rendered.entry)
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, jit.BaseBackend)
        predicted, told = {}, {}
        for sizes in [*case.launched, (2, 16), (16, 16), (2, 48), *([(4, 2**26)] if "rope" in name else [])]:
            program = case.at(*sizes)
            shape, integers = launch_of(calls_of(program, flatten_rows=False), rendered)
            constants = [str(value) if name == "INDEX" else value for name, value in shape.constants.items()]
            values = [value for _, value in integers]
            _, words, _ = bind(*[2.5] * len(program.operands), *values, *constants)
            predicted[sizes] = variant_of(program, rendered)
            told[sizes] = (repr(words), shape.num_warps)
        pairs = [(a, b) for a in told for b in told]
        assert {(a, b) for a, b in pairs if told[a] == told[b]} == {(a, b) for a, b in pairs if predicted[a] == predicted[b]}
        assert len(set(told.values())) > 1


@pytest.mark.parametrize("name", CASES)
def test_open_kernels_compile_without_a_gpu(name):
    case = CASES[name]
    assembly = assembly_for(case.at(*case.launched[-1]), rendered_case(name), 90)
    assert bytes(assembly["cubin"])[:4] == b"\x7fELF"


def test_lengths_that_are_multiples_of_16_are_read_in_vectors():
    rendered = render(p.softmax(5, 24, "bfloat16"), p.softmax(7, 33, "bfloat16"))

    def loads(cols):
        return set(re.findall(r"ld\.global\.\S+", assembly_for(p.softmax(64, cols, "bfloat16"), rendered, 90)["ptx"]))

    assert loads(1008) == {"ld.global.v4.b32"}
    assert loads(1009) == {"ld.global.b16"}


def test_strides_that_stay_multiples_of_16_keep_vectors():
    rendered = rendered_case("rope")
    ptx = assembly_for(p.rope(2, 3, 33, 16), rendered, 90)["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "tt.divisibility" not in re.search(r"%rows: i32[^%]*", assembly_for(p.rope(2, 3, 32, 16), rendered, 90)["ttir"])[0]


def test_one_row_is_no_constant():
    rendered = rendered_case("rmsnorm")
    assert "%rows: i32" in assembly_for(p.rmsnorm(1, 48), rendered, 90)["ttir"]


def test_walks_over_parts_of_open_widths_are_all_alike():
    """A part of 1,024 columns holds whole tiles, one of 1,000 does not: neither is compiled for."""
    at = CASES["looped_group_norm"].at
    rendered = render(at(2, 1003), at(3, 1019), tuning=Tuning(block_cols=1024))
    assert "WHOLE" in rendered.source
    shapes = [launch_of(calls_of(at(2, area), flatten_rows=False), rendered)[0] for area in (1000, 1024, 1536, 4096)]
    assert {(one.constants["WHOLE"], one.constants["BLOCK_COLS"]) for one in shapes} == {(False, 1024)}


def test_a_tuning_of_one_width_is_not_kept_for_all():
    """One warp is best for rows of 64 and spills at 4,096."""
    at, _ = FAMILIES["softmax"]
    rendered = render(*(at(*corner) for corner in CORNERS), tuning=Tuning(num_warps=1, block_rows=64))
    warps = {variant_of(at(2, cols), rendered).num_warps for cols in (64, 4096)}
    assert warps == {2, 8}
    rows, _ = FAMILIES["rmsnorm"]
    assert variant_of(rows(3, 5), render(rows(3, 5), rows(5, 7), tuning=Tuning(num_warps=16))).num_warps == 16
