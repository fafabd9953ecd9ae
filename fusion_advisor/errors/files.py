"""FA5xx: reports, traces, runs and plans, whether read or written."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class UnreadableReport(AdvisorError):
    """A report or capture that is truncated, damaged, or written by another program."""

    code = "FA501"
    message = "`{name}` is not readable as a report: {detail}"
    note = "nothing was changed"
    hint = "pass a run directory, its report.json or, to `plan`, its capture.json.gz; if one was cut short, run again"
    exit_code = 9


class UnreadableTrace(UnreadableReport):
    """A trace that is truncated, damaged, or not written by torch.profiler."""

    message = "`{name}` is not a readable trace: {detail}"
    note = "{known}"
    hint = (
        "export it again with `profiler.export_chrome_trace(...)` once the profiler has stopped; "
        "control characters can be taken out with `tr -d '\\000-\\037'`"
    )


class UnsafeName(UnreadableReport):
    """A name in a file that would lead out of the folder it belongs to."""

    message = "`{name}` does not name a file in `{folder}`: {detail}"
    note = "nothing was written there"
    hint = "fusion-advisor did not write this file, or the file was changed: run again"


class MissingKernels(AdvisorError):
    """Many launches in the trace have no kernel."""

    code = "FA502"
    message = "the trace has {kernels} of {launches} launched kernels; shares would be wrong"
    note = "{known}"
    hint = "record fewer steps, and synchronise the device before the profiler stops"
    exit_code = 6


class UnknownSchema(AdvisorError):
    """A report of another version of the program."""

    code = "FA503"
    message = "`{name}` follows the schema `{found}`; this version reads `{expected}`"
    note = "figures read with the wrong schema could be wrong without a sign, so nothing was read"
    hint = "read it with the version that wrote it, or run again with this one"
    exit_code = 9


class UnknownRun(AdvisorError):
    """A run that does not exist, or a prefix that fits none or several."""

    code = "FA504"
    message = "no run `{name}`: {detail}"
    hint = "{known}"
    exit_code = 9


class RunExists(AdvisorError):
    """The output directory already holds a run."""

    code = "FA505"
    message = "`{path}` already holds a run"
    hint = "choose another directory with -o, or pass --force to overwrite its report"
    exit_code = 2


class PlanMismatch(AdvisorError):
    """A saved plan that does not fit this model, this call or this device."""

    code = "FA506"
    message = "the plan of run `{run}` does not fit: {detail}"
    note = "the model was left as it was"
    hint = "run `fusion-advisor apply` again for this model and these inputs"
    exit_code = 9


class CannotSpecialize(AdvisorError):
    """A plan that does not fit another call of the same model."""

    code = "FA507"
    message = "the plan cannot be carried over to this call: {detail}"
    note = "the call still works, with the model's original ops"
    hint = "make a plan for it with `fa.apply(model, inputs)`, and join the two with `fused.include(other)`"
    exit_code = 9


class NoSuchState(AdvisorError):
    """`compare` was asked for a state of a run that was not measured."""

    code = "FA508"
    message = "the run `{run}` has no `{state}` step"
    note = "{why}"
    hint = "leave `:{state}` out, or run again and measure that step"
    exit_code = 9


class ProfilerAttached(AdvisorError):
    """A run under nsys or ncu: torch.profiler would get no kernel, so it is not started."""

    code = "FA509"
    message = "{tool} is attached, so torch.profiler was not started, and there is no report"
    note = "{recorded}"
    hint = "run the same command without {tool} for a report"
    exit_code = 6


class NoCapture(AdvisorError):
    """A run whose directory holds no capture, so that nothing can be planned from it."""

    code = "FA511"
    message = "there is no `{path}`"
    note = "`profile` and `apply` write the capture; an interrupted run, a traced file and a training step have none"
    hint = "run `fusion-advisor profile MODEL_ID -o DIR`, then `fusion-advisor plan DIR`"
    exit_code = 9


class NoPlan(NoCapture):
    """A folder that was loaded as a saved plan, and holds none."""

    message = "there is no saved plan in `{folder}`: it holds no capture.json.gz"
    note = ""
    hint = "a run directory of `fusion-advisor apply`, or of fa.apply(..., run_dir=...), is a saved plan"


class MachineTooBusy(AdvisorError):
    """The noise hid every gain that was expected."""

    code = "FA512"
    message = "could not tell what pays: this machine is too busy"
    note = "{detail}"
    hint = "run again when the machine is idle; the report has what was measured"
    exit_code = 6


class BadWeights(AdvisorError):
    """A --weights file that does not name jobs and their GPU-hours."""

    code = "FA513"
    message = "`{name}`: {detail}"
    hint = "the columns are job, gpu_hours and, if you like, model; one line for each job"
    exit_code = 9


class NoTraces(AdvisorError):
    """A pattern that matches no file."""

    code = "FA514"
    message = "no trace matches {patterns}"
    hint = "quote the pattern, so that the shell leaves ** alone: fusion-advisor fleet 'traces/**/*.json.gz'"
    exit_code = 2


class EngineLost(AdvisorError):
    """The Ray cluster went away while traces were read."""

    code = "FA515"
    message = "Ray is gone after {done} of {all} traces: {detail}"
    note = "the traces that were read are kept"
    hint = "run the command again: it reads only what is new"
    exit_code = 5


class TraceTooLarge(AdvisorError):
    """A trace whose first step alone does not fit into the memory of a worker."""

    code = "FA516"
    message = "`{name}` holds {events} events, and not one of its steps fits into a worker's memory"
    hint = "record fewer steps, or mark them: torch.profiler.schedule(...) and profiler.step()"
    exit_code = 9


class CannotExport(AdvisorError):
    """A run whose kept rewrites cannot be written in the format that was asked for."""

    code = "FA517"
    message = "the run cannot be exported: {detail}"
    note = "nothing was written"
    hint = "`fusion-advisor explain FA517` lists what each format can hold; a saved plan (`fa.load_plan`) holds the rest"
    exit_code = 9


class NothingToExport(AdvisorError):
    """A run that kept no kernel."""

    code = "FA518"
    message = "run `{run}` kept no kernel, so there is nothing to export"
    note = "nothing was written"
    hint = "`fusion-advisor report {run}` gives the reason for each rewrite that was removed"
    exit_code = 9


class ExportExists(AdvisorError):
    """The folder of an export is there already."""

    code = "FA519"
    message = "`{path}` exists"
    note = "nothing was written"
    hint = "choose another folder with --to, or pass --force to replace it"
    exit_code = 2


class LicenceForbids(AdvisorError):
    """A kernel whose licence does not allow that it is passed on."""

    code = "FA520"
    message = "kernel `{kernel}` has the licence `{licence}`, which does not allow that it is passed on"
    note = "nothing was written"
    hint = "run apply again with --skip {kernel}, or change `license` in its kernel.toml if you may"
    exit_code = 9


class RunInUse(AdvisorError):
    """Another process writes a run into the output directory."""

    code = "FA521"
    message = "another run is writing to `{path}` now"
    note = "two runs in one directory would mix their kernels and reports"
    hint = "choose another directory with -o, or wait until the other run has ended"
    exit_code = 2


class WeightsApart(AdvisorError):
    """A saved plan whose merged or odd-width GEMMs need the model's weights to lie as in the plan's model."""

    code = "FA522"
    message = "the plan of run `{run}` has {title}, for which weights must lie together in memory, and this model's do not"
    note = "the model was left as it was"
    hint = "call `fusion_advisor.lay_out_weights(model)` ahead of `apply`: it moves weights and changes no value"
    exit_code = 9
