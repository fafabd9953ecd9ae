"""The Triton backend: three skeletons, picked from the Program's shape alone.

Flat Programs are a run of elements. Pointwise Programs of more dims are tiles of the last two, the outer dims
decomposed from the program id once per tile, in scalar registers. Reduced Programs hold whole rows in registers up to
16384 columns, so every operand is read once; wider rows are walked once per reduction that waits for another, a maximum and
the sum of exponentials under it together, a sum and the squares about its mean too. Block sizes are constexpr
arguments that :meth:`TritonKernel.bind` derives from the shape, so one source serves every shape.

An entry's name covers the layout key, the tuning, fast math, and whether the row is looped over; cache kernels by
that name.
"""

from __future__ import annotations

import contextlib
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from fusion_advisor.codegen.common.arguments import Schedule, pointer_names
from fusion_advisor.codegen.common.column_passes import parts_of
from fusion_advisor.codegen.common.gelu_cdf import with_cdfs
from fusion_advisor.codegen.common.header_comment import dropout_notes, heading, tuning_note
from fusion_advisor.codegen.common.horizontal_fusion import Call, calls_of, functions_of, starts
from fusion_advisor.codegen.common.interface import (
    Form,
    Header,
    KernelBuildFailed,
    Launcher,
    Rendered,
    Tuning,
    body_of,
    entry_name,
    environment,
)
from fusion_advisor.codegen.common.printer import Unsupported
from fusion_advisor.codegen.triton.body import looped, rows_stay_cached, straight
from fusion_advisor.codegen.triton.interpreted import for_interpreter, is_interpreted
from fusion_advisor.codegen.triton.ops import TritonWriter
from fusion_advisor.codegen.triton.tiling import Shape, choose_shapes, walks_columns
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

    def render(self, program: Program, header: Header, *, tuning: Tuning, fast_math: bool) -> Rendered:
        """Print a Program as Triton source.

        Raises:
            KernelBuildFailed: the Program holds an op that Triton cannot express.
        """
        calls = calls_of(program, flatten_rows=False)
        plan = calls[0].plan
        is_looped = walks_columns(plan, tuning)
        is_cached = is_looped and rows_stay_cached([call.plan for call in calls])
        kinds = {"looped": is_looped, "cached": is_cached, "fast_math": fast_math}
        extra = ["triton", repr(tuning), *(name for name, is_one in kinds.items() if is_one)]
        entry = entry_name(program, f"{header.title[:54]}_fast" if fast_math else header.title, *extra)
        functions = functions_of(calls)
        bodies: list[dict[str, Any]] = []
        helpers: set[str] = set()
        is_float64 = is_half = False
        try:
            for function in functions:
                own_plan = replace(function.plan, program=with_cdfs(function.plan.program))
                writer = TritonWriter(own_plan, fast_math=fast_math, is_looped=is_looped)
                bodies.append(looped(own_plan, writer, is_cached=is_cached) if is_looped else straight(own_plan, writer))
                helpers |= writer.helpers
                is_float64, is_half = is_float64 or writer.is_float64, is_half or writer.is_half
        except Unsupported as error:
            raise KernelBuildFailed(kernel=entry, target="triton", cause=str(error)) from error
        exp = "exp" if "exp" in helpers else "tl.exp"
        if helpers & {"sigmoid", "expm1"} and not (fast_math or is_half or is_float64):
            helpers.add("exp")
            exp = "exp"
        constants = _constants([call.plan for call in calls], is_looped=is_looped)
        common = {
            "heading": heading(
                [call.plan for call in calls], header, fast_math=fast_math, notes=(*dropout_notes(program), *tuning_note(tuning))
            ),
            "helpers": sorted(helpers, key=lambda name: (name not in ("exp", "philox"), name)),
            "entry": entry, "fast_math": fast_math, "exp": exp, "bits": 64 if is_float64 else 32,
        }  # fmt: skip
        template = f"triton/{'looped' if is_looped else 'straight'}.py.jinja"
        if len(calls) == 1:
            signature = _signature(plan.pointers, plan.arguments, constants, fixed_arguments(calls[0]))
            source = environment().get_template(template).render(**common, **bodies[0], signature=signature)
        else:
            for function, own in zip(functions, bodies, strict=True):
                own["text"] = body_of(template, **common, **own).replace("tl.program_id(0)", "program")
                own["function"] = function.function
                fixed = fixed_arguments(replace(function, arguments=function.plan.arguments))
                own["signature"] = _signature(function.plan.pointers, function.plan.arguments, constants, fixed)
            integers = [*starts([0] * len(calls)), *(item for call in calls for item in call.arguments)]
            fixed = frozenset[str]().union(*map(fixed_arguments, calls))
            source = environment().get_template("triton/siblings.py.jinja").render(
                **common, functions=bodies, calls=calls, constants=constants,
                signature=_signature(pointer_names(program), integers, constants, fixed),
            )  # fmt: skip
        return Rendered(
            backend=self.name, entry=entry, source=source, suffix=".py", tuning=tuning, form=Form(is_looped=is_looped),
            has_asserts="checked" in helpers,
        )  # fmt: skip

    def build(self, rendered: Rendered, path: Path) -> TritonKernel:
        """Write the source to ``path`` and import it; machine code is made when a Program is bound.

        Raises:
            KernelBuildFailed: the file cannot be imported.
        """
        return TritonKernel(for_interpreter(rendered) if is_interpreted() else rendered, path)


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
        shape, scalars = _launch(calls, tuning or self._rendered.tuning, self._rendered.form)
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


class TritonLauncher:
    """Launches the machine code directly: 5.6 µs a call on an H200's host against 8.1 µs through ``kernel[grid]``.

    The code was compiled for 16-byte aligned tensors on one device; any other call takes Triton's
    own road, which specialises again.

    Args:
        kernel: Triton's.
        dtypes: of the tensors.
        scalars: arguments after the tensors, constexpr ones too.
        programs: size of the grid.
        options: of :func:`compile_options`.
        entry: the kernel's name.

    Raises:
        KernelBuildFailed: Triton refuses the kernel.
    """

    def __init__(
        self, kernel: Any, dtypes: Sequence[str], scalars: Sequence[Any], programs: int, options: dict[str, int], entry: str
    ) -> None:
        import torch

        self._scalars = tuple(scalars)
        self._options = options
        self._grid = (programs, 1, 1)
        self._kernel = kernel
        self._device = torch.cuda.current_device()
        self._current_device: Callable[[], int] = torch.cuda.current_device
        self._on_device = torch.cuda.device
        try:
            kinds = [getattr(torch, dtype) for dtype in dtypes]
            compiled = kernel.warmup(*kinds, *self._scalars, grid=self._grid, **options)
        except Exception as error:
            raise KernelBuildFailed(kernel=entry, target=f"cuda:{self._device}", cause=_last_cause(error)) from error
        self._run = compiled[self._grid] if hasattr(compiled, "__getitem__") else None

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        device, low_bits = tensors[0].get_device(), 0
        if device != self._current_device():
            with self._on_device(device):
                self(*tensors)
            return
        for tensor in tensors:
            low_bits |= tensor.data_ptr()
        if self._run is not None and not low_bits & 15 and device == self._device:
            self._run(*tensors, *self._scalars)
        else:
            self._kernel[self._grid](*tensors, *self._scalars, **self._options)


def compile_options(num_warps: int, *, asserts: bool = False, is_exact: bool = False) -> dict[str, int]:
    """Return the options that every kernel is compiled with.

    Triton drops assertions unless it is asked for debugging, and asked for it checks sums of integers for overflow as well.

    Fused multiply-adds are asked for by name: kernels are checked and timed with them, and Triton 3.10 leaves them out unless
    asked (3.9 warns of it). It is what Triton up to 3.9 does of itself, and what nvcc does. An exact kernel has none: eager
    rounds each product.
    """
    debug = {"debug": True, "sanitize_overflow": False} if asserts else {}
    return {"num_warps": num_warps, "enable_fp_fusion": not is_exact} | debug


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
        every stage of Triton's pipeline by name; ``ptx`` and ``cubin`` among them.

    Raises:
        KernelBuildFailed: the cause is Triton's last line.
    """
    shape, scalars = _launch(calls_of(program, flatten_rows=False), rendered.tuning, rendered.form)
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
            is_known = parameter.is_constexpr or value == 1
            types.append("constexpr" if is_known else "i32" if -(2**31) <= value < 2**31 else "i64")
        known = {(n,): value for n, (value, kind) in enumerate(zip(values, types, strict=True)) if kind == "constexpr"}
        attributes = {(n,): [["tt.divisibility", 16]] for n, v in enumerate(values) if types[n] != "constexpr" and v % 16 == 0}
        signature = dict(zip(kernel.arg_names, types, strict=True))
        try:
            source = ASTSource(kernel, signature, known, attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        except Exception as error:
            raise KernelBuildFailed(kernel=rendered.entry, target=f"sm_{target}", cause=_last_cause(error)) from error
    return compiled.asm  # type: ignore[no-any-return]


def _constants(plans: Sequence[Schedule], *, is_looped: bool) -> list[str]:
    """The names of :func:`~fusion_advisor.codegen.triton.tiling.choose_shape`'s constants, in their order."""
    blocks = ["BLOCK_COLS"] if plans[0].kind == "flat" else ["BLOCK_ROWS", "BLOCK_COLS"]
    blocks += ["FULL"] if plans[0].kind == "rows" else []
    blocks += ["WHOLE"] if is_looped and any(parts_of(plan) for plan in plans) else []
    return ["INDEX", *blocks, *(["BY_FOUR"] if any(plan.numbers for plan in plans) else [])]


def fixed_arguments(call: Call) -> frozenset[str]:
    """Integers that a kernel is compiled for: in tiles all but the outermost size, which is that of the batch or of its tokens.

    A tile number is split by divisions, and its masks and addresses are most of what it does before its first load. Known sizes
    turn rope of one token from 1.19 into 1.09 µs and of 2,048 tokens from 10.42 into 9.90 µs (32 heads of 128, bfloat16, H200;
    torch.compile, which fixes them too, 1.19 and 9.91 µs). Rows that are reduced and flat runs gain 2 % or nothing, but for what
    their columns are divided by.
    """
    plan = call.plan
    own = zip(plan.arguments, call.arguments, strict=True)
    if plan.kind != "tiled":
        divisors = {plan.extents.get(value.args[1]) for value in plan.program.values if value.op == "quotient"}
        return frozenset(given for (name, _), (given, _) in own if name in divisors)
    return frozenset(given for (name, _), (given, _) in own if name != plan.sizes[0])


def _signature(
    pointers: Sequence[str], integers: Sequence[tuple[str, int]], constants: Sequence[str], fixed: frozenset[str]
) -> list[str]:
    lines = textwrap.wrap(", ".join(pointers), 110)
    if integers:
        named = ", ".join(name + ":~tl.constexpr" * (name in fixed) for name, _ in integers)
        lines += [line.replace("~", " ") for line in textwrap.wrap(named, 110)]
    lines.append(", ".join(f"{name}: tl.constexpr" for name in constants))
    return [line.removesuffix(",") for line in lines]


def _launch(calls: Sequence[Call], tuning: Tuning, form: Form) -> tuple[Shape, list[int]]:
    """The launch of a kernel, and its integers in the order of the signature."""
    shape, programs = choose_shapes([call.plan for call in calls], tuning, is_looped=form.is_looped)
    return shape, [value for _, value in (*starts(programs), *(item for call in calls for item in call.arguments))]


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
        raise KernelBuildFailed(kernel=rendered.entry, target="triton", cause=_last_cause(error)) from error
    return module


def _last_cause(error: BaseException) -> str:
    """The last line of the innermost error: Triton wraps one traceback per inlined function."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    with contextlib.suppress(IndexError):
        return f"{type(error).__name__}: {lines[-1][:200]}"
    return type(error).__name__
