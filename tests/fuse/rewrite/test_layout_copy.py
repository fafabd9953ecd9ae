"""Copies to plain strides: every element of every row, in all three languages, inside and outside a CUDA graph."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend, compile_for
from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from fusion_advisor.codegen.layout_copy import permuted_copy
from fusion_advisor.codegen.layout_copy import rows_copy as rows_copy_program
from fusion_advisor.fuse.baselines.inductor_hybrid import compile_rest
from fusion_advisor.fuse.cuda_graph.tail import left_out
from fusion_advisor.fuse.passes import pad_gemm
from fusion_advisor.fuse.rewrite import layout_copy
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged, rewrite_region
from fusion_advisor.verify.check_chain import layout_of
from fusion_advisor.workload.weight_packing import leave_room
from tests.fuse.passes.test_pad_gemm import Head, X

ROOT = Path(__file__).parents[3]
HEADER = Header(title="case", summary="a test", origin="a test")
SHAPES = [(5, 13, 16), (8, 251, 256), (1, 7, 9), (16, 8, 11), (3, 1, 4)]
"""Rows, columns, distance of the rows; counts that packs divide and others, rows shorter than a pack."""
PERMUTED = [
    ((2, 3, 8, 8), (0, 2, 3, 1)),
    ((2, 5, 12), (0, 2, 1)),
    ((1, 3, 2, 4, 3, 4), (0, 2, 4, 1, 3, 5)),
    ((2, 3, 2, 16, 3, 16), (0, 2, 4, 1, 3, 5)),
    ((70, 33), (1, 0)),
    ((6, 1, 4, 1), (2, 3, 0, 1)),
]
"""Shapes and the order that their dims get: channels last, transposes, pictures cut into patches, dims of size one."""
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles kernels for the host, and there is no g++")


def wide_rows(rows, cols, stride, dtype, device="cpu"):
    """A slice of wider rows whose padding holds what must not be copied; NaN and Inf are among the elements."""
    memory = torch.randn(rows, stride, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).to(dtype)
    memory[:, cols:] = 77.0
    memory[0, 0], memory[-1, cols - 1] = float("inf"), float("nan")
    return memory.to(device)[:, :cols]


def permuted(shape, order, dtype, device="cpu"):
    """A tensor whose dims are permuted; NaN and Inf are among the elements."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)
    x.view(-1)[0], x.view(-1)[-1] = float("inf"), float("nan")
    return x.to(device).permute(order)


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(5.0), expected.nan_to_num(5.0))


@needs_gpp
def test_every_element_is_copied_and_nothing_else():
    for dtype in (torch.bfloat16, torch.float32):
        part = wide_rows(8, 251, 256, dtype)
        copy = layout_copy.build(layout_of(part), "cpp")
        found = copy(part)
        assert same(found, part) and found.is_contiguous()
        with pytest.raises(LayoutChanged):
            copy(part.contiguous())
    cube = wide_rows(6, 251, 256, torch.float16).unflatten(0, (2, 3))
    assert same(layout_copy.build(layout_of(cube), "cpp")(cube), cube)


@needs_gpp
@pytest.mark.parametrize(("shape", "order"), PERMUTED)
def test_permuted_dims_are_copied(shape, order):
    for dtype in (torch.bfloat16, torch.float32):
        x = permuted(shape, order, dtype)
        found = layout_copy.build(layout_of(x), "cpp")(x)
        assert same(found, x) and found.stride() == torch.empty(x.shape).stride()


@needs_gpp
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_cuda_kernel_on_the_host(tmp_path, dtype, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "library"))
    from tests.kernel_cases import cuda_on_host

    launches, asked = [], []
    for rows, cols, stride in SHAPES:
        program = rows_copy_program(rows, cols, stride, str(dtype).removeprefix("torch."))
        rendered = CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
        part = wide_rows(rows, cols, stride, dtype)
        out = torch.full((rows, cols), 3.0, dtype=dtype)
        launches.append(cuda_on_host.Launch(rendered=rendered, program=program, inputs=(part,), outputs=(out,)))
        asked.append((part, out))
    for shape, order in PERMUTED:
        x = permuted(shape, order, dtype)
        program = permuted_copy(tuple(x.shape), x.stride(), str(dtype).removeprefix("torch."))
        rendered = CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
        out = torch.full(x.shape, 3.0, dtype=dtype)
        launches.append(cuda_on_host.Launch(rendered=rendered, program=program, inputs=(x,), outputs=(out,)))
        asked.append((x, out))
    cuda_on_host.run_all(launches, tmp_path)
    assert all(same(out, part) for part, out in asked)


@pytest.mark.slow
def test_the_triton_kernel_in_the_interpreter():
    code = (
        "import json, torch\n"
        "from tests.fuse.rewrite.test_layout_copy import PERMUTED, SHAPES, permuted, same, wide_rows\n"
        "from fusion_advisor.fuse.rewrite import layout_copy\n"
        "from fusion_advisor.verify.check_chain import layout_of\n"
        "found = []\n"
        "for dtype in (torch.float16, torch.float32):\n"
        "    for shape in SHAPES:\n"
        "        part = wide_rows(*shape, dtype)\n"
        "        found.append(same(layout_copy.build(layout_of(part), 'triton')(part), part))\n"
        "    for shape, order in PERMUTED:\n"
        "        x = permuted(shape, order, dtype)\n"
        "        found.append(same(layout_copy.build(layout_of(x), 'triton')(x), x))\n"
        "print(json.dumps(found))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [True] * 2 * len([*SHAPES, *PERMUTED])


def test_it_stores_whole_packs_where_rows_are_odd():
    if find_nvcc() is None:
        pytest.skip("there is no nvcc")
    program = rows_copy_program(4096, 50257, 50264, "bfloat16")
    rendered = CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    assert "first / " in rendered.source  # one division for a pack
    assert "store_pack(" in rendered.source
    assert compile_for(rendered, 90, program=program).startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("shape", "stride", "is_copied"),
    [
        ((4, 13), (16, 1), True),
        ((2, 4, 13), (64, 16, 1), True),
        ((2, 4, 13), (100, 16, 1), False),  # rows of two distances
        ((4, 13), (13, 1), False),  # plain already
        ((4, 13), (16, 2), False),
        ((13,), (1,), False),
        ((0, 13), (16, 1), False),
    ],
)
def test_which_layouts_are_rows(shape, stride, is_copied):
    assert layout_copy.is_rows(layout_of(torch.empty(1000).as_strided(shape, stride))) == is_copied


@pytest.mark.parametrize(
    ("shape", "stride", "is_copied"),
    [
        ((4, 13), (1, 4), True),
        ((2, 3, 4), (12, 1, 3), True),
        ((2, 1, 3, 4), (12, 99, 1, 3), True),  # the stride of a dim of size one says nothing
        ((4, 13), (13, 1), False),  # plain already
        ((4, 1), (1, 4), False),
        ((4, 13), (1, 5), False),  # gaps
        ((4, 13), (0, 1), False),  # one row, again and again
        ((0, 13), (1, 0), False),
        ((), (), False),
    ],
)
def test_which_layouts_are_permuted(shape, stride, is_copied):
    assert layout_copy.is_permuted(layout_of(torch.empty(1000).as_strided(shape, stride))) == is_copied


def pictures(batch, channels, size, window, *, is_channels_last=False):
    x = torch.empty(batch, channels, size, size)
    x = x.to(memory_format=torch.channels_last) if is_channels_last else x
    parts = size // window
    return x.view(batch, channels, parts, window, parts, window).permute(0, 2, 4, 1, 3, 5)


@pytest.mark.parametrize(
    ("tensor", "with_cuda", "without"),
    [
        (wide_rows(4, 13, 16, torch.bfloat16), "cuda", "triton"),
        (pictures(2, 3, 32, 16), "cuda", "triton"),
        (torch.empty(2, 14 * 14, 64).transpose(1, 2), "triton", "triton"),
        (torch.empty(2, 14, 14, 64).permute(0, 3, 1, 2), "triton", "triton"),  # 14 x 14 are one run
        (pictures(2, 8, 4, 2), "cuda", None),
        (pictures(2, 8, 4, 2, is_channels_last=True), "cuda", None),
        (torch.empty(2, 5, 3), None, None),
        (torch.empty(2, 5, 3)[:, ::2], None, None),
    ],
)
def test_which_language_copies_what(tensor, with_cuda, without):
    assert layout_copy.backend_for(layout_of(tensor), has_cuda=True) == with_cuda
    assert layout_copy.backend_for(layout_of(tensor), has_cuda=False) == without


def test_a_cpu_keeps_its_own_copy():
    assert layout_copy.copy_for(layout_of(wide_rows(4, 13, 16, torch.bfloat16))) is None
    assert layout_copy.copy_for(layout_of(permuted(*PERMUTED[0], torch.bfloat16))) is None


def test_open_sizes_are_copied_by_atens_op():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.from_tensor(torch.empty(7, 3), static_shapes=False).shape[0]
    x = torch.fx.Graph().placeholder("x")
    with mode:
        x.meta["val"] = torch.empty_strided((rows, 50_257), (50_264, 1), device="cuda", dtype=torch.bfloat16)
    assert layout_copy.put_copy(x.graph, x, "pad-gemm").target is torch.ops.aten.clone.default


@needs_gpp
def test_a_padded_head_gives_the_models_tensor_by_the_kernel(monkeypatch):
    monkeypatch.setattr(layout_copy, "copy_for", lambda layout: layout_copy.build(layout, "cpp"))
    model = Head().eval()
    leave_room(model)
    with torch.no_grad():
        (region,) = capture_regions(model, (X,), {}).regions
        _, index_of = describe(region, first_index=0)
        module, (count,) = rewrite_region(region, index_of, [], [pad_gemm.pad_linears])
        (ours,), (theirs,) = module(*region.example_args), region.graph(*region.example_args)
    assert count == 1 and ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    # A CUDA graph leaves it to the copy that hands the result out.
    ((place, last),) = left_out(module, ()).items()
    assert place == 0 and isinstance(last.make, layout_copy.PlainCopy)
    # Inductor gets a copy that it writes itself.
    with torch.no_grad():
        (rest,) = compile_rest([region], [module], compiler=lambda graph_module, inputs: graph_module.forward)
        (compiled,) = rest(*region.example_args)
    assert not any(isinstance(node.target, layout_copy.PlainCopy) for node in rest.graph.nodes)
    assert torch.equal(compiled, ours) and compiled.stride() == ours.stride()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (64, 50257, 50264)], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_on_a_gpu(shape, dtype, backend):
    if backend == "cuda":
        pytest.importorskip("cuda.core")
    part = wide_rows(*shape, dtype, device="cuda")
    assert same(layout_copy.build(layout_of(part), backend)(part), part)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "order"), [*PERMUTED, ((8, 196, 768), (0, 2, 1))], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_permuted_dims_on_a_gpu(shape, order, dtype, backend):
    if backend == "cuda":
        pytest.importorskip("cuda.core")
    x = permuted(shape, order, dtype, device="cuda")
    assert same(layout_copy.build(layout_of(x), backend)(x), x)
