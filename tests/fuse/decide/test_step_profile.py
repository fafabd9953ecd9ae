"""The sums and the timeline of a step."""

from __future__ import annotations

from fusion_advisor.fuse.decide.step_profile import classed_by_name, step_profile
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


def test_sums_are_ranked_and_equal_ones_stay_in_the_order_of_the_step() -> None:
    step = step_profile("eager", (launch("a", 0, 5), launch("b", 9, 5, "view"), launch("c", 20, 7), launch("b", 40, 2, "memory")))
    assert step.kernels == (("c", "gemm", 1, 7), ("a", "gemm", 1, 5), ("b", "view", 1, 5), ("b", "memory", 1, 2))
    assert step.categories == (("gemm", 2, 12), ("view", 1, 5), ("memory", 1, 2))
    assert (step.device_ns, step.launches) == (19, 4)


def test_the_timeline_keeps_the_calls_of_a_gpu() -> None:
    step = step_profile("eager", (launch("a", 0, 700, call_ns=3_000), launch("b", 800, 20, call_ns=4_000)))
    assert step.timeline is not None
    assert step.timeline.call_start_ns == (-5_000, -4_200)
    assert step.timeline.call_ns == (3_000, 4_000)


def test_what_was_launched_without_an_op_is_classed_by_its_kernels_name() -> None:
    """A replayed graph's kernels and Inductor's; what has an op keeps its class, and an unknown name stays unknown."""
    made = (
        launch("nvjet_sm90_tst_256x128_64x4", 0, 700, "other"),
        launch("triton_poi_fused_add_mul_0", 800, 20, "other"),
        launch("triton_red_fused_native_layer_norm_1", 900, 20, "other"),
        launch("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 950, 20, "other"),
        launch("elementwise_kernel", 1_000, 20, "memory"),
        launch("mystery", 1_100, 20, "other"),
    )
    classes = [one.category for one in classed_by_name(made)]
    assert classes == ["gemm", "pointwise", "reduction", "attention", "memory", "other"]
