"""What a call returns, around what its graph returns: described in a file, and made again for each call.

A graph returns tensors, and whole numbers that follow from open sizes: how many tokens a cache with a sliding window has seen.
No class is looked up by a name from the file: the model's own call in this process gave an output, and its classes are used where
that output is as described.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fusion_advisor.fuse.direct.straight_code import Constants
from fusion_advisor.fuse.start.described import CannotDescribe, described, name_of

Make = Callable[[Sequence[Any], Sequence[torch.Tensor], Mapping[str, Any]], Any]
"""Given the graph's results, its inputs and the objects that the call passes, makes the output."""


class Number(int):
    """Stands in an output for a whole number that the graph computes.

    Attributes:
        place: among the graph's results.
    """

    place: int


def marked(results: Sequence[Any]) -> list[Any]:
    """Return a graph's results with a :class:`Number` in place of each whole number.

    Args:
        results: tensors, whole numbers and None.
    """
    found = list(results)
    for place, value in enumerate(found):
        if type(value) is int:
            found[place] = Number(value)
            found[place].place = place
    return found


def form_of(value: Any, place: Callable[[torch.Tensor], Any], objects: Mapping[int, str] | None = None, depth: int = 0) -> Any:
    """Describe an output.

    Args:
        value: the output, or a part of it.
        place: returns where a tensor of it comes from.
        objects: names of the objects that the call passes, by ``id``.
        depth: of objects around it.

    Raises:
        CannotDescribe: it holds an object that is no plain container of tensors and constants.
    """
    if isinstance(value, torch.Tensor):
        return place(value)
    if objects and id(value) in objects:
        return {"object": objects[id(value)]}
    if type(value) is Number:
        return {"number": value.place}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [form_of(item, place, objects, depth) for item in value]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, form_of(item, place, objects, depth)] for key, item in value.items()]}
    if isinstance(value, torch.dtype | torch.device | type):
        return described(value)
    names = _names(value)
    if names is not None:
        return {
            "class": name_of(type(value)),
            "fields": [[name, form_of(getattr(value, name), place, objects, depth)] for name in names],
        }
    if depth > _DEEPEST or not _is_plain_object(value):
        raise CannotDescribe(f"its output holds a {name_of(type(value))}")
    holds = [[name, form_of(item, place, objects, depth + 1)] for name, item in vars(value).items()]
    return {"class": name_of(type(value)), "holds": holds}


def holds_number(form: Any) -> bool:
    """Whether an output holds a whole number or a float of Python's, which the graph does not compute.

    Args:
        form: from :func:`form_of`; places of results and inputs in it are no numbers of the output's.
    """
    if isinstance(form, int):
        return not isinstance(form, bool)
    if isinstance(form, list):
        return any(map(holds_number, form))
    if not isinstance(form, dict) or form.keys() & {"result", "number", "input"}:
        return False
    if "float" in form:
        return True
    pairs = next((form[word] for word in ("dict", "fields", "holds") if word in form), None)
    return holds_number([item for _, item in pairs]) if pairs is not None else any(map(holds_number, form.values()))


_DEEPEST = 8
"""An object that holds itself ends there."""


def _is_plain_object(value: Any) -> bool:
    """Whether an object is what its ``__dict__`` holds, a cache, say: none is made by code of its own, nor is a container."""
    kind = type(value)
    own = getattr(value, "__dict__", None)
    is_made_otherwise = any(vars(base).get("__slots__") or "__new__" in vars(base) for base in kind.__mro__[:-1])
    is_container = isinstance(value, list | tuple | dict | set | torch.nn.Module) or callable(value)
    return type(own) is dict and not is_made_otherwise and not is_container


def _names(value: Any) -> list[str] | None:
    """Return the names of a named tuple's or a dataclass's fields; None for another object."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = [item.name for item in dataclasses.fields(value) if item.init]
        if len(found) == len(dataclasses.fields(value)) and set(getattr(value, "__dict__", found)) <= set(found):
            return found
    return None


def maker(form: Any, template: Any) -> Make:
    """Return what makes an output.

    Args:
        form: describes it.
        template: an output of the same form.
    """
    constants = Constants()
    text = written(form, template, constants)
    return constants.function(["results", "inputs", "call"], [f"return {text}"])


def written(form: Any, template: Any, constants: Constants) -> str:
    """Write the expression that makes an output of ``results``, ``inputs`` and ``call``.

    Args:
        form: describes it.
        template: an output of the same form.
        constants: gets what the expression reads besides.
    """
    if isinstance(form, dict) and form.keys() & {"result", "number"}:
        (number,) = form.values()
        return f"results[{constants.name_of(number)}]"
    if isinstance(form, dict) and "input" in form:
        return f"inputs[{constants.name_of(form['input'])}]"
    if isinstance(form, dict) and "object" in form:
        return f"call[{constants.name_of(form['object'])}]"
    if not isinstance(form, dict) or not form.keys() & {"dict", "fields", "holds", "list", "tuple"}:
        return constants.name_of(template)

    def pairs(items: Iterable[tuple[Any, Any]], part_of: Callable[[Any], Any]) -> dict[Any, str]:
        return {name: written(item, part_of(name), constants) for name, item in items}

    def table(items: Mapping[Any, str]) -> str:
        return f"{{{', '.join(f'{constants.name_of(name)}: {text}' for name, text in items.items())}}}"

    if "dict" in form:
        return table(pairs(form["dict"], template.__getitem__))
    if "holds" in form:
        made, kind = constants.name_of(_with), constants.name_of(type(template))
        return f"{made}({kind}, {table(pairs(form['holds'], vars(template).__getitem__))})"
    if "fields" in form:
        fields = pairs(form["fields"], functools.partial(getattr, template))
        return _with_fields(template, table(fields), constants)
    ((word, items),) = form.items()
    parts = [written(item, part, constants) for item, part in zip(items, template, strict=True)]
    return f"[{', '.join(parts)}]" if word == "list" else f"({''.join(f'{part}, ' for part in parts)})"


def _with_fields(template: Any, fields: str, constants: Constants) -> str:
    """Write what makes an object of fields: with its class's own code, or as that code has left it where it is a dict too.

    The outputs of transformers are: their code takes 10 µs to set three items.
    """
    kind = type(template)
    if not isinstance(template, OrderedDict) or not _is_table_of_fields(template):
        return f"{constants.name_of(kind)}(**{fields})"
    made, items = constants.name_of(_with_items), constants.name_of([*OrderedDict.keys(template)])
    return f"{made}({constants.name_of(kind)}, {items}, {fields})"


def _is_table_of_fields(template: OrderedDict[str, Any]) -> bool:
    """Whether a dict's items are some of its fields, which its attributes are all of: in this order, and made by nothing else."""
    kind: Any = type(template)
    own, names = vars(template), [item.name for item in dataclasses.fields(kind)]
    items = [*OrderedDict.items(template)]
    is_made_otherwise = kind.__new__ is not OrderedDict.__new__ or any(vars(base).get("__slots__") for base in kind.__mro__[:-1])
    is_same = [*own] == names and all(name in own and own[name] is value for name, value in items)
    return bool(items) and is_same and not is_made_otherwise


def _with_items(kind: Any, items: Sequence[str], fields: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    vars(made).update(fields)
    for name in items:
        OrderedDict.__setitem__(made, name, fields[name])
    return made


def _with(kind: type, holds: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(holds)
    return made


def without_places(form: Any, numbers: Mapping[int, int]) -> Any:
    """Return the form of one call's output, with one mark for all tensors that the graph makes: another process has others there.

    Args:
        form: of outputs.
        numbers: by place, the whole numbers that the graph computes for that call.
    """
    if isinstance(form, dict):
        if "number" in form:
            return numbers[form["number"]]
        return {"result": None} if "result" in form else {key: without_places(item, numbers) for key, item in form.items()}
    return [without_places(item, numbers) for item in form] if isinstance(form, list) else form


def furthest(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Say which of some tensors is too far from what it should be; empty where none is.

    The graph's ops and the model's own round differently, so the limit is the root of a dtype's precision: 3e-4 for fp32, 0.09
    for bf16. Whole numbers are compared only where there are no others.

    Args:
        found: the graph's results.
        expected: what the model's own ops gave.
    """
    are_floats = any(one.is_floating_point() or one.is_complex() for one in expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"result {number} is {one.dtype}{list(one.shape)}, the model's own {other.dtype}{list(other.shape)}"
        if other.is_floating_point() or other.is_complex():
            wide = torch.complex64 if other.is_complex() else torch.float32
            wide = other.dtype if other.dtype in (torch.float64, torch.complex128) else wide
            mine, theirs = (value.detach().to(wide).nan_to_num() for value in (one, other))
            error, limit = torch.linalg.vector_norm(mine - theirs), torch.finfo(other.dtype).eps ** 0.5
            if bool(error > limit * torch.linalg.vector_norm(theirs) + 1e-12):
                return f"result {number} is {float(error / torch.linalg.vector_norm(theirs)):.1e} from the model's own"
        elif not are_floats and not torch.equal(one, other):
            return f"result {number} is not the model's own"
    return ""
