"""Lines that look at whole rows or columns: reductions, softmax, norms, losses, products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.hostile.proposals_base import INF, Proposal

if TYPE_CHECKING:
    from tests.hostile.draw import Draw


def reduction(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.float(1) if name in ("mean", "var", "std", "logsumexp", "norm", "linalg.vector_norm") else d.number(1)
        keep = d.pick("True", "False")
        extra = {"var": f", correction={d.pick('0', '1')}", "std": f", correction={d.pick('0', '1')}"}.get(name, "")
        extra += ", dtype=torch.float32" if name in ("sum", "mean") and d.chance(0.1) else ""
        if name == "linalg.vector_norm":
            if 0 in d.values[x].shape:  # torch's fake tensors refuse a maximum of no numbers where the real ones give no result
                return f"torch.linalg.vector_norm({x}, {d.pick('2', '1')}, dim={d.dims(x)}, keepdim={keep})"
            return f"torch.linalg.vector_norm({x}, {d.pick('2', '1', INF)}, dim={d.dims(x)}, keepdim={keep})"
        if name in ("sum", "mean", "amax", "amin") and d.chance(0.06):
            return f"torch.{name}({x})"
        return f"torch.{name}({x}, dim={d.dims(x)}, keepdim={keep}{extra})"

    return propose


def softmax(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.float(1)
        dtype = ", dtype=torch.float32" if d.chance(0.2) else ""
        return f"functional.{name}({x}, dim={-1 if d.chance(0.7) else d.dim(x)}{dtype})"

    return propose


def safe_softmax(d: Draw) -> str:
    x = d.float(1)
    dim = -1 if d.chance(0.7) else d.dim(x)
    shown = f"{x}.masked_fill({x} > 0.2, -{INF})" if d.chance(0.5) else x
    return f"torch.ops.aten._safe_softmax.default({shown}, {dim})"


def layer_norm(d: Draw) -> str:
    x = d.float(1)
    shape = tuple(d.values[x].shape[-(2 if d.values[x].dim() > 2 and d.chance(0.2) else 1) :])
    parts = [d.input(shape, d.values[x].dtype, layout="dense") if d.chance(0.6) else "None" for _ in range(2)]
    return f"functional.layer_norm({x}, {shape}, {parts[0]}, {parts[1]}, {d.pick('1e-5', '1e-6', '1e-3')})"


def rms_norm(d: Draw) -> str:
    x = d.float(1)
    shape = tuple(d.values[x].shape[-1:])
    weight = d.input(shape, d.values[x].dtype, layout="dense") if d.chance(0.6) else "None"
    return f"functional.rms_norm({x}, {shape}, {weight}{d.pick('', ', 1e-6')})"


def group_norm(d: Draw) -> str:
    x = d.any(lambda value: value.is_floating_point() and value.dim() >= 2 and value.shape[1] > 0)
    channels = d.values[x].shape[1]
    # Eager scales by weight ÷ deviation and shifts by bias - mean × that: an infinite weight gives NaN, one product does not.
    kind = "normal" if d.is_special else ""
    groups = d.random.choice([count for count in range(1, channels + 1) if channels % count == 0][:4])
    parts = [d.input((channels,), d.values[x].dtype, layout="dense", values=kind) if d.chance(0.6) else "None" for _ in range(2)]
    return f"functional.group_norm({x}, {groups}, {parts[0]}, {parts[1]})"


def batch_norm(d: Draw) -> str:
    x = d.float(2)
    channels = (d.values[x].shape[1],)
    kind = "normal" if d.is_special else ""
    mean, weight, bias = (d.input(channels, d.values[x].dtype, layout="dense", values=kind) for _ in range(3))
    return f"functional.batch_norm({x}, {mean}, {weight}.abs() + 0.5, {weight}, {bias}, False)"


def weight_norm(d: Draw) -> str:
    x = d.any(lambda value: value.is_floating_point() and value.dim() >= 2 and 0 not in value.shape)
    shape = tuple(d.values[x].shape)
    dim = d.random.choice([0, len(shape) - 1])
    lengths = d.input(tuple(size if axis == dim else 1 for axis, size in enumerate(shape)), d.values[x].dtype, layout="dense")
    return f"torch._weight_norm({x}, {lengths}, {dim})"


def losses(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.any(lambda value: value.is_floating_point() and value.dim() == 2 and 0 not in value.shape)
        rows, classes = d.values[x].shape
        target = d.input((rows,), torch.int64, below=classes, layout="dense")
        reduction = d.pick("none", "mean", "sum")
        first = x if name == "cross_entropy" else f"functional.log_softmax({x}, -1)"
        return f"functional.{name}({first}, {target}, reduction={reduction!r})"

    return propose


def matmul(d: Draw) -> str:
    x = d.float(2)
    width = d.values[x].shape[-1]
    kind = d.pick("matmul", "linear", "linear")
    weight = d.input((width, 8) if kind == "matmul" else (8, width), d.values[x].dtype, layout="dense", values="normal")
    if kind == "matmul":
        return f"torch.matmul({x}, {weight})"
    bias = f", {d.input((8,), d.values[x].dtype, layout='dense')}" if d.chance(0.5) else ""
    return f"functional.linear({x}, {weight}{bias})"


def softmax_gradient(of: str) -> Proposal:
    """Call the gradient of ``softmax`` or ``log_softmax`` on a result of it: of any other shape torch reads past its end."""

    def propose(d: Draw) -> str:
        x = d.float(1)
        dim = d.dim(x)
        return f"torch.ops.aten._{of}_backward_data.default({x}, torch.{of}({x}, {dim}), {dim}, {x}.dtype)"

    return propose


def norm_with_statistics(d: Draw) -> str:
    """Call the layer norm of a forward pass and take one of its results."""
    x = d.float(1)
    shape = tuple(d.values[x].shape[-1:])
    parts = [d.input(shape, d.values[x].dtype, layout="dense") if d.chance(0.6) else "None" for _ in range(2)]
    return f"torch.ops.aten.native_layer_norm.default({x}, {list(shape)}, {', '.join(parts)}, 1e-5)[{d.pick('0', '1', '2')}]"


def norm_gradient(d: Draw) -> str:
    """Call the gradients of a layer norm, with the statistics of its own input: those of another one torch never gets."""
    x = d.any(lambda value: value.is_floating_point() and value.dim() >= 2 and 0 not in value.shape)
    shape = tuple(d.values[x].shape[-1:])
    weight = d.input(shape, d.values[x].dtype, layout="dense") if d.chance(0.6) else "None"
    gradient = d.input(tuple(d.values[x].shape), d.values[x].dtype)
    result = int(d.pick("0", "1", "2") if weight != "None" else "0")
    mask = [result == 0, result != 0, result != 0]
    norm = f"torch.ops.aten.native_layer_norm.default({x}, {list(shape)}, {weight}, None, 1e-5)"
    return (
        f"torch.ops.aten.native_layer_norm_backward.default({gradient}, {x}, {list(shape)}, {norm}[1], {norm}[2], {weight}, "
        f"{weight}, {mask})[{result}]"
    )


def loss_gradient(d: Draw) -> str:
    """Call the gradient of ``nll_loss`` on logarithms of probabilities."""
    x = d.any(lambda value: value.is_floating_point() and value.dim() == 2 and 0 not in value.shape)
    rows, classes = d.values[x].shape
    target = d.input((rows,), torch.int64, below=classes, layout="dense")
    reduction = d.random.choice([0, 1, 2])
    gradient = d.input((rows,) if reduction == 0 else (), d.values[x].dtype, layout="dense", values="normal")
    total = f"torch.full((), {rows}, dtype={x}.dtype, device={x}.device)"
    ignored = d.pick("-100", "0")
    return (
        f"torch.ops.aten.nll_loss_backward.default({gradient}, functional.log_softmax({x}, -1), {target}, None, {reduction}, "
        f"{ignored}, {total})"
    )


def column_sum(d: Draw) -> str:
    """Reduce leading dims."""
    x = d.float(2)
    count = d.random.choice(range(1, d.values[x].dim()))
    name = d.pick("sum", "sum", "mean", "amax", "amin")
    return f"torch.{name}({x}, dim={tuple(range(count))}, keepdim={d.pick('True', 'False')})"
