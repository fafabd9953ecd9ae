"""Seeded dropout from torch code to kernels: every backend drops exactly the elements that the torch op drops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.triton import backend as backend_triton
from fusion_advisor.ir.program import dropout_constants, layout_key
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.match import find_match
from fusion_advisor.library.patterns import kernel_patterns, lower_reference
from fusion_advisor.library.philox_dropout import seeded_dropout
from fusion_advisor.records import OpClass
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.lowered import check, lower_function

HEADER = Header(title="mask", summary="which elements are kept", origin="a test")
SEED = torch.tensor([2**40 + 7])
HERE = Path(__file__).parents[1] / "kernel_cases"
INTERPRETED = ((1001,), (7, 129), (3, 1), (1, 1), (5, 6))
SHAPES = ((4096,), (1001,), (7, 129), (3, 1), (1, 1), (1, 77), (5, 6), (64, 256))


def masked(x, seed):
    return seeded_dropout(x, seed, 0.3)


def laid_out(shape, layout):
    if layout == "transposed":
        return torch.ones(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
    return torch.ones((*shape[:-1], shape[-1] + 3))[..., : shape[-1]] if layout == "strided" else torch.ones(shape)


def mask_of(x, launch):
    out = torch.empty_like(x).fill_(7)
    launch(x, SEED, out)
    return out


def run_cpp(x, program, folder, **options):
    rendered = CppBackend().render(program, HEADER, tuning=Tuning(), fast_math=options.get("fast_math", False))
    return mask_of(x, CppBackend().build(rendered, folder / "kernel.cpp").bind(program))


def run_cuda(x, program, folder, **options):
    rendered = CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=options.get("fast_math", False))
    return mask_of(x, lambda *t: cuda_on_host.run(rendered, program, t[:2], t[2:], folder, width=options.get("width", 0)))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("run", [run_cpp, run_cuda])
def test_the_kernel_drops_what_the_op_drops(run, shape, layout, tmp_path):
    x = laid_out(shape, layout)
    program = lower_function(masked, x, SEED)[0].program
    assert torch.equal(run(x, program, tmp_path), masked(x, SEED))


@pytest.mark.parametrize("run", [run_cpp, run_cuda])
def test_fast_math_and_narrow_packs_drop_the_same(run, tmp_path):
    x = torch.ones(64, 256)
    program = lower_function(masked, x, SEED)[0].program
    for options in ({"fast_math": True}, {"width": 1}, {"width": 2}):
        assert torch.equal(run(x, program, tmp_path, **options), masked(x, SEED))


@pytest.mark.slow
def test_triton_drops_what_the_op_drops_in_blocks_of_any_size(tmp_path):
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }  # fmt: skip
    code = "from tests.codegen import test_dropout; test_dropout.triton_masks()"
    command = [sys.executable, "-c", f"import sys; sys.argv.append({str(tmp_path)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 * len(INTERPRETED) * 3
    assert not [name for name, is_equal in found.items() if not is_equal]


def triton_masks():
    """Run in a process of its own: the interpreter must be on before Triton is imported."""
    folder, found = Path(sys.argv[-1]), {}
    for layout in ("contiguous", "transposed", "strided"):
        for shape in INTERPRETED:
            x = laid_out(shape, layout)
            program = lower_function(masked, x, SEED)[0].program
            for number, tuning in enumerate((Tuning(), Tuning(block_cols=32, block_rows=2), "fast")):
                options = {"tuning": Tuning(), "fast_math": True} if tuning == "fast" else {"tuning": tuning, "fast_math": False}
                backend = backend_triton.TritonBackend()
                rendered = backend.render(program, HEADER, **options)
                out = mask_of(x, backend.build(rendered, folder / f"{len(found)}.py").bind(program))
                found[f"{layout} {shape} {number}"] = torch.equal(out, masked(x, SEED))
    print(json.dumps(found))  # noqa: T201


def test_the_number_of_an_element_is_an_address_like_any_other():
    program = lower_function(masked, torch.ones(6, 8, 10), SEED)[0].program
    assert program.dims == (480,)
    value = next(value for value in program.values if value.op == "dropout")
    assert (value.strides, value.constant) == ((1,), 0.3)
    transposed = lower_function(masked, laid_out((6, 10), "transposed"), SEED)[0].program
    value = next(value for value in transposed.values if value.op == "dropout")
    assert (transposed.dims, value.strides) == ((10, 6), (1, 10))
    assert layout_key(program) != layout_key(
        lower_function(lambda x, s: seeded_dropout(x, s, 0.4), torch.ones(480), SEED)[0].program
    )


@pytest.mark.parametrize("function", [
    lambda x, seed: x + seeded_dropout(x.relu(), seed, 0.5),
    lambda x, seed: seeded_dropout(x, seed, 0.5)[:, 3:7] * 2,
    lambda x, seed: seeded_dropout(x.t(), seed, 0.5),
    lambda x, seed: seeded_dropout(x, seed, 0.5).softmax(-1),
    lambda x, seed: torch.cat([seeded_dropout(x, seed, 0.5), x], dim=-1),
    lambda x, seed: seeded_dropout(x, seed, 0.5) + seeded_dropout(x, seed, 0.25),
    lambda x, seed: seeded_dropout(x, seed, 0.0) + seeded_dropout(x, seed, 1.0),
], ids=["chain", "slice of it", "transposed", "reduced", "joined", "two of them", "never and always"])  # fmt: skip
def test_lowers_to_the_same_numbers(function):
    check(function, torch.randn(6, 9), SEED, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 9])
def test_the_seed_is_one_number_for_all_columns(columns):
    """Also where a guard or a single column would make another load differ between them."""
    x = torch.ones(6, columns)
    lowered, _ = lower_function(lambda x, seed: torch.cat([seeded_dropout(x, seed, 0.5), x]), x, SEED)
    value = next(value for value in lowered.program.values if value.op == "dropout")
    load = lowered.program.values[value.args[0]]
    assert (load.op, load.guard, set(load.strides)) == ("load", None, {0})


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-12, 1 - 1e-12])
@pytest.mark.parametrize("run", [run_cpp, run_cuda])
def test_no_chance_and_certainty(run, p, tmp_path):
    x = torch.ones(50)
    lowered, _ = lower_function(lambda x, seed: x + seeded_dropout(x, seed, p), x, SEED)
    assert not [value for value in lowered.program.values if value.op == "dropout"]
    out = torch.empty(50)
    if run is run_cpp:
        rendered = CppBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        CppBackend().build(rendered, tmp_path / "kernel.cpp").bind(lowered.program)(x, out)
    else:
        rendered = CudaBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        cuda_on_host.run(rendered, lowered.program, [x], [out], tmp_path)
    assert torch.equal(out, x + seeded_dropout(x, SEED, p))


def test_thresholds_are_exact():
    assert dropout_constants(0.0) == (0, 1.0)
    assert dropout_constants(0.5) == (2**31, 2.0)
    assert dropout_constants(1.0) == (2**32, 0.0)
    assert dropout_constants(0.1)[0] == 429496730


def test_the_chance_of_a_match_is_the_graphs_own():
    kernel = load_kernel("dropout_add")
    program = lower_function(lambda x, r, s: r + seeded_dropout(x, s, 0.37), torch.ones(4, 6), torch.ones(4, 6), SEED)[0].program
    match = find_match(program, tuple(kernel_patterns(kernel.spec)))
    assert match is not None and match.constants == (("p", 0.37),)


def test_the_op_is_pointwise_for_the_chain_finder():
    assert base_name("fusion_advisor.seeded_dropout.default") == base_name("fusion_advisor::seeded_dropout") == "seeded_dropout"
    assert class_of("seeded_dropout") is OpClass.POINTWISE


@pytest.mark.parametrize(("name", "sizes", "most"), [
    ("dropout_add", {"R": 16384, "C": 4096}, 12), ("dropout_add_layernorm", {"R": 16384, "C": 4096}, 12),
])  # fmt: skip
def test_triton_draws_once_for_four_neighbours(name, sizes, most):
    """Nothing but the compiler joins the four equal calls: 20 products a call are 5 for an element, or 20 where it does not."""
    kernel = load_kernel(name)
    program = next(lower_reference(kernel.spec, kernel.references[0][1], sizes, dtype=torch.bfloat16)).program
    rendered = backend_triton.TritonBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    assembly = backend_triton.assembly_for(program, rendered, 90)
    products = sum(assembly["ptx"].count(op) for op in ("mul.wide.u32", "mul.hi.u32", "mul.lo.s64", "mul.lo.s32"))
    elements = 8 if name == "dropout_add" else 16
    assert products / elements < most
    assert "convert_layout" not in assembly["ttgir"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="replays CUDA graphs, and this machine has no CUDA device")
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_captured_graph_takes_a_new_seed(backend, tmp_path):
    x, seed, out = torch.ones(1000, 333, device="cuda"), torch.tensor([1], device="cuda"), torch.empty(1000, 333, device="cuda")
    program = lower_function(masked, torch.ones(1000, 333), SEED)[0].program
    maker = backend_of(backend)
    rendered = maker.render(program, HEADER, tuning=Tuning(), fast_math=False)
    launch = maker.build(rendered, tmp_path / f"kernel{rendered.suffix}").bind(program)
    launch(x, seed, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, seed, out)
    for number in (1, 2**50 + 3, -1):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(out.cpu(), masked(torch.ones(1000, 333), torch.tensor([number])))
