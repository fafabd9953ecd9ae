"""Is the step bound by launches? The device's busy time against the wall clock, and what each remedy could reach.

Wall time comes from runs without a profiler and busy time from the trace, whose kernels take as long as they do without it; what
lies between is time in which the device waits for the host. A CUDA graph takes that time away and leaves the kernels. Fusion
takes kernels away and leaves the host its cost per launch. So a step whose device idles gains little from fusion: on an H200
Liger cut the kernel time of Qwen2.5-7B at 128 tokens from 7.4 to 5.3 ms, and the wall time rose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion_advisor.records import Capture, Chain, Launch, LaunchVerdict, Match, NoMatch

IDLE_LIMIT_SHARE = 0.2
"""Above this share of idle time a step is called launch-bound."""


def busy_ns(launches: Iterable[Launch]) -> int:
    """Return how long at least one kernel ran; kernels that overlap on two streams count once."""
    total, end = 0, 0
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        stop = launch.start_ns + launch.duration_ns
        total += max(0, stop - max(end, launch.start_ns))
        end = max(end, stop)
    return total


def judge_launches(capture: Capture, chains: Sequence[Chain], answers: Sequence[Match | NoMatch]) -> LaunchVerdict | None:
    """Judge the eager step of a capture.

    Args:
        capture: with an eager trace and wall times.
        chains: of its plan.
        answers: one per chain; those with a kernel are what fusion could do.

    Returns:
        None on a CPU, where the host is the device, and where nothing was traced.
    """
    busy, wall = busy_ns(capture.eager_launches), capture.eager_step.median_ns
    if capture.environment.device_kind != "cuda" or not busy or not wall:
        return None
    matched = {answer.chain_id for answer in answers if isinstance(answer, Match)}
    fused = [chain for chain in chains if chain.id in matched]
    launches = len(capture.eager_launches)
    left = max(1, launches - sum(max(0, chain.launches - chain.runs) for chain in fused))
    both = max(0, busy - sum(chain.saving_bound_ns for chain in fused))
    idle = max(0, wall - busy)
    is_bound = idle > IDLE_LIMIT_SHARE * wall
    # Where the device waits, the host sets the pace, at about the same cost per launch whatever the kernel.
    host = wall * left // launches if is_bound else 0
    return LaunchVerdict(
        wall_ns=wall,
        busy_ns=busy,
        idle_ns=idle,
        launches=launches,
        launches_fused=left,
        limit_share=IDLE_LIMIT_SHARE,
        is_launch_bound=is_bound,
        graph_floor_ns=busy,
        fusion_floor_ns=max(both, host),
        both_floor_ns=both,
    )
