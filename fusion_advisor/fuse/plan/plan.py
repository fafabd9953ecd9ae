"""From a capture to a plan: which chains get which kernel, and why the others get none. Needs no GPU and no torch."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.chains.find import find_groups, outputs_of
from fusion_advisor.chains.group import Group, Verdict
from fusion_advisor.chains.rank import Ranked, computing_names, rank_chains
from fusion_advisor.codegen.common.interface import Header, library_origin
from fusion_advisor.fuse.plan.options import MIN_SHARE
from fusion_advisor.ir.operand_names import names_in, with_names
from fusion_advisor.ir.program import Program, layout_key
from fusion_advisor.library.match import Patterns, find_match
from fusion_advisor.lowering.lower import Lowered, lower
from fusion_advisor.lowering.memo import asked_once, lower_sites
from fusion_advisor.lowering.rules.tables import CannotLower
from fusion_advisor.records import Capture, Chain, Match, NoMatch, OpNode, Tuning

_NAME_OPS = 6
_LONGEST_TITLE = 40
_LONGEST_NAME = 64
"""Letters of a generated kernel's name; a report with names of 80 or more is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFusion:
    """One chain with its kernel, ready to be rendered."""

    id: str
    chain: Chain
    match: Match
    program: Program
    """Of every site: equal chains have equal programs."""
    sites: tuple[Lowered, ...]
    """Inputs and outputs of each site, in the order of ``chain.sites``."""
    header: Header
    tunables: tuple[Tuning, ...] = ()
    """Launch parameters that the kernel's manifest declares: tried first. A saved plan has its own and needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be tried, and an answer for every ranked chain."""

    chains: tuple[Chain, ...]
    answers: tuple[Match | NoMatch, ...]
    fusions: tuple[PlannedFusion, ...]
    unused: tuple[str, ...] = ()
    """Patterns of --only and --skip that fit the name of no kernel that was found for a chain."""


def judge_with(ops: Sequence[OpNode], members: tuple[int, ...], outputs: tuple[int, ...], *, is_exact: bool = False) -> Verdict:
    """Say whether one kernel can compute a group, and at how many bytes."""
    try:
        lowered = lower(ops, members, outputs, is_exact=is_exact)
    except CannotLower as refusal:
        return Verdict(is_fusible=False, code=refusal.code, reason=refusal.reason)
    return Verdict(is_fusible=True, floor_bytes=lowered.program.moved_bytes, key=repr(lowered.program))


def make_plan(
    capture: Capture,
    patterns: Patterns,
    *,
    min_share: float = MIN_SHARE,
    top: int = 20,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    sources: dict[str, str] | None = None,
    is_exact: bool = False,
    is_timed: bool = True,
) -> Plan:
    """Find, rank and match the chains of a capture.

    Args:
        capture: from ``profile`` or from ``capture.json``.
        patterns: the library's, from ``library.patterns``: all, or on demand.
        min_share: chains below this share of device time are ranked but get no kernel.
        top: at most this many rows.
        only: shell patterns of kernel names; when given, nothing else is tried.
        skip: shell patterns of kernel names that are not tried; a smaller kernel may take a part of their sites.
        sources: where each library kernel's idea comes from, for the rendered header.
        is_exact: kernels round each op's result as eager does.
        is_timed: a chain without a saving to measure gets no kernel, nor one below ``min_share``. False: times decide nothing.
    """
    seen: set[str] = set()
    groups = _groups(capture.ops, patterns, seen, only=only, skip=skip, is_exact=is_exact)
    rows = rank_chains(capture, groups)[:top]
    answers: list[Match | NoMatch] = []
    planned: list[PlannedFusion] = []
    for row in rows:
        answer, program, tunables = _answer(capture.ops, row, patterns, sources or {}, is_exact=is_exact)
        if isinstance(answer, Match):
            seen.add(answer.kernel)
        refusal = _refusal(row, answer, min_share=min_share, only=only, skip=skip, is_timed=is_timed)
        answers.append(refusal or answer)
        if refusal is None and isinstance(answer, Match) and program is not None:
            places = [(group.members, group.outputs) for group in row.groups]
            sites = lower_sites(capture.ops, places, is_exact=is_exact)
            fusion = _planned(row, answer, program, sites, len(planned) + 1)
            planned.append(replace(fusion, tunables=tunables))
    unused = tuple(pattern for pattern in (*only, *skip) if not any(fnmatch.fnmatchcase(name, pattern) for name in seen))
    return Plan(chains=tuple(row.chain for row in rows), answers=tuple(answers), fusions=tuple(planned), unused=unused)


def _groups(
    ops: Sequence[OpNode], patterns: Patterns, seen: set[str], *, only: Sequence[str], skip: Sequence[str], is_exact: bool
) -> list[Group]:
    """Find chains; names of kernels that were looked up are added to ``seen``.

    A site goes to the largest kernel that is not left out: queries and keys to the kernel for one where that for both is, a norm
    to its own where that with the residual is. Two chains that read the same values stay two where the kernel for both is.
    """

    def program_of(members: tuple[int, ...], outputs: tuple[int, ...]) -> Program:
        return lower(ops, members, outputs, is_exact=is_exact).program

    @functools.partial(asked_once, ops)
    def is_allowed(members: tuple[int, ...], outputs: tuple[int, ...]) -> bool | None:
        found = find_match(program_of(members, outputs), patterns)
        if found is None:
            return None
        seen.add(found.kernel)
        return _left_out(found.kernel, only, skip) is None

    def may_join(members: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
        if not only and not skip:
            return True
        allowed = is_allowed(members, outputs)
        if allowed is not None:
            return allowed
        kernel = generated_name(computing_names(ops, members), program_of(members, outputs))
        seen.add(kernel)
        return _left_out(kernel, only, skip) is None

    return find_groups(
        ops,
        asked_once(ops, lambda members, outputs: judge_with(ops, members, outputs, is_exact=is_exact)),
        lambda members, outputs: is_allowed(members, outputs) is True,
        (lambda members, outputs: is_allowed(members, outputs) is False) if only or skip else None,
        may_join,
    )


def recall(
    capture: Capture, chains: Sequence[Chain], answers: Mapping[str, Match], *, is_exact: bool = False
) -> list[PlannedFusion]:
    """Plan chains that a run found before, without looking for any.

    The answers hold what the library's kernels call things, so the library is not traced, nor need it be the one of that run.

    Args:
        capture: of that run.
        chains: of its report.
        answers: likewise, by chain.
        is_exact: of that run.
    """
    members = [site.op_indices for chain in chains for site in chain.sites]
    outputs = dict(zip(members, outputs_of(capture.ops, members), strict=True))
    verdict = Verdict(is_fusible=True)
    planned = []
    for number, chain in enumerate(chains, start=1):
        groups = tuple(Group(members=site.op_indices, outputs=outputs[site.op_indices], verdict=verdict) for site in chain.sites)
        row = Ranked(chain=chain, groups=groups, refusal=None)
        answer = answers[chain.id]
        sites = lower_sites(capture.ops, [(group.members, group.outputs) for group in groups], is_exact=is_exact)
        program = sites[0].program
        if answer.operands:
            program = with_names(program, answer.operands, dict(answer.named_values))
        planned.append(_planned(row, answer, program, sites, number))
    return planned


def _answer(
    ops: Sequence[OpNode],
    row: Ranked,
    patterns: Patterns,
    sources: Mapping[str, str],
    *,
    is_exact: bool,
) -> tuple[Match | NoMatch, Program | None, tuple[Tuning, ...]]:
    """Return what computes a chain, its Program with the kernel's names, and the launch parameters that are declared for it."""
    if row.refusal is not None:
        return row.refusal, None, ()
    group = row.groups[0]
    program = lower(ops, group.members, group.outputs, is_exact=is_exact).program
    found = find_match(program, patterns)
    if found is None:
        return Match(chain_id=row.chain.id, kernel=generated_name(row.chain.ops, program), is_library=False), program, ()
    operands, named_values = names_in(found.program)
    match = Match(
        chain_id=row.chain.id, kernel=found.kernel, is_library=True, variant=found.variant, constants=found.constants,
        operands=operands, named_values=named_values, source=sources.get(found.kernel, ""), license=found.license,
    )  # fmt: skip
    return match, found.program, found.tunables


def _refusal(
    row: Ranked, answer: Match | NoMatch, *, min_share: float, only: Sequence[str], skip: Sequence[str], is_timed: bool
) -> NoMatch | None:
    if isinstance(answer, NoMatch):
        return answer
    chain = row.chain
    if is_timed and chain.share < min_share:
        reason = f"{chain.share:.2%} of device time is below the {min_share:.2%} that is tried"
        return NoMatch(chain_id=chain.id, code="FA605", reason=reason)
    if is_timed and chain.saving_bound_ns == 0:
        return NoMatch(chain_id=chain.id, code="FA605", reason="its kernels already take no longer than one kernel must")
    left_out = _left_out(answer.kernel, only, skip)
    return None if left_out is None else NoMatch(chain_id=chain.id, code="FA607", reason=left_out)


def _left_out(kernel: str, only: Sequence[str], skip: Sequence[str]) -> str | None:
    if only and not any(fnmatch.fnmatchcase(kernel, pattern) for pattern in only):
        return f"{kernel} is not among --only {', '.join(only)}"
    if any(fnmatch.fnmatchcase(kernel, pattern) for pattern in skip):
        return f"{kernel} was left out by --skip"
    return None


def generated_name(op_names: Sequence[str], program: Program) -> str:
    """Name a generated kernel after its chain's first ops; four hex digits distinguish variants of one chain."""
    digest = hashlib.sha256(layout_key(program).encode()).hexdigest()[:4]
    words = ["".join(letter for letter in name if letter.isalnum() or letter == "_") for name in op_names[:_NAME_OPS]]
    while len("_".join([*words, digest])) > _LONGEST_NAME and len(words) > 1:
        words.pop()
    return "_".join(["_".join(words)[: _LONGEST_NAME - len(digest) - 1], digest])


def module_title(chain: Chain) -> str:
    """Name a generated kernel after the module of its sites: ``bert_embeddings``. Empty where sites lie in different modules.

    Numbers of layers are left out, because the layers of a stack share one kernel.
    """
    paths = {tuple(name for name in site.module_path.split(".") if not name.isdecimal()) for site in chain.sites}
    names = [re.sub(r"[^0-9A-Za-z_]", "", name) for name in (paths.pop() if len(paths) == 1 else ())]
    while len("_".join(names)) > _LONGEST_TITLE:
        names = names[1:]
    title = "_".join(names)
    return title if title.isidentifier() and title.isascii() else ""


def _planned(row: Ranked, match: Match, program: Program, sites: Sequence[Lowered], number: int) -> PlannedFusion:
    origin = library_origin(match.kernel, match.variant) if match.is_library else "generated from the chain"
    header = Header(
        title=match.kernel if match.is_library else module_title(row.chain) or match.kernel,
        summary=f"{' -> '.join(row.chain.ops)} in one kernel",
        origin=origin,
        source=match.source,
    )
    return PlannedFusion(id=f"F{number}", chain=row.chain, match=match, program=program, sites=tuple(sites), header=header)
