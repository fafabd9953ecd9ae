"""What every backend shares: the jinja environment kernels are rendered in, and the records between rendering and building.

The environment is not the report's: autoescape is off because the output is source code, so nothing from a model may enter it as
text. Identifiers come from an allow-list, numbers are printed as typed literals, and comments quote only names that passed
:func:`identifier`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jinja2
import jinja2.bccache

from fusion_advisor.content import content_dir
from fusion_advisor.errors import AdvisorError
from fusion_advisor.files.private_folder import cache_folder
from fusion_advisor.ir.program import Program, layout_key
from fusion_advisor.records import Tuning as Tuning  # noqa: PLC0414  # a part of this interface

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}\Z")


class KernelBuildFailed(AdvisorError):
    """A kernel that did not render or compile; its fusion is skipped and the reason kept."""

    code = "FA413"
    message = "{kernel} did not compile for {target}: {cause}"
    note = "the model is unchanged where this kernel would have gone; the compiler's full words are in log.txt"
    hint = "--strict turns this into exit 8"
    exit_code = 8


class KernelCrashed(KernelBuildFailed):
    """A kernel that ended its process, or did not end, when it first ran; its fusion is skipped and the reason kept."""

    code = "FA414"
    message = "{kernel} for {target} {cause} while it was checked"
    note = "it ran in a process of its own: the model is unchanged where this kernel would have gone"
    hint = "--strict turns this into exit 8; please report it with the kernel's source, which is in kernels/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the top of a rendered kernel tells its reader; every line is ours, none is the model's text."""

    title: str
    """``rmsnorm`` or the chain's name."""
    summary: str
    """What is fused, in one sentence."""
    origin: str
    """``library kernel rmsnorm, variant llama`` or ``generated from the chain``."""
    source: str = ""
    """Where the idea comes from: a paper or a URL, from kernel.toml."""


def library_origin(kernel: str, variant: str = "") -> str:
    """Return a header's origin for a kernel of the library, and which of its references it was rendered from."""
    return f"library kernel {kernel}, variant {variant}" if variant else f"library kernel {kernel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a kernel is written for sizes and strides like those of the Program that it was rendered for; it serves any others."""

    is_looped: bool = False
    """Rows are walked in parts."""
    is_split: bool = False
    """CUDA: a pack may lie across a border between channels."""
    is_shifted: bool = False
    """CUDA: a row's packs start where its addresses allow it, not at its first column."""
    is_clustered: bool = False
    """CUDA: a cluster of blocks shares a row, which stays in their registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenArguments:
    """Integer arguments that vary between the sizes that a kernel is to serve: it is compiled for no value of them."""

    names: tuple[str, ...] = ()
    """In the order of the signature."""
    multiples: tuple[str, ...] = ()
    """Those of them that are multiples of 16 at all these sizes."""

    @property
    def unspecialized(self) -> tuple[str, ...]:
        """Those about which nothing may be assumed."""
        return tuple(name for name in self.names if name not in self.multiples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Source text of one kernel for one backend."""

    backend: str
    entry: str
    """``fa_<title>_<hash of the layout key and the tuning>``: unique per compiled kernel."""
    source: str
    suffix: str
    """``.py``, ``.cu`` or ``.cpp``."""
    tuning: Tuning = field(default_factory=Tuning)
    """The launch parameters that were asked for; a launch uses them again."""
    form: Form = field(default_factory=Form)
    open_arguments: OpenArguments = field(default_factory=OpenArguments)
    """Triton and CUDA: what varies, where a kernel was asked for that serves several sizes without another compilation."""
    has_asserts: bool = False
    """Triton: asserts that positions are in range, which takes a compile option."""
    flags: tuple[str, ...] = ()
    """C++: what the compiler is called with."""
    is_for_one_arch: bool = False
    """CUDA: uses instructions that no other generation has; ``sm_90a``, not ``sm_90``."""
    parts: tuple[Rendered, ...] = ()
    """The launches of a kernel that takes several, in order, each with the whole source; empty where it takes one."""
    text: str = ""
    """The whole file with its launcher, see ``codegen.standalone``; empty where none was asked for."""

    @property
    def file_text(self) -> str:
        """What is written to the kernel's file; compilers are given ``source`` or this, and make the same kernel of both."""
        return self.text or self.source


Launcher = Callable[..., None]
"""Called with the program's operands in order (inputs, then outputs, as tensors); runs on the current stream."""


CompileAhead = Callable[[Sequence[Program]], None]
"""Has a kernel compiled for Programs, and returns when it is."""


class BuiltKernel(Protocol):
    """A compiled kernel."""

    @property
    def build_ns(self) -> int:
        """Nanoseconds spent compiling."""
        ...

    @property
    def tuning(self) -> str:
        """The launch parameters in words."""
        ...

    def bind(self, program: Program) -> Launcher:
        """Fix sizes, strides and grid for a Program with the layout key that was rendered; do it once, not per call."""
        ...

    def compile_for(self, programs: Iterable[Program], ahead: CompileAhead | None = None) -> int:
        """Compile what binding any of these Programs takes; return how many machine codes that is.

        Args:
            programs: of the layout that was rendered.
            ahead: compiles the kernel for several Programs side by side, where each takes machine code of its own.
        """
        ...


class KernelMaker(Protocol):
    """What renders and builds a backend's kernels."""

    name: ClassVar[str]

    def render(
        self, program: Program, header: Header, *, tuning: Tuning, fast_math: bool, elsewhere: Sequence[Program] = ()
    ) -> Rendered:
        """Print the program as readable source.

        Args:
            program: what to compute.
            header: for the comment at the top.
            tuning: launch parameters.
            fast_math: whether the kernel may approximate.
            elsewhere: the program at other sizes. What differs between all these is then an argument, and no size takes machine
                code of its own; without any, a kernel may be compiled for its sizes.
        """
        ...

    def build(self, rendered: Rendered, path: Path) -> BuiltKernel:
        """Write the source to ``path`` and compile it. Raises KernelBuildFailed."""
        ...


def identifier(text: str) -> str:
    """Return ``text`` if it may appear in source code.

    Raises:
        ValueError: it is not a plain ASCII identifier of at most 80 characters.
    """
    if not _IDENTIFIER.match(text):
        raise ValueError(f"not an identifier that may enter a kernel: {text!r}")
    return text


def entry_name(program: Program, title: str, *extra: str) -> str:
    """Name a kernel after its chain, with six hex digits that change with its layout, tuning and options."""
    return _named(layout_key(program), title, extra)


def entry_names(program: Program, title: str, options: Sequence[str]) -> tuple[str, ...]:
    """Return the name that a kernel has with each of several options."""
    layout = layout_key(program)
    return tuple(_named(layout, title, (option,)) for option in options)


def _named(layout: str, title: str, extra: Sequence[str]) -> str:
    digest = hashlib.sha256("|".join((layout, *extra)).encode()).hexdigest()[:6]
    return identifier(f"fa_{title[:60]}_{digest}")


def body_of(template: str, **context: object) -> str:
    """Render what a skeleton writes inside a kernel, without what stands around it.

    Args:
        template: of ``templates/``, one with a block ``body``.
        context: as for the whole template.
    """
    found = environment().get_template(template)
    return "".join(found.blocks["body"](found.new_context(context)))


class _KeptTemplates(jinja2.FileSystemBytecodeCache):
    """What jinja makes of templates, on disk: a damaged file, a full disk or a folder that is gone costs time, and no kernel."""

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Read a template's code; leave the bucket empty where it cannot be read."""
        try:
            super().load_bytecode(bucket)
        except (*_OF_DAMAGED_PICKLES, OSError):
            bucket.reset()

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Write a template's code, where that is possible."""
        with contextlib.suppress(OSError):
            super().dump_bytecode(bucket)


_OF_DAMAGED_PICKLES = (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError, ImportError)
"""The digest ahead of the code is a pickle, for which jinja expects no damage."""


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of kernel templates (``templates/``, then ``kernels/``): a missing name is an error.

    What jinja makes of a template, 10 ms for each, is kept on disk for later processes.
    """
    loader = jinja2.FileSystemLoader([content_dir("templates"), content_dir("kernels")])
    env = jinja2.Environment(
        loader=loader,
        bytecode_cache=_KeptTemplates(str(cache_folder("jinja"))),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Any] = {"identifier": identifier}
    env.filters.update(filters)
    return env
