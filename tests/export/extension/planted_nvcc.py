"""Stands for nvcc where there is none: each file of a kernel becomes a launch that does nothing, and the host's compiler links.

A test installs it as ``bin/nvcc`` in a folder and names the folder in CUDA_HOME. It writes each command line that it gets to
``commands.txt`` in its own folder.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path


def main(words):
    """Do what nvcc was asked for."""
    if words == ["--version"]:
        sys.stdout.write("Cuda compilation tools, release 13.0, V13.0.88\n")
        return
    with Path(__file__).with_name("commands.txt").open("a") as kept:
        kept.write(shlex.join(words) + "\n")
    output = words[words.index("-o") + 1]
    if "-c" in words:
        text = Path(words[words.index("-c") + 1]).read_text()
        name, function = re.search(r"^namespace (\w+) \{\n\n(const char \*\w+\([^)]*\)) \{", text, re.MULTILINE).groups()
        source = f"namespace {name} {{ {function} {{ return nullptr; }} }}"
        subprocess.run(["c++", "-x", "c++", "-fPIC", "-c", "-", "-o", output], input=source, text=True, check=True)
        return
    objects, folder = [word for word in words if word.endswith(".o")], next(word for word in words if word.startswith("-L"))
    subprocess.run(["c++", "-shared", *objects, "-o", output, folder, "-Wl,--no-as-needed", "-ltorch"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
