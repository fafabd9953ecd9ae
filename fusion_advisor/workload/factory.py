"""Run a user's ``file.py:factory`` or ``package.module:factory``, or such a function that returns example inputs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusion_advisor.errors import AdvisorError, BadFactory, BadInputFunction, FactoryFailed
from fusion_advisor.runtime.call_tensors import tensors_in
from fusion_advisor.workload.device import is_out_of_memory

FILE_MODULE = "fusion_advisor_user_"
"""What the module of a factory's file is called, before the file's name: `random.py` takes no module of Python's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInputs:
    """Example inputs, split as a model is called with them."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryResult:
    """Result of the user's factory."""

    model: nn.Module
    inputs: CallInputs


def run_factory(place: str, name: str) -> FactoryResult:
    """Import and call a factory that takes no arguments and returns ``(model, example_inputs)``.

    ``example_inputs`` is one tensor, a tuple or list of positional arguments, or a dict of keyword arguments.

    Raises:
        BadFactory: it cannot be found, or returns something else.
        FactoryFailed: the user's code raised.
    """
    label = f"{place}:{name}"
    wanted = "it must return (model, example_inputs)"
    returned = _called(place, name, BadFactory)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        size = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
        raise BadFactory(factory=label, detail=f"{wanted}, it returned a {type(returned).__name__}{size}")
    model, inputs = returned
    if not isinstance(model, nn.Module):
        raise BadFactory(factory=label, detail=f"{wanted}, its first value is a {type(model).__name__}, not an nn.Module")
    return FactoryResult(model=model, inputs=_split(inputs, label, BadFactory))


def run_input_function(place: str, name: str) -> CallInputs:
    """Import and call a function that takes no arguments and returns the inputs of one call of a model.

    They are one tensor, a tuple or list of positional arguments, or a dict of keyword arguments.

    Raises:
        BadInputFunction: it cannot be found, or returns something else, or something without a tensor in it.
        FactoryFailed: the user's code raised.
    """
    label = f"{place}:{name}"
    inputs = _split(_called(place, name, BadInputFunction), label, BadInputFunction)
    for value in (*inputs.args, *inputs.kwargs.values()):
        if isinstance(value, nn.Module):
            raise BadInputFunction(factory=label, detail=f"it returned a model ({type(value).__name__}) among them")
    if not any(True for value in (*inputs.args, *inputs.kwargs.values()) for _ in tensors_in("", value)):
        raise BadInputFunction(factory=label, detail="there is no tensor in what it returned")
    return inputs


def _called(place: str, name: str, mistake: type[BadFactory]) -> Any:
    """Import a function and return what it returns."""
    label = f"{place}:{name}"
    root = Path(place).expanduser().resolve().parent if place.endswith(".py") else Path.cwd()
    # The user's code finds its neighbours, also those that it imports only when called.
    with _importable(root):
        module = _import(place, label, mistake)
        factory = getattr(module, name, None)
        if factory is None:
            raise mistake(factory=label, detail=f"{place} has no `{name}`{_near(module, name)}")
        if not callable(factory) or isinstance(factory, nn.Module):
            raise mistake(factory=label, detail=f"`{name}` is a {type(factory).__name__}, not a function")
        if needed := _needed_arguments(factory):
            raise mistake(factory=label, detail=f"`{name}` needs the arguments {', '.join(needed)}")
        with _user_code(label):
            return factory()


def _import(place: str, label: str, mistake: type[BadFactory]) -> ModuleType:
    if not place.endswith(".py"):
        try:
            with _user_code(label):
                return importlib.import_module(place)
        except FactoryFailed as error:
            cause = error.__cause__
            # Only the named module itself is the user's typing mistake; a missing import inside it is the code's.
            if isinstance(cause, ModuleNotFoundError) and cause.name and f"{place}.".startswith(f"{cause.name}."):
                detail = f"there is no module `{cause.name}` in {Path.cwd().name}/ or among installed packages"
                raise mistake(factory=label, detail=detail) from cause
            raise
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise mistake(factory=label, detail=f"there is no file {place}")
    module_name = f"{FILE_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise mistake(factory=label, detail=f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered as an import would: dataclasses and dynamo look a class's module up by name.
    sys.modules[module_name] = module
    try:
        with _user_code(label):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextlib.contextmanager
def _importable(root: Path) -> Iterator[None]:
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(root))


@contextlib.contextmanager
def _user_code(label: str) -> Iterator[None]:
    """Turn whatever the user's code raises into FA302; running out of memory is phrased by the caller."""
    try:
        yield
    except AdvisorError:
        raise
    # Any code may raise anything; it is reported, never swallowed. A script that exits would end the command as if it were done.
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise FactoryFailed(
            factory=label,
            exception=type(error).__name__,
            last_line=said_by(error)[-1],
            location=location_of(error, otherwise="its import"),
        ) from error


def said_by(error: BaseException) -> list[str]:
    """Return the lines of an exception's message, at least one."""
    # traceback's own text survives a __str__ that raises
    return str(traceback.TracebackException(type(error), error, None)).strip().splitlines() or ["(no message)"]


def location_of(error: BaseException, *, otherwise: str) -> str:
    """Return ``file:line`` of the deepest frame outside installed packages and outside this one, or ``otherwise``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _owner(frame.filename) is _Owner.USER]
    return f"{_shown(own[-1].filename)}:{own[-1].lineno}" if own else otherwise


def is_raised_in(model: nn.Module, error: BaseException) -> bool:
    """Whether the user's forward of a module of the model raised, or called what raised in an installed package."""
    frames = list(traceback.walk_tb(error.__traceback__))
    owners = [owner for owner in (_owner(frame.f_code.co_filename) for frame, _ in frames) if owner is not _Owner.PACKAGE]
    if not owners or owners[-1] is not _Owner.USER:
        return False
    forwards = {getattr(module.forward, "__code__", None) for module in model.modules()}
    return any(frame.f_code in forwards for frame, _ in frames)


class _Owner(Enum):
    """Whose code a frame runs."""

    USER = "user"
    PACKAGE = "package"
    THIS_TOOL = "this tool"


def _owner(filename: str) -> _Owner:
    path = Path(filename)
    if path.is_relative_to(Path(__file__).parents[1]):
        return _Owner.THIS_TOOL
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    if filename.startswith("<") or is_installed or path.is_relative_to(sysconfig.get_paths()["stdlib"]):
        return _Owner.PACKAGE
    return _Owner.USER


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _near(module: ModuleType, name: str) -> str:
    functions = [
        other for other, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    close = [other for other in functions if other.lower().startswith(name.lower()[:3])] or functions
    return f"; it has {', '.join(f'`{other}`' for other in close[:3])}" if close else ""


def _needed_arguments(factory: Any) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [item.name for item in parameters if item.default is inspect.Parameter.empty and item.kind not in variadic]


def _split(inputs: Any, label: str, mistake: type[BadFactory]) -> CallInputs:
    if isinstance(inputs, torch.Tensor):
        return CallInputs(args=(inputs,))
    if isinstance(inputs, Mapping):
        unnamed = [key for key in inputs if not isinstance(key, str)]
        if unnamed:
            raise mistake(factory=label, detail=f"the keys of example_inputs must be argument names, not {unnamed[0]!r}")
        return CallInputs(kwargs=dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return CallInputs(args=tuple(inputs))
    raise mistake(factory=label, detail=f"example_inputs must be a tensor, a tuple or a dict, not a {type(inputs).__name__}")
