"""The CUDA C++ backend's descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.descriptor import COMPILE, Backend, Search

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from fusion_advisor.codegen.common.interface import KernelMaker, Rendered
    from fusion_advisor.codegen.common.site import Layout
    from fusion_advisor.ir.program import Program


class Cuda(Backend):
    """CUDA C++, compiled by NVRTC and launched through cuda-core."""

    name = "cuda"
    other_names = ("cuda_cpp", "nvcc")
    title = "CUDA"
    suffix = ".cu"
    lexer = "cuda"
    device_kinds = ("cuda",)
    tile_parameters = ("block_cols", "block_rows", "num_warps", "packs", "cluster")

    def why_missing(self) -> str:
        """Say that cuda-core is not installed."""
        from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core

        return "" if has_cuda_core() else "cuda-core is not installed; pip install 'fusion-advisor[cuda]'"

    def without_device(self) -> str:
        """Compile kernels where NVRTC or nvcc is."""
        from fusion_advisor.codegen.cuda.nvrtc import find_nvcc

        can_compile = self.is_available() or find_nvcc()
        return COMPILE if can_compile else "neither cuda-core nor nvcc was found, so nothing was compiled"

    def maker(self) -> KernelMaker:
        """Return what renders and builds CUDA kernels."""
        from fusion_advisor.codegen.cuda.backend import CudaBackend

        return CudaBackend()

    def compile_for(self, program: Program, rendered: Rendered, arch: int) -> bytes:
        """Compile to a cubin."""
        from fusion_advisor.codegen.cuda.backend import compile_for

        return compile_for(rendered, arch, program=program)

    def file_text(self, rendered: Rendered, program: Program, layouts: Sequence[Layout | None], *, fast_math: bool) -> str:
        """Return a file that needs nvcc, with the launch shape for the GPU that is here, or for compute capability 9.0."""
        del layouts
        import torch

        from fusion_advisor.codegen.cuda.launcher import with_launcher
        from fusion_advisor.codegen.cuda.nvrtc import device_shared_memory, has_cuda_core
        from fusion_advisor.codegen.cuda.shared_memory import shared_memory_of

        is_here = torch.cuda.is_available()
        major, minor = torch.cuda.get_device_capability() if is_here else (9, 0)
        arch = 10 * major + minor
        shared = device_shared_memory() if is_here and has_cuda_core() else shared_memory_of(arch)
        return with_launcher(rendered, program, shared=shared, arch=arch, fast_math=fast_math)

    def limits(self, device: torch.device) -> object | None:
        """Return the device's shared memory: wide rows lie in it."""
        import torch

        from fusion_advisor.codegen.cuda.nvrtc import device_shared_memory

        with torch.cuda.device(device):
            return device_shared_memory()

    def search(self, program: Program, limits: object | None) -> Search:
        """Return packs, threads, rows of a block and clusters."""
        from fusion_advisor.codegen.cuda.candidates import search
        from fusion_advisor.codegen.cuda.shared_memory import SharedMemory

        return search(program, limits if isinstance(limits, SharedMemory) else SharedMemory())

    def is_worth_a_trial(self, program: Program) -> bool:
        """Whether rows are walked more than once or divided by channels, or a tanh is computed."""
        from fusion_advisor.codegen.cuda.candidates import is_faster_in_cuda

        return is_faster_in_cuda(program)
