"""A rewritten graph, printed: the forward's source, the call that it serves, and what the model must be."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.codegen.common.header_comment import wrap
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.collect import Rewritten
from fusion_advisor.export.copied.call_objects import Unknown, at, objects_in, spec_of, tensors_in
from fusion_advisor.export.copied.model_facts import facts
from fusion_advisor.export.forward_source import ForwardPrinter, Source
from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.export.linear_ops import OddRowsCall
from fusion_advisor.export.outputs import OutputPrinter
from fusion_advisor.export.parameters import Layer, joined_tensors, place_of, tensor_names
from fusion_advisor.fuse.cuda_graph.capturable import UNDO_BYTES, has_collectives, saved_inputs
from fusion_advisor.fuse.cuda_graph.tail import LastProduct, last_product
from fusion_advisor.records import TensorMeta
from fusion_advisor.runtime.call_tensors import is_object
from fusion_advisor.workload.factory import FILE_MODULE
from fusion_advisor.workload.load import LoadedWorkload

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """All that the files of a package are rendered from.

    Attributes:
        context: names of the templates' own.
        ops: that the forward calls.
        tensors: layouts of the call's tensors, by argument.
        values: of its other arguments.
        specs: what the objects among its arguments hold.
        constants: tensors that the forward reads and the model does not have.
        expected: what the model must be.
        left_out: kept rewrites that the package does not have.
    """

    context: Mapping[str, Any]
    ops: tuple[KernelOp, ...]
    tensors: tuple[tuple[str, TensorMeta], ...]
    values: dict[str, object]
    specs: dict[str, Any]
    constants: Mapping[str, torch.Tensor]
    expected: Mapping[str, Any]
    left_out: tuple[str, ...]


def printed(loaded: LoadedWorkload, found: Rewritten) -> Printed:
    """Print a rewritten graph.

    Args:
        loaded: its model and the call of the run.
        found: the graph.

    Raises:
        CannotExport: the call, its output or the graph holds what no source can.
    """
    graph, model = found.module.graph, loaded.model
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = dict(tensor_names(model, placeholders, found.names))
    joined = joined_tensors(graph, tensors)
    call = _bound(loaded)
    objects = _objects(call)
    specs = _specs(objects)
    given = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    given |= {path: at(path, call) for path in tensors_in(list(specs.values()))}
    arguments = _arguments(loaded, placeholders, found.names, tensors)
    written = _written(graph, arguments)
    if written and _share_memory(given.values()):
        raise CannotExport(detail="tensors of its call share memory, and it writes into some of them")
    tensors |= {node: one.name for node, one in joined.items()}
    printer = ForwardPrinter(
        Source(
            model=model, graph=graph, ops=found.ops, tensors=tensors, origins=found.origins,
            arguments={node: name for node, name in arguments.items() if "." not in name},
            state={node: name for node, name in arguments.items() if "." in name},
            late=(late := _late(graph, tensors)),
        )
    )  # fmt: skip
    body = printer.printed()
    known = {id(value): place_of(name) for name, value in (*given.items(), *objects.items())}
    output = OutputPrinter(found.values, printer.result, known)
    body += _assignments(found, objects, output)
    result = output.expression(found.output)
    ops = _called(found)
    metas = tuple((name, _meta(value)) for name, value in given.items())
    text = "\n".join([*body, *(line for function in printer.functions for line in function.lines)])
    context = {
        "class_name": type(model).__name__, "imports": sorted(output.imports), "functions": _functions(printer),
        "body": body, "result": result, "written": written,
        "saved": _saved(found.module, arguments, given), "specs": specs, "sets": bool(found.assigned),
        "arguments": [name for name in call if isinstance(call[name], torch.Tensor) or name in objects],
        "tensors": [(name, laid(name, meta)) for name, meta in metas], "has_functional": "F." in text,
        "has_aten": "aten." in text,
        "values": repr(_values(call)),
        "joined": sorted({one.name: one for one in joined.values()}.values(), key=lambda one: one.name),
        "has_late": late is not None, "below": repr(_below(given)), "aten_ops": _aten_ops(graph),
    }  # fmt: skip
    return Printed(
        context=context, ops=ops, tensors=metas, values=_values(call), specs=specs,
        constants=_constants(found), expected=_expected(loaded), left_out=found.left_out,
    )  # fmt: skip


def _called(found: Rewritten) -> tuple[KernelOp, ...]:
    """Return the ops that a graph calls: a kernel of a linear may have taken the place of others."""
    called = {id(node.target) for node in found.module.graph.nodes}
    ops = tuple(op for op in found.ops.ops if any(found.ops.by_call.get(number) is op for number in called))
    if not ops:
        raise CannotExport(detail="its graph calls no kernel")
    return ops


def _share_memory(tensors: Collection[torch.Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)


def _below(given: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(value.max()) + 1 for name, value in given.items() if _is_whole(value)}


def _aten_ops(graph: Graph) -> list[str]:
    return sorted({_op_name(node) for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)})


def _functions(printer: ForwardPrinter) -> list[dict[str, object]]:
    return [
        {
            "name": one.name, "parameters": [*one.first, *one.given], "lines": one.lines, "outputs": one.outputs,
            "title": _title(one.layers),
        }
        for one in printer.functions
    ]  # fmt: skip


def _title(layers: Sequence[Layer]) -> str:
    if not layers:
        return "Compute the large result that a CUDA graph leaves out: it lies in the caller's memory without a copy"
    return f"Compute `{layers[0].path}`" + (f" to `{layers[-1].path}`" if len(layers) > 1 else "")


def _late(graph: Graph, tensors: Collection[Node]) -> LastProduct | None:
    """Return the large product that a graph makes last, of a value of its own and the model's tensors."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = list(output.all_input_nodes)
    found = [last_product(graph, one, tensors, kinds=(OddRowsCall,)) for one in results if len(one.users) == 1]
    return next((one for one in found if one is not None), None)


def _bound(loaded: LoadedWorkload) -> dict[str, Any]:
    """Return the call's arguments by the names of the forward's parameters."""
    parameters = inspect.signature(loaded.model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters if one.kind in kinds]
    if len(loaded.args) > len(names):
        raise CannotExport(detail="its forward takes *args, which have no names")
    call = {**dict(zip(names, loaded.args, strict=False)), **loaded.kwargs}
    for name, value in call.items():
        if not isinstance(value, torch.Tensor) and type(value) not in _PLAIN and not is_object(value):
            kind = type(value).__name__
            raise CannotExport(
                detail=f"its argument `{name}` is a {kind}, and a package takes tensors, plain values and caches alone"
            )
        if not name.isidentifier():
            raise CannotExport(detail=f"its argument `{name}` is no identifier")
    return call


def _arguments(
    loaded: LoadedWorkload, placeholders: list[Node], names: tuple[str, ...], tensors: Mapping[Node, str]
) -> dict[Node, str]:
    """Return the name of each placeholder that is an argument of the call."""
    parameters = list(inspect.signature(loaded.model.forward).parameters)
    known = {f"args.{place}": parameters[place] for place in range(len(loaded.args))} | {name: name for name in loaded.kwargs}
    objects = _objects(_bound(loaded))
    found = {}
    for node, name in zip(placeholders, names, strict=True):
        if node not in tensors and node.users:
            given = next((one for one in known if name == one or name.startswith(f"{one}.")), "")
            if not given or (name != given and known[given] not in objects):
                raise CannotExport(detail=f"it reads `{name}`, which is no argument of its call and no tensor of the model")
            found[node] = known[given] + name[len(given) :]
    return found


def _assignments(found: Rewritten, objects: Mapping[str, Any], output: OutputPrinter) -> list[str]:
    """Return statements that set what the call sets in its arguments: a growing cache gets new tensors."""
    owners = {id(owner): path for name, value in objects.items() for path, owner in objects_in(name, value)}
    lines = []
    for owner, name, value in found.assigned:
        place = f"{owners[id(owner)]}.{name}"
        if not isinstance(value, torch.Tensor):
            raise CannotExport(
                detail=f"its call sets `{place}` to a {type(value).__name__}, which the next call may set to another"
            )
        lines.append(f"{place_of(place)} = {output.expression(value)}")
    return lines


def _objects(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if is_object(value) and not isinstance(value, torch.Tensor)}


def _values(call: Mapping[str, Any]) -> dict[str, object]:
    return {name: value for name, value in call.items() if type(value) in _PLAIN}


def _specs(objects: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {name: spec_of(name, value) for name, value in objects.items()}
    except Unknown as error:
        raise CannotExport(detail=f"an argument of its call holds what a package cannot make again: {error}") from error


def _written(graph: Graph, arguments: Mapping[Node, str]) -> list[str]:
    """Return the paths of the call's tensors that a graph writes into."""
    keys = {key for node in graph.nodes if node.op == "call_function" for key in written_storages(node)}
    return sorted(name for node, name in arguments.items() if not keys.isdisjoint(storages(node)))


def _saved(module: GraphModule, arguments: Mapping[Node, str], given: Mapping[str, torch.Tensor]) -> list[str] | None:
    """Return the paths of what undoes a graph when it is put back; None where that would not, is too large or is no argument."""
    slots = saved_inputs(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if slots is None or has_collectives(module) or any(placeholders[slot] not in arguments for slot in slots):
        return None
    paths = sorted({arguments[placeholders[slot]] for slot in slots})
    return paths if sum(given[path].nbytes for path in paths) <= UNDO_BYTES else None


def _constants(found: Rewritten) -> dict[str, torch.Tensor]:
    names = {str(node.target) for node in found.module.graph.nodes if node.op == "get_attr"}
    values = {name: getattr(found.module, name) for name in sorted(names)}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or not name.isidentifier():
            raise CannotExport(detail=f"its graph holds `{name}`, which is no tensor")
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def _expected(loaded: LoadedWorkload) -> dict[str, Any]:
    model, config = loaded.model, getattr(loaded.model, "config", None)
    kind = type(model)
    is_importable = not kind.__module__.startswith((FILE_MODULE, "__main__")) and hasattr(type(config), "from_dict")
    return {
        **facts(model),
        "model_class": f"{kind.__module__}.{kind.__qualname__}",
        "config_class": f"{type(config).__module__}.{type(config).__qualname__}" if is_importable else "",
    }


def _op_name(node: Node) -> str:
    target: Any = node.target
    name, overload = target._schema.name.replace("::", "."), target._overloadname
    return f"{name}.{overload}"


def _is_whole(value: torch.Tensor) -> bool:
    return value.numel() > 0 and not value.dtype.is_floating_point and not value.dtype.is_complex


def _meta(value: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        shape=tuple(value.shape), stride=value.stride(), dtype=str(value.dtype).removeprefix("torch."), device=value.device.type
    )


def ops_listed(ops: Sequence[KernelOp]) -> dict[str, Any]:
    """Return what the template of ``ops.py`` prints of each op.

    Args:
        ops: of a package.
    """
    return {
        "backends": sorted({op.rendered.backend for op in ops}),
        "ops": [
            {
                "name": op.name, "comment": wrap(f"{op.fusion_id}: {op.summary}"), "file": op.file,
                "launch": list(op.launch.items()), "launcher": _launcher(op),
                "inputs": [laid(one, meta) for one, meta in op.inputs],
                "outputs": [laid(one, meta) for one, meta in op.outputs], "in_place": op.in_place, "carried": carried_of(op),
            }
            for op in ops
        ],
        "has_tensor_maps": any("maps" in op.launch for op in ops),
        "has_recurrences": any(op.carried is not None for op in ops),
        "flags": {op.file: op.rendered.flags for op in ops if op.rendered.flags},
    }  # fmt: skip


def _launcher(op: KernelOp) -> str:
    return "tensor_map_launcher" if "maps" in op.launch else f"{op.rendered.backend}_launcher"


def carried_of(op: KernelOp) -> dict[str, Any] | None:
    """Return what ``ops.py`` prints of a recurrence's state; None for any other kernel.

    Args:
        op: of a package.
    """
    if op.carried is None:
        return None
    names, first = ", ".join(name for name, _ in op.inputs), op.carried.first
    return {
        "operands": f"({', '.join(op.carried.operands)})", "state": laid("state", op.carried.state),
        "first": f"lambda {names}: {first}" if first else "", "is_handed_out": op.carried.is_handed_out,
    }  # fmt: skip


def laid(name: str, meta: TensorMeta) -> str:
    """Return the arguments of the package's ``Laid``.

    Args:
        name: of the tensor.
        meta: its layout.
    """
    return f'"{name}", {tuple(meta.shape)}, {tuple(meta.stride)}, torch.{meta.dtype}'
