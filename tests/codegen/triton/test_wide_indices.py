"""Kernels of 2^31 elements and more reach every one of them, and nothing else: their indices are computed, no tensor is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.codegen.common.arguments import schedule
from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Form, Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.cuda.tiling import launch_shapes
from fusion_advisor.codegen.gemm.problem import GemvProblem, candidates, refusal
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.codegen.triton.launch import launch_of
from fusion_advisor.codegen.triton.signature import fixed_arguments, names_at
from fusion_advisor.codegen.triton.tiling import choose_shape
from tests.kernel_cases import programs as p

HEADER = Header(title="case", summary="a test", origin="a test")
WIDTHS = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class Pointer:
    """A tensor that is not there, and how far into it an address lies."""

    name: str
    places: torch.Tensor

    def __add__(self, step):
        return replace(self, places=self.places + torch.as_tensor(step))


class Memory:
    """``tl`` with numbers of the width that Triton gives them; loads and stores are noted."""

    float32, int1, int32, int64 = torch.float32, torch.bool, torch.int32, torch.int64
    PropagateNan = SimpleNamespace(ALL=None)

    def __init__(self, program):
        self._program = program
        self.reached = {}

    def program_id(self, _axis):
        # Of one dim: torch gives a tensor of none the width of what it meets.
        return torch.tensor([self._program], dtype=torch.int32)

    def arange(self, start, end):
        return torch.arange(start, end, dtype=torch.int32)

    def cast(self, number, dtype):
        return torch.as_tensor(number).reshape(-1).to(dtype)

    def cdiv(self, number, by):
        return (number + by - 1) // by

    def full(self, shape, value, dtype):
        return torch.full(shape, value, dtype=dtype)

    def range(self, start, end, step, **_options):
        """The first and the last step."""
        last = (int(end) - 1) // step * step
        assert last + step <= torch.iinfo(end.dtype).max
        return [torch.tensor([place], dtype=end.dtype) for place in dict.fromkeys((start, last))]

    def load(self, pointer, mask=True, **_others):
        return self._noted(pointer, mask)

    def store(self, pointer, _value, mask=True):
        self._noted(pointer, mask)

    def _noted(self, pointer, mask):
        places, mask = torch.broadcast_tensors(pointer.places, torch.as_tensor(mask))
        if mask.any():
            least, most = self.reached.get(pointer.name, (2**63 - 1, -1))
            found = places[mask]
            self.reached[pointer.name] = min(least, int(found.min())), max(most, int(found.max()))
        return torch.zeros(places.shape)

    def split(self, pairs):
        return pairs[..., 0], pairs[..., 1]

    def join(self, even, odd):
        return torch.stack(torch.broadcast_tensors(even, odd), -1)

    def sum(self, tile, axis, keep_dims=True):
        return tile.sum(axis, keepdim=keep_dims)

    reduce = staticmethod(lambda tile, axis, _function, keep_dims=False: tile.amax(axis, keepdim=keep_dims))
    maximum = staticmethod(lambda a, _b, **_options: a)
    fma = staticmethod(lambda _a, _b, c: c)
    div_rn = rsqrt = exp2 = abs = staticmethod(lambda a, *_others: a)
    where, broadcast_to = staticmethod(torch.where), staticmethod(torch.broadcast_to)


def reached(program, tuning=None):
    """The least and the most that the first and the last program read and write, by tensor."""
    rendered = TritonBackend().render(program, HEADER, tuning=tuning or Tuning(), fast_math=False)
    (call,) = calls_of(program, flatten_rows=False)
    shape, integers = launch_of([call], rendered)
    known = names_at(fixed_arguments([call])[call.function], call.arguments)
    given = [
        value if name in known else torch.tensor([value], dtype=torch.int32 if abs(value) < 2**31 else torch.int64)
        for name, value in integers
    ]
    constants = {name: WIDTHS.get(str(value), value) for name, value in shape.constants.items()}
    found = {}
    for number in (0, shape.programs - 1):
        tl = Memory(number)
        names = {"tl": tl, "triton": SimpleNamespace(jit=lambda function: function), "range": tl.range}
        exec(rendered.source.replace("import triton.language as tl", "").replace("import triton\n", ""), names)
        names[rendered.entry](
            *(Pointer(operand.name, torch.zeros(1, dtype=torch.int64)) for operand in program.operands), *given, **constants
        )
        for name, (least, most) in tl.reached.items():
            before = found.get(name, (least, most))
            found[name] = min(before[0], least), max(before[1], most)
    return found


def extents(program):
    """The same of all programs, by arithmetic."""
    found = {}
    places = [(value.operand, value) for value in program.values if value.op == "load"]
    for operand, place in (*places, *((store.operand, store) for store in program.stores)):
        reach = sum((size - 1) * stride for size, stride in zip(program.dims, place.strides, strict=True))
        name = program.operands[operand].name
        least, most = found.get(name, (place.offset, 0))
        found[name] = min(least, place.offset), max(most, place.offset + reach)
    return found


def negated(size):
    b = p.Build((size,))
    b.store("out", b.add("neg", b.load("x")))
    return b.program()


CASES = {
    "flat": negated(2**31 + 5),
    "rows": p.rmsnorm(2**21 + 3, 1024),
    "rows far apart": p.rmsnorm(3, 1024, row_stride=2**30),
    "walked rows": p.rmsnorm(3, 2**30 + 7),
    "walked rows, one alone": p.rmsnorm(1, 2**31 - 2**24 - 1),
    "walked rows of 2^31": p.rmsnorm(1, 2**31 + 7),
    "pairs": p.swapped_pairs(2**30 + 5),
    "pairs of 2^31 and more": p.swapped_pairs(2**31 + 5),
    "walked pairs": p.normed_pairs(2, 2**30 + 5),
    "tiled": p.swiglu(2**16 + 1, 2**15 + 3, is_split=True),
    "tiled pairs": p.rope_pairs(2, 32, 2**20 + 1, 64),
    "pairs and a row": p.pairs_of_less(3, 2**30 + 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_reaches_the_first_and_the_last_element(name):
    assert reached(CASES[name]) == extents(CASES[name])


@pytest.mark.parametrize("name", ["walked pairs", "tiled pairs", "flat", "rows"])
def test_the_same_of_small_tensors(name):
    small = {
        "walked pairs": p.normed_pairs(2, 20_000),
        "tiled pairs": p.rope_pairs(2, 3, 17, 64),
        "flat": negated(5000),
        "rows": p.rmsnorm(33, 700),
    }
    assert reached(small[name]) == extents(small[name])


def test_more_programs_than_a_grid_holds_are_refused():
    with pytest.raises(KernelBuildFailed, match="CUDA allows"):
        reached(p.gelu_tanh((2**42,)))


def test_steps_that_would_pass_32_bits_are_refused():
    with pytest.raises(KernelBuildFailed, match="near to 2"):
        reached(p.rmsnorm(1, 2**31 - 9))
    plan = schedule(p.swiglu(3, 2**31 - 5, is_split=True), flatten_rows=False)
    with pytest.raises(KernelBuildFailed, match="near to 2"):
        choose_shape(plan, Tuning(), is_looped=False, opened=frozenset({"cols"}))
    choose_shape(plan, Tuning(), is_looped=False)  # what is compiled for is counted before


def windowed(window, cols=64):
    b = p.Build((4, cols))
    row, col = b.add("index", dim=0, dtype="int64"), b.add("index", dim=1, dtype="int64")
    is_seen = b.add("lt", b.add("sub", row, col, dtype="int64"), b.const(window, dtype="int64"))
    shifted = b.add("ge", b.add("add", col, b.const(window, dtype="int64"), dtype="int64"), row)
    b.store("out", b.add("where", b.add("and", is_seen, shifted), b.load("x"), b.const(0.0)))
    return b.program()


@pytest.mark.parametrize("flatten_rows", [False, True])
def test_sums_of_places_count_towards_32_bits(flatten_rows):
    assert not schedule(windowed(4096), flatten_rows=flatten_rows).needs_int64
    assert schedule(windowed(2**31 - 2), flatten_rows=flatten_rows).needs_int64
    assert schedule(windowed(2**62), flatten_rows=flatten_rows).needs_int64


def test_a_stride_that_moves_nothing_is_passed_in_64_bits():
    """Of a batch of one: numpy refuses a larger number as int32."""
    b = p.Build((1, 64))
    b.store("out", b.add("neg", b.load("x", (2**31, 1))))
    assert schedule(b.program(), flatten_rows=True).needs_int64


def test_a_walk_over_blocks_of_columns_ends_before_32_bits_do():
    """The grid's second side has 65,535 blocks: one step on is up to 2^27 columns."""

    def macros(cols):
        b = p.Build((1, cols), "bfloat16")
        b.store("out", b.add("add", b.load("x"), b.load("row", (1, 0))))
        plan = schedule(b.program(), flatten_rows=True)
        return launch_shapes([plan], Tuning(), form=Form(), width=8)[0]

    assert "WIDE_INDEX" not in macros(2**30)
    assert macros(2**30)["ONCE"] == 0
    assert macros(2**31 - 2**25)["WIDE_INDEX"] == 1


def test_a_linear_layer_that_passes_32_bits_goes_to_cublas():
    sizes = {"dtype": "bfloat16", "n": 4096}
    assert candidates(GemvProblem(m=16, k=2**20, **sizes))
    assert not candidates(GemvProblem(m=16, k=2**27, **sizes))
    assert not candidates(GemvProblem(m=1, n=2**30, k=64, dtype="bfloat16", is_gated=True))
    gated = {"n": 4096, "k": 4096, "dtype": "bfloat16", "is_gated": True}
    assert not refusal(GemvProblem(m=2**20, **gated), "cuda_wgmma")
    assert refusal(GemvProblem(m=2**31, **gated), "cuda_wgmma")
