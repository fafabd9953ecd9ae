"""Gated linears on Hopper's tensor cores in a package: their file, their tensor maps and their launch, with a planted driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.codegen.gemm.problem import GATED_TILES, GemvProblem, stage_bytes
from fusion_advisor.export.aot_package.traced import imported
from fusion_advisor.export.linear_ops import linear_op
from fusion_advisor.export.package import files_of_ops
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.decide.session import LinearSource
from fusion_advisor.records import TensorMeta

PROBLEM = GemvProblem(m=300, n=136, k=72, dtype="bfloat16", is_gated=True)
CONFIG = GATED_TILES[0]
HEADER = Header(title="gate_up", summary="a gated linear", origin="generated")


def op_of(problem=PROBLEM):
    source = LinearSource(problem=problem, config=CONFIG, header=HEADER)
    shapes = [(2, problem.m // 2, shape[1]) if name in ("x", "out") else shape for name, shape in problem.operands]
    metas = [
        TensorMeta(shape=shape, stride=torch.empty(shape, device="meta").stride(), dtype=problem.dtype, device="cuda")
        for shape in shapes
    ]
    return linear_op(source, "G1", metas, ())


@pytest.fixture
def package(tmp_path):
    name = "gated_ops"
    files = {**files_of_ops([op_of()], name, "cpu"), f"{name}/__init__.py": b""}
    write_folder(files, tmp_path / name, force=False)
    with imported(tmp_path / name, name):
        yield SimpleNamespace(**{one: importlib.import_module(f"{name}.{one}") for one in ("ops", "_tensor_maps", "_cuda")})


class Cuda:
    """A package's launches of CUDA C++ that keep what they are asked; tensor maps are read back from their arguments."""

    def __init__(self, multiprocessors=132, major=9):
        self.found = SimpleNamespace(major=major, minor=0, multi_processor_count=multiprocessors)
        self.maps, self.loads, self.launches = {}, [], []

    def on(self, tensor):
        return contextlib.nullcontext()

    def properties(self, device):
        return self.found

    def loaded(self, *asked):
        self.loads.append(asked)
        return "function"

    def start(self, function, shape, shared_bytes, addresses):
        self.launches.append((shape, shared_bytes, [self.maps[address] for address in addresses]))

    def driver(self, name, address, dtype, rank, pointer, sizes, strides, tile, steps, *how):
        assert name == "cuTensorMapEncodeTiled"
        assert address.value % 64 == 0
        found = [dtype.value, rank.value, pointer.value, *map(list, (sizes, strides, tile, steps)), *(one.value for one in how)]
        assert address.value not in self.maps, "a map in use is overwritten"
        self.maps[address.value] = found


def operands():
    """Tensors whose memory begins at a multiple of 16 bytes."""
    made = []
    for _, shape in PROBLEM.operands:
        room = torch.zeros(shape[0] * shape[1] + 8, dtype=torch.bfloat16)
        made.append(room[-room.data_ptr() % 16 // 2 :][: shape[0] * shape[1]].view(shape))
    return made


def launch_of(package, cuda):
    arguments = {name: eval(text) for name, text in op_of().launch.items()}
    return package._tensor_maps.tensor_map_launcher(op_of().file, **arguments, cuda=cuda)


def test_matrices_are_described_columns_first_with_strides_in_bytes(package):
    cuda, (x, weight, out) = Cuda(), operands()
    launch_of(package, cuda)(x, weight, out)
    rows = CONFIG.rows
    # bfloat16 is 9; no interleave, 128-byte swizzle or none, 256 bytes at once into L2, zeros outside
    right = [
        [9, 2, x.data_ptr(), [72, 300], [144], [64, 128], [1, 1], 0, 3, 3, 0],
        [9, 2, weight.data_ptr(), [72, 272], [144], [64, rows], [1, 1], 0, 3, 3, 0],
        [9, 2, out.data_ptr(), [136, 300], [272], [rows, 64], [1, 1], 0, 0, 3, 0],
    ]
    shared_bytes = CONFIG.stages * stage_bytes(CONFIG) + 128 * rows * 2
    # 300 rows are two clusters of 256 rows: each pair of blocks computes `rows` columns at a time.
    assert cuda.launches == [((2 * 2 * -(-136 // rows), 1, 1, 384, 1, 1), shared_bytes, right)]
    assert cuda.loads == [(op_of().file, {}, shared_bytes, -1, True)]


def test_maps_are_made_once_for_each_set_of_addresses(package):
    cuda, first, second = Cuda(), operands(), operands()
    launch = launch_of(package, cuda)
    for given in (first, first, second, first):
        launch(*given)
    assert (len(cuda.maps), len(cuda.launches), len(cuda.loads)) == (6, 4, 1)
    assert cuda.launches[0] == cuda.launches[1] == cuda.launches[3] != cuda.launches[2]


def test_an_operand_that_is_not_aligned_is_copied(package):
    cuda, (x, weight, out) = Cuda(), operands()
    shifted = torch.zeros(x.numel() + 9, dtype=x.dtype)
    shifted = shifted[-shifted.data_ptr() % 16 // 2 + 1 :][: x.numel()].view(x.shape)
    launch_of(package, cuda)(shifted, weight, out)
    ((_, _, maps),) = cuda.launches
    assert maps[0][2] % 16 == 0 and maps[0][2] != shifted.data_ptr()
    assert [one[2] for one in maps[1:]] == [weight.data_ptr(), out.data_ptr()]


def test_no_more_blocks_than_have_a_multiprocessor_and_no_other_generation(package):
    cuda = Cuda(multiprocessors=3)
    launch_of(package, cuda)(*operands())
    assert cuda.launches[0][0][0] == 2
    with pytest.raises(RuntimeError, match=r"compute capability 9\.0, and this one has 10\.0"):
        launch_of(package, Cuda(major=10))(*operands())


def test_the_shipped_file_compiles_for_hopper(package):
    """By the package's own NVRTC, with no macro from outside: its sizes stand in the file."""
    op = op_of()
    code = package._cuda._cubin(op.rendered.file_text, op.file, "sm_90a", ())
    assert code.startswith(b"\x7fELF")
    assert op.rendered.entry.encode() in code


def test_its_reference_has_the_gate(tmp_path):
    (tmp_path / "reference.py").write_text(op_of().reference)
    code = (
        "import json, torch, reference as r\n"
        "x, weight, out = r.make_inputs('cpu')\n"
        "r.reference(x, weight, out, dtype=torch.float64)\n"
        "gate, up = (x.double() @ weight.double().T).chunk(2, -1)\n"
        "right = torch.nn.functional.silu(gate) * up\n"
        "print(json.dumps([(out.double() - right).abs().max().item(), right.abs().max().item()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    difference, largest = json.loads(done.stdout)
    assert difference <= 2**-8 * largest
    assert largest > 0.1


def test_a_tensor_map_fits_the_memory_it_gets(package):
    """128 bytes each, one after the other, inside the buffer."""
    asked = []
    maps = package._tensor_maps.TensorMaps(
        [(8, 8, 8, 8, False)] * 3, [16, 32, 48], torch.float16, lambda name, address, *rest: asked.append(address.value)
    )
    assert asked == maps.addresses
    assert [one - maps.addresses[0] for one in asked] == [0, 128, 256]
    first = ctypes.addressof(maps._memory)
    assert first <= asked[0] and asked[-1] + 128 <= first + ctypes.sizeof(maps._memory)
