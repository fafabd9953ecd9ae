"""A captured graph of ATen ops in plain data, and the same graph made again.

Ops are named in full and looked up among those that torch knows; no code is read from a file. Layouts stand in a table, with a
number for each storage, so that what shares memory shares it again. Constants are written as bytes.
"""

from __future__ import annotations

import base64
import keyword
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import module_path
from fusion_advisor.capture.graph.layout_copies import LAID_OUT
from fusion_advisor.capture.graph.split_bias import WRITTEN_OUT
from fusion_advisor.capture.series.as_images import SHOWN_FOR
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.runtime.torch_internals import fake_mode, fx_trace, stored_sizes, symbolic_sizes, tensor_memory
from fusion_advisor.runtime.torch_internals.stored_sizes import OpenSizes

_MARKS = (LAID_OUT, WRITTEN_OUT, SHOWN_FOR)
"""What rewrites of layouts leave on nodes."""
_MOST_BYTES = 2**25
"""Of constants."""
_SIZE = "size"
"""In place of an op's name: computes a size from other sizes, as the node's own value says."""
_OF_SIZES: dict[str, Callable[..., Any]] = {
    f"size.{one.__name__}": one
    for one in (
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.eq, operator.ne, operator.lt,
        operator.le, operator.gt, operator.ge, torch.sym_min, torch.sym_max, torch.sym_sum,
    )
}  # fmt: skip
"""What Python does with sizes; dynamo of torch 2.11 asserts ranges of them in the graph."""
_FILES = {"from_file"}
"""Ops of ATen's that open a file: none is run by its name from a file."""
_PLACES = ("dtype", "device", "layout", "memory_format")
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    str(one).removeprefix("torch."): one
    for one in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


# -- to plain data -----------------------------------------------------------------------------------------------------------


def encode_graph(module: GraphModule, symbols: Sequence[Any] = ()) -> dict[str, Any]:
    """Describe a graph.

    Args:
        module: as captured, with the layouts of its values.
        symbols: of its open sizes.

    Raises:
        CannotDescribe: it holds what no file of ours can.
    """
    number = {node: place for place, node in enumerate(module.graph.nodes)}
    writer = _Writer(number, symbols)
    nodes = [writer.row(node) for node in module.graph.nodes]
    names = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    constants = {name: _constant(name, getattr(module, name, None)) for name in names}
    if sum(len(one["data"]) for one in constants.values()) > _MOST_BYTES:
        raise CannotDescribe(f"constants of more than {_MOST_BYTES:,} bytes")
    return {"nodes": nodes, "layouts": writer.layouts, "storages": writer.storages, "constants": constants}


class _Writer:
    def __init__(self, number: dict[Node, int], symbols: Sequence[Any]) -> None:
        self._number, self._symbols = number, symbols
        self._known: dict[str, int] = {}
        self._storage: dict[int, int] = {}
        self.layouts: list[list[Any]] = []
        self.storages: list[Any] = []

    def row(self, node: Node) -> list[Any]:
        """Describe a node: op, name, target, arguments, layouts, module, marks."""
        target = str(node.target) if node.op in ("placeholder", "get_attr", "output") else _target_name(node)
        marks = {name: node.meta[name] for name in _MARKS if name in node.meta}
        if not all(isinstance(value, bool | str) for value in marks.values()):
            raise CannotDescribe("a mark of another kind")
        given = [self._argument(one) for one in node.args]
        named = {name: self._argument(one) for name, one in node.kwargs.items()}
        return [node.op, node.name, target, given, named, self._value(node.meta.get("val")), module_path(node), marks]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": self._number[value]}
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": value.hex()}
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            kind = "memory_format" if isinstance(value, torch.memory_format) else type(value).__name__
            return {kind: str(value).removeprefix("torch.")}
        raise CannotDescribe(f"an argument that is a {type(value).__name__}")

    def _value(self, value: Any) -> Any:
        """Return the place of a value's layout; a list for several, None for none."""
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        if isinstance(value, torch.SymInt | int):
            return {"truth" if isinstance(value, bool) else "size": self._size(value)}
        if isinstance(value, torch.SymBool):
            return {"truth": self._size(value)}
        is_plain = isinstance(value, torch.Tensor) and fake_mode.is_plain_fake(value, may_be_open=True)
        if not is_plain or value.is_neg() or value.is_conj():
            raise CannotDescribe(f"a value that is a {type(value).__name__}")
        key = tensor_memory.storage_key(value)
        if key not in self._storage:
            self._storage[key] = len(self.storages)
            self.storages.append(self._size(value.untyped_storage().nbytes()))
        offset, shape, stride = value.storage_offset(), value.shape, value.stride()
        where = [self._storage[key], self._size(offset), list(map(self._size, shape)), list(map(self._size, stride))]
        row = [*where, str(value.dtype).removeprefix("torch."), value.device.type]
        if str(row) not in self._known:
            self._known[str(row)] = len(self.layouts)
            self.layouts.append(row)
        return self._known[str(row)]

    def _size(self, size: Any) -> Any:
        try:
            return stored_sizes.plain(symbolic_sizes.expression_of(size), self._symbols)
        except ValueError as error:
            raise CannotDescribe(str(error)) from error


def _target_name(node: Node) -> str:
    target = node.target
    if target is operator.getitem:
        return "getitem"
    if symbolic_sizes.is_computing(target):
        return _SIZE
    if target in _OF_SIZES.values():
        return next(name for name, one in _OF_SIZES.items() if one is target)
    if not isinstance(target, torch._ops.OpOverload):
        kind = getattr(target, "__name__", type(target).__name__)
        is_of_sizes = symbolic_sizes.is_size(node.meta.get("val"))
        raise CannotDescribe(f"a number is computed from sizes by `{kind}`" if is_of_sizes else f"an op that is a {kind}")
    name = str(target)
    _op_of(name)
    return name


def _constant(name: str, value: Any) -> dict[str, Any]:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or fake_mode.is_fake(value) or value.layout != torch.strided:
        raise CannotDescribe(f"its constant `{name}` is a {type(value).__name__}")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = base64.b64encode(flat.numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "stride": list(value.stride()), "device": value.device.type, "data": data}


# -- and back ----------------------------------------------------------------------------------------------------------------


def decode_graph(data: dict[str, Any], device: torch.device, sizes: OpenSizes | None = None) -> GraphModule:
    """Make a graph from its description.

    Args:
        data: from :func:`encode_graph`, or from whoever wrote the file.
        device: of the model.
        sizes: its open ones; None: it has none.

    Raises:
        CannotDescribe: it names an op or a dtype that torch does not have.
        LookupError, TypeError, ValueError, RuntimeError: it is no such description.
    """
    root = torch.nn.Module()
    for name, row in data["constants"].items():
        if hasattr(root, _plain_name(name)):
            raise CannotDescribe(f"a constant named {name!r:.60}")
        root.register_buffer(name, _tensor(row, device))
    values = fake_mode.laid_out(data["layouts"], data["storages"], device, _dtype, sizes)
    reader = _Reader(device)
    graph = Graph()
    made: list[Node] = []
    targets: dict[str, Callable[..., Any]] = {}
    for op, name, target, given, named, value, path, marks in data["nodes"]:
        if op == "call_function" and target == _SIZE:
            called: Any = _computing(value, [made[one["node"]] for one in given], sizes)
        elif op == "call_function":
            called = targets[target] if target in targets else targets.setdefault(target, _op_of(target))
        elif op in ("placeholder", "get_attr", "output"):
            called = _plain_name(target)
            if op == "placeholder" and (given or named):
                raise CannotDescribe(f"an input with a default, {name!r:.40}")
        else:
            raise CannotDescribe(f"a node that is a {op!r:.40}")
        arguments = tuple(reader.read(one, made) for one in given)
        options = {_plain_name(key): reader.read(one, made) for key, one in named.items()}
        node = graph.create_node(op, called, arguments, options, _plain_name(name))
        if value is not None:
            node.meta["val"] = _valued(value, values, sizes)
        if path:
            node.meta["nn_module_stack"] = {path: (path, "")}
        node.meta.update({key: marks[key] for key in _MARKS if key in marks})
        made.append(node)
    return fx_trace.lazy_graph_module(root, graph, class_name="Captured")


def _plain_name(name: Any) -> str:
    """Return a name that Python can have: FX writes a graph's names into code, and runs it.

    Raises:
        CannotDescribe: it is something else.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise CannotDescribe(f"a name like {name!r:.60}")
    return name


class _Reader:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, value: Any, made: list[Node]) -> Any:
        if isinstance(value, list):
            return [self.read(item, made) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "node":
            return made[content]
        if kind == "float":
            return float.fromhex(content)
        if kind == "dtype":
            return _dtype(content)
        if kind == "device":
            return on_device(content, self._device)
        return (_LAYOUTS if kind == "layout" else _FORMATS)[content]


def on_device(kind: str, device: torch.device) -> torch.device:
    """Return a device by its kind: the model's own, or the CPU."""
    if kind not in ("cpu", device.type):
        raise CannotDescribe(f"a tensor on {kind!r:.20}")
    return device if kind == device.type else torch.device("cpu")


def _valued(value: Any, values: list[torch.Tensor], sizes: OpenSizes | None) -> Any:
    if isinstance(value, list):
        return tuple(None if item is None else _valued(item, values, sizes) for item in value)
    if not isinstance(value, dict):
        return values[value]
    ((kind, data),) = value.items()
    return _open(sizes).truth(data) if kind == "truth" else _open(sizes).size({"size": data}[kind])


def _computing(value: Any, given: list[Node], sizes: OpenSizes | None) -> Callable[..., Any]:
    """Return the function that computes a size from others."""
    symbols = [symbolic_sizes.symbol_of(node.meta["val"]) for node in given]
    expression = _open(sizes).expression(value["size"])
    if None in symbols or not symbolic_sizes.symbols_in(expression) <= set(symbols):
        raise CannotDescribe("a size that is computed from something else than sizes")
    return symbolic_sizes.computing(expression, symbols)


def _open(sizes: OpenSizes | None) -> OpenSizes:
    if sizes is None:
        raise CannotDescribe("an open size in a graph of one size")
    return sizes


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CannotDescribe(f"a dtype {name!r:.40}")
    return found


def _op_of(name: str) -> Callable[..., Any]:
    """Return an op of torch's dispatcher by its full name: ATen's, or another library's that computes tensors from tensors.

    Raises:
        CannotDescribe: there is no such op, or it may open a file or write to its inputs.
    """
    if name == "getitem":
        return operator.getitem
    if name in _OF_SIZES:
        return _OF_SIZES[name]
    space, *rest = name.split(".")
    if len(rest) != 2:
        raise CannotDescribe(f"the op {name!r:.80}, which is none of torch's")
    packet = getattr(getattr(torch.ops, space, None), rest[0], None)
    found = getattr(packet, rest[1], None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload):
        raise CannotDescribe(f"the op {name!r:.80}, which torch does not have")
    only_computes = rest[0] not in _FILES if space == "aten" else _computes_tensors(found._schema)
    if not only_computes:
        raise CannotDescribe(f"the op {name!r:.80}, which may do more than compute")
    return found


def _computes_tensors(schema: torch.FunctionSchema) -> bool:
    """Whether an op takes tensors and numbers, no names of files or objects, gives tensors, and writes to none."""
    taken, given = ([str(one.type) for one in values] for values in (schema.arguments, schema.returns))
    is_plain = not any(word in kind for kind in (*taken, *given) for word in ("str", "Any", "__torch__"))
    return is_plain and not schema.is_mutable and all(any("Tensor" in kind for kind in kinds) for kinds in (taken, given))


def _tensor(row: dict[str, Any], device: torch.device) -> torch.Tensor:
    raw, dtype = bytearray(base64.b64decode(row["data"], validate=True)), _dtype(row["dtype"])
    shape, stride = [int(size) for size in row["shape"]], [int(step) for step in row["stride"]]
    count = math.prod(shape)
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if flat.numel() != count or any(size < 0 for size in shape):
        raise CannotDescribe("a constant of another size than its bytes")
    dense = flat.reshape(shape)
    if list(dense.stride()) != stride and count:
        laid = torch.empty_strided(shape, stride, dtype=dtype) if _is_dense(shape, stride) else None
        if laid is None:
            raise CannotDescribe("a constant with gaps")
        dense = laid.copy_(dense)
    return dense.to(on_device(row["device"], device))


def _is_dense(shape: list[int], stride: list[int]) -> bool:
    """Whether strides place each element once, without gaps."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True
