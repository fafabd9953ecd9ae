"""One class per user mistake: the code, the sentence, the hint and the exit code live on the class.

Raise sites give only the facts (``raise UnknownModel(model_id=..., near=...)``); the CLI catches :class:`AdvisorError` once and
prints it in rustc's shape. Exit codes: 2 usage, 3 environment, 4 model, 5 memory or disk, 6 measurement unusable, 7 numerics
with --strict, 8 compile with --strict, 9 bad input file, 10 gate failed, 130 interrupted.
"""

from __future__ import annotations

from typing import ClassVar


class AdvisorError(Exception):
    """Base class of every mistake that a user can fix.

    Class attributes:
        code: ``FA101`` …; ``fusion-advisor explain CODE`` prints the long text.
        message: one sentence with ``{facts}`` in it.
        note: further facts; not printed when empty.
        hint: what to do next.
        exit_code: the process's exit code.
    """

    code: ClassVar[str] = "FA000"
    message: ClassVar[str] = "{detail}"
    note: ClassVar[str] = ""
    hint: ClassVar[str] = ""
    exit_code: ClassVar[int] = 1

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        super().__init__(self.message.format(**facts))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the facts: an error of a worker process is raised again in this one."""
        return _again, (type(self), self.facts)

    @property
    def note_text(self) -> str:
        """The note with its facts filled in."""
        return self.note.format(**self.facts).strip()

    @property
    def hint_text(self) -> str:
        """The hint with its facts filled in."""
        return self.hint.format(**self.facts).strip()


def _again(cls: type[AdvisorError], facts: dict[str, object]) -> AdvisorError:
    return cls(**facts)


class UsageError(AdvisorError):
    """Options that contradict each other or name something that does not exist."""

    code = "FA001"
    message = "{detail}"
    hint = "{help}"
    exit_code = 2


class BadConfig(AdvisorError):
    """A configuration file or an environment variable that names no option, or gives it no value that fits."""

    code = "FA003"
    message = "{source}: {detail}"
    note = "nothing was run"
    hint = "{hint}"
    exit_code = 2


class CannotCapture(AdvisorError):
    """Dynamo could not capture any part of the model."""

    code = "FA303"
    message = "`{model_id}` could not be captured: {detail}"
    note = "TorchDynamo captured no graph at all, so there is nothing to rank"
    hint = "pass a factory that returns the part of the model that is plain PyTorch, or run with -vv for dynamo's message"
    exit_code = 4


class NotRepeatable(AdvisorError):
    """A call changes its own arguments in a way that cannot be put back."""

    code = "FA308"
    message = "the second call of `{model_id}` differs from the first: the call changes its own arguments"
    note = "a step is measured by running it many times, and each run must do the same work"
    hint = "pass a cache of fixed size (transformers: StaticCache), or leave the cache out"
    exit_code = 4


class NoStaticCache(AdvisorError):
    """--phase decode or generate of a model that cannot decode with a cache of fixed size."""

    code = "FA309"
    message = "--phase {phase} needs a static KV cache, and `{model_id}` ({class_name}) has none: {detail}"
    hint = "profile it with --phase forward or prefill"
    exit_code = 4


# workload


class UnknownModel(AdvisorError):
    """No model with this id was found."""

    code = "FA101"
    message = "no model `{model_id}` {where}, and no such local directory"
    note = "{reason}"
    hint = "{advice}"
    exit_code = 4

    def __init__(
        self, *, model_id: str, near: str = "", near_source: str = "", has_token: bool = False, unreachable: str = ""
    ) -> None:
        """Phrase what is known.

        Args:
            model_id: What the user typed.
            near: The nearest id that would work, if any.
            near_source: Where that id comes from (``from your local cache``).
            has_token: Whether a Hub token is set, so that a private model would have been visible.
            unreachable: Why the Hub was not asked; empty when it answered.
        """
        if unreachable:
            where, reason = "in the local cache or among the shipped configurations", f"the Hub was not asked: {unreachable}"
        else:
            where = "on the Hugging Face Hub"
            token = "this token may not read it" if has_token else "without a token (HF_TOKEN is not set)"
            reason = f"a private model looks the same {'when ' if has_token else ''}{token}"
        other = "check the id at https://huggingface.co/models, or pass a local directory or FILE.py:factory"
        advice = f"did you mean `{near}`?   ({near_source})" if near else other
        super().__init__(model_id=model_id, where=where, reason=reason, advice=advice, near=near)


class GatedModel(AdvisorError):
    """The model's terms were not accepted by this token's owner."""

    code = "FA102"
    message = "`{model_id}` is gated and this token may not read it"
    hint = (
        "1. accept the terms at https://huggingface.co/{model_id}\n"
        "2. run `hf auth login`, or set HF_TOKEN\n"
        "or pass --weights random if its configuration is shipped: speed does not depend on weights"
    )
    exit_code = 4


class RemoteCodeRefused(AdvisorError):
    """The model needs Python code from its own repository."""

    code = "FA103"
    message = "`{model_id}` ships its own Python code; it was not run"
    note = "{classes}"
    hint = "read it, then pass --trust-remote-code"
    exit_code = 4


class BrokenModelDirectory(AdvisorError):
    """A directory or repository that is not a transformers model."""

    code = "FA104"
    message = "`{model_id}` is not a transformers model: {detail}"
    hint = "pass a directory written by `save_pretrained`, a Hub id, or FILE.py:factory"
    exit_code = 4


class MissingWeights(AdvisorError):
    """The requested weights do not exist."""

    code = "FA105"
    message = "the weights of `{model_id}` could not be loaded: {detail}"
    hint = "--weights random runs the same shapes with seeded random weights; --weights auto takes what there is"
    exit_code = 4


class UnknownArchitecture(AdvisorError):
    """The installed transformers has no class for the model."""

    code = "FA106"
    message = "transformers {version} has no model class for `{model_id}` (model type `{model_type}`)"
    hint = 'pip install --upgrade transformers, or pass FILE.py:factory returning "(model, example_inputs)"'
    exit_code = 4


class NoExampleInputs(AdvisorError):
    """The model needs inputs that its configuration does not describe."""

    code = "FA107"
    message = "no example inputs are known for `{model_id}` ({class_name} wants `{wanted}`)"
    hint = "pass --input FILE.py:fn returning them, or FILE.py:factory returning (model, example_inputs)"
    exit_code = 4


class NoCudaDevice(AdvisorError):
    """``--device cuda`` where PyTorch sees no such device."""

    code = "FA201"
    message = "no CUDA device{index} is visible to PyTorch"
    note = "{reason}"
    hint = "{advice}   (`report` works without a GPU; without --device the CPU is used)"
    exit_code = 3


class NoCompiler(AdvisorError):
    """apply on a CPU where there is no C++ compiler."""

    code = "FA203"
    message = "there is no C++ compiler, and kernels for a CPU are C++"
    note = "nothing was measured"
    hint = "install g++ (`apt install g++`) or clang++, or set CXX to a compiler; `fusion-advisor doctor` says what it finds"
    exit_code = 3


class OutOfMemory(AdvisorError):
    """The device's (or host's) memory does not hold the workload."""

    code = "FA301"
    message = "out of {kind} memory while {stage} (wanted {wanted}, {free} of {total} free)"
    note = "{others}"
    hint = "{advice}"
    exit_code = 5


class FactoryFailed(AdvisorError):
    """The user's factory (or the file it lives in) raised."""

    code = "FA302"
    message = "`{factory}` raised {exception}: {last_line}"
    note = "at {location}"
    hint = "run it alone to see it fail; -vv prints the whole traceback"
    exit_code = 4


class ModelFailed(AdvisorError):
    """The model raised on its inputs before anything was measured."""

    code = "FA307"
    message = "`{model_id}` raised {exception} when it was called: {first_line}"
    note = "at {location}"
    hint = "call it by itself with the same inputs to see it fail; -vv prints the whole traceback"
    exit_code = 4


class SequenceTooLong(AdvisorError):
    """More tokens than the model has positions."""

    code = "FA304"
    message = "{option} {seq_len} is over the {maximum} positions of `{model_id}`"
    hint = "pass {option} {most} or less"
    exit_code = 2


class BadFactory(AdvisorError):
    """The factory was not found, or does not return a model and its inputs."""

    code = "FA305"
    message = "`{factory}` cannot be used: {detail}"
    hint = "write FILE.py:name or package.module:name; it takes no arguments and returns (model, example_inputs)"
    exit_code = 2


class BadInputFunction(BadFactory):
    """The function of --input was not found, or returns no arguments for a model."""

    code = "FA310"
    message = "--input {factory} cannot be used: {detail}"
    hint = "write FILE.py:name or package.module:name; it takes no arguments and returns a tensor, a tuple or a dict of keywords"


# cli and report


class UnreadableReport(AdvisorError):
    """A report or capture that is truncated, damaged, or written by another program."""

    code = "FA501"
    message = "`{name}` is not readable as a report: {detail}"
    note = "nothing was changed"
    hint = "pass a run directory or its report.json; if the file was cut short, run the same command again"
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


class TraceTooLarge(AdvisorError):
    """A trace whose first step alone does not fit into the memory of a worker."""

    code = "FA516"
    message = "`{name}` holds {events} events, and not one of its steps fits into a worker's memory"
    hint = "record fewer steps, or mark them: torch.profiler.schedule(...) and profiler.step()"
    exit_code = 9


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


class MissingExtra(AdvisorError):
    """A command whose libraries are not installed."""

    code = "FA205"
    message = "`{command}` needs {library}, which is not installed"
    hint = "pip install 'fusion-advisor[{extra}]'"
    exit_code = 3


class EngineLost(AdvisorError):
    """The Ray cluster went away while traces were read."""

    code = "FA515"
    message = "Ray is gone after {done} of {all} traces: {detail}"
    note = "the traces that were read are kept"
    hint = "run the command again: it reads only what is new"
    exit_code = 5


class MissingKernels(AdvisorError):
    """Many launches in the trace have no kernel."""

    code = "FA502"
    message = "the trace has {kernels} of {launches} launched kernels; shares would be wrong"
    note = "{known}"
    hint = "record fewer steps, and synchronise the device before the profiler stops"
    exit_code = 6


class ProfilerAttached(AdvisorError):
    """A run under nsys or ncu: torch.profiler would get no kernel, so it is not started."""

    code = "FA509"
    message = "{tool} is attached, so torch.profiler was not started, and there is no report"
    note = "{recorded}"
    hint = "run the same command without {tool} for a report"
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


class NoCapture(AdvisorError):
    """A run whose directory holds no capture, so that nothing can be planned from it."""

    code = "FA511"
    message = "there is no `{path}`"
    note = "`profile` and `apply` write the capture; an interrupted run, a traced file and a training step have none"
    hint = "run `fusion-advisor profile MODEL_ID -o DIR`, then `fusion-advisor plan DIR`"
    exit_code = 9


class RunExists(AdvisorError):
    """The output directory already holds a run."""

    code = "FA505"
    message = "`{path}` already holds a run"
    hint = "choose another directory with -o, or pass --force to overwrite its report"
    exit_code = 2


class CannotWrite(AdvisorError):
    """The run directory cannot be written."""

    code = "FA306"
    message = "cannot write `{path}`: {detail}"
    hint = "free some space, or choose another directory with -o"
    exit_code = 5


class NumericsFailed(AdvisorError):
    """A rewrite changed results and --strict was given."""

    code = "FA402"
    message = "numbers changed: {detail}"
    note = "every rewrite that failed its check was removed; the model computes the same as before"
    hint = "the report shows each error and eager's own error; without --strict this is a warning"
    exit_code = 7


class CompileFailed(AdvisorError):
    """A kernel did not compile and --strict was given."""

    code = "FA401"
    message = "a kernel did not compile: {detail}"
    note = "the original ops still run"
    hint = "the compiler's message is in the run's log.txt; without --strict this is a warning"
    exit_code = 8


class NotTrainable(AdvisorError):
    """--phase train of a model that has no backward pass, or fails in one."""

    code = "FA311"
    message = "`{model_id}` cannot run a training step: {detail}"
    hint = "profile it with --phase forward, or choose its inputs (labels, say) with --input FILE.py:fn"
    exit_code = 4


class FusionIsForInference(AdvisorError):
    """apply was asked for a training step."""

    code = "FA312"
    message = "--phase train can be profiled but not applied: fused kernels compute no gradients"
    note = "a fused model runs its original ops where gradients are enabled"
    hint = (
        "use torch.compile(model) for training, or Liger's kernels where it knows the model; apply --phase forward for inference"
    )
    exit_code = 2


class ModelInTraining(AdvisorError):
    """apply was given a model in train() mode."""

    code = "FA313"
    message = "`{model_id}` is in train() mode, where every call would run its original ops"
    hint = "call model.eval() first; `fa.profile` measures a model in the mode it is in"
    exit_code = 2


class NoTensorOutput(AdvisorError):
    """apply was given a model whose call returns no tensor and writes none."""

    code = "FA315"
    message = "`{model_id}` returns no tensor, so a fused call cannot be compared with it"
    hint = "wrap it in a module whose forward returns tensors; `fa.profile` measures it unchanged"
    exit_code = 4


class CannotCopy(AdvisorError):
    """A fused model was copied or pickled: its kernels and compiled graphs belong to this process and to this one model."""

    code = "FA314"
    message = "a fused model cannot be copied or pickled: copy or save the result of `fused.revert()`, or its `state_dict()`"
    hint = "`fa.apply(copy, inputs, plan=fa.load_plan(run_dir))` puts the same fusions into the copy"
    exit_code = 2


class NothingReplaced(AdvisorError):
    """A planned fusion replaced nothing, and --strict was given."""

    code = "FA403"
    message = "a fusion replaced nothing: {detail}"
    note = "a rewrite that does nothing is a bug in the rewrite, not a slow rewrite"
    hint = "the report's receipt gives the reason for each site; without --strict this is a warning"
    exit_code = 6


class KernelCheckFailed(AdvisorError):
    """A library kernel broke its own contract in `kernels check`."""

    code = "FA404"
    message = "`{name}` failed {failed} of {total} cases"
    hint = "the rows marked `failed` say which case, backend and dtype"
    exit_code = 10


class MachineTooBusy(AdvisorError):
    """The noise hid every gain that was expected."""

    code = "FA512"
    message = "could not tell what pays: this machine is too busy"
    note = "{detail}"
    hint = "run again when the machine is idle; the report has what was measured"
    exit_code = 6


class UnknownCode(AdvisorError):
    """`explain` was asked for a code that no error has."""

    code = "FA002"
    message = "no error has the code `{asked}`"
    hint = "{near}"
    exit_code = 2


class KernelFaulted(AdvisorError):
    """A kernel that faulted on a GPU while it was tried: nothing can run on that GPU in this process any more."""

    code = "FA415"
    message = "{kernel} faulted on the GPU while it was checked: {detail}"
    note = "the report so far was written; the process's context on the GPU is lost, and the model with it"
    hint = "leave the kernel out with `--skip {kernel}`, in a new process; please report it with its source, which is in kernels/"
    exit_code = 8


class HalfWritten(AdvisorError):
    """A fused call stopped after it may have written to its cache: the cache is not what either call would have left."""

    code = "FA416"
    message = "{detail}: reset the cache and repeat"
    note = "the call had begun to write to its cache, which now holds part of a step"
    hint = "later calls run the model's original ops where the same would happen again"
    exit_code = 4


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


class GateFailed(AdvisorError):
    """A --fail-on limit was exceeded."""

    code = "FA701"
    message = "gate failed: {failed}"
    hint = "reproduce: {command}"
    exit_code = 10


class GateNotJudged(AdvisorError):
    """A --fail-on limit names something that the run did not measure."""

    code = "FA702"
    message = "gate could not be judged: {missing}"
    hint = "a gate that cannot be judged does not pass; compare runs of the same device and workload, or leave the gate out"
    exit_code = 6


class NoSuchState(AdvisorError):
    """`compare` was asked for a state of a run that was not measured."""

    code = "FA508"
    message = "the run `{run}` has no `{state}` step"
    note = "{why}"
    hint = "leave `:{state}` out, or run again and measure that step"
    exit_code = 9
