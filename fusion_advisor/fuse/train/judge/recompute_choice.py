"""Whether a recompute option is tried, and what it may cost: by the step's peak beside eager's and by the time that is left.

A step in CUDA graphs holds the memory of both passes all the time, and its gradients are copied out beside it. In eager they lie
where activations lay. So BERT-large's peak was 9.5 GB on an H200 where eager's was 9.1, and ViT-B's 4.5 where eager's was 4.1
(``docs/measurements/training_steps.md``). Where a peak is above eager's, ``--quick`` tries the options too, and one may
cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fusion_advisor import units
from fusion_advisor.capture.graph.fx_nodes import storages, tensors_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.step_graph.step_graph import saved_names

_MOST_SHARE = 0.02
"""Of the step's time: what an option may cost where the step's peak is above eager's, or where it spares much of the peak."""
_MUCH = 0.05
"""Of the step's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """Device memory of a step at its peak, weights and inputs aside.

    Attributes:
        eager_bytes: of the graph's own ops under autograd; 0 where nothing measures it.
        ours_bytes: of both passes as they were rewritten, with what CUDA graphs copy out beside their memory.
    """

    eager_bytes: int = 0
    ours_bytes: int = 0

    @property
    def is_above(self) -> bool:
        """Whether ours is above eager's."""
        return 0 < self.eager_bytes < self.ours_bytes

    def __str__(self) -> str:
        if not self.eager_bytes:
            return "eager's peak was not measured"
        return (
            f"the step's peak is {units.size(self.ours_bytes)}, eager's {units.size(self.eager_bytes)}, weights and inputs aside"
        )


@dataclass(slots=True, kw_only=True)
class RecomputeChoice:
    """Chooses the options of a step that are tried.

    Attributes:
        options: of the run.
        peaks: of the step without an option.
        each_s: seconds that a trial is expected to take.
        end_s: when the time for trials is over, by ``clock``; None: it never is.
        clock: tells the time in seconds.
    """

    options: ApplyOptions
    peaks: StepPeaks
    each_s: float
    end_s: float | None
    clock: Callable[[], float]

    def most_share(self, saved_bytes: int) -> float:
        """Return the share of the step's time that an option may cost with confidence and stay.

        Args:
            saved_bytes: of the step's peak, with the option.
        """
        spares_much = 0 < _MUCH * self.peaks.ours_bytes <= saved_bytes
        return _MOST_SHARE if self.peaks.is_above or spares_much else 0.0

    def why_not(self) -> str:
        """Return why no option is traced and tried now; empty where one is."""
        if self.options.effort != "quick":
            return ""
        if not self.peaks.is_above:
            return f"with --quick it is not tried here: {self.peaks}"
        left_s = None if self.end_s is None else self.end_s - self.clock()
        if left_s is not None and self.each_s > left_s:
            return f"with --quick {max(left_s, 0):.0f} s are left to try it, and the step without it took {self.each_s:.0f} s"
        return ""

    def why(self) -> str:
        """Return what the row of an option that was tried says of the step without it; empty where nothing was measured."""
        return f"; without it {self.peaks}" if self.peaks.eager_bytes else ""


def copied_out_bytes(graphs: Mapping[str, GraphModule]) -> int:
    """Return the bytes of the results that a step in CUDA graphs hands out in new memory while the graphs hold their own.

    Args:
        graphs: both passes as AOTAutograd made them, by name.
    """
    found = 0
    for name, module in graphs.items():
        results = module.graph.output_node().args[0]
        assert isinstance(results, tuple | list)
        saved = len(saved_names(graphs["backward"])) if name == "forward" else 0
        given = {key for node in module.graph.find_nodes(op="placeholder") for key in storages(node)}
        handed_out = [one for one in results[: len(results) - saved] if isinstance(one, Node)]
        sizes = {
            key: value.untyped_storage().nbytes()
            for node in handed_out
            for key, value in zip(storages(node), tensors_of(node.meta.get("val")), strict=True)
        }
        found += sum(size for key, size in sizes.items() if key not in given)
    return found
