"""One step of a graph that trains: its outputs and the gradients of all that it is given, for ways to run it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.fuse.live.model_check import Wide
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.records import GRADIENT, ModelCheck, OpClass
from fusion_advisor.verify.accuracy import error_of, unit_of
from fusion_advisor.verify.compare_models import check_model
from fusion_advisor.verify.subgraph_oracle import widened

Call = Callable[..., Any]
Rows = list[tuple[str, torch.Tensor]]
"""(name, tensor) of outputs and gradients."""
_POOLED_FACTOR, _SINGLE_FACTOR = 2.0, 4.0
"""Times eager's own error that all gradients' may be, and one gradient's."""
_FEW, _DRAWS = 16, 4
"""Numbers up to which one error says little, and how many more errors are drawn then."""
_ROUNDING_UNITS = 4.0
"""Of a weight's gradient, in units of its last place: what the gradient of the bias beside it may be where it is but rounding.
In bf16 the key biases of four layers of ViT-B had 0.4 to 0.75 by a flash kernel, 0.15 by the formula (8 pictures, an EPYC)."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a step is run on.

    Attributes:
        names: of the inputs.
        args: the tensors of a call.
        tangents: a gradient for each output that has one, in order; None for one that is given none.
        written: places of inputs that the graph writes to.
    """

    names: tuple[str, ...]
    args: tuple[Any, ...]
    tangents: tuple[torch.Tensor | None, ...]
    written: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, call: Call, names: Sequence[str], args: Sequence[Any], unasked: frozenset[int] = frozenset(),
        written: frozenset[int] = frozenset(),
    ) -> TrainingStep:  # fmt: skip
        """Return the step of a call, with gradients of its outputs drawn at random: 1 for a single number.

        Args:
            call: runs the graph's own ops.
            names: of the inputs.
            args: the tensors of a call.
            unasked: places of outputs that are given no gradient.
            written: places of inputs that the graph writes to.
        """
        step = cls(_unlike(names), tuple(args), (), written)
        with _same_numbers(args):
            outputs = _with_gradient(_tensors(call(*step.given(step.leaves()))))
        generators: dict[torch.device, torch.Generator] = {}
        without = {_name_of(place) for place in unasked}
        tangents: list[torch.Tensor | None] = []
        for name, output in outputs:
            if name in without:
                tangents.append(None)
                continue
            drawn = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(0))
            # In the output's layout: what reads a gradient laid out otherwise may be another kernel, or another plan of cuDNN's.
            gradient = torch.ones_like(output)
            tangents.append(gradient if output.dim() == 0 else gradient.normal_(generator=drawn))
        return replace(step, tangents=tuple(tangents))

    def leaves(self, wide: torch.dtype | None = None) -> list[Any]:
        """Return the inputs for one run: what asks for a gradient as a leaf of its own, what does not as a copy.

        The copies keep buffers that the graph writes to as they are. A parameter is copied where the graph writes to it.

        Args:
            wide: of floats; None: as they are.
        """
        found = []
        for place, arg in enumerate(self.args):
            if not isinstance(arg, torch.Tensor):
                found.append(arg)
                continue
            own = widened(arg.detach(), wide) if wide else arg.detach()
            if not arg.requires_grad or place in self.written:
                own = own.clone()
            found.append(own.requires_grad_(arg.requires_grad))
        return found

    def given(self, leaves: Sequence[Any]) -> list[Any]:
        """Return what the graph is called with: autograd lets nobody write to a leaf, and it may write to an activation.

        Args:
            leaves: of :meth:`leaves`.
        """
        return [
            leaf.clone() if place in self.written and leaf.requires_grad and not arg.is_leaf else leaf
            for place, (arg, leaf) in enumerate(zip(self.args, leaves, strict=True))
        ]

    def run(self, call: Call, *, wide: torch.dtype | None = None, seed: int | None = None, backward_passes: int = 1) -> Rows:
        """Run forward and backward once, with the random numbers of every other run.

        Args:
            call: takes the graph's inputs.
            wide: dtype that floats are given in; None: as they are.
            seed: of the random numbers; None: they go on from where they are.
            backward_passes: over one forward pass; the gradients of the last are returned.

        Returns:
            (name, tensor) of each output and of each gradient.
        """
        leaves = self.leaves(wide)
        with torch.enable_grad(), _same_numbers(self.args):
            if seed is not None:
                torch.manual_seed(seed)
            outputs = _tensors(call(*self.given(leaves)))
            asked = [(n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            pairs = zip(_with_gradient(outputs), self.tangents, strict=True)
            ends = [(out, widened(one, wide) if wide else one) for (_, out), one in pairs if one is not None]
            for left in reversed(range(backward_passes)):
                gradients = torch.autograd.grad(
                    [end for end, _ in ends], [leaf for _, leaf in asked], [one for _, one in ends],
                    allow_unused=True, retain_graph=left > 0,
                )  # fmt: skip
        named = [
            (f"{GRADIENT}{self.names[n]}", gradient)
            for (n, _), gradient in zip(asked, gradients, strict=True)
            if gradient is not None
        ]
        return [*((name, output.detach()) for name, output in outputs), *named]


def check_gradients(ours: Rows, theirs: Rows, wide: Callable[..., Rows]) -> ModelCheck:
    """Judge the outputs and all gradients of a rewritten graph; eager's own errors set the limits.

    All gradients together keep to one limit, each one to a wider one. Both are wider than the limit of a model's outputs, since a
    gradient's error is that of the few values that it comes from: with four pictures of eight labels in tiny ViTs single ones
    were 0.6 to 1.8 times as far from fp64 as eager's, all together up to 1.5 times.

    The gradient of a key's bias is zero under a softmax, and rounding is all that is left of it. How much that is depends on the
    kernel of attention: a flash kernel leaves more than the formula. Its measure is the gradient of the weight beside it, which
    the same rows go into.

    A loss is one number, and eager's error of it may be small by luck: with 32,768 tokens of GPT-2 in bf16 3e-8, a quarter of
    fp32's unit, where fused kernels were 4e-6 away. So an output of few numbers that does not keep to its limit is judged again
    with the errors of other ways to round. So is every output where no truth fits: of Qwen2.5-1.5B (4 x 2,048, bf16) a key's
    bias was 0.073 from eager's, and eight units in the last place are 0.062.

    Args:
        ours: what the rewritten graph returns.
        theirs: what its own ops return, with the same random numbers.
        wide: runs the same ops in a dtype, for the truth: fp64, or fp32 where that does not fit and eager has 16 bits. Given a
            seed too, it rounds the result of each op at random to what the op's own dtype could hold; the dtype is None then
            where there is no truth: the ops keep their own.

    Raises:
        LostGradient: one side has gradients that the other lacks.
    """
    if lost := {name for name, _ in ours} ^ {name for name, _ in theirs}:
        raise LostGradient(f"{min(lost)} is there on one side only")
    truth, oracle = _truth(theirs, wide)
    floors = _floors(theirs, truth)
    found = check_model(ours, theirs, truth, oracle, least_factor=_SINGLE_FACTOR, floors=floors)
    # Without a truth eager's own error is not known: what other rounding changes stands for it, whatever the size.
    unsure = [name for name, mine in ours if mine.is_floating_point() and (oracle == "eager" or mine.numel() <= _FEW)]
    drawn: dict[str, list[float]] = {}
    if found.worst in unsure and not found.is_passed:
        drawn = _drawn(truth, unsure, functools.partial(wide, None if oracle == "eager" else getattr(torch, oracle)))
        found = check_model(ours, theirs, truth, oracle, least_factor=_SINGLE_FACTOR, drawn=drawn, floors=floors)
    if not found.is_passed or (oracle == "eager" and not drawn):
        return found
    pairs = _errors_by_rounding(ours, theirs, drawn) if oracle == "eager" else _errors(ours, theirs, truth)
    pairs = [(mine, own) for mine, own in pairs if own < 1]  # else eager has no digit right
    fused, eager = (math.sqrt(sum(pair[side] ** 2 for pair in pairs) / max(len(pairs), 1)) for side in (0, 1))
    unit = max((unit_of(own.dtype) for _, own in theirs if own.is_floating_point()), default=0.0)
    if fused <= max(_POOLED_FACTOR * eager, unit):
        return found
    whose = "what other rounding changes" if oracle == "eager" else "eager's own"
    limit = f"relative error of all gradients together ≤ {_POOLED_FACTOR:g} × {whose}"
    return replace(found, fused_rel_l2=fused, eager_rel_l2=eager, limit=limit, is_passed=False)


def _errors(ours: Rows, theirs: Rows, truth: Rows) -> list[tuple[float, float]]:
    """Return each output's error, and eager's own."""
    return [
        (error_of(mine, true).rel_l2, error_of(own, true).rel_l2)
        for (_, mine), (_, own), (_, true) in zip(ours, theirs, truth, strict=True)
        if mine.is_floating_point()
    ]


def _errors_by_rounding(ours: Rows, theirs: Rows, drawn: Mapping[str, Sequence[float]]) -> list[tuple[float, float]]:
    """Return how far each output is from eager's, and how far other rounding moves that; outputs of few numbers are left out."""
    return [
        (error_of(mine, own).rel_l2, math.hypot(*drawn[name]) / math.sqrt(max(len(drawn[name]), 1)))
        for (name, mine), (_, own) in zip(ours, theirs, strict=True)
        if mine.is_floating_point() and mine.numel() > _FEW
    ]


def _floors(theirs: Rows, truth: Rows) -> dict[str, float]:
    """Return by the name of a bias's gradient that all but vanishes the relative error that is rounding alone."""
    true, found = dict(truth), {}
    for name, own in theirs:
        weight = true.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
        if weight is None or not own.is_floating_point():
            continue
        size, usual = (
            float(torch.linalg.vector_norm(one, dtype=torch.float64)) / math.sqrt(one.numel()) for one in (true[name], weight)
        )
        rounding = _ROUNDING_UNITS * unit_of(own.dtype) * usual
        if 0 < size < rounding:
            found[name] = rounding / size
    return found


def _drawn(truth: Rows, names: Sequence[str], rounded: Callable[[int], Rows]) -> dict[str, list[float]]:
    """Return by the name of an output its relative errors in runs with other rounding, as many as fit."""
    true = {name: value for name, value in truth if name in names}
    drawn: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
        for seed in range(_DRAWS):
            for name, value in rounded(seed):
                if name in true:
                    drawn[name].append(error_of(value, true[name]).rel_l2)
    release_cached_memory()
    return drawn


def _truth(theirs: Rows, wide: Callable[[torch.dtype], Rows]) -> tuple[Rows, str]:
    """Return a step of the same ops in a wider dtype, and the dtype's name; eager's own where there is none."""
    widths = {row.dtype.itemsize for _, row in theirs if row.is_floating_point()}
    if min(widths, default=0) > 4:  # there is none wider: eager would be its own truth, without an error
        return theirs, "eager"
    for dtype in (torch.float64, torch.float32):
        if dtype is torch.float32 and max(widths, default=8) > 2:
            break
        try:
            return wide(dtype), str(dtype).removeprefix("torch.")
        except (RuntimeError, MemoryError):  # an op without a kernel for the dtype, or no memory for one
            pass
        release_cached_memory()
    return theirs, "eager"


class WideWithSameNumbers(Wide):
    """Runs a graph in a wider dtype, except that random ops draw what they draw in the dtypes that they were traced in.

    Attention runs in its own dtype too: that of a GPU has no float64 kernel.
    """

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run one node."""
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) and not _is_attention(node):
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        traced = iter([source.meta["val"] for source in node.all_input_nodes])

        def narrow(one: Any) -> Any:
            return one.to(next(traced).dtype) if isinstance(one, torch.Tensor) else one

        assert callable(node.target)
        found = node.target(*pytree.tree_map(narrow, args), **pytree.tree_map(narrow, kwargs))
        if node.target is torch.ops.aten.native_dropout.default:
            value, p, mask = widened(args[0], self.dtype), float(args[1]), found[1]
            return value * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
        return pytree.tree_map_only(torch.Tensor, lambda one: widened(one, self.dtype), found)


def _is_attention(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and class_of(base_name(str(node.target))) is OpClass.ATTENTION


class Rounded(torch.fx.Interpreter):
    """Runs a graph, and moves each result by up to half a unit of the dtype that it was traced in, at random."""

    def __init__(self, module: torch.fx.GraphModule, *dtype: Any, seed: int) -> None:
        super().__init__(module, *dtype)
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run one node."""
        found = super().run_node(node)
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if node.op != "call_function" or not returns or any(one.alias_info for one in returns):
            return found  # a view, or written in place: what it shows was rounded already
        kind = type(found)
        traced, is_one = node.meta.get("val"), isinstance(found, torch.Tensor)
        pairs = zip(*(([one] if is_one else one) for one in (found, traced)), strict=True)
        rounded = [self._rounded(value, known) for value, known in pairs]
        return rounded[0] if is_one else kind(rounded)

    def _rounded(self, value: Any, known: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not isinstance(known, torch.Tensor) or not value.is_floating_point():
            return value
        if not known.is_floating_point():
            return value
        device, exact = value.device, torch.float64 if value.dtype.itemsize > 4 else torch.float32
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(self._seed))
        drawn = torch.rand(value.shape, dtype=exact, device=device, generator=generator)
        return (value.to(exact) * (1 + unit_of(known.dtype) * (drawn - 0.5))).to(value.dtype)


class _RoundedWide(Rounded, Wide):
    """The same in a wider dtype."""


class _RoundedWideWithSameNumbers(Rounded, WideWithSameNumbers):
    """The same with the random numbers that the narrow ops draw."""


def wide_run(
    module: torch.fx.GraphModule, dtype: torch.dtype | None, seed: int | None = None, *, has_same_numbers: bool = False
) -> Call:
    """Return what runs a graph in a wider dtype, or in its own with other rounding.

    Args:
        module: the graph.
        dtype: of floats; None, where there is a seed: as they are.
        seed: of random rounding; None: nothing is rounded.
        has_same_numbers: draw the random numbers that the narrow ops draw.
    """
    made: torch.fx.Interpreter
    if dtype is None:
        assert seed is not None
        made = Rounded(module, seed=seed)
    elif seed is None:
        made = WideWithSameNumbers(module, dtype) if has_same_numbers else Wide(module, dtype)
    else:
        made = (_RoundedWideWithSameNumbers if has_same_numbers else _RoundedWide)(module, dtype, seed=seed)
    run: Call = made.run
    return run


class LostGradient(Exception):
    """A rewritten graph returns other gradients than its own ops do."""


def _tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    leaves = pytree.tree_leaves(output)
    return [(_name_of(n), leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _unlike(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of which no two are alike: those of dynamo's graph are the last parts of parameters' names."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(found)


def _name_of(place: int) -> str:
    return f"output {place}"


def _with_gradient(outputs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, output) for name, output in outputs if output.requires_grad]


def _same_numbers(args: Sequence[Any]) -> Any:
    devices = sorted({arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
    return torch.random.fork_rng(devices=devices)
