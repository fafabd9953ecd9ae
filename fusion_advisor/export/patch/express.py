"""Kept sites as statements of the model's source: what the patched function calls, for which values, and what it does with them.

Which tensor of the statements is which operand of the kernel is found by running the statements and the site's captured ops on
the same random tensors: their results have equal bits, or the site is not expressed.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.export.patch.frames import NotExpressed
from fusion_advisor.export.patch.guards import OwnerFacts, owner_facts, plain_source
from fusion_advisor.export.patch.observe import Observed
from fusion_advisor.export.patch.statements import Statements
from fusion_advisor.records import OpNode, TensorMeta
from fusion_advisor.verify.subgraph_oracle import OriginalChain

RESULT = "fused"
"""Name of the kernel's result in the patched function."""
_MOST_ORDERS = 720
"""Ways to give tensors to operands that are tried; six operands have as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Where a kernel's operand comes from.

    Attributes:
        source: number of the value that the patched function passes, or path of a tensor of its module.
        given: the layout in which the kernel reads it.
        is_viewed: whether the passed value has another layout, over the same memory.
    """

    source: int | str
    given: TensorMeta
    is_viewed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """A site in the model's source.

    Attributes:
        op: of the package.
        seen: one for each value that is passed: its layout, or source of the plain value that it must be.
        operands: of the kernel.
        facts: what the module must be.
        results: source of the variables that the statements set, with :data:`RESULT` for the kernel's result.
    """

    op: KernelOp
    seen: tuple[TensorMeta | str, ...]
    operands: tuple[Operand, ...]
    facts: OwnerFacts
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOps:
    """The captured ops of a site.

    Attributes:
        chain: to be run.
        given: what the kernel reads, in order.
    """

    chain: OriginalChain
    given: tuple[OpNode, ...]


def express(op: KernelOp, ops: SiteOps, statements: Statements, observed: Observed) -> Expressed:
    """Express a site.

    Args:
        op: its kernel.
        ops: its captured ops.
        statements: of the model's source that compute them.
        observed: what the statements read in one call.

    Raises:
        NotExpressed: the statements are no function of the kernel's operands, or leave something else behind.
    """
    if any(isinstance(node, ast.Name) and node.id == RESULT for node in ast.walk(statements.function)):
        raise NotExpressed(f"{statements.function.name} has a name `{RESULT}` of its own")
    seen = tuple(_seen(name, observed.values) for name in statements.reads)
    facts = owner_facts(statements.body, statements.owner, observed.owner)
    fixed, free = _fixed_operands(ops, facts, statements.owner, observed.module)
    tensors = [place for place, one in enumerate(seen) if isinstance(one, TensorMeta)]
    for order in itertools.islice(itertools.permutations(tensors, len(free)), _MOST_ORDERS):
        chosen = dict(zip(free, order, strict=True))
        metas = [seen[place] for place in order]
        if not all(_same_memory(meta, ops.given[number].outputs[0]) for number, meta in zip(free, metas, strict=True)):
            continue
        operands = tuple(_operand(one.outputs[0], fixed.get(number, chosen.get(number, 0)), seen)
                         for number, one in enumerate(ops.given))  # fmt: skip
        results = _results(operands, ops.chain, statements, observed)
        if results is not None:
            return Expressed(op=op, seen=seen, operands=operands, facts=facts, results=results)
    raise NotExpressed("its statements do not compute the captured ops from the tensors that they read")


def _seen(name: str, values: Mapping[str, Any]) -> TensorMeta | str:
    if name not in values:
        raise NotExpressed(f"`{name}` had no value when its statements began")
    value = values[name]
    if isinstance(value, torch.Tensor):
        return TensorMeta(
            shape=tuple(value.shape), stride=value.stride(), dtype=str(value.dtype).removeprefix("torch."),
            device=value.device.type,
        )  # fmt: skip
    source = plain_source(value)
    if source is None:
        raise NotExpressed(f"its statements read `{name}`, which is a {type(value).__name__}")
    return source


def _fixed_operands(ops: SiteOps, facts: OwnerFacts, owner: str, module: str) -> tuple[dict[int, str], list[int]]:
    """Return the operands that are tensors of the module, by number, and the numbers of the others."""
    fixed: dict[int, str] = {}
    free: list[int] = []
    for number, node in enumerate(ops.given):
        if node.role not in ("parameter", "buffer"):
            free.append(number)
            continue
        prefix = f"{module}." if module else ""
        path = node.target.removeprefix(prefix)
        if not owner or not node.target.startswith(prefix) or path not in facts.tensors:
            raise NotExpressed(f"it reads `{node.target}`, which its statements do not name")
        fixed[number] = path
    return fixed, free


def _same_memory(seen: TensorMeta | str, given: TensorMeta) -> bool:
    """Whether a view with one layout and a view with the other can cover the same elements."""
    assert isinstance(seen, TensorMeta)
    if seen.dtype != given.dtype:
        return False
    return (_reach(seen), _count(seen)) == (_reach(given), _count(given))


def _reach(meta: TensorMeta) -> int:
    return sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))


def _count(meta: TensorMeta) -> int:
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride else 1
    return count


def _operand(given: TensorMeta, source: int | str, seen: Sequence[TensorMeta | str]) -> Operand:
    layout = seen[source] if isinstance(source, int) else None
    is_same = isinstance(layout, TensorMeta) and (layout.shape, layout.stride) == (given.shape, given.stride)
    return Operand(source=source, given=given, is_viewed=isinstance(source, int) and not is_same)


@torch.no_grad()
def _results(
    operands: Sequence[Operand], chain: OriginalChain, statements: Statements, observed: Observed
) -> tuple[str, ...] | None:
    """Return the variables that the statements set, in terms of the kernel's results; None where the operands are others."""
    values = [_drawn(observed.values[name], number) for number, name in enumerate(statements.reads)]
    roots = [_root(one, values, observed) for one in operands]
    made = chain.run(roots)
    by_name = dict(zip(statements.reads, values, strict=True))
    left = _run(statements, observed, by_name)
    found = []
    for name, value in left:
        place = next((number for number, one in enumerate(made) if _is_equal(one, value)), None)
        alias = next((other for other, one in by_name.items() if value is one), None)
        if place is not None:
            found.append(RESULT if len(made) == 1 else f"{RESULT}[{place}]")
        elif alias is not None:
            found.append(alias)
        elif isinstance(value, torch.Tensor):
            return None
        else:
            raise NotExpressed(f"its statements set `{name}`, which is a {type(value).__name__}")
    if not any(text.startswith(RESULT) for text in found):
        raise NotExpressed("its statements leave no result of the kernel behind")
    return tuple(found)


def _drawn(value: Any, number: int) -> Any:
    """Return random values in a tensor's layout; whole numbers stay, for they may be positions."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if not value.dtype.is_floating_point:
        return copied.copy_(value)
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randn(value.shape, generator=generator).to(value.device)
    return copied.copy_(drawn) if 0 not in value.stride() else copied.as_strided(value.shape, value.stride()).copy_(drawn)


def _root(operand: Operand, values: Sequence[Any], observed: Observed) -> torch.Tensor:
    given = operand.given
    if isinstance(operand.source, int):
        value: torch.Tensor = values[operand.source]
    else:
        parent, _, leaf = operand.source.rpartition(".")
        value = getattr(observed.owner.get_submodule(parent), leaf)
    return value.detach().as_strided(given.shape, given.stride, value.storage_offset())


def _is_equal(made: torch.Tensor, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and (made.shape, made.dtype, made.stride()) == (value.shape, value.dtype, value.stride())
        and torch.equal(made.nan_to_num(), value.nan_to_num())
    )


def _run(statements: Statements, observed: Observed, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Run the statements in the function's own namespace; return what they leave, by name."""
    body: list[ast.stmt] = list(statements.body)
    if not statements.is_return:
        names = ast.parse(f"({''.join(f'{name}, ' for name in statements.leaves)})", mode="eval").body
        body.append(ast.Return(names))
    parameters = [*filter(None, [statements.owner]), *values]
    function = ast.parse(f"def site({', '.join(parameters)}):\n    pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    module = ast.fix_missing_locations(ast.Module([function], []))
    namespace = dict(observed.namespace)
    exec(compile(module, "<statements of the model>", "exec"), namespace)
    owner = [observed.owner] if statements.owner else []
    try:
        found = namespace["site"](*owner, *values.values())
    except (RuntimeError, TypeError, NameError, AttributeError, ValueError) as error:
        raise NotExpressed(f"its statements do not run by themselves: {error}") from error
    if not statements.is_return:
        return list(zip(statements.leaves, found, strict=True))
    several = found if isinstance(found, tuple) else (found,)
    return [("its result", one) for one in several]


def called_with(statements: Statements) -> str:
    """Return the arguments of the patched function's call, as source.

    Args:
        statements: that it stands before.
    """
    return ", ".join([statements.owner or "None", *statements.reads])
