"""Finding kernels: folders with a ``kernel.toml``, in the installation's ``kernels/`` and in the user's directories.

Listing reads manifests only. Loading runs ``reference.py``, which is code: the CLI says so before it loads a user's
directory. References are imported by path and stay out of ``sys.modules``, so two directories may hold a file of the
same name.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fusion_advisor.codegen.common.interface import environment, identifier
from fusion_advisor.content import content_dir
from fusion_advisor.errors import AdvisorError, UsageError
from fusion_advisor.library.manifest import BadManifest, read_spec
from fusion_advisor.library.spec import KernelSpec

_PREFIX, _BASELINE = "reference_", "baseline_"


class UnknownKernel(AdvisorError):
    """A name that no kernel has."""

    code = "FA411"
    message = "there is no kernel `{name}`"
    note = "{near}"
    hint = "`fusion-advisor kernels list` shows all; --kernels DIR adds a directory"
    exit_code = 2


class BadReference(AdvisorError):
    """A reference.py that cannot be imported or does not fit its manifest."""

    code = "FA412"
    message = "{file}: {detail}"
    hint = (
        "each variant is a function `reference_<variant>(tensor, …, *, constant=default)` with the manifest's names; "
        "`baseline_<variant>` takes the same"
    )
    exit_code = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that is ready to be traced."""

    spec: KernelSpec
    references: tuple[tuple[str, Callable[..., Any]], ...]
    """(variant, function), in the order of the file."""
    baselines: tuple[tuple[str, Callable[..., Any]], ...] = ()
    """(variant, function) where users run something else than the reference, with other numbers: torch's own dropout draws from
    its own generator. The bench times these as eager and under torch.compile."""


def list_kernels(extra: Iterable[Path] = ()) -> tuple[KernelSpec, ...]:
    """Read every manifest, sorted by name.

    Args:
        extra: the user's directories; each holds kernel folders.

    Raises:
        BadManifest: a manifest is wrong, or two kernels have one name.
        UsageError: a directory does not exist.
    """
    found: dict[str, KernelSpec] = {}
    read: set[Path] = set()
    for directory in (content_dir("kernels"), *extra):
        if not directory.is_dir():
            raise UsageError(detail=f"{directory} is not a directory", help="--kernels takes a directory of kernel folders")
        if directory.resolve() in read:
            continue
        read.add(directory.resolve())
        for manifest in sorted(directory.glob("*/kernel.toml")):
            spec = read_spec(manifest.parent)
            if spec.name in found:
                raise BadManifest(file=manifest, key="name", detail=f"`{spec.name}` is also in {found[spec.name].folder}")
            found[spec.name] = spec
    return tuple(found[name] for name in sorted(found))


def load_kernel(name: str, extra: Iterable[Path] = ()) -> Kernel:
    """Read one kernel's manifest and import its references.

    Raises:
        UnknownKernel: no manifest has this name.
        BadReference: reference.py does not import, or does not fit the manifest.
    """
    specs = {spec.name: spec for spec in list_kernels(extra)}
    if name not in specs:
        near = [f"`{found}`" for found in nearest_names(name, specs)]
        raise UnknownKernel(name=name, near=f"did you mean {' or '.join(near)}?" if near else "")
    return load_references(specs[name])


def nearest_names(asked: str, names: Iterable[str]) -> list[str]:
    """Return the names that a reader may have meant, at most four: ``gelu`` means ``gelu_erf`` or ``gelu_tanh``.

    Names that start with the word come before names that contain it, and these before names with a similar spelling.
    """
    word, known = asked.lower().replace("-", "_"), sorted(names, key=lambda name: (len(name), name))
    starts = [name for name in known if name.startswith(f"{word}_")]
    contains = [name for name in known if f"_{word}_" in f"_{name}_"]
    return (starts or contains or difflib.get_close_matches(word, known, n=2))[:4]


def load_references(spec: KernelSpec) -> Kernel:
    """Import the references of a kernel whose manifest was read.

    Raises:
        BadReference: reference.py does not import, or does not fit the manifest.
    """
    file = spec.folder / "reference.py"
    module = _import(file, spec.name)
    found: list[tuple[str, Callable[..., Any]]] = []
    baselines: list[tuple[str, Callable[..., Any]]] = []
    for attribute, function in vars(module).items():
        if attribute.startswith((_PREFIX, _BASELINE)) and inspect.isfunction(function):
            _check_signature(file, attribute, function, spec)
            prefix, chosen = (_PREFIX, found) if attribute.startswith(_PREFIX) else (_BASELINE, baselines)
            chosen.append((attribute.removeprefix(prefix), function))
    if not found:
        raise BadReference(file=file, detail=f"has no function whose name starts with {_PREFIX}")
    for variant, function in baselines:
        if variant not in dict(found):
            raise BadReference(file=file, detail=f"{function.__name__} has no {_PREFIX}{variant}")
    return Kernel(spec=spec, references=tuple(found), baselines=tuple(baselines))


def scaffold(name: str, target_dir: Path) -> Path:
    """Write the skeleton of a new kernel to ``target_dir/name``.

    Returns:
        the new folder.

    Raises:
        UsageError: the name is not an identifier, or the folder exists.
    """
    try:
        identifier(name)
    except ValueError as error:
        raise UsageError(
            detail=f"`{name}` cannot name a kernel", help="letters, digits and underscores, e.g. `bias_gelu`"
        ) from error
    folder = target_dir / name
    if folder.exists():
        raise UsageError(detail=f"{folder} exists", help="choose another name or remove it")
    folder.mkdir(parents=True)
    for template in ("kernel.toml", "reference.py"):
        text = environment().get_template(f"new_kernel/{template}.jinja").render(name=name)
        (folder / template).write_text(text, encoding="utf-8")
    return folder


def _import(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fusion_advisor_reference_{name}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise BadReference(file=file, detail="is missing")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadReference(file=file, detail=f"does not import: {type(error).__name__}: {error}") from error
    return module


def _check_signature(file: Path, name: str, function: Callable[..., Any], spec: KernelSpec) -> None:
    parameters = inspect.signature(function).parameters.values()
    tensors = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    constants = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    wanted = [i.name for i in spec.inputs]
    if tensors != wanted:
        raise BadReference(file=file, detail=f"{name} takes ({', '.join(tensors)}), the manifest says ({', '.join(wanted)})")
    for constant in constants:
        if constant not in dict(spec.constants):
            raise BadReference(file=file, detail=f"{name} has a keyword `{constant}` that the manifest's constants lack")
