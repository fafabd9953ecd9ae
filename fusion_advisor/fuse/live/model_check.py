"""Whole-model numerics: the fused model's outputs and eager's own, against a higher-precision copy of the original.

Tensors that a call writes to (a KV cache, a count) are outputs like any other: the elements that changed are compared.

A model that draws random numbers draws the same in each of the three runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.capture.graph.fx_nodes import draws_numbers
from fusion_advisor.capture.graph.side_effects import Before, Written, live_tensors
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.cuda_graph.capturable import writes_of
from fusion_advisor.records import ModelCheck, Tolerance
from fusion_advisor.runtime.call_tensors import copied, tensors_in
from fusion_advisor.runtime.torch_internals.dispatcher import Draw, DrawLog, DrawsAgain, StaysWide
from fusion_advisor.verify.compare_models import check_model
from fusion_advisor.verify.subgraph_oracle import wide_dtype, widened
from fusion_advisor.verify.wide_copies import widened_copy, widened_leaf
from fusion_advisor.workload.device import is_out_of_memory, memory_bytes
from fusion_advisor.workload.load import LoadedWorkload

_HEADROOM = 1.5
"""A copy is made only where this much more than its parameters is free: activations of a wider dtype need room too."""

_COUNTS = "written counts"
_BRACKETS = re.compile(r"\['?([^'\]]*)'?\]")
"""Around a key or a place in an output: ``['vision']['hidden'][0]`` is shown as ``vision.hidden.0``."""
_HALF = {torch.float16, torch.bfloat16}


def check_whole_model(
    loaded: LoadedWorkload,
    eager: Callable[[], Any],
    fused: Callable[[], Any],
    written: Written,
    *,
    tolerance: Tolerance | None = None,
    memory_bytes: Callable[[torch.device], tuple[int, int]] = memory_bytes,
    worst: Callable[[str], str] | None = None,
) -> ModelCheck:
    """Run all three and compare.

    Args:
        loaded: the original model and its inputs; the copy is made from it and thrown away.
        eager: the original call.
        fused: the fused call.
        written: what a call changes outside its result; put back before each of the three.
        tolerance: the user's limit instead of eager's own error.
        memory_bytes: tells how much memory of a device is free, and how much there is.
        worst: given why no copy can be made, or an empty text, returns what counts: ranks of a split model run one together.
            None: one process runs it.

    Raises:
        RuntimeError: memory ran out in the copy's run on one of several ranks; the others wait in a collective then.
    """
    names = (*written.tensors, *written.made)
    state = Before.of(loaded.model, loaded.args, loaded.kwargs)

    def start() -> None:
        written.restore()
        state.restore_generators()  # with other random numbers no two runs could be compared

    def outcome(call: Callable[[], Any]) -> _Outcome:
        start()
        return _Outcome.of(call(), live_tensors(loaded.model, loaded.args, loaded.kwargs), names)

    ours, theirs = outcome(fused), outcome(eager)
    share = worst or str
    oracle, name = None, "eager"
    drawn = _draws(outcome, eager, share) if share("it draws random numbers" if state.has_drawn() else "") else ()
    if drawn is not None:
        dtypes = {tensor.dtype for _, tensor in theirs.outputs if tensor.is_floating_point()}
        oracle, name = _oracle(loaded, dtypes, names, memory_bytes, worst, start=start, drawn=drawn)
    start()
    if oracle is not None and [tensor.shape for _, tensor in oracle.outputs] != [tensor.shape for _, tensor in theirs.outputs]:
        oracle, name = None, "eager"  # a model that reads the bits of its floats has other shapes in another dtype
    truth = theirs if oracle is None else oracle
    changed = {key: torch.ones_like(ours.written[key], dtype=torch.bool) for key in written.made} | {
        key: (ours.written[key] != before) | (theirs.written[key] != before) for key, before in written.before.items()
    }
    fused_rows, eager_rows, true_rows = (_judged(side.outputs) + side.changed(changed) for side in (ours, theirs, truth))
    exact = {_COUNTS, *(title for title, tensor in ours.outputs if _is_counted(tensor))}
    return check_model(fused_rows, eager_rows, true_rows, name, tolerance=tolerance, exact=exact)


def _draws(
    outcome: Callable[[Callable[[], Any]], object], eager: Callable[[], Any], share: Callable[[str], str]
) -> Sequence[Draw] | None:
    """Run the original call once more and return its draws of random numbers; None where it cannot be watched."""
    problem = ""
    with DrawLog() as log:
        try:
            outcome(eager)
        except RuntimeError as error:  # a model may compile a function of its own, which nothing does while ops are watched
            problem = str(error) or type(error).__name__
    return None if share(problem) else log.seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A call's outputs, and the values after it of what it wrote."""

    outputs: list[tuple[str, torch.Tensor]]
    written: dict[str, torch.Tensor]

    @classmethod
    def of(cls, output: Any, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> _Outcome:
        # Cloned: an output may be a view of the cache that the next call writes to.
        outputs = [(name, tensor.clone()) for name, tensor in named_tensors(output)]
        return cls(outputs=outputs, written={name: tensors[name].clone() for name in names})

    def changed(self, masks: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """One flat tensor of what was written to floats, layer after layer, and one of counts, which must be equal."""
        rows = []
        for title, is_float in (("written values", True), (_COUNTS, False)):
            names = [name for name, tensor in self.written.items() if _is_counted(tensor) is not is_float and masks[name].any()]
            if names:
                flat = torch.cat([_as_real(self.written[name][masks[name]]).flatten() for name in names])
                rows.append((title, flat if is_float else flat.to(torch.float64)))
        return rows


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers or booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _judged(outputs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the outputs to compare: complex numbers as pairs; integers, exactly, only where a model returns nothing else.

    Beside floats, integers are mostly what was chosen by comparing them, and a tie may fall either way.
    """
    pairs = [(name, _as_real(tensor)) for name, tensor in outputs]
    if any(tensor.is_floating_point() for _, tensor in pairs):
        return pairs
    return [(name, tensor.to(torch.float64)) for name, tensor in pairs]


def named_tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Flatten a model's output into (name, tensor); dataclasses and other objects that hold tensors are looked into."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, leaf in pytree.tree_flatten_with_path(output)[0]:
        name = _BRACKETS.sub(r".\1", pytree.keystr(path)).strip(".")
        if isinstance(leaf, torch.Tensor):
            found.append((name or "output", _dense(leaf)))
        else:
            found += [(inside.lstrip("."), tensor) for inside, tensor in tensors_in(name, leaf)]
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements can be compared: a sparse one with its zeros, a nested one with its short rows filled."""
    if tensor.is_nested:
        return torch.nested.to_padded_tensor(tensor, 0.0)
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _oracle(
    loaded: LoadedWorkload,
    dtypes: Iterable[torch.dtype],
    names: Sequence[str],
    memory_bytes: Callable[[torch.device], tuple[int, int]],
    worst: Callable[[str], str] | None,
    *,
    start: Callable[[], object],
    drawn: Sequence[Draw],
) -> tuple[_Outcome | None, str]:
    """Run a copy of the model in a wider dtype; it draws the random numbers that the model draws."""
    wide = _wide(loaded, dtypes)
    device = torch.device(loaded.record.device)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    free, _ = memory_bytes(device)
    if parameters * torch.finfo(wide).bits / 8 * _HEADROOM > free:
        return None, "eager"
    as_written = _as_written(wide, drawn)
    modes = (StaysWide(wide, drawn), as_written) if worst is None else (as_written,)  # ranks run the same ops or wait forever
    for mode in modes:
        start()
        model, problem = None, ""
        try:
            model = widened_copy(loaded.model, wide)
        except (RuntimeError, TypeError) as error:  # holds a tensor with a history, or a lock: no copy of it can be made
            problem = f"no copy: {error}"
        if (worst or str)(problem) or model is None:
            return None, "eager"

        args, kwargs = copied((loaded.args, loaded.kwargs), functools.partial(widened_leaf, wide=wide))
        output = None
        try:
            with mode:
                output = model(*args, **kwargs)
        except Exception as error:  # the model's own code refuses another dtype in whatever way it likes
            if worst is not None and isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            problem = str(error) or type(error).__name__
        if not (worst or str)(problem):
            return _Outcome.of(output, live_tensors(model, args, kwargs), names), f"{str(wide).removeprefix('torch.')} copy"
    return None, "eager"


def _as_written(wide: torch.dtype, drawn: Sequence[Draw]) -> AbstractContextManager[object]:
    """Return a context in which ops run in the dtypes that they are given, but draw the model's random numbers."""
    return DrawsAgain(wide, drawn) if drawn else nullcontext()


def _wide(loaded: LoadedWorkload, dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a copy that is more precise than the model.

    Args:
        loaded: most of its weights are in the dtype that it computes in; where it has none, most of its inputs are.
        dtypes: of its floating outputs.
    """
    weights: list[torch.Tensor] = [*loaded.model.parameters()]
    return _wide_of(weights or [given for _, given in tensors_in("", (loaded.args, loaded.kwargs))], dtypes)


def _wide_of(given: Iterable[Any], dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return float32 where most of what is given and a result are of 16 bits, for GPUs take long over float64; else float64."""
    counts: dict[torch.dtype, int] = {}
    for tensor in given:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    own = {max(counts, key=counts.__getitem__)} if counts else set(dtypes)
    is_narrow = set(dtypes) & _HALF and own & _HALF
    return torch.float32 if is_narrow else torch.float64


def check_region(region: Region, fused: Callable[..., Any], *, was_passed: bool = False) -> ModelCheck:
    """Judge what runs in place of one graph by the rule of whole models, on the tensors of its call.

    What the graph writes to is copied for each run, and the elements that changed are an output like any other.

    Args:
        region: with the tensors of a call.
        fused: the rewritten graph.
        was_passed: an earlier run passed it, as a saved plan says. Then it is enough that it differs from eager by no more than
            rounding: a wide run of 7 billion parameters on 16,000 tokens takes seconds.

    Returns:
        The check. Its oracle is the graph in a wider dtype (casts to float dtypes go there too), or eager if that cannot be run.
    """
    slots = sorted(writes_of(region.graph)[0])
    ours, theirs = (_region_outcome(call, region, slots) for call in (fused, region.original.forward))
    before = {str(slot): region.example_args[slot] for slot in slots}
    changed = {key: (ours.written[key] != old) | (theirs.written[key] != old) for key, old in before.items()}

    def against(oracle: _Outcome, name: str) -> ModelCheck:
        fused_rows, eager_rows, true_rows = (_judged(side.outputs) + side.changed(changed) for side in (ours, theirs, oracle))
        return check_model(fused_rows, eager_rows, true_rows, name, exact=[_COUNTS])

    if was_passed and (found := against(theirs, "eager")).is_passed:
        return found
    drawn: Sequence[Draw] = ()
    if any(draws_numbers(node) for node in region.graph.graph.nodes):
        with DrawLog() as log:
            _region_outcome(region.original.forward, region, slots)
        drawn = log.seen
    wide = _wide_of(region.example_args, {tensor.dtype for _, tensor in theirs.outputs if tensor.is_floating_point()})
    try:
        with _as_written(wide, drawn):
            oracle = _region_outcome(Wide(region.graph, wide).run, region, slots, wide)
    except (RuntimeError, MemoryError):  # an op without a float64 kernel, or no memory for one
        return against(theirs, "eager")
    if [tensor.shape for _, tensor in oracle.outputs] != [tensor.shape for _, tensor in theirs.outputs]:
        return against(theirs, "eager")
    return against(oracle, str(wide).removeprefix("torch."))


def _region_outcome(
    call: Callable[..., Any], region: Region, slots: Sequence[int], wide: torch.dtype | None = None
) -> _Outcome:  # fmt: skip
    """Run a graph on copies of what it writes to; the random numbers that it draws are those of the next run, too."""
    args = list(region.example_args)
    for slot in slots:
        args[slot] = (args[slot] if wide is None else widened(args[slot], wide)).clone()
    devices = sorted({arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        outputs = named_tensors(call(*args))
    return _Outcome(outputs=outputs, written={str(slot): args[slot] for slot in slots})


class Wide(torch.fx.Interpreter):
    """Runs a graph in a wider dtype: each float tensor is widened where an op reads it, so that weights are wide one at a time.

    Args:
        module: the graph.
        dtype: of floats.
    """

    def __init__(self, module: torch.fx.GraphModule, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(module)
        self.dtype = dtype

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run one node with wide arguments."""
        if node.op != "call_function":
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return self.call_function(node.target, self._widened(args), self._widened(kwargs))

    def _widened(self, value: Any) -> Any:
        """Float tensors and float dtypes of an op's arguments in the dtype."""

        def leaf(one: Any) -> Any:
            if isinstance(one, torch.dtype):
                return wide_dtype(one, self.dtype)
            return widened(one, self.dtype) if isinstance(one, torch.Tensor) else one

        return pytree.tree_map(leaf, value)
