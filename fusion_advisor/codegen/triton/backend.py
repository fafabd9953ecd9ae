"""The Triton backend: three skeletons, picked from the Program's shape alone.

Flat Programs are a run of elements. Pointwise Programs of more dims are tiles of the last two, the outer dims
decomposed from the program id once per tile, in scalar registers. Reduced Programs hold whole rows in registers up to
16384 columns, so every operand is read once; wider rows are walked once per reduction that waits for another, a maximum and
the sum of exponentials under it together, a sum and the squares about its mean too. Block sizes are constexpr
arguments that :meth:`TritonKernel.bind` derives from the shape, so one source serves every shape.

A kernel that is rendered with the Program at other sizes beside it takes what differs as arguments, and its blocks come in few
classes (``signature.py``): its machine code can be made ahead for a whole range of sizes.

An entry's name covers the layout key, the tuning, fast math, what is open, and whether the row is looped over; cache kernels
by that name.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from fusion_advisor.codegen.common.arguments import pointer_names
from fusion_advisor.codegen.common.gelu_cdf import with_cdfs
from fusion_advisor.codegen.common.header_comment import dropout_notes, heading, sizes_note, tuning_note
from fusion_advisor.codegen.common.horizontal_fusion import Call, calls_of, functions_of, open_arguments, starts
from fusion_advisor.codegen.common.interface import (
    CompileAhead,
    Form,
    Header,
    KernelBuildFailed,
    Launcher,
    OpenArguments,
    Rendered,
    Tuning,
    body_of,
    entry_name,
    environment,
)
from fusion_advisor.codegen.common.printer import Unsupported
from fusion_advisor.codegen.split.choose import split_program
from fusion_advisor.codegen.split.several import SeveralKernels, render_parts, rendered_parts
from fusion_advisor.codegen.triton.body import looped, rows_stay_cached, straight
from fusion_advisor.codegen.triton.direct_launch import TritonLauncher, compile_options, last_cause
from fusion_advisor.codegen.triton.interpreted import for_interpreter, is_interpreted
from fusion_advisor.codegen.triton.launch import Variant, launch_of, variant_of
from fusion_advisor.codegen.triton.ops import TritonWriter
from fusion_advisor.codegen.triton.signature import (
    aligned_names,
    constants_note,
    constants_of,
    decorator,
    fixed_arguments,
    fixed_of_all,
    names_at,
    signature,
)
from fusion_advisor.codegen.triton.tiling import Shape, walks_columns
from fusion_advisor.ir.program import Program
from fusion_advisor.records.serialize import write_atomic

_POINTER_TYPES = {
    "float64": "*fp64", "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int64": "*i64",
    "int32": "*i32", "int16": "*i16",
    "int8": "*i8", "uint8": "*u8", "bool": "*i1",
}  # fmt: skip


class TritonBackend:
    """Renders and builds Triton kernels."""

    name: ClassVar[str] = "triton"

    def render(
        self, program: Program, header: Header, *, tuning: Tuning, fast_math: bool, elsewhere: Sequence[Program] = ()
    ) -> Rendered:
        """Print a Program as Triton source.

        Raises:
            KernelBuildFailed: the Program holds an op that Triton cannot express.
            ValueError: a Program of ``elsewhere`` has another layout.
        """
        if not elsewhere and (parts := split_program(program)) is not None:
            return render_parts(self, parts, header, fast_math=fast_math)
        calls = calls_of(program, flatten_rows=False)
        arguments = open_arguments(program, elsewhere, flatten_rows=False)
        is_looped = walks_columns(calls[0].plan, tuning)
        everywhere = [[call.plan for call in calls_of(one, flatten_rows=False)] for one in (program, *elsewhere)]
        is_cached = is_looped and all(map(rows_stay_cached, everywhere))
        kinds = {"looped": is_looped, "cached": is_cached, "fast_math": fast_math, repr(arguments): bool(arguments.names)}
        extra = ["triton", repr(tuning), *(name for name, is_one in kinds.items() if is_one)]
        entry = entry_name(program, f"{header.title[:54]}_fast" if fast_math else header.title, *extra)
        functions = functions_of(calls)
        bodies: list[dict[str, Any]] = []
        helpers: set[str] = set()
        is_float64 = is_half = False
        is_all_half = True
        try:
            for function in functions:
                own_plan = replace(function.plan, program=with_cdfs(function.plan.program))
                writer = TritonWriter(own_plan, fast_math=fast_math, is_looped=is_looped)
                bodies.append(looped(own_plan, writer, is_cached=is_cached) if is_looped else straight(own_plan, writer))
                helpers |= writer.helpers
                is_float64, is_half = is_float64 or writer.is_float64, is_half or writer.is_half
                is_all_half = is_all_half and writer.is_half
        except Unsupported as error:
            raise KernelBuildFailed(kernel=entry, target="triton", cause=str(error)) from error
        constants = constants_of(calls, is_looped=is_looped, arguments=arguments)
        exp = "exp" if "exp" in helpers else "tl.exp"
        if helpers & {"sigmoid", "expm1"} and not (fast_math or is_half or is_float64):
            helpers.add("exp")
            exp = "exp"
        exp_below = exp
        if "add_exp" in helpers and is_all_half and not is_float64:
            exp_below = "exp_16bit"
            helpers.add(exp_below)
        notes = (*dropout_notes(program), *sizes_note(arguments), *constants_note(constants), *tuning_note(tuning))
        common = {
            "heading": heading([call.plan for call in calls], header, fast_math=fast_math, notes=notes),
            "helpers": sorted(helpers, key=lambda name: (name not in ("exp", "exp_16bit", "philox"), name)),
            "entry": entry, "fast_math": fast_math, "exp": exp, "exp_below": exp_below, "bits": 64 if is_float64 else 32,
            "decorator": decorator(arguments), "aligned": aligned_names(calls, arguments),
        }  # fmt: skip
        return Rendered(
            backend=self.name, entry=entry, source=_source(program, calls, bodies, common, arguments, is_looped=is_looped),
            suffix=".py", tuning=tuning, form=Form(is_looped=is_looped), open_arguments=arguments,
            has_asserts="checked" in helpers,
        )  # fmt: skip

    def build(self, rendered: Rendered, path: Path) -> TritonKernel | SeveralKernels:
        """Write the source to ``path`` and import it; machine code is made when a Program is bound.

        Raises:
            KernelBuildFailed: the file cannot be imported.
        """
        if rendered.parts:
            text = rendered.file_text
            kernels = [TritonKernel(_for_here(replace(one, text=text)), path) for one in rendered.parts]
            return SeveralKernels(rendered, kernels, split_program)
        return TritonKernel(_for_here(rendered), path)


def _for_here(rendered: Rendered) -> Rendered:
    return for_interpreter(rendered) if is_interpreted() else rendered


def _source(
    program: Program, calls: Sequence[Call], bodies: Sequence[dict[str, Any]], common: Mapping[str, Any],
    arguments: OpenArguments, *, is_looped: bool,
) -> str:  # fmt: skip
    """Put the parts of a kernel, one for each function, into their template."""
    template = f"triton/{'looped' if is_looped else 'straight'}.py.jinja"
    constants = constants_of(calls, is_looped=is_looped, arguments=arguments)
    fixed = fixed_arguments(calls, arguments.names)
    if len(calls) == 1:
        plan = calls[0].plan
        own = signature(plan.pointers, plan.arguments, constants, names_at(fixed[""], plan.arguments))
        return environment().get_template(template).render(**common, **bodies[0], signature=own)
    for function, body in zip(functions_of(calls), bodies, strict=True):
        body["text"] = body_of(template, **common, **body).replace("tl.program_id(0)", "program")
        body["function"] = function.function
        plan, own_fixed = function.plan, names_at(fixed[function.function], function.plan.arguments)
        body["signature"] = signature(plan.pointers, plan.arguments, constants, own_fixed)
    integers = [*starts([0] * len(calls)), *(item for call in calls for item in call.arguments)]
    return environment().get_template("triton/siblings.py.jinja").render(
        **common, functions=bodies, calls=calls, constants=constants,
        signature=signature(pointer_names(program), integers, constants, fixed_of_all(calls, fixed)),
    )  # fmt: skip


class TritonKernel:
    """An imported kernel.

    Attributes:
        build_ns: what importing and compiling took so far; binding a new shape may add to it.
        tuning: block sizes and warps of the Program bound last.
    """

    def __init__(self, rendered: Rendered, path: Path) -> None:
        start = time.perf_counter_ns()
        self._rendered = rendered
        self._kernel: Any = getattr(load_source(rendered, path), rendered.entry)
        self.build_ns = time.perf_counter_ns() - start
        self.tuning = ""

    def bind(self, program: Program, tuning: Tuning | None = None) -> Launcher:
        """Fix sizes, strides, block sizes and grid.

        Args:
            program: a Program with the layout key that was rendered.
            tuning: overrides of the block sizes chosen from the shape.

        Raises:
            KernelBuildFailed: Triton refuses the kernel for this shape.
        """
        calls = calls_of(program, flatten_rows=False)
        if all(call.plan.is_empty for call in calls):
            return lambda *_tensors: None
        shape, integers = launch_of(calls, self._rendered, tuning)
        scalars = [value for _, value in integers]
        self.tuning = shape.text
        if not hasattr(self._kernel, "warmup") or not has_cuda():
            return _interpreted(self._kernel, scalars, shape, asserts=self._rendered.has_asserts)
        start = time.perf_counter_ns()
        dtypes = [operand.dtype for operand in program.operands]
        options = compile_options(shape.num_warps, asserts=self._rendered.has_asserts, is_exact=program.is_exact)
        launcher = TritonLauncher(
            self._kernel, dtypes, (*scalars, *shape.constants.values()), shape.programs, options, self._rendered.entry
        )
        self.build_ns += time.perf_counter_ns() - start
        return launcher

    def compile_for(self, programs: Iterable[Program], ahead: CompileAhead | None = None) -> int:
        """Compile what binding any of these Programs takes, which is nothing where kernels are interpreted.

        Args:
            programs: of the layout that was rendered.
            ahead: given a Program for each machine code before the first one is bound.

        Returns:
            how many machine codes that is.

        Raises:
            KernelBuildFailed: Triton refuses the kernel for one of them.
        """
        found: dict[Variant, Program] = {}
        for program in programs:
            variant = variant_of(program, self._rendered)
            if variant is not None:
                found.setdefault(variant, program)
        if ahead is not None:
            ahead([*found.values()])
        for program in found.values():
            self.bind(program)
        return len(found)


def compile_for(program: Program, rendered: Rendered, target: int) -> bytes:
    """Compile a kernel for a GPU that need not be here; returns the cubin. See :func:`assembly_for`."""
    return bytes(assembly_for(program, rendered, target)["cubin"])


def assembly_for(program: Program, rendered: Rendered, target: int) -> Mapping[str, Any]:
    """Compile a kernel for a GPU that need not be here.

    Args:
        program: decides sizes, block sizes and which arguments are known to be multiples of 16.
        rendered: the kernel.
        target: compute capability, 80, 90 or 100.

    Returns:
        every stage of Triton's pipeline by name; ``ptx`` and ``cubin`` among them. Of several launches the last one's; all are
        compiled.

    Raises:
        KernelBuildFailed: the cause is Triton's last line.
    """
    if rendered.parts:
        return [assembly_for(*one, target) for one in rendered_parts(program, rendered, split_program)][-1]
    shape, integers = launch_of(calls_of(program, flatten_rows=False), rendered)
    scalars = [value for _, value in integers]
    dtypes = [operand.dtype for operand in program.operands]
    options = compile_options(shape.num_warps, asserts=rendered.has_asserts, is_exact=program.is_exact)
    return compile_source(rendered, target, dtypes, scalars, shape.constants, options)


def compile_source(
    rendered: Rendered,
    target: int,
    dtypes: Sequence[str],
    scalars: Sequence[int],
    constants: Mapping[str, Any],
    options: dict[str, int],
) -> Mapping[str, Any]:
    """Compile a kernel of these tensors, then these numbers, then these constexpr arguments; see :func:`assembly_for`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values: list[Any] = [*[0] * len(dtypes), *scalars, *constants.values()]
    with tempfile.TemporaryDirectory() as folder:
        kernel = getattr(load_source(rendered, Path(folder) / f"{rendered.entry}.py"), rendered.entry)
        types = [_POINTER_TYPES[dtype] for dtype in dtypes]
        for value, parameter in list(zip(values, kernel.params, strict=True))[len(dtypes) :]:
            is_known = parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize)
            types.append("constexpr" if is_known else "i32" if -(2**31) <= value < 2**31 else "i64")
        known = {(n,): value for n, (value, kind) in enumerate(zip(values, types, strict=True)) if kind == "constexpr"}
        attributes = {
            (n,): [["tt.divisibility", 16]]
            for n, (value, parameter) in enumerate(zip(values, kernel.params, strict=True))
            if types[n] != "constexpr" and value % 16 == 0 and not parameter.do_not_specialize
        }
        signature = dict(zip(kernel.arg_names, types, strict=True))
        try:
            source = ASTSource(kernel, signature, known, attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        except Exception as error:
            raise KernelBuildFailed(kernel=rendered.entry, target=f"sm_{target}", cause=last_cause(error)) from error
    return compiled.asm  # type: ignore[no-any-return]


def _interpreted(kernel: Any, scalars: Sequence[int], shape: Shape, *, asserts: bool) -> Launcher:
    def launch(*tensors: Any) -> None:
        with _interpreted_assertions() if asserts else contextlib.nullcontext():
            kernel[(shape.programs,)](*tensors, *scalars, **shape.constants, num_warps=shape.num_warps)

    return launch


@contextlib.contextmanager
def _interpreted_assertions() -> Iterator[None]:
    """Have the interpreter look at assertions: it takes its options from no launch."""
    from triton.runtime.interpreter import interpreter_builder

    before = interpreter_builder.options
    interpreter_builder.options = replace(before, debug=True, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter_builder.options = before


def has_cuda() -> bool:
    """Whether there is a device; without one kernels are interpreted."""
    import torch

    return torch.cuda.is_available()


def load_source(rendered: Rendered, path: Path) -> ModuleType:
    """Write a kernel file and import it under a name of its own, without entering it into ``sys.modules``."""
    if path.suffix != ".py":
        raise KernelBuildFailed(kernel=rendered.entry, target="triton", cause=f"{path.name} is not a Python file")
    write_atomic(path, rendered.file_text)  # a link that lies there is replaced, not followed
    module = ModuleType(f"fusion_advisor_kernel_{rendered.entry}")
    module.__file__ = str(path)
    try:
        # Compiled from the source that was rendered: an import would take `__pycache__` for it, and a run directory that somebody
        # gave away may hold one.
        exec(compile(rendered.source, str(path), "exec"), vars(module))
    except Exception as error:
        raise KernelBuildFailed(kernel=rendered.entry, target="triton", cause=last_cause(error)) from error
    return module
