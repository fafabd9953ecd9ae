"""The C++ backend against an fp64 evaluation of the same Program."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.ir.program import Operand, Program, Store, Value
from tests.kernel_cases.cases import cases, distance, inputs
from tests.kernel_cases.evaluate import allocate
from tests.kernel_cases.evaluate import evaluate as evaluate_nests

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


HEADER = Header(title="chain", summary="A test.", origin="generated from the chain", source="hand-made\\")
EPSILON = {torch.float32: 2**-24, torch.float64: 2**-53, torch.float16: 2**-11, torch.bfloat16: 2**-8}


class Maker:
    """Writes a Program down with little ceremony; strides default to contiguous."""

    def __init__(self, *dims: int) -> None:
        self.dims = dims
        self.inputs: list[Operand] = []
        self.outputs: list[Operand] = []
        self.values: list[Value] = []
        self.stores: list[tuple[int, int, tuple[int, ...], int]] = []

    @property
    def contiguous(self) -> tuple[int, ...]:
        return tuple(math.prod(self.dims[d + 1 :]) for d in range(len(self.dims)))

    def op(self, op: str, *args: int, dtype: str = "float32", **rest: object) -> int:
        self.values.append(Value(op=op, args=args, dtype=dtype, **rest))  # type: ignore[arg-type]
        return len(self.values) - 1

    def const(self, number: float | bool, dtype: str = "float32", name: str = "") -> int:
        return self.op("const", dtype=dtype, constant=number, constant_name=name)

    def load(self, name, strides=None, dtype="float32", value_dtype=None, offset=0, guard=None) -> int:
        names = [o.name for o in self.inputs]
        if name not in names:
            self.inputs.append(Operand(name=name, dtype=dtype, element_count=1))
            names.append(name)
        held = value_dtype or {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
        strides = self.contiguous if strides is None else strides
        return self.op("load", dtype=held, operand=names.index(name), strides=strides, offset=offset, guard=guard)

    def store(self, value: int, strides=None, dtype="float32", offset=0) -> None:
        self.outputs.append(Operand(name=f"out{len(self.outputs)}", dtype=dtype, is_output=True, element_count=1))
        self.stores.append((len(self.outputs) - 1, value, self.contiguous if strides is None else strides, offset))

    def program(self, *, is_reduced: bool = False) -> Program:
        stores = tuple(Store(operand=len(self.inputs) + o, value=v, strides=s, offset=at) for o, v, s, at in self.stores)
        operands = (*self.inputs, *self.outputs)
        return Program(dims=self.dims, operands=operands, values=tuple(self.values), stores=stores, is_reduced=is_reduced)


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log1p": torch.log1p,
    "expm1": torch.expm1, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor, "ceil": torch.ceil,
    "trunc": torch.trunc, "round": torch.round, "sign": torch.sign,
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum,
    "pow": torch.pow, "remainder": torch.remainder,
}  # fmt: skip
COMPARE = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
LOGIC = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}
REDUCE = {"reduce_sum": torch.sum, "reduce_max": torch.amax, "reduce_min": torch.amin}
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")}
TABLE = {**UNARY, **BINARY, **COMPARE, **LOGIC, "not": torch.bitwise_not, "isnan": torch.isnan, "where": torch.where}


def evaluate(program: Program, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The stored values over the loop nest's shape: float ops in fp64, integer ops as they are."""
    dims, found = program.dims, []
    grid = torch.meshgrid(*(torch.arange(d) for d in dims), indexing="ij")

    def where(strides: tuple[int, ...], offset: int) -> torch.Tensor:
        return sum((g * s for g, s in zip(grid, strides, strict=True)), torch.full(dims, offset))

    for value in program.values:
        args = [found[a] for a in value.args]
        kind = DTYPES[value.dtype]
        kind = torch.float64 if kind.is_floating_point else kind
        if value.op == "load":
            tensor = tensors[value.operand]
            length = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
            flat = tensor.as_strided((length,), (1,))
            at = where(value.strides, value.offset)
            if value.guard is not None:
                allowed = found[value.guard].expand(dims)
                out = torch.where(allowed, flat[torch.where(allowed, at, 0)].to(kind), torch.zeros((), dtype=kind))
            else:
                out = flat[at].to(kind)
        elif value.op == "const":
            out = torch.tensor(value.constant, dtype=DTYPES[value.dtype]).to(kind).expand(dims)
        elif value.op == "index":
            out = grid[value.dim].to(kind)
        elif value.op == "size":
            out = torch.tensor(dims[value.dim], dtype=kind).expand(dims)
        elif value.op == "cast":
            out = args[0].to(DTYPES[value.dtype]).to(kind)
        elif value.op in REDUCE:
            out = REDUCE[value.op](args[0], dim=-1, keepdim=True).to(kind).expand(dims)
        else:
            out = TABLE[value.op](*args)
        found.append(out)
    return [found[s.value] for s in program.stores]


def run(program: Program, tensors: list[torch.Tensor], path: Path, *, fast_math: bool = False) -> list[torch.Tensor]:
    """Build and launch; the outputs as one flat tensor each, filled with 7 where nothing was written."""
    backend = CppBackend()
    rendered = backend.render(program, HEADER, tuning=Tuning(), fast_math=fast_math)
    launch = backend.build(rendered, path / "kernel.cpp").bind(program)
    outs = []
    for store in program.stores:
        extent = 1 + store.offset + sum((d - 1) * s for d, s in zip(program.dims, store.strides, strict=True) if d)
        outs.append(torch.full((max(extent, 0),), 7, dtype=DTYPES[program.operands[store.operand].dtype]))
    launch(*tensors, *outs)
    return outs


def check(
    program: Program,
    tensors: list[torch.Tensor],
    path: Path,
    *,
    ulps: float = 4,
    scale: float = 0,
    floor: float = 0,
    **rest: bool,
) -> None:
    """Compare every stored element: ``ulps`` of the coarser of compute and output dtype, relative to the value or ``scale``."""
    for store, got, wanted in zip(program.stores, run(program, tensors, path, **rest), evaluate(program, tensors), strict=True):
        if not got.numel():
            continue
        seen = got.as_strided(program.dims, store.strides, store.offset)
        if not got.dtype.is_floating_point:
            assert torch.equal(seen, wanted.to(got.dtype)), program
            continue
        narrow, exact = wanted.to(got.dtype), wanted.double()
        held = torch.float64 if program.values[store.value].dtype == "float64" else torch.float32
        bound = ulps * EPSILON[held] * 2 * exact.abs().clamp(min=scale) + EPSILON[got.dtype] * 1.01 * exact.abs()
        bound += floor + torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
        same = (seen == narrow) | (seen.isnan() & narrow.isnan())
        close = (seen.double() - exact).abs() <= bound
        bad = ~(same | close)
        assert not bad.any(), (seen[bad][:5], exact[bad][:5])


SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-40,
    88.7,
    89.0,
    -88.0,
    -104.0,
    -200.0,
    1e30,
    -1e30,
    0.5,
    -0.5,
    1.5,
    2.5,
    -1.0,
    1.0,
]


def numbers(count: int, dtype: torch.dtype = torch.float32, spread: float = 4) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(count)) * spread
    return made.to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", [*UNARY, "isnan"])
def test_unary_ops(op, dtype, tmp_path):
    x = torch.cat([numbers(5000), numbers(977, spread=40), numbers(500, spread=1e-3), torch.tensor(SPECIAL)]).to(DTYPES[dtype])
    if op in ("sin", "cos"):
        x = x[x.abs() < 1e6]
    make = Maker(x.numel())
    kind = "bool" if op == "isnan" else dtype
    make.store(make.op(op, make.load("x", dtype=dtype), dtype=kind), dtype=kind)
    # tanh and sigmoid are good to 2.5 ulp; sigmoid's subnormal results are flushed to 0 because e^-x is Inf there
    check(make.program(), [x], tmp_path, ulps=3, floor=2**-126 if (op, dtype) == ("sigmoid", "float32") else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("op", [*BINARY, *COMPARE])
def test_binary_ops(op, dtype, tmp_path):
    if dtype == "int64" and op == "div":
        pytest.skip("div is true division, which has a float type")
    if dtype == "int64":
        x, y = torch.randint(-9, 9, (999,)), torch.randint(1, 9, (999,))
        if op == "remainder":
            y = y * (1 - 2 * torch.randint(0, 2, (999,)))
    else:
        x, y = (
            t.flatten().to(DTYPES[dtype]) for t in torch.meshgrid(torch.tensor(SPECIAL), torch.tensor(SPECIAL), indexing="ij")
        )
        x, y = torch.cat([x, numbers(601).to(x.dtype)]), torch.cat([y, numbers(601).to(x.dtype).flip(0)])
        if op == "remainder":  # Inf and huge quotients: not what a fused kernel is for
            y = y.clamp(-50, 50)
    make = Maker(x.numel())
    kind = "bool" if op in COMPARE else dtype
    make.store(make.op(op, make.load("x", dtype=dtype), make.load("y", dtype=dtype), dtype=kind), dtype=kind)
    check(make.program(), [x, y], tmp_path, ulps=2)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -0.5, -1.0, 1.7])
def test_power_by_a_constant(exponent, tmp_path):
    make = Maker(301)
    make.store(make.op("pow", make.load("x"), make.const(exponent)))
    check(make.program(), [numbers(301).abs() + 0.1], tmp_path)


@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_logic_and_where(dtype, tmp_path):
    x, y = torch.randint(0, 2 if dtype == "bool" else 99, (2, 513)).to(DTYPES[dtype])
    make = Maker(513)
    a, b = make.load("x", dtype=dtype), make.load("y", dtype=dtype)
    for op in LOGIC:
        make.store(make.op(op, a, b, dtype=dtype), dtype=dtype)
    make.store(make.op("not", a, dtype=dtype), dtype=dtype)
    both = make.op(
        "and", make.op("ge", a, b, dtype="bool"), make.op("not", make.op("eq", a, b, dtype="bool"), dtype="bool"), dtype="bool"
    )
    make.store(make.op("where", both, make.op("cast", a), make.const(-2.5)))
    check(make.program(), [x, y], tmp_path)


@pytest.mark.parametrize("source", DTYPES)
def test_conversions(source, tmp_path):
    x = (torch.arange(300) % (2 if source == "bool" else 100)).to(DTYPES[source])
    wide = {"float16": "float32", "bfloat16": "float32", "int32": "int64", "uint8": "int64"}
    held = wide.get(source, source)

    def convert(x: torch.Tensor, targets: list[str]) -> None:
        make = Maker(x.numel())
        loaded = make.load("x", dtype=source, value_dtype=held)
        for target in targets:
            make.store(loaded, dtype=target)
            make.store(make.op("cast", loaded, dtype=wide.get(target, target)), dtype=target)
        check(make.program(), [x], tmp_path, ulps=0.5)

    convert(x, list(DTYPES))
    if x.dtype.is_floating_point:
        edges = torch.tensor([math.inf, -math.inf, math.nan, 65520, -7e4, 6e-8]).to(x.dtype)
        convert(torch.cat([x * 1.37, x * 1e-6, edges]), ["float32", "float64", "float16", "bfloat16"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_cast_to_an_integer_and_back_makes_no_negative_zero(dtype, tmp_path):
    """GCC 12 makes ``trunc`` of the two, which keeps the sign of what it cuts to zero."""
    x = torch.tensor([-0.75, -0.0, 0.0, 0.75, -1.0, -1.5, 1.5, 1e19, -1e19, math.nan, -1e-45]).to(DTYPES[dtype]).repeat(40)
    make = Maker(x.numel())
    make.store(make.op("cast", make.op("cast", make.load("x", dtype=dtype), dtype="int64"), dtype=dtype), dtype=dtype)
    (got,) = run(make.program(), [x], tmp_path)
    assert torch.equal(got, x.long().to(x.dtype)) and not (got.signbit() & (got == 0)).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_survives_a_copy(dtype, tmp_path):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    name = str(dtype).removeprefix("torch.")
    make = Maker(x.numel())
    make.store(make.load("x", dtype=name), dtype=name)
    (got,) = run(make.program(), [x], tmp_path)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()].view(torch.int16), x[~x.isnan()].view(torch.int16))


def gelu(make: Maker, dtype: str = "float32") -> Program:
    x = make.load("x", dtype=dtype)
    cube = make.op("mul", make.op("pow", x, make.const(3.0)), make.const(0.044715))
    bent = make.op("tanh", make.op("mul", make.const(0.7978845608028654), make.op("add", x, cube)))
    make.store(make.op("mul", make.op("mul", x, make.const(0.5)), make.op("add", make.const(1.0), bent)), dtype=dtype)
    return make.program()


@pytest.mark.parametrize("count", [0, 1, 7, 16, 1023, 100_003])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_flat(count, dtype, tmp_path):
    # 1 + tanh cancels for negative x: the error is relative to x there, not to the result
    check(gelu(Maker(count), dtype), [numbers(count, DTYPES[dtype])], tmp_path, ulps=4, scale=4)


@pytest.mark.parametrize(
    ("dims", "strides"),
    [
        ((3, 5), (1, 3)), ((2, 9001), (9001, 1)), ((1, 1), (0, 0)), ((4, 3, 5), (15, 1, 3)), ((2, 3, 4, 5), (1, 2, 6, 24)),
        ((2, 1, 3, 2, 7), (42, 0, 14, 7, 1)), ((3, 0), (0, 1)), ((65, 700), (0, 2)),
    ],
)  # fmt: skip
def test_nested_strides(dims, strides, tmp_path):
    make = Maker(*dims)
    x = make.load("x", strides, offset=2)
    row = make.load("bias", (*[0] * (len(dims) - 2), 1, 0))
    column = make.load("weight", (*[0] * (len(dims) - 1), 1))
    index = make.op("cast", make.op("index", dtype="int64", dim=len(dims) - 1))
    made = make.op("add", make.op("mul", x, column), make.op("mul", make.op("exp", row), index))
    make.store(made)
    back = tuple(math.prod(dims[:d]) for d in range(len(dims)))  # transposed
    make.store(make.op("sub", made, make.op("size", dim=0)), back, offset=3)
    x_storage = numbers(sum(max(d - 1, 0) * s for d, s in zip(dims, strides, strict=True)) + 3)
    check(make.program(), [x_storage, numbers(max(dims)), numbers(max(dims))], tmp_path, ulps=4, scale=100)


def test_two_views_of_one_tensor(tmp_path):
    make = Maker(33, 50)
    gate, up = make.load("gate_up", (100, 1)), make.load("gate_up", (100, 1), offset=50)
    make.store(make.op("mul", make.op("mul", gate, make.op("sigmoid", gate)), up))
    check(make.program(), [numbers(3300)], tmp_path, ulps=5)


@pytest.mark.parametrize("is_reduced", [False, True])
def test_guarded_loads_read_nothing_outside(is_reduced, tmp_path):
    # What torch.cat becomes: the guard keeps both loads inside; outside lies NaN.
    make = Maker(5, 40)
    column = make.op("index", dtype="int64", dim=1)
    left = make.op("lt", column, make.const(16, "int64"), dtype="bool")
    right = make.op("not", left, dtype="bool")
    a = make.load("a", (16, 1), guard=left)
    b = make.load("b", (24, 1), offset=0, guard=right)
    made = make.op("where", left, a, make.op("add", b, make.op("exp", a)))
    if is_reduced:
        make.store(make.op("reduce_sum", made), (1, 0))
    else:
        make.store(made)
    storage = torch.cat([torch.full((64,), math.nan), numbers(80), torch.full((64,), math.nan)])
    check(make.program(is_reduced=is_reduced), [storage[64:144].clone(), numbers(24 * 4 + 40)], tmp_path, scale=20)


def test_a_guard_on_the_row_may_point_nowhere(tmp_path):
    make = Maker(6, 2000)
    row = make.op("index", dtype="int64", dim=0)
    inside = make.op("eq", row, make.const(0, "int64"), dtype="bool")
    make.store(make.load("x", (1 << 40, 1), guard=inside))  # any row but the first is unmapped memory
    (got,) = run(make.program(), [x := numbers(2000)], tmp_path)
    assert torch.equal(got.view(6, 2000)[0], x)
    assert not got.view(6, 2000)[1:].any()


def layernorm(make: Maker, dtype: str = "float32") -> Program:
    held = "float64" if dtype == "float64" else "float32"
    last = len(make.dims) - 1
    vector = (*[0] * last, 1)
    x, weight, bias = (make.load(n, s, dtype=dtype) for n, s in (("x", None), ("weight", vector), ("bias", vector)))
    size = make.op("size", dim=last, dtype=held)
    mean = make.op("div", make.op("reduce_sum", x, dtype=held), size, dtype=held)
    centred = make.op("sub", x, mean, dtype=held)
    variance = make.op("div", make.op("reduce_sum", make.op("mul", centred, centred, dtype=held), dtype=held), size, dtype=held)
    scale = make.op("rsqrt", make.op("add", variance, make.const(1e-5, held, "eps"), dtype=held), dtype=held)
    scaled = make.op("mul", make.op("mul", centred, scale, dtype=held), weight, dtype=held)
    make.store(make.op("add", scaled, bias, dtype=held), dtype=dtype)
    per_row = tuple(s // make.dims[-1] for s in make.contiguous[:-1])
    make.store(mean, (*per_row, 0), dtype=held)
    return make.program(is_reduced=True)


def softmax(make: Maker, dtype: str = "float32") -> Program:
    held = "float64" if dtype == "float64" else "float32"
    x = make.load("x", dtype=dtype)
    e = make.op("exp", make.op("sub", x, make.op("reduce_max", x, dtype=held), dtype=held), dtype=held)
    make.store(make.op("div", e, make.op("reduce_sum", e, dtype=held), dtype=held), dtype=dtype)
    return make.program(is_reduced=True)


DIMS = [(1, 1), (1, 4097), (37, 1), (64, 1000), (2, 3, 33), (2, 2, 3, 2, 5), (5000,)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("dims", DIMS)
def test_layernorm(dims, dtype, tmp_path):
    count = math.prod(dims)
    tensors = [(numbers(n) + 3).to(DTYPES[dtype]) for n in (count, dims[-1], dims[-1])]
    check(layernorm(Maker(*dims), dtype), tensors, tmp_path, ulps=8, scale=60)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("dims", DIMS)
def test_softmax(dims, dtype, tmp_path):
    # x - max, up to 32 in size, is rounded before exp sees it: 16 ulp of the result.
    check(softmax(Maker(*dims), dtype), [numbers(math.prod(dims), DTYPES[dtype])], tmp_path, ulps=20)


def test_softmax_with_nan_and_infinities(tmp_path):
    x = numbers(6 * 70).view(6, 70)
    x[0, 3], x[1, 69], x[2, 5] = math.nan, math.inf, -math.inf
    x[3] = -math.inf
    check(softmax(Maker(6, 70)), [x], tmp_path, ulps=20)


def test_residual_add_and_norm_return_both(tmp_path):
    make = Maker(50, 333)
    total = make.op("add", make.load("x"), make.load("residual", (340, 1), offset=4))
    square = make.op("div", make.op("reduce_sum", make.op("pow", total, make.const(2.0))), make.op("size", dim=1))
    make.store(total)
    make.store(make.op("mul", total, make.op("rsqrt", make.op("add", square, make.const(1e-6, name="eps")))))
    check(make.program(is_reduced=True), [numbers(50 * 333), numbers(50 * 340)], tmp_path, ulps=6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_reductions_of_every_type(dtype, tmp_path):
    x = torch.randint(-50, 50, (12, 77)) if dtype != "bool" else torch.randint(0, 2, (12, 77))
    make = Maker(12, 77)
    loaded = make.load("x", dtype=dtype)
    for op in REDUCE:
        if (op, dtype) != ("reduce_sum", "bool"):
            make.store(make.op(op, loaded, dtype=dtype), (1, 0), dtype=dtype)
    count = make.op("reduce_sum", make.op("cast", loaded, dtype="int64"), dtype="int64")
    make.store(make.op("add", make.op("cast", count), make.const(0.5)))
    check(make.program(is_reduced=True), [x.to(DTYPES[dtype])], tmp_path)


def test_an_empty_row_sums_to_zero(tmp_path):
    make = Maker(3, 0)
    make.store(make.op("reduce_sum", make.load("x")), (1, 0))
    program = make.program(is_reduced=True)
    out = torch.full((3,), 7.0)
    backend = CppBackend()
    backend.build(backend.render(program, HEADER, tuning=Tuning(), fast_math=False), tmp_path / "k.cpp").bind(program)(
        torch.empty(0), out
    )
    assert out.tolist() == [0, 0, 0]


def test_no_elements_are_walked_where_columns_have_no_stride(tmp_path):
    """An expanded dim of no elements has stride 0 in the result too."""
    make = Maker(3, 0)
    make.store(make.op("exp", make.load("x", (1, 0))), (1, 0))
    empty = torch.empty(0)
    backend = CppBackend()
    built = backend.build(backend.render(make.program(), HEADER, tuning=Tuning(), fast_math=False), tmp_path / "k.cpp")
    built.bind(make.program())(empty, empty.clone())


@pytest.mark.parametrize("place", [0, 767])
def test_layernorm_of_one_column_alone(place, tmp_path):
    """One lane adds equal tiny squares to a large one: each is rounded to the same side."""
    rows = torch.zeros(400, 768)
    rows[:, place] = numbers(400)
    check(layernorm(Maker(400, 768)), [rows, torch.ones(768), torch.zeros(768)], tmp_path, ulps=10, scale=28)


def test_long_rows_sum_accurately(tmp_path):
    make = Maker(2, 1_000_003)
    make.store(make.op("reduce_sum", make.load("x")), (1, 0))
    check(make.program(is_reduced=True), [torch.rand(2_000_006)], tmp_path, ulps=4)


BESIDE = [name for name in cases() if name.startswith(("beside_", "looped_beside"))]


@pytest.mark.parametrize("name", BESIDE)
def test_loop_nests_side_by_side(name, tmp_path):
    program, backend = cases()[name], CppBackend()
    assert program.siblings
    tensors, outputs = inputs(name, program), allocate(program)
    rendered = backend.render(program, HEADER, tuning=Tuning(), fast_math=False)
    backend.build(rendered, tmp_path / "kernel.cpp").bind(program)(*tensors, *outputs)
    for got, oracle in zip(outputs, evaluate_nests(program, *tensors), strict=True):
        assert distance(name, got, oracle) <= 1


@pytest.mark.parametrize("last_rows", [0, 36])
def test_a_row_number_that_decides_costs_sums_no_digits(last_rows, tmp_path):
    """One large number and 127 equal small ones: a single lane of fp32 sums is 60 units off, sixteen lanes are 2."""
    make = Maker(52, 128)
    row, first = make.op("index", dtype="int64", dim=0), make.const(52 - last_rows, "int64")
    x, y = make.load("x"), make.load("y")
    chosen = make.op("where", make.op("ge", row, first, dtype="bool"), make.op("mul", x, x), make.op("mul", y, y))
    make.store(make.op("reduce_sum", chosen), strides=(1, 0))
    tensors = [torch.full((52, 128), 0.005602).index_fill(1, torch.tensor([0]), 0.711465).flatten() for _ in range(2)]
    check(make.program(is_reduced=True), tensors, tmp_path, ulps=4)


def test_fast_math_keeps_nan(tmp_path):
    x = numbers(4 * 2050).view(4, 2050)
    x[1, 7], x[2, 8] = math.nan, math.inf
    program = softmax(Maker(4, 2050))
    check(program, [x], tmp_path, ulps=20, fast_math=True)
    assert "Fast math" in CppBackend().render(program, HEADER, tuning=Tuning(), fast_math=True).source


def test_one_build_serves_other_sizes_and_no_other_layout(tmp_path):
    backend = CppBackend()
    built = backend.build(backend.render(layernorm(Maker(4, 8)), HEADER, tuning=Tuning(), fast_math=False), tmp_path / "k.cpp")
    other = layernorm(Maker(9, 31))
    tensors = [numbers(9 * 31), numbers(31), numbers(31)]
    out, mean = torch.empty(9 * 31), torch.empty(9)
    built.bind(other)(*tensors, out, mean)
    torch.testing.assert_close(out.view(9, 31), evaluate(other, tensors)[0].float())
    with pytest.raises(ValueError, match="another layout"):
        built.bind(softmax(Maker(9, 31)))


def test_source_reads_like_code(tmp_path):
    source = CppBackend().render(gelu(Maker(100)), HEADER, tuning=Tuning(), fast_math=False).source
    assert source.startswith("// chain: A test.\n")
    assert "// Source: hand-made/\n" in source
    assert "0.5f" in source
    assert "fa_erf" not in source
    assert max(map(len, source.splitlines())) <= 132
    assert "\n\n\n" not in source


def test_the_cache_is_used_and_shared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backend = CppBackend()
    rendered = backend.render(gelu(Maker(10)), HEADER, tuning=Tuning(), fast_math=False)
    built: list[object] = []
    threads = [
        threading.Thread(target=lambda: built.append(backend.build(rendered, tmp_path / "k.cpp").library)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(built)) == 1
    assert [p.name for p in (tmp_path / "cache" / "fusion-advisor" / "cpp").iterdir()] == [built[0].name]
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("compiled again"))
    backend.build(rendered, tmp_path / "k.cpp")


def test_a_missing_or_failing_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = CppBackend()
    rendered = backend.render(gelu(Maker(10)), HEADER, tuning=Tuning(), fast_math=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildFailed, match=r"install g\+\+"):
        backend.build(rendered, tmp_path / "k.cpp")
    monkeypatch.delenv("CXX")
    broken = type(rendered)(
        backend="cpp",
        entry=rendered.entry,
        suffix=".cpp",
        source=rendered.source.replace("fa_tanh(x_", "fa_tanhh(x_").replace("out0[i]", "out1[i]"),
    )
    with pytest.raises(KernelBuildFailed, match="error: ") as failed:
        backend.build(broken, tmp_path / "k.cpp")
    assert "\n" not in str(failed.value)
