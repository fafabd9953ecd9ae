"""Positions out of range stop every kernel where they stop eager, with eager's error, and nothing outside a table is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.triton.backend import TritonBackend, assembly_for
from tests.hostile.id_cases import CASES, WRONG, answer, inputs
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.cpp_at_once import build_all
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
ALL = [(name, key) for name in CASES for key in ("right", *WRONG)]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")


def position_of(key):
    return 18 if key == "right" else WRONG[key]


@pytest.fixture(scope="module")
def lowered():
    return {name: lower_function(CASES[name][0], *inputs(name)) for name in CASES}


@pytest.fixture(scope="module")
def cpp(lowered, tmp_path_factory):
    """Launchers of all cases."""
    folder = tmp_path_factory.mktemp("ids")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        rendered = {
            name: CppBackend().render(one.program, HEADER, tuning=Tuning(), fast_math=False) for name, (one, _) in lowered.items()
        }
        built = build_all(list(rendered.values()), folder)
    return {name: built[rendered[name].entry].bind(lowered[name][0].program) for name in rendered}


def arguments(name, one, ops, position):
    """The tensors of a launch, inputs then outputs, and the output in its own shape."""
    given, at = inputs(name, position), [op.index for op in ops if op.role not in ("op", "output")]
    meta = ops[one.outputs[0]].outputs[0]
    output = given[0] if one.written else torch.full(meta.shape, 3).to(getattr(torch, meta.dtype))
    return [given[at.index(root)] for root in one.inputs], output


def is_same(got, want):
    if not want.dtype.is_floating_point:
        return torch.equal(got, want)
    return torch.allclose(got.double(), want.double(), rtol=1e-2 if want.dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize(("name", "key"), ALL)
def test_cpp_raises_what_eager_raises(cpp, lowered, name, key):
    given, output = arguments(name, *lowered[name], position_of(key))
    want = answer(name, position_of(key))
    if isinstance(want, Exception):
        with pytest.raises(type(want)) as caught:
            cpp[name](*given, output)
        assert str(caught.value) == str(want) and type(caught.value) is type(want)
    else:
        cpp[name](*given, output)
        assert is_same(output, want)


@needs_compiler
def test_memory_outside_a_table_is_never_read(cpp, lowered):
    """The table ends where pages end that nobody may read."""
    import ctypes
    import mmap

    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long],
    )
    start = libc.mmap(None, 3 * page, 3, 0x22, -1, 0)
    for forbidden in (start, start + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(forbidden), page, 0) == 0
    table = torch.frombuffer((ctypes.c_char * (19 * 32)).from_address(start + 2 * page - 19 * 32), dtype=torch.float32).view(
        19, 8
    )
    one, ops = lowered["embedding"]
    for wrong in WRONG.values():
        given, output = arguments("embedding", one, ops, wrong)
        with pytest.raises(IndexError):
            cpp["embedding"](*(table if tensor.is_floating_point() else tensor for tensor in given), output)


@needs_compiler
@pytest.mark.parametrize("key", ["right", *WRONG])
def test_cuda_asserts_where_eager_raises(lowered, tmp_path, key):
    launches, wants = [], []
    for name, (one, ops) in lowered.items():
        rendered = CudaBackend().render(one.program, HEADER, tuning=Tuning(), fast_math=False)
        given, output = arguments(name, one, ops, position_of(key))
        launches.append(cuda_on_host.Launch(rendered=rendered, program=one.program, inputs=given, outputs=[output]))
        wants.append((name, answer(name, position_of(key)), output))
    stopped = cuda_on_host.run_until_end(launches, tmp_path)
    assert [name for name, want, _ in wants if isinstance(want, Exception)] == [wants[number][0] for number in stopped]
    for name, want, output in wants:
        assert isinstance(want, Exception) or is_same(output, want), name


@pytest.mark.slow
def test_triton_asserts_where_eager_raises(tmp_path):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    places = (here, here.parent / "library", here.parents[1])
    script = here / "interpret_ids.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, places))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = {f"{n} {k}": "raised" if isinstance(answer(n, position_of(k)), Exception) else "same" for n, k in ALL}
    assert {key: one for key, one in found.items() if one != wanted[key]} == {}


def test_machine_code_for_a_gpu_asserts(lowered):
    """Triton drops assertions unless a launch asks for them."""
    pytest.importorskip("triton")
    program = lowered["embedding"][0].program
    rendered = TritonBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    stages = assembly_for(program, rendered, 90)
    assert stages["ttir"].count("tt.assert") == 1 and "__assertfail" in stages["ptx"]
    assert "overflow" not in stages["ttir"]
