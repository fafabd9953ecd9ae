"""Places of a patch that are the whole forward of a module's class, as layers of a kernel repository."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.export.patch.frames import NotExpressed
from fusion_advisor.export.patch.patch import PatchedPlace

_DECORATOR = "use_kernel_forward_from_hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        name: that the model's class is registered under, or the class's own name.
        model_class: name of the model's class.
        site: name of the place.
        parameters: of the forward, as source.
        reads: that the place is called with.
        result: what it returns, as source.
        is_registered: whether the class carries the decorator that ``kernelize`` looks for.
    """

    name: str
    model_class: str
    site: str
    parameters: str
    reads: str
    result: str
    is_registered: bool

    @property
    def given(self) -> str:
        """The parameters without their defaults."""
        return ", ".join(part.partition("=")[0] for part in self.parameters.split(", "))


def layer_of_place(place: PatchedPlace) -> Layer:
    """Return a place as a layer.

    Args:
        place: of the patch.

    Raises:
        NotExpressed: it is a part of a function, or the function is no module's forward.
    """
    statements, file = place.edit.statements, place.sites[0].file
    function = statements.function
    where = f"{function.name} in {place.path}"
    home = next((one for one in _classes(file) if any(item.lineno == function.lineno for item in one.body)), None)
    if home is None or function.name != "forward" or not statements.owner:
        raise NotExpressed(f"its statements are in {where}, which is no module's forward")
    own = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not statements.is_return or len(own) != len(statements.body):
        raise NotExpressed(f"{home.name}.forward computes more than the chain")
    registered = _registered_name(home)
    return Layer(
        name=registered or home.name, model_class=home.name, site=place.name, parameters=_parameters(function),
        reads=", ".join(statements.reads), result=", ".join(place.edit.results), is_registered=bool(registered),
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _classes(file: str) -> tuple[ast.ClassDef, ...]:
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _registered_name(home: ast.ClassDef) -> str:
    for one in home.decorator_list:
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name | ast.Attribute) and one.args:
            name = one.func.id if isinstance(one.func, ast.Name) else one.func.attr
            given = one.args[0]
            if name == _DECORATOR and isinstance(given, ast.Constant) and str(given.value).isidentifier():
                return str(given.value)
    return ""


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters after ``self``; only plain ones, since the library compares their kinds."""
    arguments = function.args
    if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        raise NotExpressed("its forward takes more than named positional arguments")
    names = [one.arg for one in arguments.args[1:]]
    if not all(isinstance(one, ast.Constant) for one in arguments.defaults):
        raise NotExpressed("its forward has a default that is no plain value")
    defaults = [f"={ast.unparse(one)}" for one in arguments.defaults]
    padded = [""] * (len(names) - len(defaults)) + defaults
    return ", ".join(f"{name}{default}" for name, default in zip(names, padded, strict=True))
