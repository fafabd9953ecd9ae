"""``fusion-advisor doctor``: what this machine can run, one line each, with the fix."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from fusion_advisor.cli.common import options
from fusion_advisor.cli.common.console import write_result
from fusion_advisor.content import tool_version

ENVIRONMENT = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the examination."""

    name: str
    state: str
    """``ok``, ``missing`` (works without it) or ``broken`` (nothing runs)."""
    found: str
    fix: str = ""


def doctor(
    context: typer.Context,
    as_json: options.JsonOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """List torch, triton, compilers, driver and profiler: present or missing, with the fix."""
    settings = options.apply_output(context, verbose=verbose, color=color)
    findings = examine()
    if as_json:
        write_result(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        from rich.text import Text

        from fusion_advisor.report.terminal.layout import plain

        console = settings.out()
        marks = {"ok": ("✓", "green"), "missing": ("!", "yellow"), "broken": ("✗", "red")}
        with console.capture() as captured:
            for finding in findings:
                mark, style = marks[finding.state]
                line = Text(plain(f"{mark} {finding.name:<14} {finding.found}", console))
                line.stylize(style, 0, 1)
                console.print(line, overflow="fold")
                if finding.fix:
                    console.print(Text(plain(f"  {'':<14} → {finding.fix}", console)), overflow="fold")
        write_result(captured.get())
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(ENVIRONMENT)


def examine() -> list[Finding]:
    """Examine everything that a run may need."""
    return [
        Finding("fusion-advisor", "ok", tool_version()),
        Finding("python", "ok", sys.version.split()[0]),
        *_torch(),
        _package("triton", "Triton kernels are skipped", "pip install triton (the version that your torch names)"),
        _package("transformers", "only factories can be run", "pip install transformers"),
        _package("nvtx", "no NVTX ranges", "pip install nvtx"),
        _cuda_compiler(),
        _host_compiler(),
        _hub(),
    ]


def _torch() -> list[Finding]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken torch raises anything from ImportError to OSError
        return [Finding("torch", "broken", f"not importable ({type(error).__name__}: {error})", "pip install torch")]
    rows = [Finding("torch", "ok", torch.__version__)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(index)
            major, minor = torch.cuda.get_device_capability(index)
            rows.append(Finding(f"cuda:{index}", "ok", f"{name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"))
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        has_events = torch.profiler.ProfilerActivity.CUDA in activities
        rows.append(
            Finding("profiler", "ok", "records device kernels")
            if has_events
            else Finding("profiler", "missing", "cannot record device kernels", "install a torch built with Kineto and CUPTI")
        )
        return rows
    rows.append(Finding("cuda", "missing", f"no device: {_why_no_cuda(torch.version.cuda)}", _cuda_fix(torch.version.cuda)))
    return rows


def _why_no_cuda(built_for: str | None) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if built_for is None:
        return "this torch is a CPU build; runs use the CPU"
    if visible is not None and visible.strip() in ("", "-1"):
        return f'CUDA_VISIBLE_DEVICES="{visible}" hides every device; runs use the CPU'
    return f"torch is built for CUDA {built_for} and sees none; runs use the CPU"


def _cuda_fix(built_for: str | None) -> str:
    return "install a CUDA build of torch" if built_for is None else "check nvidia-smi; the driver may be older than that CUDA"


def _package(name: str, effect: str, fix: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "missing", f"not installed: {effect}", fix)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "ok", "installed, version unknown")


def _cuda_compiler() -> Finding:
    has_core = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(os.environ.get("CUDA_HOME", "/nonexistent")) / "bin"))
    if has_core:
        return Finding("CUDA C++", "ok", "NVRTC through cuda-core")
    if nvcc:
        return Finding("CUDA C++", "ok", f"nvcc {_first_version([nvcc, '--version'])}")
    return Finding("CUDA C++", "missing", "neither NVRTC (cuda-core) nor nvcc", 'pip install "fusion-advisor[cuda]"')


def _host_compiler() -> Finding:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        path = shutil.which(name)
        if path:
            return Finding("C++", "ok", f"{Path(path).name} {_first_version([path, '--version'])}".strip())
    return Finding("C++", "missing", "no compiler: CPU kernels are skipped", "apt install g++, or set CXX")


def _first_version(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    words = re.split(r"[\s,()]+", done.stdout)
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _hub() -> Finding:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    has_token = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    state = "a token is set" if has_token else "no token: gated and private models cannot be read"
    fix = "" if has_token else "hf auth login, if you need one"
    return Finding("hub", "ok" if has_token else "missing", state + ("; HF_HUB_OFFLINE is set" if offline else ""), fix)
