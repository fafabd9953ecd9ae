"""Applies a model once in place, saves its plan, exports it in every format, and times what was exported next to it."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.start_up.child import Place

FORMATS = {"package": ("package", "package_graph", "plan"), "kernels": (), "patch": (), "pt2": ("pt2", "pt2_graph")}
"""Formats, and the ways that are timed next to the fused model once each is written: what is asked for most comes first."""


def applied(place: Place) -> None:
    """Apply, export, compare."""
    from tools.start_up.child import request

    torch, settings = place.torch, place.settings
    advisor, loader = importlib.import_module("fusion_advisor"), importlib.import_module("fusion_advisor.workload.load")
    loaded = loader.load_workload(request(place))
    model, config = loaded.model, loaded.model.config
    if loaded.args:
        raise RuntimeError("the call has arguments without names")
    made = {
        "class": [type(model).__module__, type(model).__qualname__], "device": loaded.record.device,
        "config_class": [type(config).__module__, type(config).__qualname__], "config": config.to_dict(),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }  # fmt: skip
    (place.folder / "model.json").write_text(json.dumps(made, default=str))
    torch.save(loaded.kwargs, place.folder / "call.pt")
    place.wait()
    place.laps.end("load")
    fused = advisor.apply(model, loaded.kwargs, run_dir=place.folder / "run", **settings["options"])
    place.laps.end("apply")
    place.steps(lambda: fused(**loaded.kwargs), loaded.kwargs)
    place.note(wall_s=place.laps.wall_s, cpu_s=place.laps.cpu_s, fallbacks=list(fused.fallbacks))
    for form in settings["formats"]:
        ways = FORMATS[form]
        export(place, fused, form)
        for way in ways:
            compare(place, fused, loaded, way, _INSTALL[way])


def export(place: Place, fused: Any, form: str) -> None:
    """Export in one format, and write down how long it took or why it is not there."""
    from tools.start_up.child import Noted

    started = time.perf_counter()
    with Noted(place, export=form):
        options = {"with_cache": True} if form == "package" else {}
        to = place.folder / "exports" / f"{form}_of_run"
        left_out = fused.export(to, format=form, within_s=place.settings.get("within_s"), progress=Lines(), **options)
        place.note(export=form, seconds=round(time.perf_counter() - started, 2), left_out=list(left_out))


class Lines:
    """Prints when each stage begins, for a process that is ended in the middle too.

    No subclass of ``Progress``: the package's process imports this module, and nothing of fusion_advisor.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def phase(self, name: str) -> None:
        """A stage begins."""
        print(f"{time.perf_counter() - self._started:7.1f} s  {name}", flush=True)

    def note(self, text: str) -> None:
        """What it found."""
        print(f"{'':12}{text}", flush=True)


def compare(place: Place, fused: Any, loaded: Any, way: str, install: Callable[..., Any]) -> None:
    """Time a way and the fused model in place in turn; the share is of their medians."""
    from tools.start_up.child import ROUNDS, Noted, counters, timed

    restore = counters(place.torch, loaded.kwargs)
    own: list[float] = []
    other: list[float] = []
    with Noted(place, against=way):
        step, done = install(place, loaded)
        with importlib.import_module("fusion_advisor.timing.alone").alone():
            for _ in range(ROUNDS + 3):
                own.append(timed(place, lambda: fused(**loaded.kwargs), restore))
                other.append(timed(place, step, restore))
        done()
        own_ms, other_ms = statistics.median(own[3:]), statistics.median(other[3:])
        place.note(against=way, in_place_ms=own_ms, other_ms=other_ms, ratio=round(other_ms / own_ms, 4))


def twin_of(place: Place) -> Any:
    """Return another model of the same configuration on the same device."""
    from tools.start_up.child import request

    loader = importlib.import_module("fusion_advisor.workload.load")
    return loader.load_workload(request(place)).model


def package(place: Place, loaded: Any, *, with_graph: bool = False) -> Any:
    """Put the exported package into a twin."""
    sys.path.insert(0, str(place.folder / "exports" / "package_of_run"))
    exported = importlib.import_module("package_of_run")
    model = exported.apply(twin_of(place), cuda_graph=with_graph)

    def done() -> None:
        if fallbacks := exported.fallbacks(model):
            raise RuntimeError(f"steps ran the model's own forward: {next(iter(fallbacks))}")

    return (lambda: model(**loaded.kwargs)), done


def package_graph(place: Place, loaded: Any) -> Any:
    """Put the exported package into a twin, as a CUDA graph."""
    return package(place, loaded, with_graph=True)


def plan(place: Place, loaded: Any) -> Any:
    """Put the saved plan into a twin."""
    advisor = importlib.import_module("fusion_advisor")
    fused = advisor.apply(twin_of(place), loaded.kwargs, plan=advisor.load_plan(place.folder / "run"))

    def done() -> None:
        if fused.fallbacks:
            raise RuntimeError(f"steps ran the original ops: {next(iter(fused.fallbacks))}")

    return (lambda: fused(**loaded.kwargs)), done


def pt2(place: Place, loaded: Any, **options: bool) -> Any:
    """Load the exported AOTInductor package."""
    folder = place.folder / "exports" / "pt2_of_run"
    if not folder.is_dir():
        raise RuntimeError("no pt2 was exported")
    sys.path.insert(0, str(folder))
    call = importlib.import_module("run").load(**options)
    inputs = {name: value for name, value in loaded.kwargs.items() if isinstance(value, place.torch.Tensor)}
    return (lambda: call(**inputs)), lambda: None


def pt2_graph(place: Place, loaded: Any) -> Any:
    """Load the exported AOTInductor package and record its call as a CUDA graph."""
    return pt2(place, loaded, cuda_graph=True)


_INSTALL = {"package": package, "package_graph": package_graph, "plan": plan, "pt2": pt2, "pt2_graph": pt2_graph}
