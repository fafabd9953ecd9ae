"""The rewritten forward as Python: one function for each distinct layer, a loop over equal ones, and what stands around them."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Graph, Node

from fusion_advisor.export.expressions import Printer, is_method
from fusion_advisor.export.kernel_ops import KernelOps
from fusion_advisor.export.names import Names, value_name
from fusion_advisor.export.parameters import Layer, attribute, layer_of, place_of
from fusion_advisor.export.steps import Section, Step, Steps, carried, is_worth_a_function
from fusion_advisor.fuse.cuda_graph.tail import LastProduct

_WIDEST = 110
_LONGEST_CHAIN = 84
_MOST_KEPT = 60
"""Statements of a function after which it drops values as soon as nobody reads them."""


_WORDS = ("model", "constants", "block", "following", "cached")
"""What a layer's function may need besides values: the model, constants, its module, the next one, its part of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the forward is printed from.

    Attributes:
        graph: the rewritten graph.
        ops: the kernels in it.
        tensors: names of the placeholders that are parameters or buffers.
        arguments: names of the placeholders that are arguments of the call.
        state: paths of the placeholders that objects among the arguments hold: ``cache.layers.0.keys``.
        origins: by a kernel's result, the model's own op that had it.
        late: its last product, which a CUDA graph leaves out; None where it has none of that size.
    """

    model: nn.Module
    graph: Graph
    ops: KernelOps
    tensors: Mapping[Node, str]
    arguments: Mapping[Node, str]
    state: Mapping[Node, str]
    origins: Mapping[Node, Node]
    late: LastProduct | None = None


@dataclass(slots=True)
class _Scope:
    """One function: how values are read in it."""

    layer: Layer | None
    texts: dict[Node, str]
    names: Names
    uses: set[str] = field(default_factory=set)
    """Of :data:`_WORDS`: those that it needs."""


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    first: tuple[str, ...]
    """Of :data:`_WORDS`: its first parameters."""
    given: tuple[str, ...]
    outputs: tuple[str, ...]
    lines: tuple[str, ...]
    layers: tuple[Layer, ...]


class ForwardPrinter:
    """Prints a graph.

    Attributes:
        functions: of the layers, in the order in which they are first called.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._steps = Steps(source.graph, source.ops, source.late)
        self._leaf = dict(source.arguments)
        self.functions: list[_Function] = []
        layers = [found.container for path in source.state.values() if (found := layer_of(path))]
        self._cached = layers[0] if layers else ""  # the objects of a cache that hold one layer each
        device = next(iter(source.arguments.values()), None)
        self._device = f"{device}.device" if device else "next(model.parameters()).device"

    # ------------------------------------------------------------------ reading

    def _read(self, node: Node, scope: _Scope) -> str:
        node = self._steps.same(node)
        if node in scope.texts:
            return scope.texts[node]
        if node in self._source.tensors:
            return self._tensor(self._source.tensors[node], scope)
        if node.op == "get_attr":
            scope.uses.add("constants")
            return f"constants.{node.target}"
        if node in self._source.state:
            return self._state(self._source.state[node], scope)
        return self._leaf[node]

    def _state(self, path: str, scope: _Scope) -> str:
        own = layer_of(path)
        if self._is_cached(path, scope.layer):
            assert own is not None
            scope.uses.add("cached")
            return attribute(path[len(own.path) :], "cached")
        return place_of(path)

    def _is_cached(self, path: str, layer: Layer | None) -> bool:
        """Whether a layer finds a tensor in the part of a cache with its own number."""
        own = layer_of(path)
        return layer is not None and own is not None and own == Layer(self._cached, layer.number)

    def _tensor(self, name: str, scope: _Scope) -> str:
        own = layer_of(name)
        if scope.layer is not None and own is not None and own.container == scope.layer.container:
            word = {0: "block", 1: "following"}.get(own.number - scope.layer.number)
            if word:
                scope.uses.add(word)
                return attribute(name[len(own.path) :], word)
        scope.uses.add("model")
        return attribute(name)

    def _name(self, node: Node, prefix: str) -> str:
        wanted = value_name(node, self._source.origins.get(node), prefix)
        return {"add": "hidden", "add_": "hidden", "mul": "product"}.get(wanted, wanted)

    # ------------------------------------------------------------------ statements

    def _lines(self, steps: Sequence[Step], outputs: Sequence[Node], scope: _Scope, device: str) -> list[str]:
        """Return the statements of some steps; names of what they compute go into the scope."""
        printer = Printer(self._source.ops, device)
        prefix = scope.layer.path if scope.layer else ""
        lines: list[str] = []
        last = self._last_readers(steps, outputs) if len(steps) > _MOST_KEPT else {}
        for place, step in enumerate(steps):
            text = printer.expression(step.node, lambda node: self._read(node, scope))
            following = steps[place + 1] if place + 1 < len(steps) else None
            if following is not None and self._goes_on(step, following, outputs) and len(text) < _LONGEST_CHAIN:
                scope.texts[step.node] = text
                continue
            names = []
            for node in step.results:
                name = "_" if node is None else scope.names.take(self._name(node, prefix))
                if node is not None:
                    scope.texts[node] = name
                names.append(name)
            lines += _statement(f"{', '.join(names)}{',' * (step.is_unpacked and len(names) == 1)}", text)
            dropped = [scope.texts[node] for node in last.get(place, ())]
            lines += [f"del {', '.join(dropped)}"] if dropped else []
        return lines

    def _goes_on(self, step: Step, following: Step, outputs: Sequence[Node]) -> bool:
        """Whether the next statement is a method of this one's value, which nothing else reads."""
        node = step.node
        if step.is_unpacked or node in outputs or node in self._steps.returned or not is_method(following.node):
            return False
        source = following.node.args[0]
        is_first = isinstance(source, Node) and self._steps.same(source) is node
        return is_first and len(self._steps.readers.get(node, ())) == 1 and following.reads.count(node) == 1

    def _last_readers(self, steps: Sequence[Step], outputs: Sequence[Node]) -> dict[int, list[Node]]:
        """Return which values nobody reads after each step; those that a chain of methods holds have no name."""
        made = {node for step in steps for node in step.results if node is not None}
        chained = {step.node for step, after in itertools.pairwise(steps) if self._goes_on(step, after, outputs)}
        last: dict[Node, int] = {}
        for place, step in enumerate(steps):
            for node in step.reads:
                if node in made and node not in outputs and node not in chained and node not in self._steps.returned:
                    last[node] = place
        found: dict[int, list[Node]] = {}
        for node, reader in last.items():
            # a chain is printed with the statement that it ends in
            end = next(place for place in range(reader, len(steps)) if steps[place].node not in chained)
            found.setdefault(end, []).append(node)
        return found

    # ------------------------------------------------------------------ layers

    def _function(self, section: Section, given: Sequence[str], name: str, layers: Sequence[Layer]) -> _Function:
        scope = _Scope(section.layer, {}, Names(dict.fromkeys((*given, *_WORDS))))
        scope.texts.update(zip(section.given, given, strict=True))
        arguments = self._arguments_in(section)
        for node, text in arguments.items():
            scope.texts[node] = text
        roots = self._roots_in(section)
        device = f"{(*given, *arguments.values(), 'model')[0]}.device"
        lines = self._lines(section.steps, section.outputs, scope, device)
        first = tuple(word for word in _WORDS if word in scope.uses)
        outputs = tuple(scope.texts[node] for node in section.outputs)
        return _Function(name, first, (*given, *arguments.values(), *roots), outputs, tuple(lines), tuple(layers))

    def _arguments_in(self, section: Section) -> dict[Node, str]:
        reads = dict.fromkeys(node for step in section.steps for node in step.reads)
        return {node: self._source.arguments[node] for node in reads if node in self._source.arguments}

    def _roots_in(self, section: Section) -> list[str]:
        """Return the arguments whose objects hold what a section reads, but for its own part of a cache."""
        state = self._source.state
        paths = [state[node] for step in section.steps for node in step.reads if node in state]
        return list(dict.fromkeys(path.partition(".")[0] for path in paths if not self._is_cached(path, section.layer)))

    def _shape(self, section: Section) -> tuple[object, ...]:
        """What is equal for two sections exactly where one function can be both."""
        found = self._function(section, [f"given_{number}" for number, _ in enumerate(section.given)], "layer", ())
        container = section.layer.container if section.layer else ""
        return (container, found.first, found.given, found.outputs, found.lines)

    def printed(self) -> list[str]:
        """Return the statements of the forward's body, up to its result, and make the functions that they call."""
        sections = self._steps.sections()
        shapes = [self._shape(one) if one.layer else None for one in sections]
        equal = {shape: [one for one, other in zip(sections, shapes, strict=True) if other == shape] for shape in shapes if shape}
        roots = [path.partition(".")[0] for path in self._source.state.values()]
        names = Names(dict.fromkeys((*self._source.arguments.values(), *roots, "model", "constants", "forward", "index")))
        scope = self._top = _Scope(None, {}, names)
        # Functions are named before values: a local variable of a function's name would hide the function.
        late = self._late_function()
        made: dict[object, _Function] = {}
        for section, shape in zip(sections, shapes, strict=True):
            if shape is not None and shape not in made and is_worth_a_function(section, equal[shape]):
                made[shape] = self._named_function(section, equal[shape])
        self.functions = [*made.values(), *([late] if late else [])]
        lines: list[str] = []
        place = 0
        while place < len(sections):
            section, shape = sections[place], shapes[place]
            if shape is None or shape not in made:
                lines += self._lines(section.steps, section.outputs, scope, self._device)
                place += 1
                continue
            run = [section]
            while place + len(run) < len(sections) and shapes[place + len(run)] == shape:
                run.append(sections[place + len(run)])
            moved = carried(run) if len(run) > 1 else None
            if moved is None:
                lines += self._call(section, made[shape], scope)
                place += 1
            else:
                lines += self._loop(run, made[shape], moved, scope)
                place += len(run)
        return lines + (self._late_call(late, scope) if late else [])

    def _late_function(self) -> _Function | None:
        """Return the last product as a function of what it reads."""
        late = self._source.late
        if late is None:
            return None
        section = Section(None, tuple(self._steps.late), (late.hidden,), (late.ops[-1],))
        return self._function(section, ["hidden"], self._top.names.take("last_product"), ())

    def _late_call(self, function: _Function, scope: _Scope) -> list[str]:
        late = self._source.late
        assert late is not None
        given = [*(word for word in function.first), self._read(late.hidden, scope)]
        scope.uses |= set(function.first)
        scope.texts[late.ops[-1]] = name = scope.names.take(self._name(late.ops[0], ""))
        return _statement(name, f"late({', '.join([function.name, *given])})")

    def result(self, node: Node) -> str:
        """Return the name of a value that the graph returns.

        Args:
            node: of the graph's result.
        """
        return self._read(node, self._top)

    def _named_function(self, section: Section, equal: Sequence[Section]) -> _Function:
        assert section.layer is not None
        kind = type(self._source.model.get_submodule(section.layer.path)).__name__
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        shown = equal[-1]  # what comes from a layer before it has a better name than what comes from the embeddings
        given = Names(dict.fromkeys(_WORDS))
        words = [given.take(self._name(node, "")) for node in shown.given]
        layers = [one.layer for one in equal if one.layer is not None]
        return self._function(section, words, self._top.names.take(snake), layers)

    def _first_arguments(self, function: _Function, block: str, following: str, number: str) -> list[str]:
        words = {"model": "model", "constants": "constants", "block": block, "following": following}
        if self._cached:
            words["cached"] = f"{place_of(self._cached.rstrip('.'))}[{number}]"
        self._top.uses |= {word for word in function.first if word in ("model", "constants")} | {"model"}
        return [words[word] for word in function.first]

    def _call(self, section: Section, function: _Function, scope: _Scope) -> list[str]:
        layer = section.layer
        assert layer is not None
        after = Layer(layer.container, layer.number + 1)
        first = self._first_arguments(function, attribute(layer.path), attribute(after.path), str(layer.number))
        given = [self._read(node, scope) for node in section.given]
        arguments = [*self._arguments_in(section).values(), *self._roots_in(section)]
        for node in section.outputs:
            scope.texts[node] = scope.names.take(self._name(node, layer.path))
        targets = ", ".join(scope.texts[node] for node in section.outputs)
        return _statement(targets, f"{function.name}({', '.join([*first, *given, *arguments])})")

    def _loop(self, run: Sequence[Section], function: _Function, moved: Mapping[int, int], scope: _Scope) -> list[str]:
        first, last = run[0].layer, run[-1].layer
        assert first is not None
        assert last is not None
        variables = {place: scope.names.take(function.given[place]) for place in moved}
        before = [(name, self._read(run[0].given[place], scope)) for place, name in variables.items()]
        lines = [f"{', '.join(name for name, _ in before)} = {', '.join(text for _, text in before)}"] if before else []
        layers = attribute(first.container.rstrip("."))
        words = self._first_arguments(function, f"{layers}[index]", f"{layers}[index + 1]", "index")
        given = [variables[place] if place in moved else self._read(node, scope) for place, node in enumerate(run[0].given)]
        arguments = [*self._arguments_in(run[0]).values(), *self._roots_in(run[0])]
        by_output = {output: variables[place] for place, output in moved.items()}
        targets = ", ".join(by_output[output] for output in range(len(run[0].outputs)))
        call = _statement(targets, f"{function.name}({', '.join([*words, *given, *arguments])})")
        lines += [
            f"for index in range({first.number}, {last.number + 1}):",
            *textwrap.indent("\n".join(call), "    ").split("\n"),
        ]
        for output, node in enumerate(run[-1].outputs):
            scope.texts[node] = by_output[output]
        return lines


def _statement(targets: str, text: str) -> list[str]:
    """An assignment, its arguments on lines of their own where it is too long for one."""
    line = f"{targets} = {text}" if targets else text
    opening = text.find("(")
    if len(line) <= _WIDEST or opening < 0 or not text.endswith(")") or _closes(text, opening) != len(text) - 1:
        return [line]
    inner = textwrap.wrap(text[opening + 1 : -1], _WIDEST, break_long_words=False, break_on_hyphens=False)
    return [f"{targets} = {text[: opening + 1]}" if targets else text[: opening + 1], *(f"    {part}" for part in inner), ")"]


def _closes(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in "([") - (text[place] in ")]")
        if depth == 0:
            return place
    return -1
