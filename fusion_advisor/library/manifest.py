"""Reads ``kernel.toml``, key by key. A manifest that is wrong is refused with its file and key named."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusion_advisor.codegen.common.interface import Tuning, identifier
from fusion_advisor.codegen.registry import NAMES
from fusion_advisor.errors import AdvisorError
from fusion_advisor.files.regular_file import read_regular
from fusion_advisor.ir.dtypes import INTEGERS
from fusion_advisor.ir.program import ITEM_BYTES
from fusion_advisor.library.spec import Case, Gemv, Input, KernelSpec, Preset

_MOST_BYTES = 2**20
_KEYS = ("name", "summary", "source", "backends", "dtypes", "constraints", "has_backward", "inputs", "outputs", "constants",
         "tunables", "check", "bench", "preset", "gemv", "license")  # fmt: skip


class BadManifest(AdvisorError):
    """A kernel.toml that cannot be used."""

    code = "FA410"
    message = "{file}: {key}: {detail}"
    hint = "`fusion-advisor kernels new NAME` writes a manifest that is right, with every key explained"
    exit_code = 9


def read_spec(folder: Path) -> KernelSpec:
    """Read ``folder/kernel.toml``.

    Raises:
        BadManifest: it is missing, not TOML, or a key is missing, unknown or wrong.
    """
    file = folder / "kernel.toml"
    try:
        data = tomllib.loads(read_regular(file, _MOST_BYTES).decode())
    except OSError as error:
        raise BadManifest(file=file, key="file", detail=error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's complaints, and a number of thousands of digits
        raise BadManifest(file=file, key="file", detail=f"is not TOML: {error}") from error
    return _Reader(file, data).spec()


class _Reader:
    """Parses one manifest; every refusal names its key."""

    def __init__(self, file: Path, data: dict[str, Any]) -> None:
        self.file = file
        self.data = data

    def spec(self) -> KernelSpec:
        self._known("", self.data, _KEYS)
        dtypes = self._names("dtypes", tuple(ITEM_BYTES))
        inputs = self._inputs()
        name = self._identifier("name", self._text("name"))
        if name != self.file.parent.name:
            self._refuse("name", f"`{name}` differs from its folder's name, `{self.file.parent.name}`")
        outputs = self._list("outputs", str)
        taken: set[str] = set()
        for item in (*(i.name for i in inputs), *outputs):
            self._variable("outputs", item)
            if item in taken:
                self._refuse("outputs", f"`{item}` names two tensors")
            taken.add(item)
        if not outputs:
            self._refuse("outputs", "needs a name")
        letters = {dim for i in inputs for dim in i.shape if isinstance(dim, str)}
        return KernelSpec(
            name=name, summary=self._text("summary"), source=self._text("source"),
            backends=self._names("backends", NAMES), dtypes=dtypes,
            constraints=tuple(self._list("constraints", str, default=[])), has_backward=self._flag("has_backward"), inputs=inputs,
            outputs=tuple(outputs), constants=self._constants(), tunables=self._tunables(),
            check=self._cases("check", letters, dtypes, inputs),
            bench=self._cases("bench", letters, dtypes), folder=self.file.parent, presets=self._presets(letters, dtypes),
            gemv=self._gemv(inputs, letters), license=self._text("license") if "license" in self.data else "",
        )  # fmt: skip

    def _refuse(self, key: str, detail: str) -> None:
        raise BadManifest(file=self.file, key=key, detail=detail)

    def _known(self, key: str, table: dict[str, Any], allowed: tuple[str, ...]) -> None:
        for found in table:
            if found not in allowed:
                near = difflib.get_close_matches(found, allowed, n=1)
                meant = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(allowed)}"
                self._refuse(f"{key}.{found}" if key else found, f"unknown key; {meant}")

    def _variable(self, key: str, text: str) -> str:
        """A name of one of a kernel's variables; those in capitals are of what it is compiled with (``CLUSTER``, ``SIZE1``)."""
        if text != text.lower():
            self._refuse(key, f"`{text}` must be in small letters; capitals name sizes, and what a kernel is compiled with")
        return self._identifier(key, text)

    def _identifier(self, key: str, text: str) -> str:
        try:
            return identifier(text)
        except ValueError:
            self._refuse(key, f"`{text}` is not a plain identifier")
            raise

    def _text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str) or not value.strip():
            self._refuse(key, "needs a text")
        return str(value)

    def _flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            self._refuse(key, "must be true or false")
        return bool(value)

    def _list(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        value = self.data.get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            self._refuse(key, "needs a list of tables" if kind is dict else "needs a list of texts")
        return list(value or [])

    def _names(self, key: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(self._list(key, str))
        for item in found:
            if item not in allowed:
                self._refuse(key, f"`{item}` is not one of {', '.join(allowed)}")
        if not found:
            self._refuse(key, f"needs at least one of {', '.join(allowed)}")
        return found

    def _table(self, key: str) -> dict[str, Any]:
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            self._refuse(key, "must be a table")
        return dict(value)

    def _inputs(self) -> tuple[Input, ...]:
        found = []
        for name, value in self._table("inputs").items():
            key = f"inputs.{name}"
            table = value if isinstance(value, dict) else {"shape": value}
            self._known(key, table, ("shape", "order", "dtype", "below", "planted"))
            shape = table.get("shape")
            if not isinstance(shape, list) or not all(isinstance(d, str | int) and not isinstance(d, bool) for d in shape):
                self._refuse(key, 'needs a shape such as ["R", "C"]')
            order = self._order(key, table.get("order", shape), shape or [])
            dtype = table.get("dtype", "")
            if dtype and dtype not in ITEM_BYTES:
                self._refuse(key, f"`{dtype}` is not one of {', '.join(ITEM_BYTES)}")
            found.append(
                Input(
                    name=self._variable(key, name), shape=tuple(shape or []), order=order, dtype=dtype,
                    below=self._below(key, table), planted=tuple(self._planted(key, table)),
                )
            )  # fmt: skip
        if not found:
            self._refuse("inputs", "needs at least one tensor")
        letters = {dim for tensor in found for dim in tensor.shape if isinstance(dim, str)}
        for tensor in found:
            if tensor.below and isinstance(tensor.below, str) and tensor.below not in letters:
                self._refuse(f"inputs.{tensor.name}", f"below: no input has a dim `{tensor.below}`")
        return tuple(found)

    def _order(self, key: str, order: Any, shape: Sequence[str | int]) -> tuple[str | int, ...]:
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, shape)):
            self._refuse(key, "order must hold the dims of shape")
        return tuple(order)

    def _below(self, key: str, table: dict[str, Any]) -> str | int:
        below, is_integer = table.get("below", ""), table.get("dtype", "") in INTEGERS
        if is_integer != ("below" in table):
            self._refuse(key, "needs `below`: what its integers are smaller than" if is_integer else "below is for integers")
        if isinstance(below, bool) or not isinstance(below, str | int) or (isinstance(below, int) and below < 1):
            self._refuse(key, "below must be a letter of some shape or a number of at least 1")
        return below if isinstance(below, str | int) else ""

    def _planted(self, key: str, table: dict[str, Any]) -> list[int]:
        planted = table.get("planted", [])
        if not isinstance(planted, list) or not all(isinstance(value, int) and not isinstance(value, bool) for value in planted):
            self._refuse(key, "planted must be a list of whole numbers")
        if planted and "below" not in table:
            self._refuse(key, "planted is for integers")
        return list(planted)

    def _gemv(self, inputs: tuple[Input, ...], letters: set[str]) -> Gemv | None:
        if "gemv" not in self.data:
            return None
        table = self._table("gemv")
        self._known("gemv", table, ("is_gated", "norm_offsets"))
        is_gated, offsets = table.get("is_gated", False), table.get("norm_offsets", {})
        if not isinstance(is_gated, bool):
            self._refuse("gemv.is_gated", "must be true or false")
        if not isinstance(offsets, dict) or not all(isinstance(v, float) for v in offsets.values()):
            self._refuse("gemv.norm_offsets", "needs a number for each variant that it names")
        halves: tuple[int, ...] = (2,) if is_gated else ()
        known: dict[str, tuple[str | int, ...]] = {
            "x": ("M", "K"), "norm_weight": ("K",), "weight": (*halves, "N", "K"), "bias": (*halves, "N"), "residual": ("M", "N"),
        }  # fmt: skip
        for tensor in inputs:
            if known.get(tensor.name) != tensor.shape or tensor.order != tensor.shape or tensor.dtype:
                shapes = ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in known.items())
                self._refuse(f"inputs.{tensor.name}", f"a [gemv] kernel's tensors are {shapes}")
        if [tensor.name for tensor in inputs] != [name for name in known if name in {t.name for t in inputs}]:
            self._refuse("inputs", f"must come in the order {', '.join(known)}")
        if not {"x", "weight"} <= {tensor.name for tensor in inputs} or letters != {"M", "N", "K"}:
            self._refuse("inputs", "a [gemv] kernel needs x and weight")
        return Gemv(is_gated=is_gated, norm_offsets=tuple(offsets.items()))

    def _constants(self) -> tuple[tuple[str, float], ...]:
        found = []
        for name, value in self._table("constants").items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                self._refuse(f"constants.{name}", "needs a number: its default")
            found.append((self._variable(f"constants.{name}", name), float(value)))
        return tuple(found)

    def _tunables(self) -> tuple[Tuning, ...]:
        found = []
        for number, table in enumerate(self._list("tunables", dict, default=[])):
            key = f"tunables[{number}]"
            self._known(key, table, tuple(f.name for f in fields(Tuning)))
            for name, value in table.items():
                if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
                    self._refuse(f"{key}.{name}", "must be a power of two")
            found.append(Tuning(**table))
        return tuple(found) or (Tuning(),)

    def _presets(self, letters: set[str], dtypes: tuple[str, ...]) -> tuple[Preset, ...]:
        found = []
        for number, table in enumerate(self._list("preset", dict, default=[])):
            place = f"preset[{number}]"
            self._known(place, table, ("name", "sizes", "dtypes"))
            name, sizes = table.get("name"), table.get("sizes")
            if not isinstance(name, str) or not name.strip():
                self._refuse(f"{place}.name", "needs a text")
            if not isinstance(sizes, dict) or set(sizes) != letters:
                self._refuse(f"{place}.sizes", f"needs sizes for each of {', '.join(sorted(letters))} and nothing else")
            choices = {k: v if isinstance(v, list) else [v] for k, v in dict(sizes or {}).items()}
            for letter, values in choices.items():
                if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
                    self._refuse(f"{place}.sizes.{letter}", "must be a whole number or a list of them")
            chosen = table.get("dtypes", list(dtypes))
            if not isinstance(chosen, list) or not chosen or not set(chosen) <= set(dtypes):
                self._refuse(f"{place}.dtypes", f"must be some of {', '.join(dtypes)}")
            sweep = tuple((letter, tuple(values)) for letter, values in choices.items())
            found.append(Preset(name=str(name), sizes=sweep, dtypes=tuple(chosen)))
        return tuple(found)

    def _cases(self, key: str, letters: set[str], dtypes: tuple[str, ...], movable: tuple[Input, ...] = ()) -> tuple[Case, ...]:
        found = []
        for number, table in enumerate(self._list(key, dict, default=[])):
            place = f"{key}[{number}]"
            self._known(place, table, ("sizes", "dtypes", "order") if movable else ("sizes", "dtypes"))
            sizes = table.get("sizes")
            if not isinstance(sizes, dict) or set(sizes) != letters:
                self._refuse(f"{place}.sizes", f"needs a size for each of {', '.join(sorted(letters))} and nothing else")
            for letter, size in dict(sizes or {}).items():
                if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                    self._refuse(f"{place}.sizes.{letter}", "must be a whole number")
            chosen = table.get("dtypes", list(dtypes))
            if not isinstance(chosen, list) or not set(chosen) <= set(dtypes):
                self._refuse(f"{place}.dtypes", f"must be some of {', '.join(dtypes)}")
            orders = self._orders(f"{place}.order", table.get("order", {}), movable)
            found.append(Case(sizes=tuple(dict(sizes or {}).items()), dtypes=tuple(chosen), orders=orders))
        if not found:
            self._refuse(key, "needs at least one case")
        return tuple(found)

    def _orders(self, place: str, orders: Any, inputs: tuple[Input, ...]) -> tuple[tuple[str, tuple[str | int, ...]], ...]:
        if not isinstance(orders, dict):
            self._refuse(place, "must be a table of inputs, each with its dims as they lie in memory")
        shapes = {tensor.name: tensor.shape for tensor in inputs}
        self._known(place, orders, tuple(shapes))
        return tuple((name, self._order(f"{place}.{name}", order, shapes[name])) for name, order in orders.items())
