"""The report's background: its glossary, and the machine and workload that it was measured on."""

from __future__ import annotations

from fusion_advisor import units
from fusion_advisor.records import Report
from fusion_advisor.report import clocks
from fusion_advisor.report.escape import plural

GLOSSARY = (
    ("op", "One ATen operation of the captured graph, for example mul or mean."),
    ("kernel", "One function that runs on the device. An eager op launches one or more."),
    ("launch", "One start of a kernel from the host, which costs a few microseconds of the host's time."),
    ("chain", "Neighbouring pointwise and reduction ops that pass values on and could be one kernel."),
    ("site", "One place in the model where a chain occurs. Equal chains of different layers are sites of one row."),
    ("fusion", "A chain's sites replaced by one kernel."),
    ("piece", "Sizes that one graph serves, because the model assumes the same of all of them."),
    ("point", "Sizes at which the rewrites of a piece were built, checked and timed."),
    ("floor", "Time that no kernel can go below: outside values read once and results written once, at the copy's speed."),
    ("share", "Part of the captured step's kernel time."),
    ("speedup", "Time before divided by time after: above 1 is faster."),
    ("95% interval", "Where the median lies with 95% certainty, from the order of the measured times."),
    ("A/A noise", "How much a step differs from itself when it is measured twice. Smaller gains are not counted."),
    ("after a rest", "One step on a device that was idle for twice as long before, so that no power limit lowers its clock."),
    ("oracle", "The same computation in higher precision, against which both the fused and the original error are taken."),
    ("relative L2", "Length of the error over length of the oracle's result."),
    ("pointwise", "An op whose every output element depends on the input elements at the same place."),
    ("reduction", "An op that sums or compares along a dimension: mean, softmax, layer norm."),
    ("launch-bound", "Part of the step is the device waiting for the host. Fewer launches and a CUDA graph shorten it."),
    ("roofline", "Speed against operations per byte, under what the device's memory and arithmetic allow."),
)
"""Terms of the report: (term, meaning)."""


def environment_rows(report: Report) -> tuple[tuple[str, str], ...]:
    """Environment and workload as (name, value), empty values left out."""
    env, work, band = report.environment, report.workload, report.bandwidth
    rows = (
        ("Device", env.device_name + (f" (compute capability {env.capability})" if env.capability else "")),
        ("Device memory", units.size(env.device_memory_bytes) if env.device_memory_bytes else ""),
        ("Measured copy bandwidth", units.bandwidth(report.bandwidth.copy_bytes_per_s)),
        (
            "Measured read, write, triad",
            ", ".join(units.bandwidth(speed) for speed in (band.read_bytes_per_s, band.write_bytes_per_s, band.triad_bytes_per_s))
            if band.read_bytes_per_s
            else "",
        ),
        ("Smallest kernel", units.duration(report.bandwidth.launch_ns)),
        ("fusion-advisor", env.tool),
        ("Commit", env.commit),
        ("Templates and kernels", env.templates),
        *clocks.environment_rows(report),
        ("torch", env.torch),
        ("triton", env.triton),
        ("transformers", env.transformers),
        ("CUDA", env.cuda),
        ("Driver", env.driver),
        ("Compiler", env.compiler),
        ("Python", env.python),
        ("System", f"{env.os}, {plural(env.cores, 'core')}" if env.cores else env.os),
        ("Container", env.container),
        ("Model", work.model_id),
        ("Revision", work.revision or "none recorded"),
        ("Weights", work.weights),
        (
            "Parameters",
            f"{units.number(work.parameter_count)} in {units.size(work.parameter_bytes)}" if work.parameter_count else "",
        ),
        ("Inputs", "; ".join(f"{name} {list(meta.shape)} {meta.dtype}" for name, meta in work.inputs)),
        ("Phase, dtype", f"{work.phase}, {work.dtype}"),
        ("Cached tokens", str(work.context) if work.context else ""),
        ("New tokens", str(work.new_tokens) if work.new_tokens else ""),
        ("Seed", str(work.seed)),
        ("Config hash", report.config_hash),
    )
    return tuple((name, value) for name, value in rows if value)
