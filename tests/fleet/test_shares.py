"""Compute, communication and overlap."""

from __future__ import annotations

import pytest

from fusion_advisor.capture.trace.kernels import Work
from fusion_advisor.fleet.shares import is_collective, split

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def work(name, start, duration, *, device=0, stream=7):
    return Work(name, "x", "other", -1, False, start, duration, duration, (device, stream), 0, None)


def test_only_exposed_communication_counts():
    found = split([work("gemm", 0, 100), work(NCCL, 50, 100, stream=8), work("add", 120, 10)])
    assert (found.compute_ns, found.communication_ns) == (110, 40)
    assert found.collectives_ns == (100,)


def test_devices_add_up():
    found = split([work("gemm", 0, 100), work("gemm", 0, 100, device=1), work(NCCL, 100, 30, device=1)])
    assert (found.compute_ns, found.communication_ns) == (200, 30)


def test_overlap_on_two_streams_counts_once():
    assert split([work("a", 0, 100), work("b", 20, 50, stream=8), work("c", 90, 20)]).compute_ns == 110


@pytest.mark.parametrize("name", [NCCL, "ncclKernel_AllGather_RING_LL_Sum_int8_t", "multimem_all_reduce_kernel<bf16>"])
def test_collectives_are_known_by_name(name):
    assert is_collective(name) and not is_collective("void at::native::reduce_kernel<nccl>")
