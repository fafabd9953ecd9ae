"""The chains and rewrites of all graphs of a training step as one ranked list, each with the pass that it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.fuse.loss.record import LINEAR_CROSS_ENTROPY
from fusion_advisor.fuse.receipts import reverted_fusion, reverted_rewrite
from fusion_advisor.fuse.train.journal import Entry
from fusion_advisor.fuse.train.trained_graph import NOT_FASTER, SLOWER, Outcome
from fusion_advisor.records import Chain, Finding, Fusion, GraphRewrite, Launch, Match, ModelCheck, NoMatch, OpNode, Status
from fusion_advisor.records.op_facts import overload_free


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a report shows of both passes."""

    chains: tuple[Chain, ...]
    answers: tuple[Match | NoMatch, ...]
    fusions: tuple[Fusion, ...]
    rewrites: tuple[GraphRewrite, ...]
    launches: tuple[Launch, ...]
    """Kernels of all graphs, traced op by op."""
    passes_ns: tuple[tuple[str, int], ...]
    """(pass, kernel time), in the order of the passes."""


def merged(entries: Sequence[Entry], refusal_of: Callable[[Entry], str]) -> Findings:
    """Rank the chains of all graphs together, and say of each row which pass it belongs to.

    Args:
        entries: one for each graph.
        refusal_of: why a graph runs its own ops; empty where it runs as it was rewritten. What was kept in it then does not stay.
    """
    time_of = {id(entry): sum(launch.duration_ns for launch in entry.capture.launches) for entry in entries}
    total_ns = max(sum(time_of.values()), 1)
    found = [
        (chain, answer, entry) for entry in entries for chain, answer in zip(entry.plan.chains, entry.plan.answers, strict=True)
    ]
    found.sort(key=lambda row: -row[0].device_ns)
    names = {(id(entry), chain.id): f"C{number}" for number, (chain, _, entry) in enumerate(found, start=1)}
    chains = tuple(
        replace(
            chain,
            id=names[id(entry), chain.id],
            share=chain.device_ns / total_ns,
            training_pass=entry.training_pass,
        )
        for chain, _, entry in found
    )
    fusions = [
        _stays_or_not(replace(row, chain_id=names[id(entry), row.chain_id], training_pass=entry.training_pass), refusal_of(entry))
        for entry in entries
        for row in entry.fusions
    ]
    fusions.sort(key=lambda row: int(row.chain_id[1:]))
    return Findings(
        chains=chains,
        answers=tuple(replace(answer, chain_id=names[id(entry), chain.id]) for chain, answer, entry in found),
        fusions=tuple(fusions),
        rewrites=tuple(_rewrites(entries, refusal_of)),
        launches=tuple(launch for entry in entries for launch in entry.capture.launches),
        passes_ns=tuple(
            (name, sum(time_of[id(entry)] for entry in entries if entry.training_pass == name))
            for name in ("forward", "backward")
        ),
    )


def _stays_or_not(row: Fusion, refusal: str) -> Fusion:
    return reverted_fusion(row, refusal, _status_of(refusal)) if refusal else row


def _status_of(refusal: str) -> Status:
    """The verdict on what was kept in a graph that runs its own ops: on its time, or on its numbers."""
    return Status.WITHIN_NOISE if refusal == NOT_FASTER else Status.NOT_REPLACED


def _rewrites(entries: Sequence[Entry], refusal_of: Callable[[Entry], str]) -> list[GraphRewrite]:
    """Return the rows of graph rewrites; each ends in its pass, and in a number where a pass has several graphs."""
    graphs: Counter[str] = Counter()
    several = Counter(entry.training_pass for entry in entries)
    rows = []
    for entry in entries:
        graphs[entry.training_pass] += 1
        number = f"-{graphs[entry.training_pass]}" if several[entry.training_pass] > 1 else ""
        end, refusal = f"-{entry.training_pass}{number}", refusal_of(entry)
        for row in entry.rewrites:
            named = replace(row, id=f"{row.id}{end}", training_pass=entry.training_pass)
            rows.append(reverted_rewrite(named, refusal, _status_of(refusal)) if refusal else named)
    return rows


def step_rows(outcomes: Sequence[Outcome]) -> tuple[GraphRewrite, ...]:
    """Return the rows of rewrites of whole steps, as they stand after the step was judged.

    Args:
        outcomes: of the graphs of a step.
    """
    several = len(outcomes) > 1
    rows = []
    for number, outcome in enumerate(outcomes, start=1):
        for row in outcome.step_rows:
            named = replace(row, id=f"{row.id}-{number}") if several else row
            is_reverted = outcome.reason and row.status is Status.KEPT
            status = Status.SLOWER if outcome.reason == SLOWER else Status.NOT_REPLACED
            rows.append(replace(reverted_rewrite(named, outcome.reason, status), saved_bytes=0) if is_reverted else named)
    return tuple(rows)


def logits_findings(rows: Sequence[GraphRewrite], model: str) -> tuple[Finding, ...]:
    """Return a finding for each loss that holds the logits only because the step returns them.

    Args:
        rows: of :func:`step_rows`.
        model: how the command line names it.
    """
    return tuple(
        Finding(
            id=f"N{number}", title="The step returns its logits", reason=row.reason, gain_ns=0, is_measured=False, share=0.0,
            change=f"fusion-advisor apply {model} --phase train --drop-logits", spared_bytes=row.saved_bytes,
        )
        for number, row in enumerate((row for row in rows if _returns_logits(row)), start=1)
    )  # fmt: skip


def _returns_logits(row: GraphRewrite) -> bool:
    """Whether a loss would spare memory; so would recompute options, which a step that returns no logits has too."""
    return bool(row.saved_bytes) and row.status is Status.NOT_REPLACED and row.id.startswith(LINEAR_CROSS_ENTROPY.id)


_NORMS = {"native_batch_norm": 5, "_native_batch_norm_legit_functional": 5, "native_batch_norm_backward": 7}
"""Batch norm's ops in AOTAutograd's graphs, and the place of the argument that says whether it trains."""


def batch_norm_notes(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Say which share of a step's kernel time batch norms in training take, and why no chain takes them; empty without one.

    Args:
        entries: one for each graph.
    """
    total_ns = max(sum(launch.duration_ns for entry in entries for launch in entry.capture.launches), 1)
    names, norms_ns = set[str](), 0
    for entry in entries:
        found = {op.index: overload_free(op.target) for op in entry.capture.ops if _is_trained_norm(op)}
        names |= set(found.values())
        norms_ns += sum(launch.duration_ns for launch in entry.capture.launches if launch.op_index in found)
    if not names:
        return ()
    return (
        f"Batch norm in training stays torch's own op in both passes ({norms_ns / total_ns:.1%} of kernel time: "
        f"{', '.join(sorted(names))}). It sums each channel over all images, then changes every element by the sums. So its "
        "gradient is two kernels, as torch's is. With ReLU's gradient in them they would move 7 tensors, and torch moves 8.",
    )


def _is_trained_norm(op: OpNode) -> bool:
    place = _NORMS.get(overload_free(op.target))
    return place is not None and len(op.args) > place and op.args[place] is True


def check_of_all(checks: Sequence[ModelCheck]) -> ModelCheck | None:
    """Return one check for several graphs: the worst gradient or output of any of them, and eager's own error.

    Args:
        checks: of graphs that run as they were rewritten, or of those that do not where none does.
    """
    if not checks:
        return None
    worst = max(checks, key=lambda one: (not one.is_passed, one.fused_rel_l2 / max(one.eager_rel_l2, 1e-300)))
    return replace(
        worst, outputs=tuple(name for one in checks for name in one.outputs),
        nonfinite_mismatches=sum(one.nonfinite_mismatches for one in checks),
    )  # fmt: skip
