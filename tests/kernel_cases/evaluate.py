"""An independent evaluator of Programs: torch, float64, as_strided views; the oracle of every backend's tests."""

from __future__ import annotations

import torch

from fusion_advisor.ir.program import nests
from fusion_advisor.library.philox_dropout import philox4x32

_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.true_divide,
    "maximum": torch.maximum, "minimum": torch.minimum,
    "pow": torch.pow, "remainder": torch.remainder,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}  # fmt: skip
_WIDE = {"float32": torch.float64, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}


def evaluate(program, *inputs, into=None):
    """Return the outputs as float64 (int64, bool) tensors of the shape and layout that :func:`allocate` gives them.

    ``into``: what the outputs hold before, where a program does not write them whole; flat, and at least as large.
    """
    if program.siblings:
        found = {}
        for part in nests(program):
            own = [at for at in part.operands if at < len(inputs)]
            theirs = part.operands[len(own) :]
            before = None if into is None else [into[at - len(inputs)] for at in theirs]
            found |= zip(theirs, evaluate(part.program, *(inputs[at] for at in own), into=before), strict=True)
        return [found[at] for at in sorted(found)]
    dims = program.dims
    values = []
    for value in program.values:
        args = [values[a] for a in value.args]
        guard = None if value.guard is None else values[value.guard]
        values.append(_one(program, value, args, guard, inputs))
    outputs = allocate(program) if into is None else [before.clone() for before in into]
    outputs = [output.to(torch.float64 if output.is_floating_point() else output.dtype) for output in outputs]
    for store in program.stores:
        target = outputs[store.operand - len(inputs)]
        if store.args or store.guard is not None:
            _scatter(dims, store, target, values)
            continue
        shape = tuple(s if k else 1 for s, k in zip(dims, store.strides, strict=True))
        source = values[store.value]
        source = source[tuple(slice(0, 1) if not k else slice(None) for k in store.strides)] if source.dim() else source
        torch.as_strided(target, shape, store.strides, store.offset).copy_(source)
    return outputs


def allocate(program, is_output=True, fill=0, generator=None):
    """Flat tensors for the outputs (zeros) or the inputs (normal numbers), as large as every address reaches."""
    sizes = [0] * len(program.operands)
    for part in nests(program):
        for at, size in zip(part.operands, _sizes(part.program), strict=True):
            sizes[at] = max(sizes[at], size)
    found = []
    for operand, size in zip(program.operands, sizes, strict=True):
        if operand.is_output != is_output:
            continue
        dtype = getattr(torch, operand.dtype)
        if is_output:
            found.append(torch.zeros(size, dtype=dtype))
        elif dtype.is_floating_point:
            found.append(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
        elif dtype == torch.bool:
            found.append(torch.randint(0, 2, (size,), generator=generator).bool())
        else:
            found.append(torch.randint(-9, 10, (size,), generator=generator).to(dtype))
    return found


def _sizes(program):
    """How far the addresses of each operand reach."""
    sizes = [0] * len(program.operands)
    places = [(v.operand, v.strides, v.offset, v.guard) for v in program.values if v.op == "load"]
    places += [(s.operand, s.strides, s.offset + _furthest(program, s), None) for s in program.stores]
    unguarded = {operand for operand, _, _, guard in places if guard is None}
    for operand, strides, offset, guard in places:
        if guard is not None and operand in unguarded:
            continue  # a guarded read stays inside what the others read
        walked = [(s, k) for s, k in zip(program.dims, strides, strict=True) if k]
        reach = offset + sum((s - 1) * k for s, k in walked) + 1 if all(s for s, _ in walked) else 0
        sizes[operand] = max(sizes[operand], reach)
    return sizes


def _furthest(program, store):
    """How far positions move a store: to the extent that its guard compares them with, or as far as its row's index does."""
    if not store.args:
        return 0
    if store.guard is None:
        return sum(_greatest(program, number) * step for number, step in zip(store.args, store.steps, strict=True))
    values, waiting = program.values, [store.guard]
    while values[waiting[-1]].op != "extent":
        waiting += values[waiting.pop()].args
    return sum(store.steps) * (values[waiting[-1]].constant - 1)


def _greatest(program, number):
    """The greatest value of an index, or of what it is over or modulo an extent."""
    value = program.values[number]
    if value.op == "index":
        return program.dims[value.dim] - 1
    inner, extent = _greatest(program, value.args[0]), program.values[value.args[1]].constant
    return inner // extent if value.op == "quotient" else min(inner, extent - 1)


def _one(program, value, args, guard, inputs):
    dims, op = program.dims, value.op
    dtype = _WIDE[value.dtype]
    if op == "load":
        return _load(program, value, args, guard, inputs[value.operand]).to(dtype)
    if op == "const":
        return torch.tensor(value.constant, dtype=dtype)
    if op == "index":
        shape = [1] * len(dims)
        shape[value.dim] = dims[value.dim]
        return torch.arange(dims[value.dim]).reshape(shape)
    if op == "dropout":
        return _dropout(value, args[0], _address(dims, value)).to(dtype)
    if op == "size":
        return torch.tensor(dims[value.dim], dtype=dtype)
    if op == "inside":
        wanted = torch.tensor(True) if guard is None else guard
        lies_inside = (args[0] >= 0) & (args[0] < args[1])
        if bool((wanted & ~lies_inside).any()):
            raise IndexError("position out of range")
        return wanted & lies_inside
    if op == "extent":
        return torch.tensor(value.constant)
    if op == "quotient":
        return torch.div(*args, rounding_mode="floor")
    if op.startswith("reduce_"):
        whole = args[0].expand(dims)
        if op == "reduce_sum":
            return whole.sum(-1, keepdim=True)
        return whole.amax(-1, keepdim=True) if op == "reduce_max" else whole.amin(-1, keepdim=True)
    if op in _BINARY:
        return _BINARY[op](*args)
    if op == "where":
        return torch.where(*args)
    if op == "cast":
        return args[0].to(dtype)
    if op in ("round_float16", "round_bfloat16"):
        return args[0].float().to(getattr(torch, op.removeprefix("round_"))).to(dtype)
    if op == "not":
        return torch.bitwise_not(args[0])
    if op == "erf":
        return torch.special.erf(args[0])
    return getattr(torch, op)(args[0])


def _load(program, value, args, guard, tensor):
    """Gather by address, so that a guarded element is never touched."""
    address = _address(program.dims, value)
    for moved, step in zip(args, value.steps, strict=True):
        address = address + moved * step
    if not address.dim():
        address = address.reshape([1] * len(program.dims))
    if guard is None:
        return tensor[address]
    address, guard = torch.broadcast_tensors(address, guard)
    found = torch.zeros(address.shape, dtype=tensor.dtype)
    found[guard] = tensor[address[guard]]
    return found


def _scatter(dims, store, target, values):
    """Write by address; a guarded element goes nowhere."""
    address = _address(dims, store)
    for moved, step in zip(store.args, store.steps, strict=True):
        address = address + values[moved] * step
    guard = torch.tensor(True) if store.guard is None else values[store.guard]
    address, guard, source = (part.expand(dims) for part in (address, guard, values[store.value]))
    target[address[guard]] = source[guard].to(target.dtype)


def _address(dims, value):
    address = torch.tensor(value.offset)
    for d, (size, stride) in enumerate(zip(dims, value.strides, strict=True)):
        shape = [1] * len(dims)
        if stride:
            shape[d] = size
            address = address + (torch.arange(size) * stride).reshape(shape)
    return address


def _dropout(value, seed, number):
    """One Philox call for each element, and the word that is its own."""
    seed, counter = seed.reshape(()), number >> 2
    words = philox4x32(
        (counter & 0xFFFFFFFF, counter >> 32, 0 * counter, 0 * counter), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    )
    word = torch.stack(words).gather(0, (number & 3)[None])[0]
    return (word >= round(value.constant * 2**32)).double() / (1 - value.constant)
