"""Which profiler watches, told by the variables that it sets."""

from __future__ import annotations

import pytest

from fusion_advisor.runtime.external_profiler import attached_profiler


@pytest.mark.parametrize(
    ("variables", "tool"),
    [
        ({}, ""),
        ({"NSYS_PROFILING_SESSION_ID": ""}, ""),
        ({"NSYS_PROFILING_SESSION_ID": "5012"}, "nsys"),
        ({"NV_NSIGHT_INJECTION_PORT_BASE": "49152"}, "ncu"),
        ({"NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "1"}, "ncu"),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "0"}, ""),
    ],
)
def test_which_profiler_started_the_process(variables: dict[str, str], tool: str) -> None:
    assert attached_profiler(variables) == tool
