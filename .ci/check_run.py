"""Checks the files of `fusion-advisor apply gpt2`: `check_run.py RUN` (exit 6 if only the timing said no), `--install RUN`.

Whether a kernel pays is a measurement, and neighbours on the same machine can drown it. That the kernel was rendered, built, is
right and goes into the model is none: `--install` takes the run's plan as if GELU had been kept, and puts it in place.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

SITES = 12
UNDECIDED = 6
"""The command's own code for a measurement that could not tell."""
FILES = ("report.html", "report.md", "capture.json.gz", "request.json", "log.txt", "trace.before.json.gz")


def main() -> int:
    """Check a run; return the exit code."""
    run = Path(sys.argv[-1])
    report = json.loads((run / "report.json").read_text())
    gelu = next(fusion for fusion in report["fusions"] if fusion["kernel"] == "gelu_tanh")
    check_kernel(run, report, gelu)
    if "--install" in sys.argv:
        return install(run, report)
    if gelu["status"] != "kept":
        print(f"gelu_tanh: {gelu['status']}: {gelu['reason']}")
        return UNDECIDED
    receipt = gelu["receipt"]
    assert (receipt["sites_replaced"], receipt["launches_after"]) == (SITES, SITES), receipt
    assert report["model_check"]["is_passed"], report["model_check"]
    print(f"gelu_tanh: kept, {SITES} sites replaced, {SITES} launches seen, the model's numbers pass")
    return 0


def check_kernel(run: Path, report: dict[str, Any], gelu: dict[str, Any]) -> None:
    """See that the files are there, and the C++ kernel rendered, built, right and faster than the ops it stands for."""
    for name in FILES:
        assert (run / name).stat().st_size > 0, name
    assert report["status"] == "applied", report["status"]
    assert report["workload"]["weights"] == "random", report["workload"]["weights"]
    (kernel,) = gelu["rendered"]
    assert kernel["backend"] == "cpp", kernel["backend"]
    assert (run / kernel["path"]).read_text() == kernel["source"], kernel["path"]
    assert kernel["build_ns"] > 0
    assert gelu["numerics"]["is_passed"], gelu["numerics"]
    assert gelu["receipt"]["sites_matched"] == SITES, gelu["receipt"]
    assert 2 * gelu["chain_after"]["median_ns"] < gelu["chain_before"]["median_ns"], "alone it is not even twice as fast"


def install(run: Path, report: dict[str, Any]) -> int:
    """Put the run's GELU kernel into the model, compare what it computes, and take it out again."""
    import torch

    import fusion_advisor as fa
    from fusion_advisor.cli.common import core

    decided = run.with_name(run.name + "-decided")
    shutil.copytree(run, decided)
    for fusion in report["fusions"]:
        if fusion["kernel"] == "gelu_tanh":
            fusion["status"] = "kept"
    (decided / "report.json").write_text(json.dumps(report))
    loaded = core.load_workload(core.load_request((run / "request.json").read_bytes(), "request.json"))
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    with torch.no_grad():
        eager, tanh_before = call(loaded.model, loaded.kwargs)
        with fa.apply(loaded.model, dict(loaded.kwargs), plan=fa.load_plan(decided)) as fused:
            ours, tanh_after = call(fused, loaded.kwargs)
            assert not fused.fallbacks, fused.fallbacks
        again, tanh_again = call(loaded.model, loaded.kwargs)
    assert (tanh_before, tanh_after, tanh_again) == (SITES, 0, SITES), (tanh_before, tanh_after, tanh_again)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert torch.equal(again, eager), "revert did not bring the original back"
    assert all(torch.equal(before[name], value) for name, value in loaded.model.state_dict().items())
    print(f"gelu_tanh: put in place, {tanh_before} calls of aten::tanh became {tanh_after}, same numbers, reverted")
    return 0


def call(model: Any, inputs: dict[str, Any]) -> tuple[Any, int]:
    """Return a call's logits, and how often it ran aten::tanh."""
    import torch

    from fusion_advisor.capture.trace.profiler import markers_logged

    model(**inputs)  # dynamo traces in the first call, with ops of its own
    profiler = torch.profiler.profile()
    with markers_logged():
        profiler.start()
    logits = model(**inputs).logits
    with markers_logged():
        profiler.stop()
    return logits, sum(event.count for event in profiler.key_averages() if event.key == "aten::tanh")


if __name__ == "__main__":
    sys.exit(main())
