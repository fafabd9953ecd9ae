"""Applies an exported patch to a copy of the sources, as a user would, and loads a patched file."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path


def patched(export, name, root, folder):
    """Copy the files that a patch names from a source root into a folder, and apply the patch there with git."""
    patch = export / f"{name}.patch"
    for line in patch.read_text().splitlines():
        if line.startswith("--- a/"):
            path = line.removeprefix("--- a/")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(root) / path, folder / path)
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=folder, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return folder


@contextlib.contextmanager
def loaded(path, module, export):
    """Load a patched file under another name beside the module that it is a copy of; its package is the export's."""
    sys.path.insert(0, str(export))
    name = f"{module}_patched"
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        spec.loader.exec_module(made)
        yield made
    finally:
        sys.modules.pop(name, None)
        sys.path.remove(str(export))
