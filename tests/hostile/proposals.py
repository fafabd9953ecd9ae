"""What can be drawn: for each op, text that calls it on values that a program has.

Names of ops come from the lowering's own table: an op that got a lowering and has no proposal here is called with arguments made
from its schema.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from fusion_advisor.lowering.rules.tables import LOWERABLE
from tests.hostile import proposals_elementwise as elementwise
from tests.hostile import proposals_layout as layout
from tests.hostile import proposals_memory as memory
from tests.hostile import proposals_rows as rows
from tests.hostile.proposals_base import Nothing, Proposal

if TYPE_CHECKING:
    from tests.hostile.draw import Draw

_OWN: dict[str, tuple[float, Proposal]] = {
    **{
        name: (1.0, elementwise.unary(name))
        for name in (
            "neg",
            "abs",
            "exp",
            "exp2",
            "expm1",
            "sigmoid",
            "tanh",
            "erf",
            "erfc",
            "sin",
            "cos",
            "floor",
            "ceil",
            "trunc",
            "round",
            "sign",
            "square",
            "reciprocal",
        )
    },
    **{name: (1.0, elementwise.guarded(name)) for name in ("log", "log1p", "sqrt", "rsqrt")},
    **{name: (3.0, elementwise.binary(name)) for name in ("add", "sub", "mul")},
    **{f"operator {sign}": (3.0, elementwise.operator(sign)) for sign in ("+", "-", "*")},
    "operator /": (1.5, elementwise.operator("/")),
    "div": (2.0, elementwise.binary("div")),
    "true_divide": (0.5, elementwise.binary("true_divide")),
    "rsub": (0.5, elementwise.binary("rsub")),
    **{name: (1.0, elementwise.tensors(name)) for name in ("maximum", "minimum", "max", "min")},
    "remainder": (0.7, elementwise.remainder),
    "pow": (2.0, elementwise.power),
    **{name: (0.8, elementwise.binary(name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{
        name: (0.5, elementwise.logical(name))
        for name in (
            "logical_and",
            "logical_or",
            "logical_xor",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
        )
    },
    **{name: (0.5, elementwise.of_bool(name)) for name in ("logical_not", "bitwise_not")},
    "__and__": (0.4, elementwise.of_bools("&")),
    "__or__": (0.4, elementwise.of_bools("|")),
    "__xor__": (0.4, elementwise.of_bools("^")),
    "to": (5.0, elementwise.cast),
    "_to_copy": (0.0, elementwise.cast),
    "type_as": (0.5, elementwise.type_as),
    "where": (2.0, elementwise.where),
    "masked_fill": (1.5, elementwise.masked_fill),
    "clamp": (1.0, elementwise.clamp),
    "clip": (0.3, elementwise.clamp),
    "clamp_min": (0.5, elementwise.clamp_side("clamp_min")),
    "clamp_max": (0.5, elementwise.clamp_side("clamp_max")),
    **{name: (0.7, elementwise.three(name)) for name in ("addcmul", "addcdiv", "lerp")},
    **{name: (0.5, elementwise.unary(name)) for name in ("isnan", "isinf", "isfinite")},
    **{
        name: (0.8, elementwise.activation(text))
        for name, text in (
            ("silu", "silu(X)"),
            ("gelu", "gelu(X)"),
            ("gelu tanh", "gelu(X, approximate='tanh')"),
            ("relu", "relu(X)"),
            ("leaky_relu", "leaky_relu(X, 0.2)"),
            ("softplus", "softplus(X)"),
            ("mish", "mish(X)"),
            ("elu", "elu(X, 0.7)"),
            ("log_sigmoid", "logsigmoid(X)"),
            ("selu", "selu(X)"),
            ("celu", "celu(X, 0.8)"),
            ("hardtanh", "hardtanh(X, -0.5, 2.0)"),
            ("relu6", "relu6(X)"),
            ("glu", "glu(X, -1)"),
            ("hardsigmoid", "hardsigmoid(X)"),
            ("hardswish", "hardswish(X)"),
            ("threshold", "threshold(X, 0.1, -2.0)"),
            ("dropout", "dropout(X, 0.5, False)"),
        )
    },
    "prelu": (0.6, elementwise.prelu),
    **{f"_{of}_backward_data": (1.0, rows.softmax_gradient(of)) for of in ("softmax", "log_softmax")},
    **{
        name: (1.5, rows.reduction(name))
        for name in (
            "mean",
            "sum",
            "amax",
            "amin",
            "var",
            "std",
            "logsumexp",
            "norm",
            "linalg.vector_norm",
        )
    },
    "nll_loss_backward": (0.6, rows.loss_gradient),
    "slice_backward": (0.6, layout.slice_gradient),
    "select_backward": (0.4, layout.select_gradient),
    "native_layer_norm": (1.0, rows.norm_with_statistics),
    "native_layer_norm_backward": (1.0, rows.norm_gradient),
    "column sum": (1.5, rows.column_sum),
    "softmax": (3.0, rows.softmax("softmax")),
    "log_softmax": (1.5, rows.softmax("log_softmax")),
    "_safe_softmax": (1.0, rows.safe_softmax),
    "layer_norm": (3.0, rows.layer_norm),
    "rms_norm": (2.0, rows.rms_norm),
    "group_norm": (1.0, rows.group_norm),
    "batch_norm": (0.7, rows.batch_norm),
    "_weight_norm": (0.5, rows.weight_norm),
    "transpose": (1.5, layout.view("X.transpose(D, E)", 2)),
    "swapaxes": (0.4, layout.view("X.swapaxes(D, E)", 2)),
    "mT": (0.5, layout.view("X.mT", 2)),
    "t": (0.5, lambda d: f"{d.any(lambda value: value.dim() == 2)}.t()"),
    "permute": (1.5, layout.permute),
    "unsqueeze": (1.0, layout.view("X.unsqueeze(D)", 1)),
    "squeeze": (0.7, layout.view("X.squeeze(D)", 1)),
    "flip": (0.5, layout.view("X.flip(D)", 1)),
    "flatten": (0.7, layout.view("X.flatten(0)", 1)),
    "reshape": (2.0, layout.reshape),
    "slice": (2.0, layout.cut),
    "select": (1.0, layout.select),
    "narrow": (0.5, layout.narrow),
    "expand": (1.0, layout.expand),
    "expand_as": (0.4, layout.expand_as),
    "unflatten": (0.4, layout.unflatten),
    "contiguous": (0.7, layout.view("X.contiguous()", 1)),
    "clone": (0.7, layout.view("X.clone()", 0)),
    "detach": (0.2, layout.view("X.detach()", 0)),
    "movedim": (0.4, layout.view("X.movedim(D, E)", 2)),
    "roll": (0.5, layout.roll),
    "pad": (0.7, layout.pad),
    "upsample_nearest1d": (0.2, layout.resample(3, "nearest")),
    "upsample_nearest2d": (0.4, layout.resample(4, "nearest")),
    "upsample_nearest3d": (0.1, layout.resample(5, "nearest")),
    "upsample_linear1d": (0.2, layout.resample(3, "linear")),
    "upsample_bilinear2d": (0.4, layout.resample(4, "bilinear")),
    "avg_pool2d": (0.6, layout.mean_pool),
    "max_pool2d": (0.5, layout.max_pool),
    "chunk": (1.0, layout.pieces("X.chunk(2, dim=D)[N]")),
    "split": (0.7, layout.pieces("X.split(S, dim=D)[N]")),
    "unbind": (0.5, layout.pieces("X.unbind(D)[N]")),
    "tensor_split": (0.3, layout.pieces("X.tensor_split(2, dim=D)[N]")),
    "cat": (2.0, layout.cat("cat")),
    "stack": (1.0, layout.cat("stack")),
    "repeat_interleave": (0.5, layout.repeat_interleave),
    "repeat": (0.5, layout.repeat),
    "embedding": (0.8, memory.embedding),
    "index_select": (0.8, memory.index_select),
    "gather": (0.7, memory.gather),
    "index": (0.8, memory.index),
    "nll_loss": (0.4, rows.losses("nll_loss")),
    "cross_entropy_loss": (0.4, rows.losses("cross_entropy")),
    "arange": (0.8, layout.arange),
    "tril": (0.8, layout.triangle("tril")),
    "triu": (0.8, layout.triangle("triu")),
    "zeros_like": (0.2, layout.made("torch.zeros_like(X)")),
    "ones_like": (0.2, layout.made("torch.ones_like(X)")),
    "full_like": (0.3, layout.made("torch.full_like(X, NUMBER)")),
    "full": (0.3, layout.made("torch.full(SHAPE, NUMBER, device=DEVICE)")),
    "zeros": (0.2, layout.made("torch.zeros(SHAPE, dtype=DTYPE, device=DEVICE)")),
    "ones": (0.2, layout.made("torch.ones(SHAPE, dtype=DTYPE, device=DEVICE)")),
    "new_full": (0.2, layout.made("X.new_full(SHAPE, NUMBER)")),
    "new_zeros": (0.2, layout.made("X.new_zeros(SHAPE)")),
    "new_ones": (0.2, layout.made("X.new_ones(SHAPE)")),
    "seeded_dropout": (0.4, elementwise.seeded_dropout),
    "in place": (1.2, memory.in_place("X.add_(Y)")),
    "in place mul": (0.8, memory.in_place("X.mul_(Y)")),
    "in place part": (0.8, memory.write_part),
    "in place relu": (0.3, layout.view("X.relu_()", 0)),
    "copy_": (0.4, memory.copy_in),
    "index_copy": (0.4, memory.put("index_copy")),
    "index_put": (0.4, memory.put("index_put")),
    "scatter_add": (0.3, memory.put("scatter_add")),
    "matmul": (2.0, rows.matmul),
    "cumsum": (0.4, layout.view("X.cumsum(D)", 1)),
    "complex": (0.3, elementwise.complex_part),
    "argmax": (0.3, layout.view("X.argmax(D)", 1)),
    "sort": (0.2, layout.view("X.sort(D)[0]", 1)),
    "any": (0.2, layout.view("X.any(D)", 1)),
    "max of a dim": (0.3, layout.view("X.max(D)[0]", 1)),
    "prod": (0.2, layout.view("X.prod(D)", 1)),
}
"""Weight and proposal of each op that is drawn with arguments of its own."""

_SPELT = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "linalg_vector_norm": "linalg.vector_norm",
    "hardswish": "hardswish",
    "view": "reshape",
    "_unsafe_view": "reshape",
    "_reshape_alias": "reshape",
    "view_as": "reshape",
    "alias": "detach",
    "lift_fresh": "detach",
    "nll_loss_nd": "nll_loss",
    "adaptive_avg_pool2d": "softmax",
    "argmin": "argmax",
    "constant_pad_nd": "pad",
}
"""Names in the lowering's table that torch makes out of another op, or that are there to be refused by name."""


@functools.cache
def proposals() -> dict[str, Proposal]:
    """Return every op that can be drawn: those above, and what else has a lowering."""
    others = {name: _from_schema(name) for name in sorted(LOWERABLE) if name not in _OWN and name not in _SPELT}
    return {**{name: proposal for name, (_, proposal) in _OWN.items()}, **others}


@functools.cache
def weights() -> list[float]:
    return [_OWN[name][0] if name in _OWN else 1.5 for name in proposals()]


def _from_schema(name: str) -> Proposal:
    """Call an op that nothing above knows, with arguments made from the schema of one of its overloads."""

    def propose(d: Draw) -> str:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            raise Nothing
        schemas = {one: getattr(packet, one)._schema for one in packet.overloads()}
        overload = d.random.choice(
            [one for one, schema in schemas.items() if not any(given.is_out for given in schema.arguments)]
        )
        schema = schemas[overload]
        x = d.number()
        arguments = []
        for position, argument in enumerate(schema.arguments):
            kind = str(argument.type)
            if argument.has_default_value() and d.chance(0.7):
                continue
            if "Optional" in kind:
                continue
            if str(argument.real_type) == "ScalarType":
                text = f"{x}.dtype"  # of what the op was given before, which torch's own fakes do not check
            elif kind == "Tensor":
                text = x if position == 0 else d.partner(x)
            elif kind in ("number", "float"):
                text = d.scalar(x)
            elif kind == "int":
                text = str(d.dim(x)) if "dim" in argument.name and d.values[x].dim() else d.pick("0", "1", "2")
            elif kind == "bool":
                text = d.pick("True", "False")
            elif kind == "List[int]":
                text = f"[{d.dim(x)}]" if "dim" in argument.name else str(list(d.values[x].shape))
            elif kind == "List[Tensor]":
                text = f"[{x}, {d.partner(x)}]"
            else:
                raise Nothing
            arguments.append(f"{argument.name}={text}" if argument.kwarg_only else text)
        return f"torch.ops.aten.{name}.{overload}({', '.join(arguments)})"

    return propose
