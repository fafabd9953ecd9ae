"""What would be faster without any kernel of ours: a setting, a built-in op, a mask that nothing needs.

The cheapest fix comes first, and often it is not a fusion. Each finding says what was seen, the line that changes it, and what
that could save: measured where both sides ran in this run, else an upper bound (the time of the ops in question less the time
that their bytes take at the measured copy bandwidth).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_advisor.capture.graph.split_bias import allows_tf32
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.fuse.decide.step_profile import attention_of
from fusion_advisor.fuse.dependence.masks_of_ones import mask_inputs, meanings_with_ones
from fusion_advisor.fuse.passes.attention import mask_meanings, masked_calls
from fusion_advisor.fuse.plan.plan import Plan
from fusion_advisor.fuse.shapes.pieces import hold_ones
from fusion_advisor.records import Arg, Capture, Chain, Finding, Match, OpClass, OpNode, Ref
from fusion_advisor.records.op_facts import LOOP_PREFIX, item_bytes, overload_free
from fusion_advisor.workload.weight_packing import GEMM_MULTIPLE

MIN_SHARE = 0.005
"""Of the captured step's device time: what saves less is not listed."""
OF_ONES = ", of a mask of ones"
_HALF = ("float16", "bfloat16")
_TF32_CAPABILITY = (8, 0)

BUILT_IN = {
    "gelu_tanh": ("gelu", 'torch.nn.functional.gelu(x, approximate="tanh")'),
    "gelu_erf": ("gelu", "torch.nn.functional.gelu(x)"),
    "layernorm": ("layer_norm", "torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)"),
    "rmsnorm": ("rms_norm", "torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)"),
}
"""Library kernels whose whole chain is one op of torch: that op's name, and how it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """Switches of torch that decide how the same model runs."""

    allows_tf32: bool
    has_cudnn_benchmark: bool


def torch_settings() -> TorchSettings:
    """Read the switches as they are now."""
    return TorchSettings(allows_tf32=allows_tf32(), has_cudnn_benchmark=bool(torch.backends.cudnn.benchmark))


def evaluated_masks(live: LiveCapture) -> Mapping[str, int]:
    """Count the attention calls whose traced mask says no more than a flag, by what it says (``causal``, ``all true``).

    Those that say it because the call's own mask holds ones alone are counted by themselves (``causal`` + :data:`OF_ONES`).
    """
    found = Counter(meaning for region in live.regions for meaning in mask_meanings(region.graph.graph, region).values())
    for region in live.regions:
        masks = mask_inputs(region)
        if masks and hold_ones(region.example_args, [*masks.values()]):
            found.update(
                meaning + OF_ONES for meaning in meanings_with_ones(masked_calls(region.graph.graph), masks, {}).values()
            )
    return found


def find_findings(capture: Capture, plan: Plan, settings: TorchSettings, masks: Mapping[str, int]) -> tuple[Finding, ...]:
    """List what needs no kernel, costliest first.

    Args:
        capture: the profile.
        plan: its chains and what the library says to them.
        settings: torch's switches during the profile.
        masks: from :func:`evaluated_masks`.
    """
    seen = _Seen(capture)
    found = [
        *_tf32(capture, seen, settings),
        *_odd_gemms(capture, seen),
        *_slow_attention(capture, seen),
        *_traced_mask(capture, seen, masks),
        *_written_out_attention(seen),
        *_built_ins(seen, plan),
        *_cudnn_benchmark(capture, seen, settings),
        *_upcasts(seen),
        *_unrolled_loops(capture, seen),
    ]
    listed = sorted((one for one in found if one.share >= MIN_SHARE), key=lambda one: -one.gain_ns)
    return tuple(replace(one, id=f"N{number}") for number, one in enumerate(listed, start=1))


class _Seen:
    """A capture's ops with their device time."""

    def __init__(self, capture: Capture) -> None:
        self.ops = capture.ops
        self.bandwidth = capture.bandwidth
        self.ns: Counter[int] = Counter()
        for launch in capture.launches:
            if launch.op_index is not None:
                self.ns[launch.op_index] += launch.duration_ns
        self.total_ns = max(sum(launch.duration_ns for launch in capture.launches), 1)

    def of_class(self, op_class: OpClass) -> list[OpNode]:
        return [op for op in self.ops if op.op_class is op_class and op.role == "op" and self.ns[op.index]]

    def sources(self, op: OpNode) -> list[OpNode]:
        return [self.ops[index] for argument in op.args for index in _refs(argument)]

    def dtype(self, op: OpNode) -> str:
        """The dtype of an op's first tensor argument."""
        return next((source.outputs[0].dtype for source in self.sources(op) if source.outputs), "")

    def reads_weights(self, index: int) -> bool:
        """Whether a GEMM multiplies by a parameter: attention's own two multiply activations (a router's does not)."""
        return any(
            self.ops[source.index if source.alias_of is None else source.alias_of].role == "parameter"
            for source in self.sources(self.ops[index])
        )

    def time(self, ops: Iterable[OpNode]) -> int:
        return sum(self.ns[op.index] for op in ops)

    def above_floor(self, ops: Sequence[OpNode]) -> int:
        """The ops' time less what their bytes take: no setting makes them faster than that."""
        moved = sum(_bytes(value) for op in ops for value in (op, *self.sources(op)))
        return max(0, self.time(ops) - moved * 10**9 // self.bandwidth.copy_bytes_per_s)

    def finding(self, title: str, reason: str, change: str, gain_ns: int, *, is_measured: bool = False) -> Finding:
        share = gain_ns / self.total_ns
        return Finding(id="", title=title, reason=reason, change=change, gain_ns=gain_ns, is_measured=is_measured, share=share)


def _tf32(capture: Capture, seen: _Seen, settings: TorchSettings) -> Iterator[Finding]:
    environment = capture.environment
    if environment.device_kind != "cuda" or settings.allows_tf32 or not environment.capability:
        return
    if tuple(int(part) for part in environment.capability.split(".")) < _TF32_CAPABILITY:
        return
    gemms = [op for op in seen.of_class(OpClass.GEMM) if seen.dtype(op) == "float32"]
    if gemms:
        yield seen.finding(
            "fp32 GEMMs run without TF32",
            f"{len(gemms)} GEMMs in fp32 take {_share(seen.time(gemms), seen)} of device time on the CUDA cores; TF32 runs them "
            "on the tensor cores, with 10 bits of mantissa",
            'torch.backends.cuda.matmul.fp32_precision = "tf32"',
            seen.above_floor(gemms),
        )


def _odd_gemms(capture: Capture, seen: _Seen) -> Iterator[Finding]:
    if capture.environment.device_kind != "cuda":
        return
    linears = [
        op for op in seen.of_class(OpClass.GEMM) if op.outputs and seen.dtype(op) in _HALF and seen.reads_weights(op.index)
    ]
    odd = [op for op in linears if op.outputs[0].shape[-1] % GEMM_MULTIPLE]
    if not odd:
        return
    costliest = max(odd, key=lambda op: seen.ns[op.index])
    width = costliest.outputs[0].shape[-1]
    yield seen.finding(
        "a GEMM of an odd width runs on a kernel for unaligned operands",
        f"{len(odd)} GEMMs take {_share(seen.time(odd), seen)} of device time, the costliest with {width:,} columns at "
        f"{costliest.source_file}:{costliest.source_line}: no multiple of {GEMM_MULTIPLE}",
        f"fusion-advisor apply pads it; for a vocabulary, model.resize_token_embeddings(pad_to_multiple_of={8 * GEMM_MULTIPLE})",
        seen.above_floor(odd),
    )


def _slow_attention(capture: Capture, seen: _Seen) -> Iterator[Finding]:
    calls = seen.of_class(OpClass.ATTENTION)
    slow = [row for row in attention_of(capture.eager_launches) if _is_slow(row[0], calls, seen)]
    if not calls or not slow:
        return
    names = " and ".join(f"{name} ({count} kernels, {ns / 1e6:.3f} ms)" for name, count, ns in slow)
    masked = next((op for op in calls if _mask_of(op) is not None), None)
    why = "each call is given a mask, which not every fused kernel takes" if masked else "no fused kernel took these inputs"
    moved = sum(_bytes(value) for op in calls for value in (op, *seen.sources(op)))
    floor_ns = moved * 10**9 // seen.bandwidth.copy_bytes_per_s
    yield seen.finding(
        "attention fell to a slow backend",
        f"eager attention ran as {names}: {why}",
        "attn_mask=None with is_causal where the mask says no more, or a length that is a multiple of 8"
        if masked
        else "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) around the call tells what it refuses",
        max(0, sum(ns for _, _, ns in slow) - floor_ns),
    )


def _is_slow(backend: str, calls: Sequence[OpNode], seen: _Seen) -> bool:
    # In fp32 the memory-efficient kernel is the best there is: flash and cuDNN take 16 bits only.
    return backend == "math" or (backend == "efficient" and any(seen.dtype(op) in _HALF for op in calls))


def _traced_mask(capture: Capture, seen: _Seen, masks: Mapping[str, int]) -> Iterator[Finding]:
    calls = seen.of_class(OpClass.ATTENTION)
    if not masks or not calls:
        return
    traced, eager = attention_of(capture.launches), attention_of(capture.eager_launches)
    who = _mask_builder(capture, seen, calls)
    ones = {name for name in masks if name.endswith(OF_ONES)}
    said = sorted({name.removesuffix(OF_ONES) for name in masks})
    kinds = " and ".join("an all-true mask" if name == "all true" else f"a {name} mask" for name in said)
    is_lost = any(name == "math" for name, _, _ in traced) and not any(name == "math" for name, _, _ in eager)
    was, now = sum(ns for _, _, ns in eager), seen.time(calls)
    lost = ", fused attention is lost" if is_lost else ""
    yield seen.finding(
        f"{who} builds {kinds}{' of a mask of ones' if ones else ''} when traced{lost}",
        f"{sum(masks.values())} attention calls: {was / 1e6:.3f} ms as eager runs them ({_backends(eager)}), {now / 1e6:.3f} ms "
        f"traced ({_backends(traced)}); torch.compile and CUDA graph capture pay this too",
        "leave the mask out of the inputs: it holds ones alone; calls in ranges (--shapes) go without such masks by themselves"
        if ones
        else "fusion-advisor apply evaluates the mask and puts the flag in its place",
        max(0, now - was),
        is_measured=True,
    )


def _mask_builder(capture: Capture, seen: _Seen, calls: Sequence[OpNode]) -> str:
    """Name who builds the mask, read off the source file of the op that made it."""
    for op in calls:
        index = _mask_of(op)
        while index is not None:
            source = seen.ops[index]
            if source.source_file.startswith("transformers/"):
                return f"transformers {capture.environment.transformers}".rstrip()
            index = next((found for argument in source.args for found in _refs(argument)), None)
    return "the model"


def _written_out_attention(seen: _Seen) -> Iterator[Finding]:
    readers: dict[int, list[OpNode]] = {}
    for op in seen.ops:
        for source in seen.sources(op):
            readers.setdefault(source.index, []).append(op)
    paths: set[int] = set()
    sites = 0
    for op in seen.ops:
        if overload_free(op.target) not in ("softmax", "_softmax"):
            continue
        before = _path(op, seen.sources)
        after = _path(op, lambda found: readers.get(found.index, []))
        if before and after and not seen.reads_weights(before[-1]) and not seen.reads_weights(after[-1]):
            sites += 1
            paths.update((*before, op.index, *after))
    if sites:
        taken = seen.time(seen.ops[index] for index in paths)
        yield seen.finding(
            "attention is written out",
            f"{sites} times a GEMM, a softmax and a GEMM: {_share(taken, seen)} of device time, with the scores in memory",
            'attn_implementation="sdpa" (torch.nn.functional.scaled_dot_product_attention)',
            taken,
        )


def _path(op: OpNode, step: Callable[[OpNode], list[OpNode]]) -> tuple[int, ...]:
    """Return the ops from a softmax to the nearest GEMM one way, through pointwise ops and views; empty when there is none."""
    path: list[int] = []
    at = op
    for _ in range(12):
        nearest = [found for found in step(at) if found.role == "op"]
        gemm = next((found for found in nearest if found.op_class is OpClass.GEMM), None)
        if gemm is not None:
            return (*path, gemm.index)
        through = next((found for found in nearest if found.op_class in (OpClass.POINTWISE, OpClass.VIEW)), None)
        if through is None:
            return ()
        path.append(through.index)
        at = through
    return ()


def _built_ins(seen: _Seen, plan: Plan) -> Iterator[Finding]:
    chains: dict[str, list[Chain]] = {}
    for chain, answer in zip(plan.chains, plan.answers, strict=True):
        if isinstance(answer, Match) and answer.kernel in BUILT_IN and BUILT_IN[answer.kernel][0] not in chain.ops:
            chains.setdefault(answer.kernel, []).append(chain)
    for kernel, same in chains.items():
        site = same[0].sites[0]
        sites = sum(len(chain.sites) for chain in same)
        launches = sum(chain.launches for chain in same)
        yield seen.finding(
            f"{BUILT_IN[kernel][0]} is written out where torch has one op for it",
            f"{launches} kernels at {sites} sites, the first at {site.source_file}:{site.source_line}",
            BUILT_IN[kernel][1],
            sum(chain.saving_bound_ns for chain in same),
        )


def _cudnn_benchmark(capture: Capture, seen: _Seen, settings: TorchSettings) -> Iterator[Finding]:
    convolutions = seen.of_class(OpClass.CONVOLUTION)
    if capture.environment.device_kind != "cuda" or settings.has_cudnn_benchmark or not convolutions:
        return
    yield seen.finding(
        "cuDNN chooses convolutions without trying them",
        f"{len(convolutions)} convolution{' takes' if len(convolutions) == 1 else 's take'} "
        f"{_share(seen.time(convolutions), seen)} of device time",
        "torch.backends.cudnn.benchmark = True",
        seen.above_floor(convolutions),
    )


def _upcasts(seen: _Seen) -> Iterator[Finding]:
    casts = [op for op in seen.ops if op.role == "op" and op.op_class is OpClass.POINTWISE and seen.ns[op.index] and op.outputs]
    up = [op for op in casts if _is_cast(op) and seen.dtype(op) in _HALF and op.outputs[0].dtype == "float32"]
    modules = {op.module_path for op in up}
    down = [
        op
        for op in casts
        if _is_cast(op) and seen.dtype(op) == "float32" and op.outputs[0].dtype in _HALF and op.module_path in modules
    ]
    if up:
        costliest = max(up, key=lambda op: seen.ns[op.index])
        yield seen.finding(
            "16-bit tensors go through memory as fp32",
            f"{len(up)} casts up and {len(down)} down, the costliest at {costliest.source_file}:{costliest.source_line}",
            "an op that widens in registers: torch.nn.functional.rms_norm, softmax(x, dim, dtype=torch.float32)",
            seen.time([*up, *down]),
        )


def _unrolled_loops(capture: Capture, seen: _Seen) -> Iterator[Finding]:
    loops = [op for op in seen.ops if op.target.startswith(LOOP_PREFIX)]
    if not loops:
        return
    mine = {op.index for op in loops}
    launches = sum(launch.op_index in mine for launch in capture.launches)
    steps = sorted({int(op.target.removeprefix(LOOP_PREFIX).partition("_")[0]) for op in loops})
    yield seen.finding(
        f"a loop of Python over {' or '.join(map(str, steps))} steps computes a linear recurrence",
        f"{launches} kernels at {len(loops)} {'site' if len(loops) == 1 else 'sites'}, the first at "
        f"{loops[0].source_file}:{loops[0].source_line}, take {_share(seen.time(loops), seen)} of device time",
        "one scan kernel, which keeps the state in registers: `apply` tries one where all steps are alike",
        seen.above_floor(loops),
    )


def _is_cast(op: OpNode) -> bool:
    return overload_free(op.target) in ("to", "_to_copy", "type_as", "float")


def _mask_of(op: OpNode) -> int | None:
    mask = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("attn_mask")
    return mask.index if isinstance(mask, Ref) else None


def _refs(argument: Arg) -> list[int]:
    if isinstance(argument, Ref):
        return [argument.index]
    return [index for item in argument for index in _refs(item)] if isinstance(argument, tuple) else []


def _bytes(op: OpNode) -> int:
    total = 0
    for meta in op.outputs:
        elements = 1
        for size, stride in zip(meta.shape, meta.stride, strict=True):
            elements *= size if stride else 1
        total += elements * item_bytes(meta.dtype)
    return total


def _share(ns: int, seen: _Seen) -> str:
    return f"{ns / seen.total_ns:.1%}"


def _backends(rows: Sequence[tuple[str, int, int]]) -> str:
    return ", ".join(name for name, _, _ in rows) or "no attention kernel"
