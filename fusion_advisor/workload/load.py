"""From a request, or a live model, to a model on its device with the inputs of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusion_advisor.errors import CannotCapture, UsageError
from fusion_advisor.records import TensorMeta, Workload
from fusion_advisor.runtime.call_tensors import without_numbers
from fusion_advisor.workload.architecture import auto_class, cut_layers, total_layers
from fusion_advisor.workload.device import (
    TORCH_DTYPES,
    dtype_name,
    is_out_of_memory,
    memory_bytes,
    out_of_memory,
    resolve_device,
    resolve_dtype,
)
from fusion_advisor.workload.factory import CallInputs, run_factory, run_input_function
from fusion_advisor.workload.generate import Generation
from fusion_advisor.workload.inputs import NEW_TOKENS, ExampleInputs, input_metas, make_inputs, move
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.resolve import Source, resolve_source
from fusion_advisor.workload.weight_packing import lay_out_weights
from fusion_advisor.workload.weights import build_random, load_weights, seeded, weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """A model that is ready to run, and what to call it with: ``model(*args, **kwargs)``."""

    model: nn.Module
    """In eval mode, on its device."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    record: Workload
    request: WorkloadRequest
    generation: Generation | None = None
    """Set for phase ``generate``: the whole call, of which ``kwargs`` is only the prompt."""
    notes: tuple[str, ...] = ()
    """Choices made for the user, as sentences to print: random weights and why, options without effect."""

    def step(self, kwargs: dict[str, Any], record: Workload) -> LoadedWorkload:
        """Return one step of the generation as a workload of its own."""
        record = replace(record, inputs=input_metas(self.model, (), kwargs))
        return replace(self, args=(), kwargs=kwargs, record=record, generation=None, notes=())


def load_workload(request: WorkloadRequest) -> LoadedWorkload:
    """Find, build and place the model of a request, and make its inputs.

    A factory wins over a directory, a directory over the local cache, the cache over the Hub, the Hub over a shipped
    configuration with seeded random weights; ``record.weights`` says which it was. Global defaults (dtype, device, random state)
    are as before when this returns.
    """
    device = resolve_device(request.device)
    try:
        if request.factory is not None:
            return _load_factory(request, *request.factory, device=device)
        return _load_pretrained(request, device)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(stage="loading the model", device=device, request=request, error=error) from error
        raise


def describe_live(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, phase: str = "forward"
) -> LoadedWorkload:
    """Describe a model that the caller made, as it is: nothing is moved, cast or switched to eval mode.

    Args:
        model: the module.
        args: of one call.
        kwargs: of the same call.
        phase: ``forward`` or ``train``.

    Raises:
        TypeError: it is no module.
        CannotCapture: a tensor of it or of the call is sparse, nested, or without numbers.
    """
    refuse_non_module(model)
    kwargs = dict(kwargs or {})
    _refuse_without_numbers(model, tuple(args), kwargs, _name_of(model))
    metas = input_metas(model, args, kwargs)
    device = _device_of(model, metas)
    request = WorkloadRequest(
        model_id=_name_of(model),
        device=str(device) if device.type in ("cpu", "cuda") else "auto",
        batch=_batch_of(metas),
        phase=phase,
    )
    notes = ("the model is in training mode: dropout is part of what is measured",) if model.training else ()
    record = _record(request, model, metas, device=device, seq_len=_seq_len_of(metas), weights="user")
    return LoadedWorkload(model=model, args=tuple(args), kwargs=kwargs, record=record, request=request, notes=notes)


def refuse_non_module(given: object) -> None:
    """Refuse what is given for a model and is none.

    Raises:
        TypeError: with what to do.
    """
    if isinstance(given, nn.Module):
        return
    if isinstance(given, str):
        what = f"the name {given!r}: load it first, as with transformers.AutoModel.from_pretrained({given!r})"
    elif isinstance(given, type):
        what = f"the class {given.__name__}: make one of it, {given.__name__}(...)"
    else:
        what = f"{type(given).__name__}: wrap a function in a module's forward"
    raise TypeError(f"a torch.nn.Module is expected, not {what}")


def _load_pretrained(request: WorkloadRequest, device: torch.device) -> LoadedWorkload:
    own: CallInputs | None = None
    if request.input_function is not None:  # before anything is fetched: a mistake in it should not take minutes to show
        with seeded(request.seed, device):
            own = run_input_function(*request.input_function)
    source = resolve_source(request)
    config = source.config
    total = total_layers(config)
    model_class = auto_class(
        config, model_id=request.model_id, trust_remote_code=request.trust_remote_code, is_trained=request.phase == "train"
    )  # fmt: skip
    if request.layers is not None:
        config = cut_layers(config, request.layers, model_id=request.model_id)
    dtype = resolve_dtype(request.dtype, device, getattr(config, "dtype", None))
    model = _build(model_class, source, request, config=config, device=device, dtype=dtype)
    new_tokens = (request.new_tokens or NEW_TOKENS) if request.phase == "generate" else 0
    if own is None:
        inputs = make_inputs(model, request, device=device, dtype=dtype)
    else:
        inputs = _placed(own, model, device=device, dtype=dtype)
    metas = input_metas(model, inputs.args, inputs.kwargs)
    record = _record(
        request,
        model,
        metas,
        device=device,
        seq_len=inputs.seq_len,
        batch=None if own is None else _batch_of(metas),
        weights=source.weights,
        revision=source.revision,
        layers=request.layers if request.layers != total else None,
        total=total,
        context=inputs.context,
        new_tokens=new_tokens,
    )
    notes = (*source.notes, *inputs.notes)
    generation = None
    if new_tokens:
        ids = inputs.kwargs["input_ids"]
        generation = Generation(model=model, input_ids=ids, new_tokens=new_tokens, model_id=request.model_id)
    return LoadedWorkload(
        model=model,
        args=inputs.args,
        kwargs=inputs.kwargs,
        record=record,
        request=request,
        generation=generation,
        notes=notes,
    )


def _build(
    model_class: Any, source: Source, request: WorkloadRequest, *, config: Any, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Make the model with its weights on the device, in eval mode.

    Raises:
        OutOfMemory: the weights need more than is free.
    """
    # Asked for before anything is allocated: on a CPU, Linux kills the process rather than refuse the memory.
    if not getattr(config, "auto_map", None):
        wanted = weight_bytes(model_class, config, dtype)
        free, _ = memory_bytes(device)
        if free and wanted > free:
            raise out_of_memory(stage="loading the weights", device=device, request=request, wanted_bytes=wanted)
    if source.weights == "random":
        model = build_random(
            model_class, config, device=device, dtype=dtype, seed=request.seed, trust_remote_code=request.trust_remote_code
        )
    else:
        model = load_weights(model_class, source, request, config=config, device=device, dtype=dtype)
    lay_out_weights(model)
    return model.eval()


def _load_factory(request: WorkloadRequest, place: str, name: str, *, device: torch.device) -> LoadedWorkload:
    ignored = {
        "--seq-len": request.seq_len is not None,
        "--batch": request.batch != 1,
        "--layers": request.layers is not None,
        "--revision": request.revision is not None,
        "--weights": request.weights != "auto",
        "--phase": request.phase not in ("forward", "train"),
    }
    for option, is_set in ignored.items():
        if is_set:
            raise UsageError(detail=f"{option} has no effect on `{request.model_id}`", help="the factory decides it")
    with seeded(request.seed, device):
        made = run_factory(place, name)
    _refuse_without_numbers(made.model, made.inputs.args, made.inputs.kwargs, request.model_id)
    dtype = TORCH_DTYPES.get(request.dtype)
    metas = input_metas(made.model, made.inputs.args, made.inputs.kwargs)
    # A factory that chose a GPU itself keeps it; one that built on the CPU, as most do, is moved to where we run.
    chosen = _device_of(made.model, metas)
    if request.device == "auto" and chosen.type != "cpu":
        device = chosen
    is_switched = made.model.training and request.phase != "train"
    model = made.model.to(device, dtype).eval()
    if request.phase != "train":  # an optimizer of the factory's would go on with parameters that the model no longer has
        lay_out_weights(model)
    inputs = _placed(made.inputs, model, device=device, dtype=dtype)
    metas = input_metas(model, inputs.args, inputs.kwargs)
    record = _record(request, model, metas, device=device, seq_len=inputs.seq_len, weights="user", batch=_batch_of(metas))
    notes = (f"`{request.model_id}` returned a model in train() mode; it was set to eval()",) if is_switched else ()
    return LoadedWorkload(model=model, args=inputs.args, kwargs=inputs.kwargs, record=record, request=request, notes=notes)


def _placed(made: CallInputs, model: nn.Module, *, device: torch.device, dtype: torch.dtype | None) -> ExampleInputs:
    """Return the user's inputs on the device, floating-point ones in ``dtype`` if one is given."""
    args = tuple(move(value, device, dtype) for value in made.args)
    kwargs = {name: move(value, device, dtype) for name, value in made.kwargs.items()}
    return ExampleInputs(args=args, kwargs=kwargs, seq_len=_seq_len_of(input_metas(model, args, kwargs)))


def _record(
    request: WorkloadRequest,
    model: nn.Module,
    metas: tuple[tuple[str, TensorMeta], ...],
    *,
    device: torch.device,
    seq_len: int,
    weights: str,
    revision: str = "",
    layers: int | None = None,
    total: int | None = None,
    batch: int | None = None,
    context: int = 0,
    new_tokens: int = 0,
) -> Workload:
    # `parameters()` yields a tied weight once, so it is counted once.
    parameters = list(model.parameters())
    return Workload(
        model_id=request.model_id,
        revision=revision,
        phase=request.phase,
        dtype=_dtype_of(model, metas),
        device=str(device),
        batch=request.batch if batch is None else batch,
        seq_len=seq_len,
        seed=request.seed,
        weights=weights,
        layers=layers,
        total_layers=total,
        inputs=metas,
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        parameter_count=sum(parameter.numel() for parameter in parameters),
        context=context,
        new_tokens=new_tokens,
    )


def _refuse_without_numbers(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], model_id: str) -> None:
    """Refuse, ahead of any work, a call on tensors that cannot be compared."""
    lack = without_numbers(model, args, kwargs)
    if lack:
        raise CannotCapture(model_id=model_id, detail=lack)


def _name_of(model: nn.Module) -> str:
    given = getattr(getattr(model, "config", None), "_name_or_path", "")
    return given if isinstance(given, str) and given else type(model).__name__


def _dtype_of(model: nn.Module, metas: tuple[tuple[str, TensorMeta], ...]) -> str:
    """Return the dtype that most of the weights have; of the first floating-point input where there are none."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    if counts:
        return dtype_name(counts.most_common(1)[0][0])
    floating = [meta.dtype for _, meta in metas if "float" in meta.dtype]
    return dtype_name(getattr(torch, floating[0])) if floating else "fp32"


def _device_of(model: nn.Module, metas: tuple[tuple[str, TensorMeta], ...]) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device(metas[0][1].device if metas else "cpu")


def _batch_of(metas: tuple[tuple[str, TensorMeta], ...]) -> int:
    return max(metas[0][1].shape[0], 1) if metas and metas[0][1].shape else 1


def _seq_len_of(metas: tuple[tuple[str, TensorMeta], ...]) -> int:
    """Return the length of the first integer matrix, which is what token ids are; 0 where there is none."""
    return next((meta.shape[1] for _, meta in metas if meta.dtype in ("int64", "int32") and len(meta.shape) == 2), 0)
