"""The JSON Schema of a document, read off the records' own type hints."""

from __future__ import annotations

import enum
import typing
from dataclasses import MISSING, fields
from typing import Any

from fusion_advisor.records import Report
from fusion_advisor.records.hints import TAG, hints_of, is_tagged, options_of
from fusion_advisor.records.serialize import REPORT_SCHEMA


def json_schema(cls: type = Report, schema: str = REPORT_SCHEMA) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a document, read off the records' own type hints.

    A key with a default may be missing, for an older version may have written the file. Unknown keys are refused, as by reading.
    """
    definitions: dict[str, Any] = {}

    def of_record(record: type, *, is_tagged: bool = False) -> dict[str, Any]:
        name = f"{record.__name__}Tagged" if is_tagged else record.__name__
        if name not in definitions:
            definitions[name] = {}  # a record may hold itself
            hints = hints_of(record)
            properties = {item.name: of_hint(hints[item.name]) for item in fields(record)}
            required = [item.name for item in fields(record) if item.default is MISSING and item.default_factory is MISSING]
            if is_tagged:
                properties, required = {TAG: {"const": record.__name__}, **properties}, [TAG, *required]
            definitions[name] = _object_schema(properties, required)
        return {"$ref": f"#/$defs/{name}"}

    def of_hint(hint: object) -> dict[str, Any]:
        options = options_of(hint)
        shapes = [of_option(option, options) for option in options]
        return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}

    def of_option(option: Any, options: tuple[Any, ...]) -> dict[str, Any]:
        if option is float:
            spelled = {"enum": ["nan", "inf", "-inf"]}
            if str in options:
                spelled = _object_schema({TAG: {"const": "float"}, "value": spelled}, [TAG, "value"])
            return {"anyOf": [{"type": "number"}, spelled]}
        if option in _PLAIN_TYPES:
            return {"type": _PLAIN_TYPES[option]}
        if typing.get_origin(option) is tuple:
            inner = typing.get_args(option)
            if len(inner) == 2 and inner[1] is Ellipsis:
                return {"type": "array", "items": of_hint(inner[0])}
            return {"type": "array", "prefixItems": [of_hint(item) for item in inner], "minItems": len(inner), "items": False}
        if issubclass(option, enum.Enum):
            return {"enum": [item.value for item in option]}
        return of_record(option, is_tagged=is_tagged(options))

    of_record(cls)
    body = definitions.pop(cls.__name__)
    body["properties"] = {"schema": {"const": schema}, **body["properties"]}
    body["required"] = ["schema", *body["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": schema, **body, "$defs": definitions}


_PLAIN_TYPES = {int: "integer", str: "string", bool: "boolean", type(None): "null"}


def _object_schema(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
