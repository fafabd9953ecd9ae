"""Programs written by hand, the shapes of kernels that real models need; tests of every backend share them."""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.ir.program import Operand, Part, Program, Store, Value, with_dims


class Build:
    """Collects values and operands of one Program."""

    def __init__(self, dims, dtype="float32", is_reduced=False):
        self.dims, self.dtype, self.is_reduced = tuple(dims), dtype, is_reduced
        self.compute = "float64" if dtype == "float64" else "float32"
        self.inputs, self.outputs, self.values, self.stores = [], [], [], []

    def contiguous(self):
        strides, step = [], 1
        for size in reversed(self.dims):
            strides.insert(0, step)
            step *= size
        return tuple(strides)

    def load(self, name, strides=None, offset=0, guard=None, dtype=None, value_dtype=None):
        strides = self.contiguous() if strides is None else tuple(strides)
        names = [o.name for o in self.inputs]
        if name not in names:
            count = 1
            for size, stride in zip(self.dims, strides, strict=True):
                count *= size if stride else 1
            self.inputs.append(Operand(name=name, dtype=dtype or self.dtype, element_count=count))
            names.append(name)
        return self.add(
            "load", dtype=value_dtype or self.compute, operand=names.index(name), strides=strides, offset=offset, guard=guard
        )

    def add(self, op, *args, dtype=None, **fields):
        is_logic = op in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan")
        dtype = dtype or ("bool" if is_logic else self.compute)
        self.values.append(Value(op=op, args=args, dtype=dtype, **fields))
        return len(self.values) - 1

    def const(self, value, name="", dtype=None):
        return self.add("const", dtype=dtype or self.compute, constant=value, constant_name=name)

    def dropout(self, p, numbers=None, offset=0):
        seed = self.load("seed", (0,) * len(self.dims), dtype="int64", value_dtype="int64")
        return self.add("dropout", seed, constant=p, strides=tuple(numbers or self.contiguous()), offset=offset)

    def store(self, name, value, strides=None, dtype=None, offset=0):
        strides = self.contiguous() if strides is None else tuple(strides)
        count = 1
        for size, stride in zip(self.dims, strides, strict=True):
            count *= size if stride else 1
        names = [o.name for o in self.outputs]
        if name in names:
            number = names.index(name)
            self.outputs[number] = replace(self.outputs[number], element_count=self.outputs[number].element_count + count)
        else:
            number = len(names)
            self.outputs.append(Operand(name=name, dtype=dtype or self.dtype, is_output=True, element_count=count))
        self.stores.append(Store(operand=number, value=value, strides=strides, offset=offset))

    def program(self):
        stores = tuple(replace(s, operand=s.operand + len(self.inputs)) for s in self.stores)
        return Program(
            dims=self.dims,
            operands=(*self.inputs, *self.outputs),
            values=tuple(self.values),
            stores=stores,
            is_reduced=self.is_reduced,
        )


def gelu_tanh(dims=(1000,), dtype="float32", strides=None):
    b = Build(dims, dtype)
    x = b.load("x", strides)
    cube = b.add("mul", b.add("mul", x, x), x)
    inner = b.add("mul", b.const(0.7978845608028654), b.add("add", x, b.add("mul", b.const(0.044715), cube)))
    gate = b.add("add", b.const(1.0), b.add("tanh", inner))
    b.store("out", b.add("mul", b.add("mul", b.const(0.5), x), gate))
    return b.program()


def bias_gelu_erf(rows=5, cols=24, dtype="float32"):
    b = Build((rows, cols), dtype)
    x = b.add("add", b.load("x"), b.load("bias", (0, 1)))
    erf = b.add("erf", b.add("mul", x, b.const(0.7071067811865476)))
    b.store("out", b.add("mul", b.add("mul", x, b.const(0.5)), b.add("add", erf, b.const(1.0))))
    return b.program()


def swiglu(rows=5, cols=24, dtype="float32", is_split=False):
    b = Build((rows, cols), dtype)
    if is_split:
        gate, up = b.load("x", (2 * cols, 1)), b.load("x", (2 * cols, 1), offset=cols)
    else:
        gate, up = b.load("gate"), b.load("up")
    b.store("out", b.add("mul", b.add("mul", gate, b.add("sigmoid", gate)), up))
    return b.program()


def rmsnorm(rows=5, cols=24, dtype="float32", row_stride=None):
    b = Build((rows, cols), dtype, is_reduced=True)
    x = b.load("x", (row_stride or cols, 1))
    mean = b.add("div", b.add("reduce_sum", b.add("mul", x, x)), b.add("size", dim=1))
    scale = b.add("rsqrt", b.add("add", mean, b.const(1e-6, "eps")))
    b.store("out", b.add("mul", b.load("weight", (0, 1)), b.add("mul", x, scale)), (cols, 1))
    return b.program()


def add_layernorm(rows=5, cols=24, dtype="float32"):
    b = Build((rows, cols), dtype, is_reduced=True)
    x = b.add("add", b.load("x"), b.load("residual"))
    size = b.add("size", dim=1)
    centered = b.add("sub", x, b.add("div", b.add("reduce_sum", x), size))
    var = b.add("div", b.add("reduce_sum", b.add("mul", centered, centered)), size)
    scale = b.add("rsqrt", b.add("add", var, b.const(1e-5, "eps")))
    normed = b.add("mul", centered, scale)
    b.store("total", x)
    b.store("out", b.add("add", b.add("mul", normed, b.load("weight", (0, 1))), b.load("bias", (0, 1))))
    return b.program()


def softmax(rows=5, cols=24, dtype="float32", is_causal=False, scale=0.125):
    b = Build((rows, cols), dtype, is_reduced=True)
    x = b.add("mul", b.load("x"), b.const(scale))
    if is_causal:
        keep = b.add("le", b.add("index", dim=1, dtype="int64"), b.add("index", dim=0, dtype="int64"))
        x = b.add("where", keep, x, b.const(float("-inf")))
    shifted = b.add("exp", b.add("sub", x, b.add("reduce_max", x)))
    b.store("out", b.add("div", shifted, b.add("reduce_sum", shifted)))
    return b.program()


def rope(batch=2, heads=3, seq=5, dim=16, dtype="float32"):
    """x*cos + rotate_half(x)*sin over (B, H, S, D), x a transposed view of (B, S, H, D), cos and sin (B, 1, S, D)."""
    b = Build((batch, heads, seq, dim), dtype)
    strides = (seq * heads * dim, dim, heads * dim, 1)
    table = (seq * dim, 0, dim, 1)
    half = dim // 2
    d = b.add("index", dim=3, dtype="int64")
    is_low = b.add("lt", d, b.const(half, dtype="int64"))
    is_high = b.add("ge", d, b.const(half, dtype="int64"))
    rotated = b.add(
        "where", is_low,
        b.add("neg", b.load("x", strides, offset=half, guard=is_low)), b.load("x", strides, offset=-half, guard=is_high),
    )  # fmt: skip
    x = b.load("x", strides)
    out = b.add("add", b.add("mul", x, b.load("cos", table)), b.add("mul", rotated, b.load("sin", table)))
    b.store("out", out)
    return b.program()


def rope_pairs(batch=2, heads=3, seq=5, pairs=8, dtype="float32", offset=0, row=0):
    """Neighbouring pairs turned by one angle each; x is a transposed view of (B, S, H, D), the tables hold every angle once."""
    b = Build((batch, heads, seq, pairs), dtype)
    row = row or 2 * pairs
    strides = (seq * heads * row, row, heads * row, 2)
    table = (seq * pairs, 0, pairs, 1)
    even, odd = b.load("x", strides, offset=offset), b.load("x", strides, offset=offset + 1)
    cos, sin = b.load("cos", table), b.load("sin", table)
    b.store("out", b.add("sub", b.add("mul", even, cos), b.add("mul", odd, sin)), strides, offset=offset)
    b.store("out", b.add("add", b.add("mul", odd, cos), b.add("mul", even, sin)), strides, offset=offset + 1)
    return b.program()


def swapped_pairs(pairs=500, dtype="float32"):
    """One run of pairs, the odd element read first."""
    b = Build((pairs,), dtype)
    odd, even = b.load("x", (2,), offset=1), b.load("x", (2,), offset=0)
    b.store("out", b.add("neg", odd), (2,))
    b.store("out", even, (2,), offset=1)
    return b.program()


def normed_pairs(rows=5, pairs=12, dtype="float32"):
    """A row's pairs divided by its largest element; the odd ones are turned around."""
    b = Build((rows, pairs), dtype, is_reduced=True)
    even, odd = b.load("x", (2 * pairs, 2)), b.load("x", (2 * pairs, 2), offset=1)
    most = b.add("reduce_max", b.add("maximum", b.add("abs", even), b.add("abs", odd)))
    b.store("out", b.add("div", even, most), (2 * pairs, 2))
    b.store("out", b.add("div", b.add("neg", odd), most), (2 * pairs, 2), offset=1)
    return b.program()


def pairs_of_less(rows=6, pairs=9, dtype="float32", *, is_reduced=False):
    """What is stored as pairs does not vary like them: a constant beside a row's number, a bias beside a column's."""
    b = Build((rows, pairs), dtype, is_reduced=is_reduced)
    row = b.load("row", (1, 0))
    row = b.add("reduce_sum", b.add("mul", row, b.load("x"))) if is_reduced else row
    b.store("out", b.const(2.5), (2 * pairs, 2))
    b.store("out", row, (2 * pairs, 2), offset=1)
    b.store("turned", b.load("bias", (0, 2), offset=1), (2 * pairs, 2))
    b.store("turned", b.load("bias", (0, 2)), (2 * pairs, 2), offset=1)
    return b.program()


def three_of_a_kind(rows=4, cols=10, dtype="float32"):
    """Three loads with stride 2: two are neighbours, one is alone."""
    b = Build((rows, cols), dtype)
    strides = (2 * cols + 9, 2)
    alone, even, odd = (b.load("x", strides, offset=offset) for offset in (7, 2, 3))
    b.store("out", b.add("add", alone, b.add("sub", even, odd)), (2 * cols, 2))
    b.store("out2", b.add("mul", alone, odd))
    return b.program()


def mean_and_sum(rows=5, cols=24, dtype="float32"):
    """Two outputs of one element per row."""
    b = Build((rows, cols), dtype, is_reduced=True)
    total = b.add("reduce_sum", b.load("x"))
    b.store("total", total, (1, 0))
    b.store("mean", b.add("div", total, b.add("size", dim=1)), (1, 0))
    return b.program()


def unary(op, size=64, dtype="float32"):
    b = Build((size,), dtype)
    b.store("out", b.add(op, b.load("x")))
    return b.program()


def binary(op, size=64, dtype="float32"):
    b = Build((size,), dtype)
    value = b.add(op, b.load("x"), b.load("y"))
    b.store("out", value, dtype="bool" if b.values[value].dtype == "bool" else dtype)
    return b.program()


def transposed_add(rows=40, cols=50, dtype="float32"):
    b = Build((rows, cols), dtype)
    b.store("out", b.add("add", b.load("x", (1, rows)), b.load("y")))
    return b.program()


def five_dims(dtype="float32"):
    b = Build((2, 3, 2, 3, 7), dtype)
    x = b.load("x", (1000, 7 * 40, 80, 9, 1), offset=5)
    y = b.load("y", (0, 7, 0, 21, 0))
    b.store("out", b.add("sub", x, y))
    return b.program()


def batched_softmax(dims=(2, 3, 4, 21), dtype="float32"):
    """Reduced with row dims that do not collapse: a mask without the head dim."""
    b = Build(dims, dtype, is_reduced=True)
    _, heads, rows, cols = dims
    x = b.add("add", b.load("x", (heads * rows * cols, cols, heads * cols, 1)), b.load("mask", (rows * cols, 0, cols, 1)))
    shifted = b.add("exp", b.add("sub", x, b.add("reduce_max", x)))
    b.store("out", b.add("div", shifted, b.add("reduce_sum", shifted)))
    return b.program()


def special(op):
    """A unary op over a size that holds every special value once; see ``SPECIAL`` in cases.py."""
    return unary(op, 32)


def int_and_bool():
    """bool and int inputs, a comparison, logic, casts, an int output and a bool output."""
    b = Build((50,))
    keep = b.load("keep", dtype="bool", value_dtype="bool")
    ids = b.load("ids", dtype="int64", value_dtype="int64")
    is_small = b.add("lt", ids, b.const(3, dtype="int64"))
    both = b.add("and", keep, is_small)
    b.store("both", both, dtype="bool")
    b.store("rest", b.add("remainder", ids, b.const(4, dtype="int64"), dtype="int64"), dtype="int32")
    as_float = b.add("cast", b.add("not", both), dtype="float32")
    b.store("out", b.add("where", keep, as_float, b.const(-1.5)), dtype="float32")
    return b.program()


def row_extremes(rows=5, cols=24):
    b = Build((rows, cols), is_reduced=True)
    x = b.load("x")
    b.store("highest", b.add("reduce_max", x), (1, 0))
    b.store("lowest", b.add("reduce_min", x), (1, 0))
    return b.program()


def one_row_dim(cols=37):
    """Reduced, with no dim before the columns."""
    b = Build((cols,), is_reduced=True)
    x = b.load("x")
    b.store("out", b.add("sub", x, b.add("div", b.add("reduce_sum", x), b.add("size", dim=0))))
    return b.program()


def dropout_add(dims=(1001,), dtype="float32", strides=None, numbers=None, offset=0, p=0.25):
    """residual + x dropped; ``numbers`` are the strides of the element's number where it is not the place in memory."""
    b = Build(dims, dtype)
    x, residual = b.load("x", strides), b.load("residual")
    factor = b.dropout(p, numbers, offset)
    b.store("out", b.add("add", residual, b.add("mul", x, factor)))
    return b.program()


def dropout_add_rmsnorm(rows=5, cols=24, dtype="float32"):
    b = Build((rows, cols), dtype, is_reduced=True)
    total = b.add("add", b.load("residual"), b.add("mul", b.load("x"), b.dropout(0.25)))
    mean = b.add("div", b.add("reduce_sum", b.add("mul", total, total)), b.add("size", dim=1))
    scale = b.add("rsqrt", b.add("add", mean, b.const(1e-6, "eps")))
    b.store("total", total)
    b.store("out", b.add("mul", b.load("weight", (0, 1)), b.add("mul", total, scale)))
    return b.program()


def row_dropout(rows=6, cols=40):
    """One decision for a whole row."""
    b = Build((rows, cols))
    b.store("out", b.add("mul", b.load("x"), b.dropout(0.5, (1, 0))))
    return b.program()


def logsumexp(rows=5, cols=24, dtype="float32"):
    """As the lowering writes it: a row whose maximum is infinite is shifted by 0."""
    b = Build((rows, cols), dtype, is_reduced=True)
    x = b.load("x")
    highest = b.add("reduce_max", x)
    is_infinite = b.add("eq", b.add("abs", highest), b.const(float("inf")))
    shift = b.add("where", is_infinite, b.const(0.0), highest)
    total = b.add("reduce_sum", b.add("exp", b.add("sub", x, shift)))
    b.store("out", b.add("add", b.add("log", total), shift), (1, 0))
    return b.program()


def renamed(program, **names):
    """The same over operands of other names."""
    return replace(program, operands=tuple(replace(o, name=names.get(o.name, o.name)) for o in program.operands))


def siblings(*programs):
    """One launch of several loop nests; operands of one name are one."""
    least = min(2, max(len(program.dims) for program in programs))
    programs = [with_dims(program, least) for program in programs]
    operands = {operand.name: operand for program in programs for operand in program.operands}
    operands = sorted(operands.values(), key=lambda operand: operand.is_output)
    place = {operand.name: number for number, operand in enumerate(operands)}
    parts = [Part(program=program, operands=tuple(place[o.name] for o in program.operands)) for program in programs]
    first, own = programs[0], parts[0].operands
    return replace(
        first,
        operands=tuple(operands),
        values=tuple(replace(v, operand=own[v.operand]) if v.op == "load" else v for v in first.values),
        stores=tuple(replace(s, operand=own[s.operand]) for s in first.stores),
        siblings=tuple(parts[1:]),
    )


def rope_qk(heads=3, key_heads=1, batch=2, seq=5, dim=16, dtype="float32"):
    """Queries and keys turned by the same tables: one function for both."""
    query = renamed(rope(batch, heads, seq, dim, dtype), x="q", out="q_out")
    return siblings(query, renamed(rope(batch, key_heads, seq, dim, dtype), x="k", out="k_out"))


def pairs_qk(dtype="float32"):
    """The keys' pairs lie off by three elements: a function of their own, and packs of one column."""
    query = renamed(rope_pairs(2, 3, 5, 8, dtype), x="q", out="q_out")
    return siblings(query, renamed(rope_pairs(2, 1, 5, 8, dtype, offset=3, row=21), x="k", out="k_out"))


def norms_beside_softmax(cols=24, dtype="float32", rows=(5, 3, 7, 2)):
    """Two nests of one function and two of others, all over rows of one width."""
    keys = renamed(rmsnorm(rows[1], cols, dtype), x="k", out="k_out")
    scores = renamed(softmax(rows[2], cols, dtype), x="scores", out="probabilities")
    hidden = renamed(add_layernorm(rows[3], cols, dtype), x="hidden", out="normed")
    return siblings(rmsnorm(rows[0], cols, dtype), keys, scores, hidden)


def flat_beside_tiled():
    """A run of elements is a tile of one row beside rows."""
    return siblings(bias_gelu_erf(9, 24), renamed(gelu_tanh((300,)), x="gate", out="up"))


def dropouts_beside():
    """The elements of one nest begin in the middle of a call of the random numbers: no pack takes whole calls then."""
    return siblings(dropout_add((1000,)), renamed(dropout_add((64,), offset=3), x="y", residual="z", out="out2"))
