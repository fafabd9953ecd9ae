"""FA3xx: running the model and its step."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


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


class CannotCapture(AdvisorError):
    """Dynamo could not capture any part of the model."""

    code = "FA303"
    message = "`{model_id}` could not be captured: {detail}"
    note = "TorchDynamo captured no graph at all, so there is nothing to rank"
    hint = "pass a factory that returns the part of the model that is plain PyTorch, or run with -vv for dynamo's message"
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


class CannotWrite(AdvisorError):
    """The run directory cannot be written."""

    code = "FA306"
    message = "cannot write `{path}`: {detail}"
    hint = "choose another directory with -o; on a full disk, free some space"
    exit_code = 5


class ModelFailed(AdvisorError):
    """The model raised on its inputs before anything was measured."""

    code = "FA307"
    message = "`{model_id}` raised {exception} when it was called: {first_line}"
    note = "at {location}"
    hint = "call it by itself with the same inputs to see it fail; -vv prints the whole traceback"
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


class BadInputFunction(BadFactory):
    """The function of --input was not found, or returns no arguments for a model."""

    code = "FA310"
    message = "--input {factory} cannot be used: {detail}"
    hint = "write FILE.py:name or package.module:name; it takes no arguments and returns a tensor, a tuple or a dict of keywords"


class NotTrainable(AdvisorError):
    """--phase train of a model that has no backward pass, or fails in one."""

    code = "FA311"
    message = "`{model_id}` cannot run a training step: {detail}"
    hint = "use --phase forward, or choose its inputs (labels, say) with --input FILE.py:fn"
    exit_code = 4


class ModelInTraining(AdvisorError):
    """apply was given a model in train() mode."""

    code = "FA313"
    message = "`{model_id}` is in train() mode, where every call would run its original ops"
    hint = '{switch} first, or give phase="train" to fuse its training step'
    exit_code = 2


class CannotCopy(AdvisorError):
    """A fused model was copied or pickled: its kernels and compiled graphs belong to this process and to this one model."""

    code = "FA314"
    message = "a fused model cannot be copied or pickled: copy or save the result of `fused.revert()`, or its `state_dict()`"
    hint = "`fa.apply(copy, inputs, plan=fa.load_plan(run_dir))` puts the same fusions into the copy"
    exit_code = 2


class NoTensorOutput(AdvisorError):
    """apply was given a model whose call returns no tensor and writes none."""

    code = "FA315"
    message = "`{model_id}` returns no tensor, so a fused call cannot be compared with it"
    hint = "wrap it in a module whose forward returns tensors; `fa.profile` measures it unchanged"
    exit_code = 4


class SizeRejected(AdvisorError):
    """A range of --shapes holds sizes that the model refuses."""

    code = "FA316"
    message = "`{model_id}` refuses {name}={size}: {cause}"
    note = "{largest}"
    hint = "give {name} a range of sizes that it takes"
    exit_code = 2


class LaterCallFailed(AdvisorError):
    """The model raised in one of the calls after its first."""

    code = "FA317"
    message = "`{model_id}` raised {exception} in a later call: {first_line}"
    note = "at {location}; its first call, with the same inputs, passed"
    hint = "call it several times by itself: look for what its first calls change; -vv prints the whole traceback"
    exit_code = 4


class NoSecondDerivative(AdvisorError, RuntimeError):
    """A gradient of a fused training step was differentiated; a RuntimeError, as torch's own for a compiled step is."""

    code = "FA318"
    message = (
        "a gradient of a fused training step was differentiated again (create_graph=True), and the step has no double backward: "
        "call `fused.revert()` before such a step and `fused.apply()` after it, or call the model that torch.compile was given"
    )
    exit_code = 4


class AutocastAround(AdvisorError):
    """apply was called for inference while autocast was on."""

    code = "FA319"
    message = "autocast is on around this call of apply, and every call of `{model_id}` in it would run its original ops"
    hint = "enter torch.autocast in the model's forward, where it is followed, or call apply and the model outside of it"
    exit_code = 2
