"""Many C++ kernels as one file, with the flags they ship with: the headers are read once, and the linker runs once."""

from __future__ import annotations

import re
from dataclasses import replace

from fusion_advisor.codegen.cpp.backend import CppBackend

_INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)


def build_all(rendered, folder):
    """Return entry → built kernel. All must have been rendered with the same flags."""
    unique = {one.entry: one for one in rendered}
    sources = [one.source for one in unique.values()]
    (flags,) = {line for source in sources for line in source.splitlines() if line.startswith("// Build: ")}
    includes = dict.fromkeys(line for source in sources for line in _INCLUDE.findall(source))
    bodies = [
        f'namespace {entry}_file {{\n#line 1 "{entry}.cpp"\n{_INCLUDE.sub("", one.source)}}}\n' for entry, one in unique.items()
    ]
    first = next(iter(unique.values()))
    together = replace(first, source=f"{flags}\n{''.join(includes)}{''.join(bodies)}")
    kernel = CppBackend().build(together, folder / "kernels.cpp")
    return {entry: replace(kernel, entry=entry) for entry in unique}
