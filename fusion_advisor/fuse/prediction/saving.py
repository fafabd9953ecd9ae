"""What a chain's kernel saves in the step, from its ops' traced time and from how ops and kernel compare alone.

Alone, ops and kernel run again and again on the same tensors. Both may then find in the cache what the step has in memory, and
both run at another clock. So the kernel is expected to take in the step the same share of its ops' traced time as it does alone.
Each launch costs the step something besides its kernel, and the kernel that stays has launches too, one for each run. Figures of
both corrections: ``docs/measurements/predictions.md``.
"""

from __future__ import annotations

from fusion_advisor.records import Chain, Fusion

OF_ALONE = 1.25
"""By how much a traced time may differ from the same ops' time alone, up or down, and still scale the kernel's time. On an H200
0.84 to 1.13; what is further off says that the two did not run the same work."""
_IN_GRAPH = "cuda_graph"


def chain_saving_ns(fusion: Fusion, chain: Chain, cost_ns: int) -> int | None:
    """Return what a fusion is expected to save in a step; None where its kernel was not timed alone.

    Args:
        fusion: with the times of one site.
        chain: that it stands for.
        cost_ns: what a launch costs the step besides its kernel.
    """
    if fusion.chain_after is None:
        return None
    if not is_scaled(fusion):
        return most_saving_ns(fusion, chain, cost_ns)
    launches = max(0, chain.launches - chain.runs)
    return max(0, round(chain.device_ns - kernel_ns(fusion, chain) + launches * cost_ns))


def most_saving_ns(fusion: Fusion, chain: Chain, cost_ns: int) -> int:
    """Return the saving when the kernel takes in the step what it takes alone, and no launch stays.

    Args:
        fusion: with the time of its kernel at one site.
        chain: that it stands for.
        cost_ns: what a launch costs the step besides its kernel.
    """
    after_ns = fusion.chain_after.median_ns if fusion.chain_after else 0
    return max(0, chain.device_ns + chain.launches * cost_ns - after_ns * chain.runs)


def is_scaled(fusion: Fusion) -> bool:
    """Whether its kernel's time in the step is expected to differ from the one alone.

    Only where a GPU replayed both sides: on a CPU no run has shown it, and a time alone includes the call from Python.
    """
    times = fusion.chain_before, fusion.chain_after
    return all(timing is not None and timing.method == _IN_GRAPH and timing.median_ns > 0 for timing in times)


def kernel_ns(fusion: Fusion, chain: Chain) -> float:
    """Return what its kernel is expected to take in the step, at all sites together.

    Args:
        fusion: with the times of one site.
        chain: that it stands for.
    """
    assert fusion.chain_after is not None
    after_ns = fusion.chain_after.median_ns * chain.runs
    if fusion.chain_before is None or not is_scaled(fusion):
        return after_ns
    scale = chain.device_ns / (fusion.chain_before.median_ns * max(chain.runs, 1))
    return after_ns * min(OF_ALONE, max(1 / OF_ALONE, scale))
