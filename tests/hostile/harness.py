"""Run programs fused, by both of the doors a user has, and judge what they did.

Programs run several to a model, because a profile, a capture and a report cost as much for one as for sixteen. A model that is
refused, fails or is wrong is halved until the program that is at fault stands alone.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

import fusion_advisor.fuse.decide.session as building
from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.installed import LastStage
from fusion_advisor.fuse.live.model_check import check_region, check_whole_model
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.records import Bandwidth, Report, Status, Timing, WarmUp
from fusion_advisor.workload.load import describe_live
from tests.fuse.conftest import backend_with
from tests.hostile.judge import Side, judge
from tests.hostile.programs import Program, SideBySide

DOORS = ("apply", "backend")
_BANDWIDTH = Bandwidth(copy_bytes_per_s=10**13, launch_ns=1)
_TIMING = Timing(times_ns=(100,) * 6, median_ns=100, ci_low_ns=100, ci_high_ns=100, method="wall")
_FASTER = replace(_TIMING, median_ns=50, ci_low_ns=50, ci_high_ns=50)
_CALLS = ("first call", "other inputs", "first inputs again")
_SECOND = 7919
"""Added to the seeds of the inputs for a second call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one program."""

    program: Program
    door: str
    kernels: int = 0
    """Generated kernels in its graph; through the backend, which has no report, they are counted for the whole model."""
    launches: int = 0
    wrong: tuple[str, ...] = ()
    refused: str = ""
    is_noisy: bool = False


@dataclass(slots=True)
class Launches:
    """Counts calls of generated kernels: through the backend no fused model does."""

    count: int = 0


def _kept(_bench, candidates, **_):
    """The keep rule's answer: all kernels whose numbers pass stay, and nobody waits for a clock."""
    planted = {
        one.id: Verdict(id=one.id, status=Status.KEPT, reason="planted", delta_ns=-5, interval_ns=(-6, -4)) for one in candidates
    }
    return Decision(verdicts=planted, noise_share=0.01, before=_TIMING, after=_TIMING, method="wall")


def _passes(check):
    """A check of the whole that always passes: it would take wrong kernels out again, and here the judge sees them."""
    return lambda *args, **more: replace(check(*args, **more), is_passed=True)


UNTIMED = Instruments(
    decide=_kept, compare_alone=lambda *_, **__: (_TIMING, _FASTER), walls=lambda calls, **_: [_TIMING] * len(calls)
)
LAST = LastStage(
    check_model=_passes(check_whole_model), measure_warm_up=lambda *_: WarmUp(phases_s=(("planted", 0.0),), build_s=0.0)
)


@contextlib.contextmanager
def counted(launches: Launches) -> Iterator[None]:
    """Count launches of all kernels that are bound meanwhile."""
    made = building.fused_call

    def counting(name, *args, **kwargs):
        call = made(name, *args, **kwargs)

        def launch(*tensors):
            launches.count += 1
            return call(*tensors)

        functools.update_wrapper(launch, call)
        return launch

    building.fused_call = counting
    try:
        yield
    finally:
        building.fused_call = made


def options(*, device: str) -> dict[str, object]:
    """What ``apply`` is called with: everything is tried, nothing is compared with."""
    chosen: dict[str, object] = {
        "keep": "verified", "top": 10_000, "graph": False, "compile": False, "warmup": 1, "runs": 2, "steps": 1,
        "bandwidth": _BANDWIDTH, "budgets": Budgets(wall_s=0.01),
    }  # fmt: skip
    if device == "cuda":
        chosen["backend"] = "fastest"
    return chosen


def try_programs(programs: Sequence[Program], door: str, device: str = "cpu") -> list[Outcome]:
    """Fuse some programs side by side and judge each.

    Args:
        programs: none that writes to its inputs beside one that does not; the backend refuses the whole graph for it.
        door: one of :data:`DOORS`.
        device: ``cpu`` or ``cuda``.
    """
    try:
        outcomes = _try_together(programs, door, device)
    except AdvisorError as error:
        outcomes = [Outcome(program=one, door=door, refused=f"{error.code} {type(error).__name__}") for one in programs]
        return outcomes if len(programs) == 1 else _halves(programs, door, device)
    except Exception as error:  # noqa: BLE001  (any other exception is what is looked for)
        if len(programs) > 1:
            return _halves(programs, door, device)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('fusion_advisor/')[2]}:{last.lineno}"
        words = str(error).strip().splitlines() or [""]
        return [Outcome(program=programs[0], door=door, wrong=(f"{type(error).__name__} at {where}: {words[0][:200]}",))]
    if len(programs) == 1:
        return outcomes
    # What is wrong is tried again by itself, so that the report is of that program alone.
    return [one if not one.wrong else _alone(one, door, device) for one in outcomes]


def _alone(outcome: Outcome, door: str, device: str) -> Outcome:
    again = try_programs([outcome.program], door, device)[0]
    return again if again.wrong else replace(outcome, wrong=tuple(f"only side by side: {fault}" for fault in outcome.wrong))


def _halves(programs: Sequence[Program], door: str, device: str) -> list[Outcome]:
    middle = len(programs) // 2
    return try_programs(programs[:middle], door, device) + try_programs(programs[middle:], door, device)


def _try_together(programs: Sequence[Program], door: str, device: str) -> list[Outcome]:
    torch._dynamo.reset()
    launches, model = Launches(), SideBySide(programs).eval()
    with warnings.catch_warnings(), torch.no_grad(), counted(launches):
        warnings.simplefilter("ignore")
        inputs = _joined(programs, device, 0)
        report: Report | None = None
        if door == "apply":
            loaded = describe_live(model, inputs)
            fused = apply_workload(loaded, ApplyOptions(**options(device=device)), instruments=UNTIMED, last=LAST).fused
            call, report, undo, launched_so_far = model, fused.report, fused.revert, lambda: fused.launches
        else:
            # The backend of torch.compile has no keep="verified".
            backend = backend_with(ApplyOptions(bandwidth=_BANDWIDTH), check=_passes(check_region), instruments=UNTIMED)
            call, undo = torch.compile(model, backend=backend, dynamic=False), torch._dynamo.reset
            launched_so_far = lambda: launches.count  # noqa: E731
            call(*inputs)  # the graphs are fused at their first call
        before = launched_so_far()
        found = [_judged(programs, call, device, shift) for shift in (0, _SECOND, 0)]
        launched = launched_so_far() - before
        undo()
        after = _side_by_side(programs, model, device, 0)
        plain = _side_by_side(programs, SideBySide(programs).eval(), device, 0)
    kernels = _kernels(report, len(programs))
    outcomes = []
    for number, program in enumerate(programs):
        faults = [f"{when}: {fault}" for when, one in zip(_CALLS, found, strict=True) for fault in one[number].wrong]
        faults += [] if is_eagers(program, after[number], plain[number], device) else ["after revert the model is not eager's"]
        refused = _refusal(report) if len(programs) == 1 or not launched else ""
        outcomes.append(
            Outcome(
                program=program, door=door, kernels=kernels[number] if report else 0, launches=launched if number == 0 else 0,
                wrong=tuple(faults), refused="" if launched else refused, is_noisy=any(one[number].is_noisy for one in found),
            )
        )  # fmt: skip
    return outcomes


def is_eagers(
    program: Program, one: Side, other: Side, device: str, fresh: Callable[[str], tuple[torch.Tensor, ...]] | None = None
) -> bool:
    """Whether a call of the model's own ops did what eager did: left the same bits, or as right numbers where eager's bits vary.

    Args:
        program: what ran.
        one: after the call.
        other: after eager's.
        device: that both ran on.
        fresh: makes the inputs again; left out, the program's own do.
    """
    if _same(one, other) or not program.varies_on(device):
        return _same(one, other)
    make = fresh or program.make_inputs
    return not judge(program, one, other, [make(device) for _ in range(2)]).wrong


def _same(one: Side, other: Side) -> bool:
    """Whether two calls left the same bits, whatever NaN they hold."""
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True) for (_, ours), (_, theirs) in pairs)


def _refusal(report: Report | None) -> str:
    """Why a program that was tried runs its own ops, where the package took kernels out again."""
    if report is None:
        return ""
    if report.model_check is not None and not report.model_check.is_passed:
        return "the whole model's numbers do not pass"
    return next((fusion.reason for fusion in report.fusions if fusion.status is Status.NOT_REPLACED), "")[:80]


def _kernels(report: Report | None, count: int) -> list[int]:
    """Kept kernels by program, told by the module path of the sites of their chains."""
    found = [0] * count
    if report is None:
        return found
    sites = {chain.id: chain.sites for chain in report.chains}
    for fusion in report.fusions:
        if fusion.status is Status.KEPT:
            for number in {_number_in(site.module_path) for site in sites[fusion.chain_id]} - {-1}:
                found[number] += 1
    return found


def _number_in(module_path: str) -> int:
    numbers = [part for part in module_path.replace("[", ".").replace("]", "").split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else -1


def _joined(programs: Sequence[Program], device: str, shift: int) -> tuple[torch.Tensor, ...]:
    return tuple(value for program in programs for value in program.make_inputs(device, shift=shift))


def _side_by_side(programs: Sequence[Program], call: torch.nn.Module, device: str, shift: int) -> list[Side]:
    inputs = _joined(programs, device, shift)
    results, sides, start = call(*inputs), [], 0
    for program, result in zip(programs, results, strict=True):
        sides.append(Side(outputs=tuple(result), inputs=inputs[start : start + len(program.inputs)]))
        start += len(program.inputs)
    return sides


def _judged(programs, call, device, shift):
    ours = _side_by_side(programs, call, device, shift)
    theirs = _side_by_side(programs, SideBySide(programs).eval(), device, shift)
    return [
        judge(program, one, other, [program.make_inputs(device, shift=shift) for _ in range(2)])
        for program, one, other in zip(programs, ours, theirs, strict=True)
    ]
