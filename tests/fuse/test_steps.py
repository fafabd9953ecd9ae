"""The sums and the timeline of a step."""

from __future__ import annotations

from fusion_advisor.fuse.steps import step_profile
from fusion_advisor.records import Launch


def launch(name: str, start_ns: int, duration_ns: int, category: str = "gemm", call_ns: int = 0) -> Launch:
    return Launch(
        kernel_name=name,
        op_index=None,
        start_ns=start_ns,
        duration_ns=duration_ns,
        category=category,
        call_start_ns=start_ns - 5_000,
        call_ns=call_ns,
    )


def test_the_timeline_names_kernels_by_their_place_in_the_table() -> None:
    made = (launch("b", 900, 10, "memory"), launch("a", 0, 700), launch("b", 800, 20), launch("b", 1_000, 30, "memory"))
    step = step_profile("eager", made)
    assert step.timeline is not None
    assert step.timeline.start_ns == (0, 800, 900, 1_000)
    assert [step.kernels[at][:2] for at in step.timeline.kernel] == [
        ("a", "gemm"),
        ("b", "gemm"),
        ("b", "memory"),
        ("b", "memory"),
    ]
    for place, (_, _, count, ns) in enumerate(step.kernels):
        durations = [step.timeline.duration_ns[at] for at, kernel in enumerate(step.timeline.kernel) if kernel == place]
        assert (len(durations), sum(durations)) == (count, ns)
    # an op of a CPU runs inside its own call: there is none to show
    assert step.timeline.call_ns == step.timeline.call_start_ns == ()


def test_the_timeline_keeps_the_calls_of_a_gpu() -> None:
    step = step_profile("eager", (launch("a", 0, 700, call_ns=3_000), launch("b", 800, 20, call_ns=4_000)))
    assert step.timeline is not None
    assert step.timeline.call_start_ns == (-5_000, -4_200)
    assert step.timeline.call_ns == (3_000, 4_000)
