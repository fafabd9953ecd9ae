"""Reads dynamo's guards of a captured call into a tree that means the same in another process."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from fusion_advisor.fuse.direct.guard_nodes import OF_PAIRS, inside_of
from fusion_advisor.fuse.start.described import CannotDescribe, described, layout, name_of
from fusion_advisor.fuse.start.guard_tree import BY_KEY, Node, Tree, holder_of, reached, step
from fusion_advisor.fuse.start.size_conditions import condition_of

_CONTAINS = re.compile(r"^(not )?___dict_contains\(('[^'\\]*'|\"[^\"\\]*\"|-?\d+), ")
_LACKS = re.compile(r"^(not )?hasattr\(.*, '(\w+)'\)( == False)?$")
_OF_DYNAMOS_MAKING = re.compile(r"__import_|___|_\d+_c\d+$")
"""Global names under which dynamo puts Python modules into a function's module."""
_GENERIC = re.compile(r"object\.__getattribute__\(.*, '(\w+)'\)$")
_ITEM_BY_PLACE = re.compile(r"dict\.__getitem__\((.+), list\(dict\.keys\(\1\)\)\[(\d+)\]\)$")
_FRAME = re.compile(r"^FrameLocalsGuardAccessor\(key='(\w+)'")
_WHOLE = {"ID_MATCH", "EQUALS_MATCH", "CONSTANT_MATCH", "NONE_MATCH", "TRUE_MATCH", "FALSE_MATCH", "DTYPE_MATCH",
          "SET_CONTAINS"}  # fmt: skip
"""What is compared whole. Of a set dynamo asks one item, which stands in the guard's text as Python shows it."""
_LENGTHS = {"LENGTH_CHECK", "DICT_LENGTH"}
_KEYS = {"MAPPING_KEYS_MATCH", "DICT_VERSION"}
_REGISTRY = "._CAN_RECORD_REGISTRY"
"""Of transformers, by class of model: a trace looks one class up, and which models another process has made is its own affair."""
_OF_DYNAMO = {"DIMENSION_DYNAMIC_MARKING_GUARD", "DYNAMIC_INDICES"}
"""About marks that dynamo alone reads."""
OF_THE_PROCESS = {"LAMBDA_GUARD", "GLOBAL_STATE", "TORCH_FUNCTION_MODE_STACK", "DEFAULT_DEVICE"}
"""At the root: what is not of the model, and compared apart."""


def recorded(
    root: Any, variables: Mapping[str, Any], space: dict[str, Any], passed: Sequence[torch.Tensor] = (),
    opened: Mapping[int, Any] | None = None,
) -> Tree:  # fmt: skip
    """Read dynamo's tree of guards, which hold now.

    Args:
        root: of the tree.
        variables: of the frame.
        space: the function's globals.
        passed: tensors of the call.
        opened: by ``id`` of one of them, the dims whose sizes and whose strides are open.

    Raises:
        CannotDescribe: a guard or a value that means nothing in another process.
    """
    tree, reader = Tree(), _Reader(opened or {})
    names = {type(guard).__name__ for guard in root.get_leaf_guards()}
    if not names <= OF_THE_PROCESS or len(_lambdas(root)) > 1:
        raise CannotDescribe(f"dynamo asks for {', '.join(sorted(names - OF_THE_PROCESS)) or 'more than its own state'}")
    for accessor, below in zip(root.get_accessors(), root.get_child_managers(), strict=True):
        kind, text = type(accessor).__name__, accessor.repr()
        frame = _FRAME.match(text)
        if frame and frame[1] in variables:
            tree.variables[frame[1]] = reader.read(below, variables[frame[1]], frame[1])
        elif kind == "GlobalsGuardAccessor":
            _read_globals(tree, below, space, reader)
        else:
            raise CannotDescribe(f"dynamo reads the frame by {kind}")
    for guard in root.get_epilogue_lambda_guards():
        for text in guard.verbose_code_parts():
            _read_condition(tree, text.partition("  #")[0].strip(), variables, space, passed)
    return tree


def _read_condition(
    tree: Tree, text: str, variables: Mapping[str, Any], space: dict[str, Any], passed: Sequence[torch.Tensor]
) -> None:
    """Read that two ways lead to one object, ``L['self'].config is L['self'].inner.config``, or what is asked of sizes.

    Raises:
        CannotDescribe: it says something else.
    """
    parsed = ast.parse(text, mode="eval").body
    if not isinstance(parsed, ast.Compare) or len(parsed.ops) != 1 or not isinstance(parsed.ops[0], ast.Is):
        places = {id(tensor): place for place, tensor in reversed([*enumerate(passed)])}

        def place_of(way: ast.expr) -> int:
            value = _value_at(way, variables, space)
            if id(value) not in places:
                raise CannotDescribe(f"dynamo asks for sizes of `{ast.unparse(way):.80}`")
            return places[id(value)]

        tree.conditions.append(condition_of(parsed, place_of))
        return
    group = tree.groups.setdefault(ast.unparse(parsed.left), len(tree.groups))
    for way in (parsed.left, parsed.comparators[0]):
        _read_way(tree, way, variables, space).group = group


def _steps_on(way: ast.expr) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return where a way begins, the name of what it begins at, and its steps.

    Raises:
        CannotDescribe: a step of another kind.
    """
    steps: list[tuple[str, Any]] = []
    while not isinstance(way, ast.Name):
        if isinstance(way, ast.Attribute):
            steps.append(("attribute", way.attr))
        elif isinstance(way, ast.Subscript) and isinstance(way.slice, ast.Constant):
            steps.append(("item", way.slice.value))
        elif (attribute := _GENERIC.match(ast.unparse(way))) is not None and isinstance(way, ast.Call):
            steps.append(("attribute", attribute[1]))
            way = way.args[0]
            continue
        elif (item := _ITEM_BY_PLACE.match(ast.unparse(way))) is not None and isinstance(way, ast.Call):
            steps.append(("place", int(item[2])))
            way = way.args[0]
            continue
        elif isinstance(way, ast.Call) and len(way.args) == 1 and (called := ast.unparse(way.func)) in ("type", "dict"):
            if called == "type":  # `dict` copies what shows a class's attributes, and a copy has the same items
                steps.append(("type", ""))
            way = way.args[0]
            continue
        else:
            raise CannotDescribe(f"dynamo asks for `{ast.unparse(way):.400}`")
        way = way.value
    (_, root), *rest = reversed(steps)
    return way.id, root, rest


def _accessor(kind: str, key: Any, value: Any) -> tuple[str, str]:
    """Return dynamo's accessor of a step from a value.

    Raises:
        CannotDescribe: the step leads to an item whose key cannot be written down.
    """
    if kind == "place":
        key = list(dict.keys(value))[key]
        if type(key) not in (str, int):
            raise CannotDescribe(f"dynamo asks for an item of a dict by a {name_of(type(key))}")
    if kind == "type":
        return "TypeGuardAccessor", ""
    if key == "__dict__" and isinstance(value, type):
        return "TypeDictGuardAccessor", ""
    by_item = BY_KEY[0] if isinstance(value, dict | MappingProxyType) else _BY_PLACE.get(type(value), "")
    return (_BY_NAME, key) if kind == "attribute" else (by_item, repr(key))


def _value_at(way: ast.expr, variables: Mapping[str, Any], space: dict[str, Any]) -> Any:
    name, root, steps = _steps_on(way)
    value = (variables if name == "L" else space)[root]
    for kind, key in steps:
        value = reached(*_accessor(kind, key, value), value)
    return value


def _read_way(tree: Tree, way: ast.expr, variables: Mapping[str, Any], space: dict[str, Any]) -> Node:
    """Return the node that a way leads to; what lies on it is added to the tree."""
    begin, root, steps = _steps_on(way)
    part, name, value = _root_of(begin, root, variables, space)
    node = getattr(tree, part).setdefault(name, Node(name))
    for kind, key in steps:
        accessor, text = _accessor(kind, key, value)
        value = reached(accessor, text, value)
        found = next((one for word, argument, one in node.below if (word, argument) == (accessor, text)), None)
        if found is None:
            found = Node(f"{node.title}{step(accessor, text)}", ("TYPE_MATCH",), [["class", "", name_of(type(value))]])
            node.below.append((accessor, text, found))
        node = found
    return node


_BY_NAME = "GetAttrGuardAccessor"
_BY_PLACE: dict[type, str] = {tuple: "TupleGetItemGuardAccessor", list: "ListGetItemGuardAccessor"}


def _root_of(space_name: str, name: str, variables: Mapping[str, Any], space: dict[str, Any]) -> tuple[str, str, Any]:
    if space_name == "L":
        return "variables", name, variables[name]
    module = _module_of(name, space[name])
    return ("globals", name, space[name]) if module is None else ("modules", module, space[name])


def _lambdas(node: Any) -> list[Any]:
    return [guard for guard in node.get_leaf_guards() if type(guard).__name__ == "LAMBDA_GUARD"]


def _read_globals(tree: Tree, node: Any, space: dict[str, Any], reader: _Reader) -> None:
    if node.get_leaf_guards():
        raise CannotDescribe("dynamo asks for all globals of a module")
    for accessor, below in zip(node.get_accessors(), node.get_child_managers(), strict=True):
        name = _literal(accessor)
        if type(accessor).__name__ not in BY_KEY or not isinstance(name, str) or name not in space:
            raise CannotDescribe(f"dynamo reads a global by {type(accessor).__name__}")
        value = space[name]
        if name.startswith("__builtins_dict__"):
            for inner, one in zip(below.get_accessors(), below.get_child_managers(), strict=True):
                key = _literal(inner)
                tree.builtins[key] = reader.read(one, value[key], key)
        elif (module := _module_of(name, value)) is not None:
            _join(tree.modules, module, reader.read(below, value, module))
        elif name.startswith("___unnamed_scope") and str(value.get("__name__")).startswith("namedtuple_"):
            continue  # in which ``collections`` made a named tuple's ``__new__``
        elif name.startswith("___"):
            raise CannotDescribe(f"dynamo reads `{name}`, which it made")
        else:
            tree.globals[name] = reader.read(below, value, name)


def _module_of(name: str, value: Any) -> str | None:
    """Return the name of a Python module that dynamo has put into the globals; None for any other global.

    Raises:
        CannotDescribe: it is not imported under its name.
    """
    if not _OF_DYNAMOS_MAKING.match(name) or not isinstance(value, ModuleType):
        return None
    if sys.modules.get(value.__name__) is not value:
        raise CannotDescribe(f"the module {value.__name__}, which is not imported under its name")
    return value.__name__


def _join(known: dict[str, Node], name: str, node: Node) -> None:
    """Add a node; dynamo may reach one module by two names."""
    if name in known:
        known[name].facts += node.facts
        known[name].below += node.below
    else:
        known[name] = node


class _Reader:
    """Reads nodes of dynamo's tree.

    Args:
        opened: by ``id`` of a tensor, the dims whose sizes and whose strides are open.
    """

    def __init__(self, opened: Mapping[int, Any]) -> None:
        self._opened = opened

    def read(self, node: Any, value: Any, title: str) -> Node:
        """Read a node and all below it.

        Args:
            node: of dynamo's tree.
            value: what it guards.
            title: how it was reached.
        """
        found = Node(title, tuple(type(guard).__name__ for guard in node.get_leaf_guards()))
        for guard in node.get_leaf_guards():
            found.facts += self._facts(guard, value, title)
        managers: Mapping[int, tuple[Any, Any]] = getattr(node, "get_key_value_managers", dict)()
        if managers:
            if not isinstance(value, dict):
                raise CannotDescribe(f"items of `{title}` by place, a {name_of(type(value))}")
            items = list(dict.items(value))
            is_registry = title.endswith(_REGISTRY)
            if not is_registry:
                # Dynamo asks for class and length of a dict that was walked through in no guard of their own.
                found.facts += [["class", "", name_of(type(value))], ["length", "", len(value)]]
            for place, (key, item) in managers.items():
                name = items[place][0]
                if is_registry and type(name) is str:
                    if item is not None:
                        below = self.read(item, items[place][1], f"{title}[{name!r:.60}]")
                        found.below.append((BY_KEY[0], repr(name), below))
                    continue
                found.items[place] = (
                    None if key is None else self.read(key, name, f"{title}'s key {place}"),
                    None if item is None else self.read(item, items[place][1], f"{title}[{name!r:.60}]"),
                )
        for accessor, below in zip(node.get_accessors(), node.get_child_managers(), strict=True):
            kind, text = type(accessor).__name__, accessor.repr()
            text = inside_of(text) if "(" in text else ""
            inner = self.read(below, reached(kind, text, value), f"{title}{step(kind, text)}")
            found.below.append((kind, text, inner))
            if kind == "TypeMROGuardAccessor":
                found.facts += [["found in", name, holder_of(value, name)] for name in _attributes_below(inner)]
        return found

    def _facts(self, guard: Any, value: Any, title: str) -> list[list[Any]]:
        """Return what a guard asks, and the answer.

        Raises:
            CannotDescribe: it is not known what it asks.
        """
        name = type(guard).__name__
        if name in _OF_DYNAMO or name in OF_PAIRS:
            return []  # identities are compared for all tensors at once
        if name == "TYPE_MATCH":
            return [["class", "", name_of(type(value))]]
        if name in _WHOLE:
            try:
                return [["is", "", described(value)]]
            except CannotDescribe as error:
                raise CannotDescribe(f"`{title}`, {error}") from error
        if name == "TENSOR_MATCH":
            open_at = self._opened.get(id(value), "")
            return [["tensor", open_at, layout(value, open_at)]]
        if name == "NOT_NONE":
            return [["is not", "", None]]
        if name in _LENGTHS:
            return [["length", "", len(value)]]
        if name in _KEYS:
            return [["keys", "", described(list(value))]]
        text = guard.verbose_code_parts()[0].partition("  #")[0].strip() if guard.verbose_code_parts() else ""
        if name == "DICT_CONTAINS" and (found := _CONTAINS.match(text)):
            return [["contains", ast.literal_eval(found[2]), not found[1]]]
        if name == "NO_HASATTR" and (found := _LACKS.match(text)):
            return [] if found[2].startswith("_dynamo_") else [["has", found[2], not (found[1] or found[3])]]
        raise CannotDescribe(f"dynamo's guard {name} of `{title}`")


def _attributes_below(order: Node) -> list[str]:
    """Return which attributes were read in the classes that a class inherits from; dynamo asks none whether it hides them."""
    tables = [table for _, _, base in order.below for kind, _, table in base.below if kind == "TypeDictGuardAccessor"]
    names = [ast.literal_eval(text) for table in tables for kind, text, _ in table.below if kind in BY_KEY]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _literal(accessor: Any) -> Any:
    try:
        return ast.literal_eval(inside_of(accessor.repr()))
    except (ValueError, SyntaxError) as error:
        raise CannotDescribe(f"dynamo's {accessor.repr():.80}") from error
