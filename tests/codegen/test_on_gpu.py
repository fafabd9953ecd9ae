"""The library on a CUDA device: ``pytest -m gpu tests/codegen/test_on_gpu.py``; what is marked serial needs the GPU for itself.

Every kernel, reference, dtype and case against fp64 with eager's own error beside it; layouts that vector loads dislike;
addresses past 32 bits; streams and CUDA graphs; exponentials around their overflow; and whether memory is the limit.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.codegen.cuda.candidates import is_faster_in_cuda
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.evaluate.bench.inputs import make_inputs
from fusion_advisor.evaluate.check import check_kernel
from fusion_advisor.library.discover import list_kernels, load_references
from tests.kernel_cases import overflow
from tests.kernel_cases.on_device import HEADER, LAYOUTS, SHAPES, laid_out, like, site

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device"),
]
BACKENDS = [
    "triton",
    pytest.param("cuda", marks=pytest.mark.nvrtc),
]
SPECS = {spec.name: spec for spec in list_kernels() if spec.gemv is None}  # those: gemm/test_problem.py
FUNCTIONS = {name: load_references(SPECS[name]).references[0][1] for name in ("swiglu", "gelu_tanh", "rmsnorm", "add_layernorm")}


class Silent:
    def step(self, done, total, text):
        pass


def arguments(name, first):
    """The other inputs of a kernel whose first one is given."""
    found = [first]
    for number, tensor in enumerate(SPECS[name].inputs[1:]):
        shape = first.shape if len(tensor.shape) == 2 else first.shape[-1:]
        generator = torch.Generator().manual_seed(number + 1)
        found.append(torch.randn(shape, generator=generator).to(first.dtype).to(first.device))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_every_case_of_the_manifest(name, backend):
    rows = check_kernel(name, Silent(), backends=[backend])
    assert len(rows) > 3
    assert not [row for row in rows if row.result != "passed"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts(tmp_path, name, layout, backend):
    for rows, cols in SHAPES if layout in LAYOUTS[:2] else SHAPES[::2]:
        inputs = arguments(name, laid_out(layout, rows, cols, torch.bfloat16, "cuda"))
        made = site(FUNCTIONS[name], inputs, backend, tmp_path)
        assert not made.complaints(inputs, made.run(inputs)), (rows, cols)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bound_kernel_takes_tensors_of_any_alignment(tmp_path, name, backend):
    inputs = arguments(name, laid_out("contiguous", 40, 264, torch.float16, "cuda"))
    made = site(FUNCTIONS[name], inputs, backend, tmp_path)
    for layout in ("contiguous", "one element off", "contiguous"):
        shifted = arguments(name, laid_out(layout, 40, 264, torch.float16, "cuda", seed=5))
        outputs = [torch.full((t.numel() + 1,), 3.0, dtype=t.dtype, device="cuda") for t in made.run(inputs)]
        views = [t[1:].view(40, 264) for t in outputs]
        assert not made.complaints(shifted, made.run(shifted, views))
        assert all(float(t[0]) == 3 for t in outputs)  # nothing before the view was touched


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gelu_tanh", "rmsnorm"])
@pytest.mark.slow
def test_more_than_2_to_the_31_elements(tmp_path, name, backend):
    rows, cols = 2**19 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 14e9:
        pytest.skip("needs 14 GB of free GPU memory")
    block = torch.randn(1 << 12, cols, device="cuda", dtype=torch.float16)
    x = block.repeat(rows // (1 << 12) + 1, 1)[:rows]
    inputs = arguments(name, x)
    made = site(FUNCTIONS[name], inputs, backend, tmp_path)
    out = torch.full_like(x, 3)
    made.run(inputs, [out])
    torch.cuda.synchronize()
    for start in (0, 2**18 - 2, 2**19 - 4, rows - 5):  # around the signed and the unsigned end of 32 bits, and the last rows
        part = [x[start : start + 5], *inputs[1:]]
        assert not made.complaints(part, [out[start : start + 5]]), start


@pytest.mark.parametrize("backend", BACKENDS)
def test_launches_on_the_current_stream(tmp_path, backend):
    x = torch.ones(64, 1024, device="cuda")
    made = site(FUNCTIONS["gelu_tanh"], [x], backend, tmp_path)
    want = made.run([torch.full_like(x, 2.0)])[0]
    out = made.run([x])[0]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(2.0)
        made.run([x], [out])  # on any other stream it would run while this one sleeps, and see ones
    side.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_captured_in_a_cuda_graph(tmp_path, name, backend):
    inputs = arguments(name, laid_out("contiguous", 64, 1024, torch.bfloat16, "cuda"))
    made = site(FUNCTIONS[name], inputs, backend, tmp_path)
    outputs = made.run(inputs)  # loads the code: capture must find it loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(inputs, outputs)
    inputs[0].copy_(laid_out("contiguous", 64, 1024, torch.bfloat16, "cuda", seed=9))
    for tensor in outputs:
        tensor.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert not made.complaints(inputs, outputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exponentials_around_their_overflow(tmp_path, dtype, backend):
    wrong = {}
    for name, function, inputs, program in overflow.programs():
        if not name.endswith(f"-{dtype}"):
            continue
        rendered = backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)
        out = torch.zeros_like(inputs[0], device="cuda")
        path = tmp_path / f"{rendered.entry}{rendered.suffix}"
        backend_of(backend).build(rendered, path).bind(program)(*(t.cuda() for t in inputs), out)
        problem = overflow.complaint(function, inputs, out.cpu())
        wrong |= {name: problem} if problem else {}
    assert not wrong


@pytest.mark.serial
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_memory_is_the_limit(tmp_path, name, backend, monkeypatch):
    """Coarse: a fifth below the speed of a copy of as many bytes, measured in the same process.

    Triton is let off where CUDA is known to be faster: ``apply`` then tries both, and CUDA is not let off.

    Rows that are looked up in a table come no faster than a plain look-up of them, which says nothing to memory in order:
    65,536 of 30,522 rows of 2 kB take F.embedding 66.8 µs, a copy of as many bytes as table and result have 47.5 (H200).
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = SPECS[name]
    case = max(spec.bench, key=lambda case: sum(math.prod(spec.shape_of(t, case)) for t in spec.inputs))
    inputs = make_inputs(spec, dict(case.sizes), torch.bfloat16, torch.device("cuda"), seed=0)
    made = site(load_references(spec).references[0][1], inputs, backend, tmp_path, is_tuned=True)
    outputs = made.run(inputs)
    moved = made.program.moved_bytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    copy = max(seconds(lambda: target.copy_(source)), *(seconds(look_up) for look_up in look_ups(spec, inputs)), 0.0)
    ours = seconds(lambda: made.run(inputs, outputs))
    ratio = copy / ours
    is_let_off = backend == "triton" and is_faster_in_cuda(made.program)
    assert ratio >= 0.8 or is_let_off, f"{moved / ours / 1e12:.2f} TB/s, {ratio:.2f} of a copy"


def look_ups(spec, inputs):
    """Plain look-ups of the rows that a kernel takes from tables."""
    for ids, letter in ((tensor, given.below) for given, tensor in zip(spec.inputs, inputs, strict=True)):
        for given, table in zip(spec.inputs, inputs, strict=True):
            if isinstance(letter, str) and not ids.is_floating_point() and given.shape[0] == letter and table.ndim == 2:
                yield lambda ids=ids, table=table: torch.nn.functional.embedding(ids, table)


def seconds(call):
    """Median time of one call among many in a row."""
    for _ in range(5):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)  # the host runs ahead (some 20 ms), so that no launch is waited for
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(events))
    return times[len(times) // 2] / 1e3


def test_outputs_start_with_what_no_kernel_writes():
    assert float(like([torch.zeros(2)])[0][0]) == 3
