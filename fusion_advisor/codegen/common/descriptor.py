"""What a backend is: its name, its files, its devices, and how its parts are reached.

A backend is a folder with a subclass of :class:`Backend` in ``descriptor.py``, and one line in ``codegen.registry``. The command
line imports descriptors, so they load compilers and torch only inside their methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from fusion_advisor.codegen.common.interface import KernelMaker, Rendered
    from fusion_advisor.codegen.common.site import Layout
    from fusion_advisor.ir.program import Program
    from fusion_advisor.records import Tuning

RUN, INTERPRET, COMPILE = "run", "interpret", "compile"
"""What a machine can do with a backend's kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Launch parameters worth trying for one Program."""

    shape_of: Callable[[Tuning], str]
    """The launch of a tuning in words; tunings with equal launches are one. Raises KernelBuildFailed where there is none."""
    tunings: Sequence[Tuning]
    """The most promising first; the backend's own choice is not among them."""


class Backend:
    """A language that kernels are rendered in. Attributes without a default must be set."""

    name: ClassVar[str]
    """In manifests, reports and on the command line; also its folder in ``templates/``."""
    other_names: ClassVar[tuple[str, ...]] = ()
    """What users may type for it, in lower case; the command line then names the right one."""
    title: ClassVar[str]
    """For readers: ``CUDA``."""
    suffix: ClassVar[str]
    """Of source files."""
    lexer: ClassVar[str]
    """Pygments' name of the language."""
    device_kinds: ClassVar[tuple[str, ...]]
    """torch's device types on which its kernels run."""
    tile_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the launch parameters (fields of ``Tuning``) that it takes; empty where there is nothing to choose."""
    interpreter_variable: ClassVar[str] = ""
    """Environment variable that must be 1, before its compiler is imported, for kernels to run without their device."""

    def why_missing(self) -> str:
        """Say why kernels cannot be built and launched in this process; empty where they can."""
        raise NotImplementedError

    def is_available(self) -> bool:
        """Whether kernels can be built and launched, given a device."""
        return not self.why_missing()

    def without_device(self) -> str:
        """Return what can be done without a device of its kinds: ``run``, ``interpret``, ``compile``, or why nothing can."""
        return f"this machine has no {' or '.join(self.device_kinds)} device"

    def maker(self) -> KernelMaker:
        """Return what renders and builds its kernels."""
        raise NotImplementedError

    def compile_for(self, program: Program, rendered: Rendered, arch: int) -> bytes:
        """Compile a kernel for a GPU that need not be here.

        Args:
            program: decides the launch shape.
            rendered: the kernel.
            arch: compute capability, 80, 90 or 100.

        Raises:
            KernelBuildFailed: the compiler refuses it.
        """
        raise NotImplementedError

    def compile_ahead(self, program: Program, rendered: Rendered, arch: int) -> None:
        """Leave in the compiler's cache on disk what binding a Program compiles, in a process that launches nothing itself.

        Args:
            program: decides the launch shape.
            rendered: the kernel.
            arch: compute capability, 80, 90 or 100.

        Raises:
            KernelBuildFailed: the compiler refuses it.
        """
        self.compile_for(program, rendered, arch)

    def file_text(self, rendered: Rendered, program: Program, layouts: Sequence[Layout | None], *, fast_math: bool) -> str:
        """Return the kernel's whole file: the kernel, then a launch, a reference, and a main program that checks and times it.

        Args:
            rendered: the kernel.
            program: of its site.
            layouts: shape and strides of each operand at the site, where they are known.
            fast_math: whether the kernel approximates.
        """
        raise NotImplementedError

    def limits(self, device: torch.device) -> object | None:
        """Return what launches depend on of a device; None where they depend on the program alone."""
        del device
        return None

    def search(self, program: Program, limits: object | None) -> Search:
        """Return the launch parameters worth trying; asked only where there are tile parameters.

        Args:
            program: what will be bound.
            limits: of :meth:`limits`; None for a device that is not here.
        """
        raise NotImplementedError

    def is_worth_a_trial(self, program: Program) -> bool:
        """Whether a Program is of a kind that this backend was faster at than the device's preferred one."""
        del program
        return False
