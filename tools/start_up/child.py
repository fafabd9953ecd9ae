"""One way of running a model, from the start of its process to its steps: ``python -m tools.start_up.child WAY FOLDER STARTED``.

Facts are appended to ``FOLDER/WAY.jsonl`` as they are found, so that a process that is ended in the middle leaves what it had.
torch is imported here and nowhere above: how long that takes is one of the facts.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

STEPS = 30
ROUNDS = 30


class Laps:
    """Seconds since the process started, phase by phase: wall time, and processor time of all threads."""

    def __init__(self, started: float) -> None:
        """Begin.

        Args:
            started: when the process was started (s, of ``time.time``).
        """
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self._wall, self._cpu = started, 0.0

    def end(self, phase: str) -> None:
        """End a phase; what lies between this call and the one before counts for it."""
        wall, cpu = time.time(), time.process_time()
        self.wall_s[phase] = round(self.wall_s.get(phase, 0.0) + wall - self._wall, 4)
        self.cpu_s[phase] = round(self.cpu_s.get(phase, 0.0) + cpu - self._cpu, 4)
        self._wall, self._cpu = wall, cpu


class Noted:
    """Writes down why its block failed, whatever the reason: all else is measured all the same."""

    def __init__(self, place: Place, **row: object) -> None:
        """Prepare.

        Args:
            place: where to write.
            row: what failed.
        """
        self._place, self._row = place, row

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Write the error's first line down and print all of it; exits and interrupts go on."""
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        self._place.note(**self._row, failed=f"{type(error).__name__}: {lines[0][:300]}")
        return True


class Place:
    """The folder of a measurement, and what the process that applied the model left there."""

    def __init__(self, folder: Path, way: str, started: float) -> None:
        self.folder, self.way = folder, way
        self.settings = json.loads((folder / "settings.json").read_text())
        self.laps = Laps(started)
        self.laps.end("python")
        self.torch = importlib.import_module("torch")
        self.laps.end("torch")

    def note(self, **facts: object) -> None:
        """Write facts down."""
        with (self.folder / f"{self.way}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def wait(self) -> None:
        """Wait for the GPU, where there is one."""
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def import_model(self) -> type:
        """Import transformers and the model's module; return the model's class."""
        made = json.loads((self.folder / "model.json").read_text())
        home, name = made["class"]
        kind: type = getattr(importlib.import_module(home), name)
        self.laps.end("transformers")
        return kind

    def load_model(self, kind: Any) -> tuple[Any, dict[str, Any]]:
        """Make the model with random weights on its device, and read its call."""
        torch, made = self.torch, json.loads((self.folder / "model.json").read_text())
        home, name = made["config_class"]
        config = getattr(importlib.import_module(home), name).from_dict(made["config"])
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, made["dtype"]))
        try:
            with torch.device(made["device"]):
                model = kind(config)
        finally:
            torch.set_default_dtype(before)
        call = torch.load(self.folder / "call.pt", weights_only=False, map_location=made["device"])
        self.wait()
        self.laps.end("weights")
        return model.eval(), call

    def first_step(self, step: Callable[[], object]) -> None:
        """Make the first step and write the phases down."""
        step()
        self.wait()
        self.laps.end("first step")
        self.note(wall_s=self.laps.wall_s, cpu_s=self.laps.cpu_s)

    def steps(self, step: Callable[[], object], call: object) -> None:
        """Time more steps and write their median down."""
        restore = counters(self.torch, call)
        times = [timed(self, step, restore) for _ in range(STEPS + 3)][3:]
        self.note(step_ms=statistics.median(times), fastest_ms=min(times), steps=STEPS)


def counters(torch: Any, call: object) -> Callable[[], None]:
    """Return what sets the whole numbers in a call's objects back: a cache counts its tokens, and has room for so many alone."""
    found = [(one, one.clone()) for one in tensors_of(torch, call, 0) if not one.dtype.is_floating_point and one.numel() == 1]

    def restore() -> None:
        for tensor, value in found:
            tensor.copy_(value)

    return restore


def tensors_of(torch: Any, value: object, depth: int) -> Iterator[Any]:
    """Yield the tensors of a call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 6 and not isinstance(value, torch.nn.Module):
        inner: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in inner or getattr(value, "__dict__", {}).values():
            yield from tensors_of(torch, item, depth + 1)


def timed(place: Place, step: Callable[[], object], restore: Callable[[], None]) -> float:
    """Return the wall time of a step (ms), the GPU's work included."""
    restore()
    place.wait()
    started = time.perf_counter()
    step()
    place.wait()
    return (time.perf_counter() - started) * 1e3


def eager(place: Place) -> None:
    """The model as it is."""
    model, call = place.load_model(place.import_model())
    place.first_step(lambda: model(**call))
    place.steps(lambda: model(**call), call)


def compiled(place: Place) -> None:
    """torch.compile, default mode."""
    model, call = place.load_model(place.import_model())
    fast = place.torch.compile(model)
    place.first_step(lambda: fast(**call))
    place.steps(lambda: fast(**call), call)


def package(place: Place, *, with_graph: bool = False) -> None:
    """The exported package, where fusion_advisor is not imported."""
    kind = place.import_model()
    model, call = place.load_model(kind)
    sys.path.insert(0, str(place.folder / "exports" / "package_of_run"))
    exported = importlib.import_module("package_of_run")
    place.laps.end("own imports")
    exported.apply(model, cuda_graph=with_graph)
    place.laps.end("put in")
    place.first_step(lambda: model(**call))
    place.steps(lambda: model(**call), call)
    if fallbacks := exported.fallbacks(model):
        raise RuntimeError(f"steps ran the model's own forward: {next(iter(fallbacks))}")
    if "fusion_advisor" in sys.modules:
        raise RuntimeError("fusion_advisor was imported")


def package_graph(place: Place) -> None:
    """The exported package, replayed as a CUDA graph from its second step on."""
    package(place, with_graph=True)


def plan(place: Place) -> None:
    """The saved plan, on a model that fusion_advisor loads."""
    place.import_model()
    advisor, pause = importlib.import_module("fusion_advisor"), importlib.import_module("fusion_advisor.runtime.gc_pause")
    saved = advisor.load_plan(place.folder / "run")
    with pause.collector_paused():  # as in fusion_advisor.load_plan
        loader = importlib.import_module("fusion_advisor.workload.load")
        restore = importlib.import_module("fusion_advisor.fuse.live.restore_plan")
        progress = importlib.import_module("fusion_advisor.fuse.plan.progress")
    place.laps.end("own imports")
    loaded = loader.load_workload(request(place))
    place.wait()
    place.laps.end("weights")
    clock = progress.PhaseClock(progress.Progress())
    fused = restore.apply_plan(loaded, saved, clock)
    place.laps.end("put in")
    place.first_step(lambda: fused(*loaded.args, **loaded.kwargs))
    place.note(put_in_s=dict(clock.durations_s), started=fused.started)
    place.steps(lambda: fused(*loaded.args, **loaded.kwargs), loaded.kwargs)
    if fused.fallbacks:
        raise RuntimeError(f"steps ran the original ops: {next(iter(fused.fallbacks))}")


def pt2(place: Place, **options: bool) -> None:
    """The exported AOTInductor package; its weights are inside, so that reading it reads them too."""
    folder = place.folder / "exports" / "pt2_of_run"
    if not folder.is_dir():
        raise RuntimeError("no pt2 was exported")
    sys.path.insert(0, str(folder))
    call = importlib.import_module("run").load(**options)
    inputs = place.torch.load(folder / "example.pt", weights_only=True)
    place.wait()
    place.laps.end("weights")
    place.first_step(lambda: call(**inputs))
    place.steps(lambda: call(**inputs), inputs)


def pt2_graph(place: Place) -> None:
    """The exported AOTInductor package, replayed as a CUDA graph."""
    pt2(place, cuda_graph=True)


def aoti_make(place: Place) -> None:
    """Compile the plain model with AOTInductor, its weights left outside."""
    torch = place.torch
    model, call = place.load_model(place.import_model())
    program = torch.export.export(model, (), call)
    place.laps.end("trace")
    options = {"aot_inductor.package_constants_in_so": False, **host_options(call)}
    torch._inductor.aoti_compile_and_package(program, package_path=str(place.folder / "plain.pt2"), inductor_configs=options)
    place.laps.end("compile")
    place.note(made_s=place.laps.wall_s)


def aoti(place: Place) -> None:
    """AOTInductor's package of the plain model, given the weights of a model that was loaded as for the other ways."""
    torch = place.torch
    if not (place.folder / "plain.pt2").is_file():
        raise RuntimeError("AOTInductor made no package")
    model, call = place.load_model(place.import_model())
    importlib.import_module("torch._inductor.config")
    place.laps.end("own imports")
    with torch._inductor.config.patch(host_options(call)):
        fast = torch._inductor.aoti_load_package(str(place.folder / "plain.pt2"))
    own = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    wanted = fast.get_constant_fqns()
    if missing := [name for name in wanted if name not in own]:
        raise RuntimeError(f"the package wants `{missing[0]}`, which is no tensor of the model")
    fast.load_constants({name: own[name] for name in wanted}, check_full_update=True)
    place.laps.end("put in")
    place.first_step(lambda: fast(**call))
    place.steps(lambda: fast(**call), call)


def host_options(call: Mapping[str, Any]) -> dict[str, bool]:
    """Return Inductor's options for code on the host: for a GPU it has no vector instructions, as in the exported ``pt2``.

    Else torch 2.11 compiles programs and imports torch in six processes to know them, at the compilation and at each start.
    """
    is_on_gpu = any(getattr(one, "is_cuda", False) for one in call.values())
    return {"cpp.vec_isa_ok": False} if is_on_gpu else {}


def request(place: Place) -> Any:
    """Return the request of the run."""
    made = importlib.import_module("fusion_advisor.workload.request").WorkloadRequest
    return made(**place.settings["request"])


def runners() -> dict[str, Callable[[Place], None]]:
    """Return what runs each way."""
    from tools.start_up import in_place  # after torch's import was timed

    return {
        "eager": eager, "compile_cold": compiled, "compile": compiled, "package": package, "package_graph": package_graph,
        "plan": plan, "pt2": pt2, "pt2_graph": pt2_graph, "aoti_make": aoti_make, "aoti": aoti, "apply": in_place.applied,
    }  # fmt: skip


def main(way: str, folder: str, started: str) -> None:
    """Run one way; a failure is a fact like any other."""
    place = Place(Path(folder), way, float(started))
    with Noted(place), place.torch.no_grad():
        runners()[way](place)


if __name__ == "__main__":
    main(*sys.argv[1:])
