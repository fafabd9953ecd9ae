"""Random graphs do fused what they do in eager, and a fault would be seen.

Sixty run here. ``HOSTILE_COUNT=5000 HOSTILE_SEED=0 pytest -m hostile`` runs as many as it is told, and so does
``python -m tests.hostile.random_graphs``.
"""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace

import pytest
import torch

import fusion_advisor.fuse.decide.session as building
from fusion_advisor.lowering.rules.tables import LOWERABLE
from tests.hostile import proposals as module
from tests.hostile.draw import Draw, draw
from tests.hostile.harness import DOORS, is_eagers, try_programs
from tests.hostile.judge import Side, judge
from tests.hostile.programs import SUMMED, Input, Line, Program, compiled, tensor
from tests.hostile.proposals import _OWN, _SPELT, proposals
from tests.hostile.random_graphs import run, smallest
from tests.hostile.shrink import shrink

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
_BATCH = 12
_BATCHES = 5


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(seeds, doors, record_property, device="cpu"):
    counts = run(seeds, doors, device=device)
    record_property("random graphs", (counts.tried, counts.kernels, counts.launches, len(counts.failures)))
    for outcome in counts.failures[:1]:
        pytest.fail(f"{'; '.join(outcome.wrong)}\n\n{smallest(outcome, device)}")
    assert counts.tried == len(seeds) and counts.launches > 0
    return counts


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("number", range(_BATCHES))
def test_random_graphs_do_fused_what_they_do_in_eager(number, record_property):
    door = DOORS[number % 4 == 3]
    counts = check(range(number * _BATCH, (number + 1) * _BATCH), [door], record_property)
    if door == "apply":
        assert counts.fused > 0.7 * counts.tried


@pytest.mark.hostile
@pytest.mark.skipif("HOSTILE_COUNT" not in os.environ, reason="HOSTILE_COUNT says how many")
def test_as_many_random_graphs_as_asked_for(record_property):
    first = int(os.environ.get("HOSTILE_SEED", "0"))
    check(range(first, first + int(os.environ["HOSTILE_COUNT"])), DOORS, record_property, os.environ.get("HOSTILE_DEVICE", "cpu"))


@pytest.mark.gpu
def test_random_graphs_do_fused_on_a_gpu_what_they_do_in_eager(record_property):
    check(range(2 * _BATCH), DOORS, record_property, "cuda")


# ---------------------------------------------------------------------- the generator


def test_every_op_with_a_lowering_is_drawn():
    assert set(LOWERABLE) <= set(proposals()) | set(_SPELT)
    assert all(weight > 0 for name, (weight, _) in _OWN.items() if name != "_to_copy")


@pytest.mark.parametrize("op", sorted(proposals()))
def test_each_proposal_makes_lines_that_run(op):
    for seed in range(60):
        made = Draw(seed)
        made.grow(3)
        if made.step(op):
            assert made.lines[-1].op == op
            return
    pytest.fail(f"{op} never made a line")


def test_a_new_lowering_is_drawn_by_its_schema(monkeypatch):
    monkeypatch.setattr(module, "LOWERABLE", LOWERABLE | {"hypot", "logaddexp"})
    module.proposals.cache_clear()
    module.weights.cache_clear()
    try:
        for op in ("hypot", "logaddexp"):
            assert any(made.step(op) for seed in range(40) for made in [_grown(seed)])
    finally:
        module.proposals.cache_clear()
        module.weights.cache_clear()


def _grown(seed):
    made = Draw(seed)
    made.grow(3)
    return made


def test_a_seed_always_draws_the_same_program_and_its_script_runs():
    for seed in range(10):
        program = draw(seed)
        assert str(program) == str(draw(seed))
        names = {}
        exec(str(program).split("fused = ")[0], names)
        results = names["Model"]()(*names["inputs"])
        expected = compiled(program)(*program.make_inputs("cpu"))
        for one, other in zip(results, expected, strict=True):
            assert one.dtype == other.dtype and one.stride() == other.stride()


# ---------------------------------------------------------------------- the judge


def of(*lines, dtype=torch.float32, shape=(4, 33), values="normal"):
    made = tuple(Line(name=f"v{number}", text=text, op="") for number, text in enumerate(lines))
    return Program(inputs=(Input(name="x0", shape=shape, dtype=dtype, values=values),), lines=made, outputs=(made[-1].name,))


def judged(program, change):
    sides = []
    for _ in range(2):
        inputs = program.make_inputs("cpu")
        sides.append(Side(outputs=compiled(program)(*inputs), inputs=inputs))
    ours = replace(sides[0], outputs=tuple(change(value) for value in sides[0].outputs))
    return judge(program, ours, sides[1], [program.make_inputs("cpu") for _ in range(2)])


def test_eager_itself_passes():
    assert judged(of("x0.exp()", "torch.softmax(v0, -1)"), lambda value: value).wrong == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: value * 1.001, "are off"),
        (lambda value: value.index_fill(1, torch.tensor(7), float("nan")), "are off"),
        (lambda value: value.double(), "dtype"),
        (lambda value: value.t().contiguous().t(), "strides"),
        (lambda value: value[:3], "shape"),
    ],
    ids=["numbers", "nan", "dtype", "strides", "shape"],
)
def test_what_differs_from_eager_is_said(change, words):
    (fault,) = judged(of("x0.exp()"), change).wrong[:1]
    assert words in fault


def test_rounding_errors_inside_a_norm_are_no_fault():
    """The number nearest to its row's mean is all that is left of two larger ones."""
    program = of("functional.layer_norm(x0, (33,))", "torch.square(v0)", "torch.amin(v1)")
    assert judged(program, lambda value: value * (1 + 3e-6)).is_noisy
    assert judged(program, lambda value: value * (1 + 1e-4)).wrong


def test_special_numbers_that_are_summed_overflow_in_no_order():
    for values in ("special", SUMMED):
        made = tensor((4096,), torch.float32, values=values)
        largest = made[made.isfinite()].abs().max()
        assert float(largest) > 1e38 if values == "special" else float(largest) < 1e15
    summed = [program for program in map(draw, range(200)) if any(line.sums for line in program.lines)]
    assert summed and not any(one.values == "special" for program in summed for one in program.inputs)


def test_an_output_that_shares_an_inputs_memory_must_go_on_doing_so():
    (fault,) = judged(of("x0.t()"), lambda value: value.t().clone().t()).wrong
    assert "shares memory" in fault


def test_a_sum_in_another_order_is_eagers_only_where_eagers_own_order_varies():
    ids = Input(name="x1", shape=(31, 2, 65), dtype=torch.int64, below=31)
    added = Line(name="v0", text="x0.scatter_add(0, x1, x2)", op="scatter_add")
    inputs = (of("x0", dtype=torch.bfloat16, shape=(31, 2, 65)).inputs[0], ids)
    inputs = (*inputs, replace(inputs[0], name="x2", seed=5))
    program = Program(inputs=inputs, lines=(added,), outputs=("v0",))
    one, other = (program.make_inputs("cpu") for _ in range(2))
    backwards = one[0].clone()
    for row in reversed(range(31)):  # each sum rounded, as atomic ones are
        backwards.scatter_add_(0, one[1][row : row + 1], one[2][row : row + 1])
    ours, theirs = (
        Side(outputs=(result,), inputs=given) for result, given in ((backwards, one), (compiled(program)(*other)[0], other))
    )
    assert not torch.equal(ours.outputs[0], theirs.outputs[0])

    def on_cpu(_device):
        return program.make_inputs("cpu")

    assert is_eagers(program, theirs, theirs, "cpu") and not is_eagers(program, ours, theirs, "cpu")
    assert is_eagers(program, ours, theirs, "cuda", on_cpu)
    wrong = replace(ours, outputs=(torch.where(one[1] == 3, backwards * 1.25, backwards),))
    assert not is_eagers(program, wrong, theirs, "cuda", on_cpu)
    steady = of("x0.exp()", dtype=torch.bfloat16)
    result = compiled(steady)(*steady.make_inputs("cpu"))[0]
    sides = [Side(outputs=(made,), inputs=steady.make_inputs("cpu")) for made in (result, result.nextafter(result + 1))]
    assert not is_eagers(steady, *sides, "cuda", steady.make_inputs)


def test_integers_are_equal_or_wrong():
    program = of("x0 * 3", dtype=torch.int32)
    assert judged(program, lambda value: value).wrong == ()
    assert "differ" in judged(program, lambda value: value + (value == 3)).wrong[0]


def test_a_jump_may_fall_either_way_only_where_rounding_may_move_it():
    program = of("torch.sin(x0)", "torch.sin(x0 * 1)", "v0 - v1", "v2 >= 0")
    assert judged(program, torch.logical_not).is_noisy  # sin(x) − sin(x) is a rounding error, of either sign
    assert judged(of("torch.sin(x0)", "v0 >= 0"), torch.logical_not).wrong


def test_an_equality_may_fall_either_way_where_rounding_decides_it():
    program = of("torch.round(x0 * 5)", "functional.gelu(v0, approximate='tanh')", "v1 != v0")
    assert judged(program, lambda value: value ^ (program.make_inputs("cpu")[0] > 1)).is_noisy  # gelu(5) is one unit below 5
    assert judged(program, lambda value: value ^ (program.make_inputs("cpu")[0] < 0)).wrong


@needs_compiler
@pytest.mark.parametrize("door", DOORS)
def test_a_kernel_that_is_wrong_in_the_model_is_found(door, monkeypatch):
    made = building.fused_call

    def spoilt(name, *args, **kwargs):
        call = made(name, *args, **kwargs)
        return functools.wraps(call)(lambda *tensors: call(*tensors) + 1e-3)

    monkeypatch.setattr(building, "fused_call", spoilt)
    (outcome,) = try_programs([of("torch.sin(x0)", "v0 * 2 + 1", "v1.exp()")], door)
    assert outcome.wrong and outcome.launches > 0


def test_a_failure_is_shrunk_to_the_line_that_fails():
    program = next(one for one in map(draw, range(300)) if any("exp(" in line.text for line in one.lines) and len(one.lines) > 6)
    small = shrink(program, lambda one: any("exp(" in line.text for line in one.lines))
    assert len(small.lines) == 1 and len(small.inputs) == 1
