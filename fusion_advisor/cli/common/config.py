"""Options from files and the environment, for options that were not given as flags.

Precedence, the first wins: the flag, ``FUSION_ADVISOR_<OPTION>``, the project's file (``./fusion-advisor.toml`` or
``[tool.fusion-advisor]`` of ``./pyproject.toml``), ``$XDG_CONFIG_HOME/fusion-advisor/config.toml``, the default. Keys are the
long options without their dashes; a table named after a command holds keys for that command alone. What is not an option is an
error: a misspelt key that is passed over would leave its author believing in it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fusion_advisor.cli.common import core
from fusion_advisor.cli.common.bad_values import reason_and_advice
from fusion_advisor.cli.common.console import Settings, write_result
from fusion_advisor.errors import BadConfig
from fusion_advisor.files.regular_file import read_regular

_MOST_BYTES = 2**20
PREFIX = "FUSION_ADVISOR_"
COMMANDS = ("profile", "plan", "apply", "report", "export", "compare", "fleet")
"""The commands that read configuration, each also a table's name."""
_BY_HAND = {"help", "config", "show-config"}
_NEVER_FROM_A_FILE = {"trust-remote-code", "force"}
"""Only the command line may allow foreign code to run or a run to be overwritten."""

LEFT_OUT = {
    "revision": "the newest",
    "input": "made from the model's configuration",
    "seq-len": "below the model's maximum",
    "context": "512, or what the model has room for",
    "new-tokens": "32",
    "layers": "all",
    "shapes": "the example's alone",
    "points": "chosen in the ranges",
    "only": "all",
    "skip": "none",
    "kernels": "the shipped library",
    "backend": "by device",
    "compile": "by device",
    "rtol": "by eager's own error",
    "atol": "by eager's own error",
    "fail-on": "none",
    "trace": "none",
    "redact": "nothing",
    "format": "html, md, json",
    "output": "fusion-runs/<run id>",
    "compare.format": "the terminal's table",
    "compare.output": "B's directory",
    "report.output": "the run's own directory",
    "fleet.address": "Ray on this machine",
    "fleet.weights": "the traces' own device time",
    "fleet.job": "the trace's own job, or its folder",
}
"""Options without one default value: what is taken where they are left out. ``compare.output`` is of that command alone."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value from a file or an environment variable."""

    key: str
    value: Any
    source: str
    """``./fusion-advisor.toml``, ``FUSION_ADVISOR_BATCH`` …"""
    command: str = ""
    """The command it is for; empty for every command that has such an option."""


def configure(context: typer.Context, path: Path | None) -> None:
    """Fill a command's defaults from the environment and the files, and remember where each came from.

    Args:
        context: Of a command in :data:`COMMANDS`, before its options are read.
        path: The file that ``--config`` named, instead of the project's.

    Raises:
        BadConfig: A file that is no TOML, a key that is no option, a value of the wrong kind.
    """
    known = _options_of(context)
    mine = known[str(context.info_name)]
    everywhere = {key for options in known.values() for key in options}
    defaults: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in read_settings(Path(), os.environ, path):
        keys = set(known[setting.command]) if setting.command else everywhere
        if setting.key not in keys or setting.key in _BY_HAND:
            near = difflib.get_close_matches(setting.key, sorted(keys - _BY_HAND), n=1, cutoff=0.5)
            hint = f"did you mean `{_spelled(near[0], setting)}`?" if near else "`--help` of each command lists its options"
            of = f"`{setting.command}`" if setting.command else "any command"
            name = _spelled(setting.key, setting)
            what = "it" if name == setting.source else f"`{name}`"
            detail = f"{what} is no option of {of}"
            if isinstance(setting.value, dict):
                tables = difflib.get_close_matches(setting.key, sorted(known), n=1, cutoff=0.5)
                detail = f"[{name}] is no table of a command"
                hint = f"did you mean [{tables[0]}]?" if tables else f"tables are {', '.join(f'[{one}]' for one in known)}"
            raise BadConfig(source=setting.source, detail=detail, hint=hint)
        if setting.key in _NEVER_FROM_A_FILE:
            raise BadConfig(
                source=setting.source,
                detail=f"`{_spelled(setting.key, setting)}` may only be given on the command line",
                hint=f"pass --{setting.key} where you mean it",
            )
        parameter = mine.get(setting.key)
        if parameter is not None and setting.command in ("", context.info_name):
            defaults[parameter.name] = _checked(context, parameter, setting)
            sources[parameter.name] = setting.source
    context.default_map = defaults
    context.obj.sources = sources


def read_settings(folder: Path, env: Mapping[str, str], path: Path | None = None) -> list[Setting]:
    """Return every setting that is there, the weakest first, so that a later one replaces an earlier."""
    settings: list[Setting] = []
    home = env.get("XDG_CONFIG_HOME") or (Path(env["HOME"]) / ".config" if env.get("HOME") else None)
    if home is not None:
        user = Path(home) / "fusion-advisor" / "config.toml"
        if user.is_file():
            settings += _file_settings(_table(user), str(user))
    settings += _project_settings(folder) if path is None else _file_settings(_table(path), str(path))
    for name, text in sorted(env.items()):
        if name.startswith(PREFIX) and text:
            settings.append(Setting(name.removeprefix(PREFIX).lower().replace("_", "-"), text, name))
    return settings


def shown_settings(context: typer.Context) -> list[tuple[str, Any, str]]:
    """Return each option of a command with its value (None where the command chooses) and its source."""
    rows = []
    left_out = core.request_defaults()
    for key, parameter in _options_of(context)[str(context.info_name)].items():
        if key in _BY_HAND:
            continue
        given = context.get_parameter_source(parameter.name)
        if given is not None and given.name == "COMMANDLINE":
            source = f"--{key}"
        else:
            source = context.obj.sources.get(parameter.name, "default")
        value = context.params.get(parameter.name)
        rows.append((key, left_out.get(key) if value is None else value, source))
    return rows


def print_settings(context: typer.Context, settings: Settings) -> None:
    """Print each option with its value and source, as a table or as JSON."""
    from fusion_advisor.report.terminal.layout import simple_table

    def text(key: str, value: object) -> str:
        if value is None or value in ((), []):
            return LEFT_OUT.get(f"{context.info_name}.{key}", LEFT_OUT.get(key, "none"))
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    settled = shown_settings(context)
    if context.params.get("as_json"):
        import json

        listed = [{"option": key, "value": value, "source": source} for key, value, source in settled]
        write_result(json.dumps(listed, indent=1, default=str) + "\n")
        return
    rows = [(key, text(key, value), source) for key, value, source in settled]
    console = settings.out()
    with console.capture() as captured:
        console.print(simple_table(("Option", "Value", "Source"), rows, console))
    write_result(captured.get())


def _options_of(context: typer.Context) -> dict[str, dict[str, Any]]:
    """The options of the configured commands by their long names."""
    group: Any = context.find_root().command
    return {
        name: {_long(parameter): parameter for parameter in group.commands[name].params if _long(parameter)} for name in COMMANDS
    }


def _long(parameter: Any) -> str:
    return next((name[2:] for name in parameter.opts if name.startswith("--")), "")


def _project_settings(folder: Path) -> list[Setting]:
    own, shared = folder / "fusion-advisor.toml", folder / "pyproject.toml"
    section = _tool_table(shared) if shared.is_file() else None
    if own.is_file() and section is not None:
        raise BadConfig(
            source="./pyproject.toml",
            detail="[tool.fusion-advisor] and ./fusion-advisor.toml are both there",
            hint="keep one of the two",
        )
    if own.is_file():
        return list(_file_settings(_table(own), "./fusion-advisor.toml"))
    return [] if section is None else list(_file_settings(section, "./pyproject.toml"))


def _table(path: Path) -> dict[str, Any]:
    if path.name == "pyproject.toml":
        return _tool_table(path) or {}
    return _parsed(path)


def _tool_table(path: Path) -> dict[str, Any] | None:
    tool = _parsed(path).get("tool", {})
    found = tool.get("fusion-advisor") if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise BadConfig(source=str(path), detail="tool.fusion-advisor is no table", hint="write [tool.fusion-advisor]")
    return found


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, _MOST_BYTES).decode())
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's complaints, and a number of thousands of digits
        raise BadConfig(source=str(path), detail=f"it is no TOML: {error}", hint="see https://toml.io") from error
    except OSError as error:
        raise BadConfig(source=str(path), detail=error.strerror or str(error), hint="check its path and rights") from error


def _file_settings(table: dict[str, Any], source: str) -> Iterator[Setting]:
    for key, value in table.items():
        if key in COMMANDS and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield Setting(inner.replace("_", "-"), inner_value, f"{source} [{key}]", key)
        else:
            yield Setting(key.replace("_", "-"), value, source)


def _checked(context: typer.Context, parameter: Any, setting: Setting) -> Any:
    """Return a value as its option takes it, so that a mistake names the file rather than a flag nobody typed."""
    value = setting.value
    is_flag = getattr(parameter, "is_flag", False)
    is_many = parameter.multiple
    if is_many:
        value = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    items = value if is_many and isinstance(value, list) else [value]
    if (is_many and not isinstance(value, list)) or any(
        isinstance(item, dict | list) or (isinstance(item, bool) and not is_flag) for item in items
    ):
        kind = "a list" if is_many else "one value" if not is_flag else "true or false"
        raise BadConfig(
            source=setting.source,
            detail=f"`{_spelled(setting.key, setting)}` has the wrong kind of value",
            hint=f"it takes {kind}",
        )
    try:
        parameter.process_value(context, value)
    except typer.BadParameter as error:
        typed = str(value) if isinstance(value, str | int | float) else ""
        reason, advice = reason_and_advice(error.message, typed)
        detail = f"`{_spelled(setting.key, setting)}` {reason}"
        raise BadConfig(source=setting.source, detail=detail, hint=advice or f"see --{setting.key} in `--help`") from error
    return value


def _spelled(key: str, setting: Setting) -> str:
    is_variable = setting.source == f"{PREFIX}{setting.key.upper().replace('-', '_')}"
    return PREFIX + key.upper().replace("-", "_") if is_variable else key
