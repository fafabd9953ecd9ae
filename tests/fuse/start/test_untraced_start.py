"""A saved plan starts without a trace where the model is as it was; where not, the model is traced again, with the reason."""

from __future__ import annotations

import gc
import gzip
import importlib.util
import math
import shutil
import sys
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch

from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.fuse.start.made_again import start_again
from fusion_advisor.fuse.start.record import NAME
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.start import network
from tests.fuse.start.saved import a_network, assert_no_frame, edit, frames, put_in, run_of, traced
from tests.tiny import BANDWIDTH, cache_in, decode_step, gpt2, llama, qwen2

pytestmark = test_pipeline.pytestmark


def options_in(folder):
    return ApplyOptions(
        warmup=1, runs=4, min_share=0.0, run_dir=folder, run_id="r1", config_hash="abc", command="x", compile=False,
        budgets=Budgets(wall_s=0.02, decide_s=0.1), bandwidth=BANDWIDTH, effort="quick",
    )  # fmt: skip


def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes, vocab_size=200)).eval(), {"input_ids": torch.randint(1, 200, (2, 16))}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved run of the network; tests that change it copy it."""
    found = tmp_path_factory.mktemp("network") / "run"
    assert run_of(a_network(seed=0), options_in(found)) == ""
    return found


def own(loaded):
    """What the model itself returns."""
    with torch.no_grad():
        return loaded.model._call_impl(*loaded.args, **loaded.kwargs)


def assert_close(found, expected):
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["sum"], expected["sum"], rtol=1e-4, atol=1e-4)


# -- started without a trace ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_of", [gpt2, llama, bert, vit])
def test_models_start_without_a_trace_and_give_the_same_bits(model_of, tmp_path):
    model, inputs = model_of()
    assert run_of(describe_live(model, (), inputs), options_in(tmp_path / "run")) == ""
    plan = load_plan(tmp_path / "run")
    loaded = describe_live(model_of()[0], (), inputs)
    before = frames()
    with torch.no_grad(), apply_plan(loaded, plan) as fused:
        assert fused.traced_because == ""
        found = loaded.model(**inputs)
        assert fused.launches > 0 and fused.fallbacks == {}
        again = loaded.model(**inputs)
    assert frames() == before  # dynamo has compiled nothing, neither for the start nor for the calls
    with torch.no_grad(), apply_plan(loaded, traced(plan)) as fused:
        assert fused.traced_because == "it is not to be used" and frames() != before
        expected = loaded.model(**inputs)
    assert type(found) is type(expected) and list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value) and torch.equal(again[name], value), name


@pytest.mark.parametrize("model_of", [gpt2, llama])
def test_a_cache_that_a_call_makes_is_made_without_a_trace(model_of, tmp_path):
    model, inputs = model_of()
    inputs = {"input_ids": inputs["input_ids"]}
    assert run_of(describe_live(model, (), inputs), options_in(tmp_path / "run")) == ""
    loaded, before = describe_live(model_of()[0], (), inputs), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        found, again = loaded.model(**inputs), loaded.model(**inputs)
        assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before
    expected = own(loaded)
    mine, theirs, other = found.past_key_values, expected.past_key_values, again.past_key_values
    assert type(mine) is type(theirs) and mine is not other and mine.layers is not other.layers
    assert [vars(one).keys() for one in mine.layers] == [vars(one).keys() for one in theirs.layers]
    for one, two, three in zip(mine.layers, theirs.layers, other.layers, strict=True):
        torch.testing.assert_close((one.keys, one.values), (two.keys, two.values), rtol=1e-4, atol=1e-5)
        assert one is not three and one.keys is not three.keys and torch.equal(one.keys, three.keys)
    with torch.no_grad():  # it is a cache: the model goes on with it
        step = {"input_ids": inputs["input_ids"][:, -1:], "use_cache": True}
        ours, eager = (loaded.model(**step, past_key_values=cache).logits for cache in (mine, theirs))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_of", [gpt2, qwen2])
def test_a_decode_step_starts_without_a_trace(model_of, tmp_path):
    model = model_of()[0]
    assert run_of(describe_live(model, (), decode_step(model)), options_in(tmp_path / "run")) == ""
    other = model_of()[0]
    step, eager_step, later = decode_step(other), decode_step(other), decode_step(other)
    loaded, before = describe_live(other, (), step), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert fused.traced_because == ""
        for _ in range(3):
            found, expected = other(**step), other._call_impl(**eager_step)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
            assert found.past_key_values is cache_in(step) and type(found) is type(expected)
            for one, two in zip(cache_in(step).layers, cache_in(eager_step).layers, strict=True):
                torch.testing.assert_close((one.keys, one.values), (two.keys, two.values), rtol=1e-4, atol=1e-5)
                assert torch.equal(one.cumulative_length, two.cumulative_length)
        assert fused.fallbacks == {} and fused.launches > 0 and frames() == before
        # another cache of the same form is another cache, and nothing keeps the first one alive
        gone = weakref.ref(cache_in(step).layers[0].keys)
        expected = other._call_impl(**decode_step(other)).logits
        torch.testing.assert_close(other(**later).logits, expected, rtol=1e-4, atol=1e-5)
        del step, found, loaded, one
        gc.collect()
        assert gone() is None and frames() == before
        # one whose tensors lie in one memory, or with another value in it, is traced or runs the model's own ops
        shared, alike = decode_step(other), decode_step(other)
        for one in (shared, alike):
            cache_in(one).layers[1].keys = cache_in(one).layers[0].keys
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(other(**shared).logits, other._call_impl(**alike).logits, rtol=1e-4, atol=1e-5)
        assert frames() != before or fused.fallbacks


def test_another_cache_is_traced_again(tmp_path):
    model = gpt2()[0]
    assert run_of(describe_live(model, (), decode_step(model)), options_in(tmp_path / "run")) == ""
    other = gpt2()[0]
    step = decode_step(other)
    cache_in(step).layers[0].is_extra = True
    before = frames()
    with put_in(describe_live(other, (), step), tmp_path / "run") as fused:
        assert fused.traced_because == "" and frames() == before  # nobody had read that
    step = decode_step(other)
    kind = type(cache_in(step).layers[0])
    cache_in(step).layers[0].__class__ = type("OtherLayer", (kind,), {})
    with put_in(describe_live(other, (), step), tmp_path / "run") as fused:
        assert "OtherLayer" in fused.traced_because and frames() != before


def test_a_graph_that_was_read_is_replayed(folder):
    loaded, recorder = a_network(), FakeRecorder()
    model, before = loaded.model, frames()
    live = start_again(loaded, dict(load_plan(folder).start)).live
    variant = Bench(live, on_cuda=False).build((), ())
    graphs = Graphs(recorder)
    with torch.no_grad(), FusedModel(model, live.regions, variant.modules, loaded.args, {}, graphs=graphs, live=live) as fused:
        for number in range(4):
            x = torch.randn(2, 48, 64)
            assert_close(model(x), model._call_impl(x))
            assert (recorder.recorded, recorder.replayed) == (min(number, 1), number)
        assert fused.fallbacks == {} and fused.traced_because == "" and frames() == before
        replaced_tensor(model)
        assert_close(model(x), model._call_impl(x))
        assert fused.traced_because == "" and frames() == before
        model.blocks[0].shift = 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                assert_close(model(x), model._call_impl(x))
        assert "shift" in fused.traced_because or "0.25" in fused.traced_because


class Odd(torch.nn.Module):
    """Writes to a buffer, has numbers that JSON lacks, returns its input, a parameter, one result twice, and a named tuple."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.most, self.unknown = math.inf, math.nan

    def forward(self, x, *, more=(), gain=1.0):
        self.count.add_(1)
        u = torch.nn.functional.gelu(self.lin(x)).clamp(max=self.most) * gain + x
        for one in more:
            u = u * one
        return Two(u, [u, x]), self.lin.weight, {"count": self.count, 3: (u.sum(-1), 2.5, "text", None)}


class Two(NamedTuple):
    first: torch.Tensor
    second: list


def odd(seed=0):
    torch.manual_seed(seed)
    return Odd().eval(), (torch.randn(2, 48, 64),), {"more": [torch.rand(64), torch.rand(48, 1)], "gain": 2.0}


def test_odd_inputs_and_outputs_are_the_models_own(tmp_path):
    assert run_of(describe_live(*odd()), options_in(tmp_path / "run")) == ""
    model, args, kwargs = odd(1)
    loaded, before = describe_live(model, args, kwargs), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert fused.traced_because == "" and model.count.item() == 0
        (pair, weight, rest) = model(*args, **kwargs)
        assert type(pair) is Two and weight is model.lin.weight and pair.second[0] is pair.first and pair.second[1] is args[0]
        assert rest["count"] is model.count and model.count.item() == 1 and rest[3][1:] == (2.5, "text", None)
        assert fused.fallbacks == {} and frames() == before
        expected = model._call_impl(*args, **kwargs)
        torch.testing.assert_close(pair.first, expected[0].first, rtol=1e-4, atol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same = {"more": [kwargs["more"][0], kwargs["more"][0][:48, None].contiguous()], "gain": 2.0}
            for other in ({**kwargs, "gain": 3.0}, {"more": kwargs["more"][::-1], "gain": 2.0}, same, {"gain": 2.0}):
                found, eager = model(*args, **other), model._call_impl(*args, **other)
                torch.testing.assert_close(found[0].first, eager[0].first, rtol=1e-4, atol=1e-5)


class Passes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)

    def forward(self, *tensors):
        return torch.nn.functional.gelu(self.lin(tensors[0])) * tensors[1]


def test_tensors_of_a_star_argument_are_the_calls_own(tmp_path):
    inputs = torch.randn(2, 48, 64), torch.rand(64)
    assert run_of(describe_live(Passes().eval(), inputs), options_in(tmp_path / "run")) == ""
    loaded, before = describe_live(Passes().eval(), inputs), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        torch.testing.assert_close(loaded.model(*inputs), loaded.model._call_impl(*inputs), rtol=1e-4, atol=1e-5)
        assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before


def test_a_stored_graph_is_what_runs(folder, tmp_path):
    """Fails where the stored graph is read and then ignored: a constant in it is seen in the results' first check."""
    shutil.copytree(folder, tmp_path / "run")
    put_in(a_network(), tmp_path / "run").revert()

    def change(start):
        row = next(row for row in start["graph"]["nodes"] if row[2] == "aten.layer_norm.default")
        row[3] = [*row[3][:4], 1e-3]

    edit(tmp_path / "run", change)
    fused = put_in(a_network(), tmp_path / "run")
    assert fused.traced_because.startswith("the stored graph is not the plan's: op ")
    fused.revert()


def test_another_instance_has_its_own_weights(folder):
    for seed in (1, 2):
        loaded = a_network(seed)
        expected, before = own(loaded), frames()
        with torch.no_grad(), put_in(loaded, folder) as fused:
            found = loaded.model(*loaded.args)
            assert fused.traced_because == "" and fused.fallbacks == {} and fused.launches > 0
            assert fused.started == "The plan started without a trace."
        assert_close(found, expected)
        assert found["gain"] is None and frames() == before


def test_a_new_process_compiles_nothing(folder):

    script = f"""
import torch
from tests.fuse.start.saved import a_network, put_in
loaded = a_network()
from pathlib import Path
fused = put_in(loaded, Path({str(folder)!r}))
with torch.no_grad():
    fused(*loaded.args)
"""
    assert_no_frame(script)


def test_a_process_that_compiles_something_else_later_goes_on(tmp_path):
    """Dynamo wraps ``Module.__init__`` when it first compiles: here between two calls, and in the process of the run before."""
    model, inputs = gpt2()
    inputs = {"input_ids": inputs["input_ids"]}  # the call makes a cache, whose `__init__` the trace went through
    assert run_of(describe_live(model, (), inputs), options_in(tmp_path / "run")) == ""
    script = f"""
import torch
from pathlib import Path
from fusion_advisor.workload.load import describe_live
from tests.fuse.start.saved import frames, put_in
from tests.tiny import gpt2
model, inputs = gpt2()
inputs = {{"input_ids": inputs["input_ids"]}}
plain = torch.nn.Module.__init__
fused = put_in(describe_live(model, (), inputs), Path({str(tmp_path / "run")!r}))
with torch.no_grad():
    first = model(**inputs).logits
    assert fused.traced_because == "" and frames() == {{}}, fused.traced_because
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.randn(3, 2))
    assert torch.nn.Module.__init__ is not plain
    assert torch.equal(model(**inputs).logits, first)
    torch._dynamo.utils.counters.clear()
    model(**inputs)
"""
    assert_no_frame(script)


def test_it_is_reverted_and_applied_again(folder):
    loaded = a_network()
    expected = own(loaded)
    fused = put_in(loaded, folder)
    with torch.no_grad():
        fused.revert()
        assert "_compiled_call_impl" not in vars(loaded.model)
        with fused.apply():
            assert_close(loaded.model(*loaded.args), expected)
            assert fused.traced_because == "" and fused.launches > 0 and fused.fallbacks == {}


def test_other_sizes_are_traced_beside_it(folder):
    loaded = a_network()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        shorter = loaded.args[0][:, :16].contiguous()
        fused.specialize(shorter)
        assert_close(loaded.model(shorter), loaded.model._call_impl(shorter))
        assert_close(loaded.model(*loaded.args), own(loaded))
        assert fused.fallbacks == {} and fused.traced_because == ""


# -- changed before the start --------------------------------------------------------------------------------------------------


class Doubled(network.Block):
    def mixed(self, u):
        return super().mixed(u) * 1.0


def replaced_tensor(model):
    model.blocks[1].lin.weight = torch.nn.Parameter(torch.randn(64, 64) / 8)


def own_forward(model):
    model.forward = lambda x: network.Net.forward(model, x * 2.0)


def other_list(model):
    model.blocks[0].weights = [1.0, 0.5, 0.25]


CHANGES = {
    "a value of the configuration": (lambda model: setattr(model.config, "factor", 2.5), "factor"),
    "a flag of the configuration": (lambda model: setattr(model.config, "is_gated", False), "is_gated"),
    "a configuration of its own": (lambda model: setattr(model.blocks[1], "config", network.Config()), "were one object"),
    "an attribute": (lambda model: setattr(model.blocks[0], "shift", 0.5), "shift: 0.5"),
    "an item of a list": (lambda model: model.blocks[0].weights.__setitem__(1, 0.75), "weights"),
    "an epsilon": (lambda model: setattr(model.blocks[1].norm, "eps", 1e-3), "eps: 0.001"),
    "a class": (lambda model: setattr(model.blocks[0], "__class__", Doubled), "Doubled"),
    "a forward of its own": (lambda model: setattr(model.blocks[0], "forward", model.blocks[0].lin.forward), "forward"),
    "a hook": (lambda model: model.blocks[0].register_forward_hook(lambda *_: None), "a hook"),
    "a hook of the model": (lambda model: model.register_forward_hook(lambda *_: None), "a hook"),
    "one parameter for two": (
        lambda model: setattr(model.blocks[1].lin, "weight", model.blocks[0].lin.weight), "one and the same"
    ),
    "another dtype": (lambda model: model.double(), "float64"),
    "a frozen parameter": (lambda model: model.requires_grad_(requires_grad=False), "False"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_traced_again(name, folder):
    change, word = CHANGES[name]
    loaded = a_network()
    change(loaded.model)
    if name == "another dtype":
        loaded = describe_live(loaded.model, (loaded.args[0].double(),))
    expected, before = own(loaded), frames()
    try:
        fused = put_in(loaded, folder)
    except PlanMismatch as refused:
        assert frames() != before, refused
        return
    assert word in fused.traced_because and frames() != before, fused.traced_because
    with torch.no_grad(), fused:
        assert_close(loaded.model(*loaded.args), expected)


def test_other_inputs_are_traced_again(folder):
    for loaded in (a_network(length=32), describe_live(a_network().model, (), {"x": torch.randn(2, 48, 64)})):
        before = frames()
        try:
            fused = put_in(loaded, folder)
        except PlanMismatch:
            assert frames() != before
        else:
            assert fused.traced_because
            fused.revert()


@contextmanager
def set_to(space, name, value):
    before = space[name]
    space[name] = value
    try:
        yield
    finally:
        space[name] = before


def other_activation(x, factor):
    return torch.nn.functional.relu(x) * factor


@pytest.mark.parametrize(("name", "value"), [("SCALE", 3.0), ("activated", other_activation)])
def test_a_global_that_was_replaced_is_traced_again(name, value, folder):
    with set_to(vars(network), name, value):
        before = frames()
        with pytest.raises(PlanMismatch):
            put_in(a_network(), folder)
        assert frames() != before


def test_a_state_of_torch_is_traced_again(folder):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        with put_in(a_network(), folder) as fused:
            assert fused.traced_because == "torch's deterministic_algorithms is True, and was False"
    finally:
        torch.use_deterministic_algorithms(before)


def imported(path, name="edited_network"):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return activated(u, self.config.factor) + self.shift", "return activated(u, float(self.config.factor)) + self.shift"),
        ("gelu(x) * factor", "gelu(x, approximate='none') * factor"),
    ],
    ids=["a method", "a function"],
)
@pytest.mark.parametrize("is_imported_again", [True, False])
def test_code_that_was_edited_is_traced_again(old, new, is_imported_again, tmp_path):
    path = tmp_path / "edited_network.py"
    text = Path(network.__file__).read_text()
    path.write_text(text)
    try:
        module = imported(path)
        assert run_of(a_network(module=module), options_in(tmp_path / "run")) == ""
        put_in(a_network(module=module), tmp_path / "run").revert()
        assert old in text
        path.write_text(text.replace(old, new))
        if is_imported_again:
            module = imported(path)
        loaded = a_network(module=module)
        expected, before = own(loaded), frames()
        with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
            if old.startswith("gelu") and not is_imported_again:
                assert fused.traced_because == ""  # what runs is the code that was imported
            else:
                assert ("source of Block" in fused.traced_because or "activated" in fused.traced_because) and frames() != before
            assert_close(loaded.model(*loaded.args), expected)
    finally:
        sys.modules.pop("edited_network", None)


# -- changed behind the start --------------------------------------------------------------------------------------------------

LATER = {name: CHANGES[name][0] for name in (
    "a value of the configuration", "a flag of the configuration", "a configuration of its own", "an attribute",
    "an item of a list", "an epsilon", "a class", "a hook", "one parameter for two",
)}  # fmt: skip
LATER |= {"another parameter": replaced_tensor, "another list": other_list, "a forward of the instance's own": own_forward}


@pytest.mark.parametrize("name", LATER)
def test_a_model_that_changes_is_served_right(name, folder):
    loaded = a_network()
    with torch.no_grad(), put_in(loaded, folder) as fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            loaded.model(*loaded.args)
        assert fused.fallbacks == {} and fused.traced_because == ""
        LATER[name](loaded.model)
        if name == "a configuration of its own":
            loaded.model.blocks[1].config.factor = 3.0
        for _ in range(3):
            assert_close(loaded.model(*loaded.args), own(loaded))
        assert fused.fallbacks or fused.traced_because or name == "another parameter"


def test_a_global_that_changes_is_served_right(folder):
    loaded = a_network()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        loaded.model(*loaded.args)
        with set_to(vars(network), "SCALE", 3.0), pytest.warns(match="not verified"):
            assert_close(loaded.model(*loaded.args), own(loaded))
        assert "SCALE" in fused.traced_because
        assert_close(loaded.model(*loaded.args), own(loaded))


def test_a_model_in_training_runs_its_own_ops(folder):
    loaded = a_network()
    with torch.no_grad(), put_in(loaded, folder) as fused, pytest.warns(match="train"):
        loaded.model.train()
        loaded.model(*loaded.args)
        assert fused.fallbacks == {"the model is in train() mode": 1}


# -- a file that is damaged, old, or somebody else's ---------------------------------------------------------------------------


def swap_inputs(start):
    names = [name for name in start["sources"] if isinstance(name, str) and name.endswith("norm.weight")]
    others = [name.replace("weight", "bias") for name in names]
    swap = dict(zip(names + others, others + names, strict=True))
    start["sources"] = [swap.get(name, name) for name in start["sources"]]


def open_a_file(start):
    row = next(row for row in start["graph"]["nodes"] if row[0] == "call_function")
    row[2], row[3], row[4] = "aten.from_file.default", ["written-by-a-file", True, 8], {}


EVIL = "x=open('written-by-a-file','w')"


def evil_placeholder(start):
    next(row for row in start["graph"]["nodes"] if row[0] == "placeholder")[2] = EVIL


def evil_option(start):
    next(row for row in start["graph"]["nodes"] if row[0] == "call_function")[4] = {EVIL: 1}


def evil_name(start):
    next(row for row in start["graph"]["nodes"] if row[0] == "call_function")[1] = "import"


def evil_attribute(start):
    row = next(row for row in start["graph"]["nodes"] if row[0] == "call_function")
    row[0], row[2], row[3], row[4] = "get_attr", f'a" + str({EVIL[2:]}) + "', [], {}


def input_with_a_default(start):
    next(row for row in start["graph"]["nodes"] if row[0] == "placeholder")[3] = [1.0]


def input_named_as_a_keyword(start):
    next(row for row in start["graph"]["nodes"] if row[0] == "placeholder")[2] = "class"


def with_op(name):
    def change(start):
        next(row for row in start["graph"]["nodes"] if row[0] == "call_function")[2] = name

    return change


DAMAGES = {
    "other inputs": (swap_inputs, "the stored graph computes something else: result"),
    "an op that writes a file": (open_a_file, "may do more than compute"),
    "code for an input": (evil_placeholder, "a name like"),
    "code for an option": (evil_option, "a name like"),
    "code for an attribute": (evil_attribute, "a name like"),
    "a keyword for a name": (evil_name, "a name like 'import'"),
    "a function of Python's": (with_op("os.system"), "none of torch's"),
    "an input named as a keyword": (input_named_as_a_keyword, "a name like"),
    "an input with a default": (input_with_a_default, "an input with a default"),
    "an op that is not there": (with_op("aten.no_such.default"), "torch does not have"),
    "another version of torch": (lambda start: start["versions"].update(torch="1.0"), "torch is"),
    "another version of ours": (lambda start: start["versions"].update({"fusion-advisor": "1"}), "fusion-advisor is"),
    "no graph": (lambda start: start.pop("graph"), "does not fit this model (KeyError"),
    "no nodes": (lambda start: start["graph"].update(nodes=[]), ""),
    "half of the nodes": (lambda start: start["graph"].update(nodes=start["graph"]["nodes"][:9]), ""),
    "a huge storage": (lambda start: start["graph"].update(storages=[2**70]), "does not fit this model"),
    "a list for a dict": (lambda start: start.update(tree=[]), "does not fit this model"),
    "fewer names": (lambda start: start["names"].pop(), "another number of inputs"),
    "an output of another class": (lambda start: start.update(output={"list": [{"result": 0}]}), "its output has another form"),
    "other code": (lambda start: start["code"][0].__setitem__(2, "0" * 24), "the code of `"),
    "another capture": (lambda start: start.update(capture="0"), "is of another capture"),
    "another schema": (lambda start: start.update(schema="fusion-advisor-start/0"), "is of another version"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_does_not_fit_is_not_used(name, folder, tmp_path):
    change, reason = DAMAGES[name]
    shutil.copytree(folder, tmp_path / "run")
    edit(tmp_path / "run", change)
    loaded = a_network()
    expected, before = own(loaded), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert reason in fused.traced_because and fused.traced_because and frames() != before, fused.traced_because
        assert_close(loaded.model(*loaded.args), expected)
        assert fused.launches > 0 and fused.fallbacks == {}
    assert not Path("written-by-a-file").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, None], ids=["nothing", "no gzip", "deep", "cut"])
def test_a_file_that_cannot_be_read_is_not_used(content, folder, tmp_path):

    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else gzip.compress(content) if content[:1] == b"[" else content)
    with put_in(a_network(), tmp_path / "run") as fused:
        assert fused.traced_because.startswith(f"{NAME} cannot be read")
    path.unlink()
    with put_in(a_network(), tmp_path / "run") as fused:
        assert fused.traced_because == f"the run has no {NAME}"
        assert fused.started == f"The model was traced again: the run has no {NAME}."


@pytest.mark.parametrize(
    ("why", "said"),
    [("", "start.json.gz gives no reason."), ([1], "[1]."), ("red \x1b[31m\ud800", r"red \x1b[31m\ud800."), ("y" * 9999, "y….")],
    ids=["nothing", "a list", "what a terminal obeys", "a long one"],
)
def test_a_reason_of_a_file_is_one_line_to_read(why, said, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    edit(tmp_path / "run", lambda start: start.update(why_not=why))
    with put_in(a_network(), tmp_path / "run") as fused:
        assert fused.started.startswith("The model was traced again: ") and fused.started.endswith(said)
        assert fused.started.isprintable() and len(fused.started) < 500


# -- what is not written down --------------------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """Appends to a list of Python's at each call."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)

    def forward(self, x):
        SEEN.append(1)
        u = self.lin(x)
        return torch.nn.functional.gelu(u) * 2.0 + x


SEEN: list = []


def test_a_call_that_changes_python_is_traced(tmp_path):
    torch.manual_seed(0)
    loaded = describe_live(Counting().eval(), (torch.randn(2, 48, 64),))
    assert run_of(loaded, options_in(tmp_path / "run")) == "the call changes a list of Python's"
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert fused.traced_because == "the call changes a list of Python's"
        count = len(SEEN)
        loaded.model(*loaded.args)
        assert len(SEEN) == count + 1


class Sampling(torch.nn.Module):
    """Draws random numbers, and writes to a buffer, so that its own ops run twice when it is watched."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        u = torch.nn.functional.gelu(self.lin(x)) * 2.0
        self.mean.mul_(0.5).add_(u.mean((0, 1)))
        return u + torch.randn_like(u) + torch.nn.functional.dropout(x, 0.5)


def test_a_model_that_draws_random_numbers_starts_without_a_trace(tmp_path):
    torch.manual_seed(0)
    loaded = describe_live(Sampling().eval(), (torch.randn(2, 48, 64),))
    assert run_of(loaded, options_in(tmp_path / "run")) == ""
    state = torch.get_rng_state()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert fused.traced_because == "" and torch.equal(torch.get_rng_state(), state)
        found = loaded.model(*loaded.args)
        loaded.model.mean.zero_()
        torch.set_rng_state(state)
        torch.testing.assert_close(found, own(loaded))


class Registered(torch.nn.Module):
    """A layer whose class is looked up in a table, as transformers does to note what its layers return."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.nn.functional.gelu(self.lin(x)) * SCALES[type(self)]


class Other(Registered):
    """Of another class, with the same scale."""


SCALES = {Registered: 2.0, Other: 2.0}


class TwoRegistered(torch.nn.Module):
    """Two layers of one class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Registered(), Registered()])

    def forward(self, x):
        first, second = self.layers
        return second(first(x)) * (3.0 if type(first) is type(second) else 1.0 + 2.0)


def test_classes_that_are_one_are_compared(tmp_path):
    """Dynamo asks whether two layers have one class: MoE models, T5 and Swin were traced again for it."""
    x = torch.randn(2, 48, 64)
    loaded = describe_live(TwoRegistered().eval(), (x,))
    assert run_of(loaded, options_in(tmp_path / "run")) == ""
    with torch.no_grad(), put_in(describe_live(TwoRegistered().eval(), (x,)), tmp_path / "run") as fused:
        assert fused.traced_because == "" and fused.fallbacks == {}
        torch.testing.assert_close(fused(x), TwoRegistered().eval()(x), rtol=1e-4, atol=1e-5)
    changed = TwoRegistered().eval()
    changed.layers[1].__class__ = Other
    with torch.no_grad(), put_in(describe_live(changed, (x,)), tmp_path / "run") as fused:
        assert "layers" in fused.traced_because
        torch.testing.assert_close(fused(x), changed._call_impl(x), rtol=1e-4, atol=1e-5)


class Scaled(torch.nn.Module):
    """A base with a scale."""

    GAINS: ClassVar = {"first": 2.0}

    def scaled(self, x):
        return x * self.GAINS["first"]


class Layer(Scaled):
    """A layer that calls its base's method, and is compared with its class."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)

    def scaled(self, x):
        return super().scaled(x) * (3.0 if type(self) is Layer else 1.0)

    def forward(self, x):
        return torch.nn.functional.gelu(self.scaled(self.lin(x)))


class OtherLayer(Layer):
    """Of another class, with the same code."""


SHARED = {"a": 2.0}
KINDS = {"one": SHARED, "other": SHARED}


class Varied(torch.nn.Module):
    """Leaves layers out that a set names, and walks through a dict two of whose items are one object."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.left_out = {5}

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            if place not in self.left_out:
                x = layer(x)
        for gains in KINDS.values():
            x = x * gains["a"]
        return x


def left_out_first(model):
    model.left_out.add(0)


def other_class(model):
    model.layers[1].__class__ = OtherLayer


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    found = tmp_path_factory.mktemp("varied") / "run"
    assert run_of(describe_live(Varied().eval(), (torch.randn(2, 48, 64),)), options_in(found)) == ""
    return found


@pytest.mark.parametrize(("change", "word"), [(None, ""), (left_out_first, "left_out"), (other_class, "OtherLayer")])
def test_sets_and_what_a_method_finds_of_its_base_are_compared(change, word, varied):
    """Models with ``super()`` in layers of one class were traced again, and so was CLIP: a dict of its holds one object twice."""
    x = torch.randn(2, 48, 64)
    changed = Varied().eval()
    with torch.no_grad(), put_in(describe_live(changed, (x,)), varied) as fused:
        assert fused.traced_because == "" and fused.launches == 0
        torch.testing.assert_close(fused(x), Varied().eval()(x), rtol=1e-4, atol=1e-4)
        assert fused.launches > 0
        if change is not None:
            change(changed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.testing.assert_close(fused(x), changed._call_impl(x), rtol=1e-4, atol=1e-4)
        assert word in fused.traced_because


@pytest.mark.parametrize("is_before", [True, False])
def test_an_attribute_of_a_base_that_a_class_hides_is_traced_again(is_before, varied):
    """Dynamo asks the base alone."""
    x = torch.randn(2, 48, 64)
    model = Varied().eval()
    try:
        if is_before:
            Layer.GAINS = {"first": 2.0}
        with torch.no_grad(), put_in(describe_live(model, (x,)), varied) as fused, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x)
            Layer.GAINS = {"first": 4.0}
            torch.testing.assert_close(fused(x), model._call_impl(x), rtol=1e-4, atol=1e-4)
            assert "GAINS" in fused.traced_because
    finally:
        del Layer.GAINS


def test_objects_of_a_dict_that_are_no_longer_one_are_traced_again(varied):
    with set_to(KINDS, "other", {"a": 2.0}), put_in(describe_live(Varied().eval(), (torch.randn(2, 48, 64),)), varied) as fused:
        assert "were one object" in fused.traced_because
