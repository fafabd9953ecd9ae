"""Trace the library's references into patterns, with the tracer and the lowering that models go through.

A reference is traced at a few example shapes, because a loop nest with one row collapses differently from one with many; and
once more with its last output alone, because a model may not read the others (the last residual sum, say). Its keyword floats
get values that occur nowhere else, which distinguishes them from the constants that belong to the formula. A power of two that
the lowering moved into such a float (0.5 · (x · scale) becomes x · (0.5 · scale)) is recognised by the quotient.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.content import content_dir
from fusion_advisor.library.discover import BadReference, list_kernels, load_references
from fusion_advisor.library.kept_patterns import keep_patterns, kept_patterns
from fusion_advisor.library.match import Pattern, arithmetic_in, structure
from fusion_advisor.library.spec import CHAIN, Input, KernelSpec
from fusion_advisor.lowering.lower import Lowered, lower
from fusion_advisor.lowering.rules.tables import CannotLower
from fusion_advisor.records import OpClass, Ref

_SENTINEL = 0.00123456789
_ROWS, _COLS, _TABLE = (5, 3, 7, 2), 24, 11


def library_patterns(kernel_dirs: Sequence[Path] = ()) -> tuple[tuple[Pattern, ...], dict[str, str]]:
    """Return the patterns of all kernels, and where each kernel's idea comes from.

    Args:
        kernel_dirs: folders of a user's own kernels, searched in addition to the shipped ones.
    """
    specs = list_kernels(kernel_dirs)
    return tuple(itertools.chain.from_iterable(map(kernel_patterns, specs))), {spec.name: spec.source for spec in specs}


def library_on_demand(kernel_dirs: Sequence[Path] = ()) -> tuple[Callable[[str], Iterator[Pattern]], dict[str, str]]:
    """Return what gives the patterns that a canonical form may be equal to, and where each kernel's idea comes from.

    A reference's arithmetic is the same at all its example shapes; only where elements lie differs. So a kernel of the library is
    traced at one shape first (a fifth of the time), and at the others where a chain has the same arithmetic. A user's own kernel
    is traced at all of them.

    Args:
        kernel_dirs: folders of a user's own kernels, searched in addition to the shipped ones.
    """
    specs, shipped = list_kernels(kernel_dirs), content_dir("kernels")

    def with_arithmetic_of(text: str) -> Iterator[Pattern]:
        wanted = arithmetic_in(text)
        for spec in specs:
            if spec.folder.parent != shipped or wanted in _arithmetic_of(spec, _source(spec)):
                yield from kernel_patterns(spec)

    return with_arithmetic_of, {spec.name: spec.source for spec in specs}


@functools.cache
def _arithmetic_of(spec: KernelSpec, source: bytes) -> frozenset[frozenset[str]]:
    """Return what :func:`arithmetic_in` says of each of a kernel's forms."""
    if spec.kind != CHAIN:
        return frozenset()
    return frozenset(arithmetic_in(pattern.structure.text) for pattern in _first_traced(spec, source))


def kernel_patterns(spec: KernelSpec) -> tuple[Pattern, ...]:
    """Return one pattern per reference, example shape and set of outputs of a kernel.

    Traced once for a user (``library.kept_patterns``): tracing the library takes 10 to 15 s of CPU time, reading it 0.3 s
    (``docs/measurements/first_minutes.md``).

    Args:
        spec: the kernel's manifest.

    Raises:
        BadReference: a reference cannot be traced, or is more than one kernel can compute.
    """
    if spec.kind != CHAIN:
        return ()
    return _traced(spec, _source(spec))


def first_patterns(spec: KernelSpec) -> tuple[Pattern, ...]:
    """Return a kernel's patterns at its references' first example shape, which say what arithmetic it can match."""
    return _first_traced(spec, _source(spec)) if spec.kind == CHAIN else ()


def _source(spec: KernelSpec) -> bytes:
    file = spec.folder / "reference.py"
    return file.read_bytes() if file.is_file() else b""


@functools.cache
def _traced(spec: KernelSpec, source: bytes) -> tuple[Pattern, ...]:
    """The patterns of a kernel; its file's content is a part of the key, so that an edit in a notebook counts."""
    return _kept_or_traced(spec, source, of="all")


@functools.cache
def _first_traced(spec: KernelSpec, source: bytes) -> tuple[Pattern, ...]:
    """The patterns of a kernel at its references' first example shape; those of all shapes where they are at hand."""
    return kept_patterns(spec, source, of="all") or _kept_or_traced(spec, source, of="first")


def _kept_or_traced(spec: KernelSpec, source: bytes, *, of: str) -> tuple[Pattern, ...]:
    kept = kept_patterns(spec, source, of=of)
    if kept is not None:
        return kept
    found = tuple(_trace_patterns(spec, most_shapes=1 if of == "first" else None))
    keep_patterns(spec, source, found, of=of)
    return found


def _trace_patterns(spec: KernelSpec, most_shapes: int | None = None) -> Iterator[Pattern]:
    marks = sentinels(spec)
    for variant, function in load_references(spec).references:
        seen: set[str] = set()
        is_masked = False
        most = 2
        for sizes in itertools.islice(_example_sizes(spec), most_shapes):
            try:
                found = _in_both_widths(spec, function, sizes, marks)
            except CannotLower as error:
                if 1 in sizes.values():  # one token of a batch of one, say: what was a copy is a view
                    continue
                detail = f"reference_{variant} cannot be one kernel: {error.reason}"
                raise BadReference(file=spec.folder / "reference.py", detail=detail) from error
            # Query and key are computed the same way, also where the key has one head and its loop nest is another.
            most = min(most, *map(len, found))
            for lowered in (lowered for width in found for lowered in width[:most]):
                pattern = _pattern(spec, variant, lowered, marks)
                # A causal mask over one row hides nothing: what is left is another kernel's pattern.
                is_masked |= "triangle(" in pattern.structure.text
                if is_masked and "triangle(" not in pattern.structure.text:
                    continue
                if pattern.structure.text not in seen:
                    seen.add(pattern.structure.text)
                    yield pattern


def _in_both_widths(
    spec: KernelSpec, function: Callable[..., Any], sizes: Mapping[str, int], marks: Mapping[str, float]
) -> list[list[Lowered]]:
    """A reference in fp32, and in bfloat16 where it names a dtype: a cast of its own then rounds inside the kernel."""
    graph = trace_reference(spec, function, sizes, constants=marks)
    names = tuple(tensor.name for tensor in spec.inputs)
    found = [list(lower_graph(graph, names))]
    if "bfloat16" in spec.dtypes and any(_names_dtype(node) for node in graph.graph.nodes):
        found.append(list(lower_reference(spec, function, sizes, constants=marks, dtype=torch.bfloat16)))
    return found


def _names_dtype(node: torch.fx.Node) -> bool:
    given = (*node.args, *node.kwargs.values())
    return str(node.target).startswith("aten.type_as") or any(isinstance(value, torch.dtype) for value in given)


def lower_reference(
    spec: KernelSpec,
    function: Callable[..., Any],
    sizes: Mapping[str, int],
    *,
    constants: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Lowered]:
    """Lower a reference: first with all its outputs, then, where there are several, with the last alone.

    Args:
        spec: the kernel's manifest.
        function: one of its references.
        sizes: size of each letter of the manifest's shapes.
        constants: values of the keyword floats; the manifest's by default.
        dtype: of the tensors whose dtype the manifest leaves open.
    """
    graph = trace_reference(spec, function, sizes, constants=constants, dtype=dtype)
    yield from lower_graph(graph, tuple(tensor.name for tensor in spec.inputs))


def lower_graph(graph: torch.fx.GraphModule, names: tuple[str, ...]) -> Iterator[Lowered]:
    """Lower a traced function: first with all its outputs, then, where there are several, with the last alone.

    Outputs that are computed the same way (query, key, value) are not lowered alone: one of them is another kernel.
    """
    region = Region(index=0, graph=graph, original=graph, names=names, roles=("input",) * len(names))
    ops, _ = describe(region)
    members = [op.index for op in ops if op.role == "op"]
    returned = ops[-1].args[0]
    outputs = [item.index for item in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(item, Ref)]
    outputs = [_computed(ops, index) for index in outputs]
    if len(set(outputs)) != len(outputs):
        raise CannotLower("FA603", "at these sizes several results are views of one value, which no kernel has to move")
    yield lower(ops, members, outputs)
    if len(outputs) > 1 and not any(ops[output].mutates for output in outputs):  # what is written into a tensor is always wanted
        first, last = (lower(ops, members, [output]) for output in (outputs[0], outputs[-1]))
        if structure(first.program).text != structure(last.program).text:
            yield last


def trace_reference(
    spec: KernelSpec,
    function: Callable[..., Any],
    sizes: Mapping[str, int],
    *,
    constants: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.fx.GraphModule:
    """Trace a reference into ATen ops; the arguments are those of :func:`lower_reference`.

    Raises:
        BadReference: it stops with an error of its own.
    """
    taken = inspect.signature(function).parameters
    given = dict(spec.constants) if constants is None else constants
    bound = functools.partial(function, **{name: value for name, value in given.items() if name in taken})
    try:
        with torch.autocast("cpu", enabled=False):  # that around the user's call is no part of the pattern
            return trace(bound, [example(tensor, sizes, dtype) for tensor in spec.inputs])
    except Exception as error:
        detail = f"{function.__name__} cannot be traced: {type(error).__name__}: {error}"
        raise BadReference(file=spec.folder / "reference.py", detail=detail) from error


def example_inputs(
    spec: KernelSpec, function: Callable[..., Any], dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return tensors and keyword floats that a reference can be run with; the values mean nothing."""
    sizes = next(_example_sizes(spec))
    taken = inspect.signature(function).parameters
    constants = {name: value for name, value in spec.constants if name in taken}
    return [example(tensor, sizes, dtype).zero_() for tensor in spec.inputs], constants


def sentinels(spec: KernelSpec) -> dict[str, float]:
    """The values that mark the manifest's constants: odd multiples, so that none is a power of two times another."""
    return {name: _SENTINEL * (2 * number + 1) for number, (name, _) in enumerate(spec.constants)}


def _named(constant: float, marks: Mapping[str, float]) -> tuple[str, float]:
    """The keyword float that a constant of a marked trace is a multiple of, and the factor; no name where it is the formula's."""
    for name, mark in marks.items():
        factor = constant / mark
        if abs(math.frexp(factor)[0]) == 0.5:  # a power of two
            return name, factor
    return "", 1.0


def _computed(ops: Sequence[Any], index: int) -> int:
    while ops[index].op_class is OpClass.VIEW:
        index = ops[index].args[0].index
    return index


def example(tensor: Input, sizes: Mapping[str, int], dtype: torch.dtype) -> torch.Tensor:
    """Make an input of a reference, laid out as the manifest says."""
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape]
    own = getattr(torch, tensor.dtype) if tensor.dtype else dtype
    memory = [dim if isinstance(dim, int) else sizes[dim] for dim in tensor.order]
    if tensor.order == tensor.shape:
        return torch.empty(shape, dtype=own)
    places = list(range(len(tensor.order)))
    moved = []
    for dim in tensor.shape:
        place = next(number for number in places if tensor.order[number] == dim)
        places.remove(place)
        moved.append(place)
    return torch.empty(memory, dtype=own).permute(moved)


def _example_sizes(spec: KernelSpec) -> Iterator[dict[str, int]]:
    letters = list(dict.fromkeys(dim for tensor in spec.inputs for dim in tensor.shape if isinstance(dim, str)))
    last = next(dim for dim in reversed(spec.inputs[0].shape) if isinstance(dim, str))
    tables = [tensor.below for tensor in spec.inputs if isinstance(tensor.below, str) and tensor.below not in ("", last)]
    rows = [letter for letter in letters if letter not in (last, *tables)]
    many = {letter: _ROWS[number % len(_ROWS)] for number, letter in enumerate(rows)}
    length = dict.fromkeys(tables, _TABLE)  # no loop runs over it
    for are_one in itertools.product((False, True), repeat=len(rows)):  # a batch of one, a sequence of one, a token of a decode
        sized = {letter: 1 if is_one else many[letter] for letter, is_one in zip(rows, are_one, strict=True)}
        yield {**sized, **length, last: _COLS}
        for letters_of_dim in _same_dim(spec, rows):  # as many key heads as query heads
            if len({sized[letter] for letter in letters_of_dim}) > 1:
                yield {**sized, **dict.fromkeys(letters_of_dim, sized[letters_of_dim[0]]), **length, last: _COLS}


def _same_dim(spec: KernelSpec, rows: Sequence[str]) -> list[tuple[str, ...]]:
    """Letters that stand for the same dim of different inputs."""
    found: dict[tuple[int, int], dict[str, None]] = {}
    for tensor in spec.inputs:
        for place, dim in enumerate(tensor.shape):
            if dim in rows:
                found.setdefault((len(tensor.shape), place), {})[str(dim)] = None
    return [tuple(letters) for letters in found.values() if len(letters) > 1]


def manifest_names(spec: KernelSpec, lowered: Lowered) -> list[str]:
    """Return the manifest's names for the operands of a lowered reference, in the Program's order.

    A model may not read all outputs; a reference lowered for some of them has the last ones.
    """
    return [*(spec.inputs[index].name for index in lowered.inputs), *spec.outputs[-len(lowered.outputs) :]]


def _pattern(spec: KernelSpec, variant: str, lowered: Lowered, marks: Mapping[str, float]) -> Pattern:
    form = structure(lowered.program)
    named = [_named(constant, marks) for constant in form.constants]
    names = manifest_names(spec, lowered)
    return Pattern(
        kernel=spec.name,
        variant=variant,
        structure=form,
        operand_names=tuple(names[number] for number in form.operands),
        constant_names=tuple(name for name, _ in named),
        constant_factors=tuple(factor for _, factor in named),
        dtypes=spec.dtypes,
        tunables=spec.tunables,
        license=spec.license,
    )
