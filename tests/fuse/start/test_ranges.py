"""A plan of ranges starts without a trace where the model is as it was; where not, it is traced or refused, and right."""

from __future__ import annotations

import itertools
import random
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.restore_shapes import restore_shapes
from fusion_advisor.timing.host_timer import WallTimer
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.live.test_saved_plan import save
from tests.fuse.points.test_choose_layouts import Turned
from tests.fuse.start import network
from tests.fuse.start.saved import assert_no_frame, edit, frames, traced
from tests.fuse.start.test_untraced_start import CHANGES, EVIL, LATER, assert_close, bert, options_in, other_activation, set_to
from tests.fuse.start.test_what_a_trace_implies import default_dtype
from tests.fuse.test_pipeline import keep_all, verdicts
from tests.tiny import gpt2, llama

pytestmark = test_pipeline.pytestmark

RANGES = "batch=2..16,seq=2..64"
DIMS = {"args.0": ("batch=2..9", "seq=2..64", None)}
LONG = 24


class Net(network.Net):
    """Does something else with long inputs, and adds as many values of a buffer as there are positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.linspace(0.0, 1.0, 64).reshape(64, 1), persistent=False)
        self.factors = [1.5, 0.5]

    def forward(self, x, *, gain=None):
        """Run it."""
        x = x + self.positions[: x.shape[1]]
        if x.shape[1] > LONG:
            x = x * 0.5
        for factor in self.factors:
            x = torch.tanh(x * factor) + x
        return super().forward(x, gain=gain)


def a_net(seed=1):
    model, args = network.made(Net, seed=seed, length=16)
    return describe_live(model, args)


def inputs():
    """Of both pieces, of their ends among them."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*sizes, 64, generator=generator) for sizes in ((2, 16), (2, 2), (9, 64), (5, LONG), (3, LONG + 1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("ranges") / "run"
    loaded = a_net(seed=0)
    fa.apply(loaded.model, loaded.args, shapes=DIMS, keep="verified", compile=False, run_dir=found).revert()
    pieces = load_plan(found).start["pieces"]
    assert len(pieces) == 2 and all("why" not in row for row in pieces), [row.get("why") for row in pieces]
    return found


def put_in(loaded, folder):
    """Load a saved plan and serve its ranges."""
    plan = load_plan(folder) if isinstance(folder, Path) else folder
    fused = apply_plan(loaded, plan)
    try:
        restore_shapes(fused, loaded, plan)
    except PlanMismatch:
        fused.revert()
        raise
    return fused


def own(loaded, x):
    """What the model itself returns."""
    return loaded.model._call_impl(x)


def assert_right(loaded):
    for x in inputs():
        assert_close(loaded.model(x), own(loaded, x))


# -- started without a trace ---------------------------------------------------------------------------------------------------


def calls_of(kwargs, count=20):
    generator = random.Random(3)
    torch.manual_seed(3)
    for _ in range(count):
        shape = (generator.randint(2, 16), generator.randint(2, 64))
        yield {**kwargs, "input_ids": torch.randint(1, 200, shape)}


@pytest.mark.parametrize("model_of", [gpt2, llama, bert])
def test_models_serve_random_sizes_without_a_trace_and_give_the_same_bits(model_of, tmp_path):
    model, kwargs = model_of()
    fa.apply(model, kwargs, shapes=RANGES, keep="verified", compile=False, run_dir=tmp_path).revert()
    plan, before = load_plan(tmp_path), frames()
    with torch.no_grad(), put_in(describe_live(model_of()[0], (), kwargs), plan) as fused:
        found = [fused(**call)[0] for call in calls_of(kwargs)]
        assert fused.traced_because == "" and fused.fallbacks == {} and fused.launches > 20
        assert frames() == before  # dynamo has compiled nothing, neither for the start nor for the calls
    with torch.no_grad(), put_in(describe_live(model_of()[0], (), kwargs), traced(plan)) as fused:
        assert fused.traced_because == "it is not to be used" and frames() != before
        expected = [fused(**call)[0] for call in calls_of(kwargs)]
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


class Alike(WallTimer):
    """A clock on which all steps take as long, so that copies to another layout stay."""

    def time_ns(self, call):
        call()
        return 1000


class Sampling(torch.nn.Module):
    """Draws random numbers."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)

    def forward(self, x):
        """Run it."""
        return torch.nn.functional.gelu(self.lin(x)) * 2.0 + torch.randn_like(x)


def test_a_model_that_draws_random_numbers_serves_ranges_without_a_trace(tmp_path):
    model, args = network.made(Sampling, length=16)
    fa.apply(model, args, shapes=DIMS, keep="verified", compile=False, run_dir=tmp_path).revert()
    loaded, before = describe_live(*network.made(Sampling, length=16)), frames()
    with torch.no_grad(), put_in(loaded, tmp_path) as fused:
        for x in inputs():
            state = torch.get_rng_state()
            found = fused(x)
            torch.set_rng_state(state)
            torch.testing.assert_close(found, own(loaded, x))
        assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before


def test_copies_to_another_layout_are_put_in_again(tmp_path):
    x = torch.randn(5, 7, 1024)
    options = replace(options_in(tmp_path), shapes=read_shapes("batch=2..9"), keep="verified")
    instruments = replace(verdicts(keep_all), timer=Alike())
    run = apply_workload(describe_live(Turned().eval(), (x,)), options, instruments=instruments)
    save(run, tmp_path)
    assert run.write_start(tmp_path) == ""
    run.revert()
    assert [piece.layouts for piece in run.report.shapes.pieces] == [("contiguous-rows",)]
    with torch.no_grad(), put_in(describe_live(Turned().eval(), (x,)), tmp_path) as fused:
        for batch in (2, 3, 9):
            x = torch.randn(batch, 7, 1024)
            torch.testing.assert_close(fused(x), Turned().eval()(x), rtol=1e-4, atol=1e-5)
        assert fused.traced_because == "" and fused.fallbacks == {} and fused.launches > 0


def test_another_process_serves_ranges_without_a_trace(folder):
    script = f"""
import torch
from pathlib import Path
from tests.fuse.start.test_ranges import a_net, assert_right, put_in
loaded = a_net()
with torch.no_grad(), put_in(loaded, Path({str(folder)!r})) as fused:
    assert_right(loaded)
"""
    assert_no_frame(script)


def test_sizes_outside_of_the_range_run_the_original_ops(folder):
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        before = frames()
        for shape in ((10, 16), (1, 16), (4, 1)):
            x = torch.randn(*shape, 64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_close(loaded.model(x), own(loaded, x))
        assert fused.fallbacks == {"batch is outside of batch=2..9": 2, "seq is outside of seq=2..64": 1}
        with pytest.warns(), pytest.raises(RuntimeError, match="dtype"):  # of the model's own ops
            loaded.model(torch.randn(4, 16, 64).double())
        x = torch.randn(16, 4, 64).transpose(0, 1)  # laid out in another way
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_close(loaded.model(x), own(loaded, x))
        assert frames() == before and fused.traced_because == ""
        assert_right(loaded)


def test_it_is_reverted_and_applied_again(folder):
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        assert_right(loaded)
        fused.revert()
        assert "_compiled_call_impl" not in vars(loaded.model)
        with fused.apply():
            assert_right(loaded)
            assert fused.traced_because == "" and fused.fallbacks == {}


def test_graphs_that_were_read_are_replayed_by_shape(folder):
    loaded, recorder, plan, before = a_net(), FakeRecorder(), load_plan(folder), frames()
    fused = apply_plan(loaded, plan)
    fused.graphs = Graphs(recorder)
    restore_shapes(fused, loaded, plan)
    with torch.no_grad(), fused:
        for number in range(4):
            for x in inputs()[1:]:
                assert_close(loaded.model(x + number), own(loaded, x + number))
        assert recorder.recorded == 4 and recorder.replayed == 3 * 4
        assert fused.fallbacks == {} and fused.traced_because == "" and frames() == before
        loaded.model.blocks[0].shift = 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                assert_right(loaded)
        assert "shift" in fused.traced_because


# -- changed before the start, and behind it -----------------------------------------------------------------------------------


def other_buffer(model):
    model.positions = torch.linspace(0.0, 2.0, 64).reshape(64, 1)


def longer(model):
    model.factors.append(0.25)


MORE = {
    "a longer list": (longer, "factors"),
    "a shorter list of layers": (lambda model: model.blocks.pop(1), ""),
    "a shorter buffer": (lambda model: setattr(model, "positions", model.positions[:48].clone()), "positions"),
    "a buffer of another dtype": (lambda model: setattr(model, "positions", model.positions.half()), "float16"),
    "a forward of its own": (lambda model: setattr(model, "forward", lambda x: Net.forward(model, x)), ""),
}


@pytest.mark.parametrize("name", [*CHANGES, *MORE])
def test_a_model_that_was_changed_is_traced_or_refused(name, folder):
    change, word = {**CHANGES, **MORE}[name]
    loaded, before = a_net(), frames()
    change(loaded.model)
    if name == "another dtype":
        loaded = describe_live(loaded.model, (loaded.args[0].double(),))
    try:
        fused = put_in(loaded, folder)
    except (PlanMismatch, fa.errors.CannotCapture):
        assert frames() != before
        return
    assert word in fused.traced_because and fused.traced_because and frames() != before, fused.traced_because
    with torch.no_grad(), fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name != "another dtype":
            for x in inputs():
                if x.shape[1] <= len(loaded.model.positions):
                    torch.testing.assert_close(loaded.model(x)["hidden"], own(loaded, x)["hidden"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*LATER, "a longer list", "a buffer of another dtype"])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_model_that_changes_is_served_right(name, has_run, folder):
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if has_run:
            assert_right(loaded)
        assert fused.fallbacks == {} and fused.traced_because == ""
        {**LATER, **{name: change for name, (change, _) in MORE.items()}}[name](loaded.model)
        if name == "a configuration of its own":
            loaded.model.blocks[1].config.factor = 3.0
        for _ in range(2):
            for x in inputs():
                torch.testing.assert_close(loaded.model(x), own(loaded, x), rtol=1e-4, atol=1e-4)
        assert fused.fallbacks or fused.traced_because or name == "another parameter"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_model_that_is_changed_for_each_request_is_never_traced(is_slow, folder):
    loaded, before = a_net(), frames()

    def assert_ranges_right():
        for x in inputs()[1:]:  # the first is the example's
            assert_close(loaded.model(x), own(loaded, x))

    with torch.no_grad(), put_in(loaded, folder) as fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for piece in fused.shapes[0].pieces:
            piece.untraced.clock = itertools.count().__next__ if is_slow else lambda: 0  # seconds to read a model
        for request in range(8):
            loaded.model.generation_config = [request]  # the trace had not read it
            assert_ranges_right()
        assert fused.traced_because == "" and frames() == before
        assert [reason[:25] for reason in fused.fallbacks] == ["the model is changed so o"] * is_slow
        for piece in fused.shapes[0].pieces:
            piece.untraced.clock = lambda: 10**6
        served = fused.launches
        assert_ranges_right()
        assert fused.launches > served and fused.traced_because == ""


def test_values_of_a_buffer_that_change_are_read(folder):
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        assert_right(loaded)
        loaded.model.positions.mul_(3.0)
        assert_right(loaded)
        other_buffer(loaded.model)
        assert_right(loaded)
        assert fused.fallbacks == {} and fused.traced_because == ""


@pytest.mark.parametrize(("name", "value"), [("SCALE", 3.0), ("activated", other_activation)])
def test_a_global_that_was_replaced_is_refused_or_served_right(name, value, folder):
    with set_to(vars(network), name, value), pytest.raises(PlanMismatch):
        put_in(a_net(), folder)
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        assert_right(loaded)
        with set_to(vars(network), name, value), pytest.warns(match="not verified"):
            assert_right(loaded)
        assert fused.traced_because


def mixed(self, u):
    return u * 3.0 + self.shift


@pytest.mark.parametrize("is_code_alone", [True, False])
def test_code_that_was_replaced_is_served_right_and_refused_by_the_next_start(is_code_alone, folder):
    before, code = network.Block.mixed, network.Block.mixed.__code__
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right(loaded)
        if is_code_alone:  # IPython's autoreload does that
            network.Block.mixed.__code__ = mixed.__code__
        else:
            network.Block.mixed = mixed
        try:
            assert_right(loaded)
            assert fused.fallbacks
            with pytest.raises(PlanMismatch):
                put_in(a_net(), folder)
        finally:
            network.Block.mixed = before
            before.__code__ = code


def test_train_gradients_and_another_default_dtype_run_the_original_ops(folder):
    loaded = a_net()
    with torch.no_grad(), put_in(loaded, folder) as fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = frames()
        assert_right(loaded)
        x = inputs()[0]
        with default_dtype(torch.float64):
            assert_close(loaded.model(x), own(loaded, x))
        loaded.model.train()
        loaded.model(inputs()[0])
        loaded.model.eval()
        with torch.enable_grad():
            assert loaded.model(inputs()[0])["hidden"].requires_grad
        assert len(fused.fallbacks) == 3 and frames() == before
        assert_right(loaded)
        x = inputs()[0].requires_grad_()
        assert_close(loaded.model(x), own(loaded, x))
        assert "gradients" in fused.traced_because


# -- a file that is damaged, or somebody else's --------------------------------------------------------------------------------


def symbolic(start):
    """A layout of the first piece that has an open size."""
    return next(row for row in start["pieces"][0]["graph"]["layouts"] if any(isinstance(size, list) for size in row[2]))


def other_expression(start):
    row = symbolic(start)
    place = next(dim for dim, size in enumerate(row[2]) if isinstance(size, list))
    row[2][place] = ["sympy.Min", row[2][place], 6]


def unknown_function(start):
    symbolic(start)[2][0] = ["os.system", EVIL]


def deep_expression(start):
    size = ["", 0]
    for _ in range(300):
        size = ["sympy.Add", size, 1]
    symbolic(start)[2][0] = size


def swapped_sizes(start):
    sizes = start["pieces"][0]["open"]["places"]
    sizes[0], sizes[1] = sizes[1], sizes[0]


def with_piece(**changes):
    return lambda start: start["pieces"][0].update(changes)


def with_sizes(**changes):
    return lambda start: start["pieces"][0]["open"].update(changes)


DAMAGES = {
    "another expression": other_expression,
    "a function of Python's": unknown_function,
    "an endless expression": deep_expression,
    "sizes swapped": swapped_sizes,
    "a size for an op's name": lambda start: start["pieces"][0]["graph"]["nodes"][-2].__setitem__(2, "size"),
    "no open sizes": with_piece(open=None),
    "a guard that is not true": with_sizes(guards=[["sympy.Equality", ["", 0], 77]]),
    "a guard more": with_sizes(guards=[["sympy.StrictLessThan", ["", 0], 5]]),
    "no guard": with_sizes(guards=[]),
    "a condition on nothing": lambda start: start["pieces"][0]["tree"].update(conditions=[["==", ["size", 7, 7], 1]]),
    "a condition of another kind": lambda start: start["pieces"][0]["tree"].update(conditions=[["eval", EVIL]]),
    "a condition that does not hold": lambda start: start["pieces"][0]["tree"].update(conditions=[["<", ["size", 0, 0], 0]]),
    "another piece's graph": lambda start: start["pieces"][0].update(graph=start["pieces"][1]["graph"]),
    "no pieces": lambda start: start.update(pieces=[]),
    "a list of nothing": lambda start: start.update(pieces=[[], 1]),
    "no dict": lambda start: start.update(pieces=None),
    "fewer names": lambda start: start["pieces"][0]["names"].pop(),
    "names of no dims": with_sizes(names=["nothing", "else"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_does_not_fit_is_not_used(name, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    edit(tmp_path / "run", DAMAGES[name])
    loaded, before = a_net(), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert fused.traced_because and frames() != before, fused.traced_because
        assert_right(loaded)
        assert fused.launches > 0 and fused.fallbacks == {}
    assert not Path("written-by-a-file").exists()
