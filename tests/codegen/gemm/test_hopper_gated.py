"""What the host does before a gated GEMM is launched, with a planted driver; the kernel itself is in test_problem.py."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.gemm import hopper_gated
from fusion_advisor.codegen.gemm.problem import GATED_TILES, GemvProblem, stage_bytes
from tests.kernel_cases.gemv_cases import complaint, tensors

PROBLEM = GemvProblem(m=300, n=136, k=72, dtype="bfloat16", is_gated=True)
CONFIG = GATED_TILES[0]
DONE = SimpleNamespace(name="CUDA_SUCCESS", value=0)
REFUSED = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE", value=1)


class Driver(ModuleType):
    """Remembers what it is asked; a tensor map is the arguments that it was made of."""

    def __init__(self):
        super().__init__("driver")
        self.maps, self.launches, self.answer = [], [], DONE
        names = SimpleNamespace
        self.CUtensorMapDataType = names(CU_TENSOR_MAP_DATA_TYPE_FLOAT16="half", CU_TENSOR_MAP_DATA_TYPE_BFLOAT16="bfloat16")
        self.CUtensorMapSwizzle = names(CU_TENSOR_MAP_SWIZZLE_128B="swizzled", CU_TENSOR_MAP_SWIZZLE_NONE="plain")
        self.CUtensorMapInterleave = names(CU_TENSOR_MAP_INTERLEAVE_NONE=None)
        self.CUtensorMapL2promotion = names(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=None)
        self.CUtensorMapFloatOOBfill = names(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=None)
        self.cuuint64_t = self.cuuint32_t = int

    def cuTensorMapEncodeTiled(self, dtype, rank, place, sizes, strides, box, steps, interleave, swizzle, *rest):
        pointer = 0x1000 + len(self.maps)
        self.maps.append((dtype, rank, place, sizes, strides, box, swizzle))
        return self.answer, SimpleNamespace(getPtr=lambda: pointer)

    def cuKernelGetFunction(self, handle):
        return DONE, f"function of {handle}"

    def cuLaunchKernel(self, function, *numbers):
        *shape, address, extra = numbers
        pointers = (ctypes.c_void_p * 3).from_address(address)
        self.launches.append((function, shape, list(pointers), extra))
        return (self.answer,)


@pytest.fixture
def driver(monkeypatch):
    planted = Driver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = planted
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", planted)):
        monkeypatch.setitem(sys.modules, name, module)
    here = torch.zeros(1).get_device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(hopper_gated, "allow_shared_memory", lambda *asked: planted.allowed.append(asked))
    planted.allowed = []
    return planted


def launch_of(problem=PROBLEM):
    return hopper_gated.launcher(SimpleNamespace(handle="kernel"), problem, CONFIG)


def aligned(*shape):
    """A tensor of a row-major matrix whose data begins at a multiple of 16 bytes."""
    size = shape[0] * shape[1]
    room = torch.zeros(size + 8, dtype=torch.bfloat16)
    skip = -room.data_ptr() % 16 // 2
    return room[skip : skip + size].view(shape)


def operands(problem=PROBLEM):
    return aligned(problem.m, problem.k), aligned(2 * problem.n, problem.k), aligned(problem.m, problem.n)


def test_matrices_are_described_columns_first_with_strides_in_bytes(driver):
    x, weight, out = operands()
    launch_of()(x, weight, out)
    rows = CONFIG.rows
    assert driver.maps == [
        ("bfloat16", 2, x.data_ptr(), [72, 300], [144], [64, 128], "swizzled"),
        ("bfloat16", 2, weight.data_ptr(), [72, 272], [144], [64, rows], "swizzled"),
        ("bfloat16", 2, out.data_ptr(), [136, 300], [272], [rows, 64], "plain"),
    ]
    # 300 rows are two clusters of 256, 136 columns two tiles of 128: four of the 66 clusters have work.
    shared_bytes = CONFIG.stages * stage_bytes(CONFIG) + 128 * rows * 2
    ((function, shape, pointers, extra),) = driver.launches
    assert (function, extra) == ("function of kernel", 0)
    assert shape == [2 * 2 * -(-136 // rows), 1, 1, 384, 1, 1, shared_bytes, 77]
    assert pointers == [0x1000, 0x1001, 0x1002]
    assert [asked[1] for asked in driver.allowed] == [shared_bytes]


def test_maps_are_made_once_for_each_set_of_addresses(driver, monkeypatch):
    launch, first, second = launch_of(), operands(), operands()
    for given in (first, first, second, first):
        launch(*given)
    assert (len(driver.maps), len(driver.launches), len(driver.allowed)) == (6, 4, 1)
    assert [pointers[0] - 0x1000 for _, _, pointers, _ in driver.launches] == [0, 0, 3, 0]
    monkeypatch.setattr(hopper_gated, "_MOST_BOUND", 2)
    launch(*operands())
    launch(*first)
    assert len(driver.maps) == 12


def test_unaligned_tensors_go_to_torchs_ops(driver):
    x, weight, out = operands()
    given = tensors(PROBLEM)
    shifted = aligned(1, x.numel() + 8).view(-1)[1 : x.numel() + 1].view(x.shape).copy_(given[0])
    launch_of()(shifted, weight.copy_(given[1]), out)
    assert not driver.maps and not driver.launches
    assert not complaint(PROBLEM, given, out)


def test_what_the_driver_refuses_is_said(driver):
    driver.answer = REFUSED
    with pytest.raises(KernelBuildFailed, match="CUDA_ERROR_INVALID_VALUE"):
        launch_of()(*operands())
    driver.answer, launch, given = DONE, launch_of(), operands()
    launch(*given)
    driver.answer = REFUSED
    with pytest.raises(RuntimeError, match="could not be launched: CUDA_ERROR_INVALID_VALUE"):
        launch(*given)


def test_no_more_blocks_than_have_a_multiprocessor(driver):
    problem = GemvProblem(m=4096, n=4096, k=64, dtype="bfloat16", is_gated=True)
    launch_of(problem)(*operands(problem))
    assert driver.launches[0][1][0] == 132
