"""Export as an AOTInductor package: trace, compile, build the op library, and compare the result with the fused model."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.aot_package.op_source import entries, in_library, library_ops, refuse_python_launches, traced_ops
from fusion_advisor.export.aot_package.stages import Stages
from fusion_advisor.export.aot_package.traced import imported, named_tensors, traced
from fusion_advisor.export.collect import rewritten
from fusion_advisor.export.export import check_export, package_name
from fusion_advisor.export.extension.files import extension_context, library_sources
from fusion_advisor.export.kernel_files.files import ops_context, rendered
from fusion_advisor.export.package import files_of
from fusion_advisor.export.printed import Printed, printed
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.runtime.torch_internals.inductor import compile_and_package, missing_for_packages
from fusion_advisor.workload.load import LoadedWorkload

_FLOORS = {"float32": 1e-5, "float64": 1e-12}
"""Relative difference from the fused model that Inductor's other order of sums may make; 2e-2 for half types."""


def export_pt2(
    loaded: LoadedWorkload, saved: SavedPlan, folder: Path, *, force: bool = False, stages: Stages | None = None
) -> tuple[str, ...]:
    """Write a compiled package of the fused model, and the library of its kernels.

    Args:
        loaded: the model of the run, and its call.
        saved: the plan.
        folder: of the export, whose name becomes the ops' namespace.
        force: replace what is there.
        stages: that are announced.

    Returns:
        sentences about kept rewrites that the package does not have.

    Raises:
        NothingToExport: the run kept no kernel.
        ExportExists: the folder is there, and ``force`` was not given.
        PlanMismatch: the model is not that of the run any more.
        CannotExport: the call passes a cache, a kernel is launched by Python, torch is too old, or AOTInductor refuses the model.
        CannotWrite: the file system refuses.
    """
    check_export(saved, folder, force=force)
    if missing := missing_for_packages():
        raise CannotExport(detail=f"torch {torch.__version__} has no {missing}")
    name, stages = package_name(folder), stages or Stages()
    with stages.stage("capture again"):
        graph = rewritten(loaded, saved)
    with stages.stage("print the source"):
        found = printed(loaded, graph)
        refuse_objects(found.specs)
        refuse_python_launches(found.ops)
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as place:
        files = _made(loaded, saved, found, name, Path(place), stages)
        with stages.stage("write"):
            write_folder(files, folder, force=force)
    return found.left_out


def refuse_objects(specs: Collection[str]) -> None:
    """Refuse a call that passes a cache: a compiled model's arguments are tensors.

    Args:
        specs: what the objects among the call's arguments hold, by the names of the arguments.

    Raises:
        CannotExport: there is one; its name is in the message.
    """
    if specs:
        name = next(iter(specs))
        raise CannotExport(
            detail=f"its argument `{name}` is a cache, and a compiled model takes tensors alone; use --format package for it"
        )


def _made(
    loaded: LoadedWorkload, saved: SavedPlan, found: Printed, name: str, place: Path, stages: Stages
) -> dict[str, bytes | Path]:
    """Make everything in a folder for temporary files; return the content of the export."""
    call = {one: loaded.kwargs.get(one) for one, _ in found.tensors} | _positional(loaded)
    tensors = {one: value for one, value in call.items() if isinstance(value, torch.Tensor)}
    context = pt2_context(saved, found, name)
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    files: dict[str, bytes | Path] = {"example.pt": buffer.getvalue(), "LICENSE": rendered("export/LICENSE", context)}
    library = in_library(found.ops)
    files |= {"run.py": rendered("export/pt2/run.py", context)}
    files |= {f"kernels/{op.file}": op.rendered.file_text.encode() for op in found.ops if op.rendered.suffix != ".cu"}
    files |= op_library_files(found, context)
    made = place / "made"
    _write(made, files)
    # nvcc compiles the library while AOTInductor compiles the model
    building = stages.meanwhile([sys.executable, "build.py"], made) if library else contextlib.nullcontext(None)
    results = place / "results.pt"
    alone = stages.meanwhile([sys.executable, "-c", _RUN_ALONE, "run.py", "--save", str(results)], made, waits=True)
    with building as built, alone as ran_alone:
        outputs, eager = _compiled(loaded, saved, found, name, place, tensors, stages)
        if built is not None:
            with stages.stage("op library"):
                stages.note(_require(built(), "its op library"))
        (place / "model.pt2").rename(made / "model.pt2")
        with stages.stage("run it alone"):
            _require(ran_alone(), "the compiled model")
            context["agreement"] = _agreement(results, outputs, eager)
    files["README.md"] = rendered("export/pt2/README.md", context)
    return files | {one: made / one for one in ("model.pt2", *[context["library_file"]] * bool(library))}


def op_library_files(found: Printed, context: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the sources of the op library and the script that builds it, by path; nothing where there is none.

    Args:
        found: the printed forward and its ops.
        context: of :func:`pt2_context`.
    """
    if context["launches"]:
        return {**library_sources(found.ops, context), "build.py": rendered("export/extension/build.py", context)}
    if context["library_ops"]:
        return {one: rendered(f"export/pt2/{one}", context) for one in ("ops.cpp", "build.py")}
    return {}


def pt2_context(saved: SavedPlan, found: Printed, name: str) -> dict[str, Any]:
    """Return what the templates print: the ops by what launches them, the call, what is left out.

    Args:
        saved: the plan of the run.
        found: the printed forward and its ops.
        name: of the export, and the ops' namespace.
    """
    library = in_library(found.ops)
    compiled_in = [op for op in found.ops if op not in library]
    on_cpu = [op for op in library if op.rendered.suffix == ".cpp"]
    context = ops_context(found.ops, saved.report, name)
    native = extension_context(found.ops, context, saved.report.environment.capability)
    return context | {one: native[one] for one in ("native_ops", "launches", "arch")} | {
        "library_file": f"lib{name}_ops.so" if library else "", "namespace": name,
        "library_ops": library_ops(on_cpu), "entries": entries(on_cpu), "left_out": found.left_out,
        "checks_less": [op.name for op in compiled_in if op.rendered.has_asserts], "compiled_in": bool(compiled_in),
        "values": found.values, "class_name": found.context["class_name"],
        "tensors": [(one, tuple(meta.shape), tuple(meta.stride), meta.dtype) for one, meta in found.tensors],
    }  # fmt: skip


def _compiled(
    loaded: LoadedWorkload, saved: SavedPlan, found: Printed, name: str, place: Path, tensors: Mapping[str, torch.Tensor],
    stages: Stages,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """Write ``model.pt2``; return the outputs of the fused model and of the model as it is."""
    source = place / "source"
    listed = traced_ops(ops_context(found.ops, saved.report, name), found.ops)
    own = {"ops.py": rendered("export/ops.py", listed), "_compiled.py": rendered("export/pt2/_compiled.py", listed)}
    _write(source, files_of(found, saved.report, name) | {f"{name}/{file}": content for file, content in own.items()})
    with imported(source, name) as package:
        with stages.stage("trace"), torch.no_grad():
            eager = named_tensors(loaded.model(**tensors, **found.values))
            program, outputs = traced(package, loaded.model, tensors, found.values)
        try:
            with stages.stage("AOTInductor"):
                is_on_gpu = found.expected["device"] == "cuda"
                spent = compile_and_package(program, place / "model.pt2", is_on_gpu=is_on_gpu)
                stages.note(", ".join(f"{part} {seconds:.1f} s" for part, seconds in spent.items()))
        except (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError) as error:
            line = next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)
            raise CannotExport(detail=f"AOTInductor refuses its graph: {line[:300]}") from error
    return outputs, eager


def _positional(loaded: LoadedWorkload) -> dict[str, Any]:
    """Return the call's positional arguments by the names of the forward's parameters."""
    names = loaded.model.forward.__code__.co_varnames[1:] if loaded.args else ()
    return dict(zip(names, loaded.args, strict=False))


_RUN_ALONE = """\
import runpy, sys
import torch, torch._inductor.package
sys.stdin.read()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as soon as its input ends. torch is imported before, beside the compilation: 4 s on two cores of an AMD EPYC."""


def _agreement(results: Path, outputs: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor]) -> str:
    """Say how near a package's results in a process of its own come to the fused model's.

    Raises:
        CannotExport: they are too far from them.
    """
    found = torch.load(results, weights_only=True, map_location="cpu")
    if all(torch.equal(found[name], value.cpu()) for name, value in outputs.items()):
        return "Its results have the fused model's bits."
    worst, own = (max(_difference(other[name], value) for name, value in outputs.items()) for other in (found, eager))
    dtype = str(next(iter(outputs.values())).dtype).removeprefix("torch.")
    if worst > max(2 * own, _FLOORS.get(dtype, 2e-2)):
        raise CannotExport(detail=f"its compiled results differ from the fused model's by {worst:.1e}, eager's by {own:.1e}")
    return (
        f"Its results differ from the fused model's by {worst:.1e} (norm of the difference), eager's by {own:.1e}."
        " The kernels are the same; Inductor compiles the other ops in its own way."
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.cpu().double().nan_to_num(), other.cpu().double().nan_to_num()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def _require(done: subprocess.CompletedProcess[str], what: str) -> str:
    """Refuse to go on where a process failed; return the last line that it wrote."""
    if done.returncode:
        raise CannotExport(detail=f"{what} does not work: {why_it_failed(done)}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def why_it_failed(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line that says why a process failed, or the signal that ended it and a compiler that is the usual cause.

    On one H200's host ``CXX`` named another compiler than the system's. AOTInductor's packages of any model that it made
    ended with SIGSEGV in ``std::regex`` when they were loaded; those that the system's g++ 13.3 made ran.

    Args:
        done: the process, with what it wrote.
    """
    if done.returncode < 0:
        name = next((one.name for one in signal.Signals if one == -done.returncode), str(-done.returncode))
        compiler = os.environ.get("CXX", "")
        advice = f"; CXX is {compiler}: try the compiler of the system, with CXX unset" if compiler else ""
        return f"{name} ended it{advice}"
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    shown = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else f"exit status {done.returncode}")
    return shown[:300]


def _write(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(content, bytes)
        path.write_bytes(content)
