"""Where a record was made: the machine, the versions and the day."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any


def here(*, is_on_gpu: bool) -> dict[str, str]:
    """Return machine, versions and date.

    Args:
        is_on_gpu: whether what was tried ran on the CUDA device.
    """
    import torch

    machine = processor()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if is_on_gpu:
        import triton

        machine = torch.cuda.get_device_name()
        versions += f", triton {triton.__version__}"
    return {"machine": machine, "versions": versions, "date": today()}


def processor() -> str:
    """The CPU's name, or its architecture where the system does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def today() -> str:
    """The day in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
