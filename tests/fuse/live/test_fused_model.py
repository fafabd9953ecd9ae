"""The fused model: the same object, the same state, fused for the verified call and the original for every other."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch.autograd import forward_ad

import fusion_advisor
import fusion_advisor.fuse.live.fused_model as model_module
from fusion_advisor.errors import CannotCopy
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.records import Status
from fusion_advisor.report.html.notebook import for_notebook
from fusion_advisor.runtime.torch_internals import cuda_state
from tests.report.fixtures import applied
from tests.tiny import Toy, fuse, gpt2, toy


@pytest.fixture
def fused():
    """A Toy whose fused graphs are off by 0.5, so that it shows which graph ran; not applied yet."""
    model, args = toy()
    return fuse(model, args, spoil=0.5)


@pytest.fixture
def x():
    return toy()[1][0]


def is_fused(model, x):
    with torch.no_grad():
        return not torch.allclose(model(x), model._call_impl(x), atol=0.1)


def test_inside_the_block_the_call_is_fused_and_after_it_is_not(fused, x):
    model = fused.model
    assert not is_fused(model, x)
    with fused as same:
        assert same is fused
        assert is_fused(model, x) and is_fused(fused, x)
    assert not is_fused(model, x)
    assert fused.fallbacks == {}


def test_a_call_makes_its_device_the_current_one(fused, x, monkeypatch):
    """Two devices that are not there: the tensors are on 1, the caller on 0. The original ops stay with the caller."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(cuda_state, "current_device_number", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(model_module, "device_of", lambda leaves: 1)
    for name in ("_run_compiled", "_original"):
        own = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *given, _own=own, **named: seen.append(current[-1]) or _own(*given, **named))
    with fused, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = fused(x)
        assert seen == [1] and current == [0] and not fused.fallbacks
        current[0] = 1
        assert torch.equal(fused(x), want)
        current[0] = 0
        fused(x[:1])
    assert seen == [1, 1, 0] and current == [0]


def test_a_notebook_shows_the_report_and_how_things_stand(fused, x):
    assert fused._repr_html_() is None  # no report: Jupyter shows repr() instead
    fused.report = for_notebook(applied())
    assert "Nothing is in place" in fused._repr_html_()
    with fused, pytest.warns(UserWarning, match="gradients"):
        fused(x)
        shown = fused._repr_html_()
    assert "What was kept is in place." in shown and "1 of its calls ran the original ops: gradients are enabled" in shown
    assert "1.19× faster than eager" in shown


def test_a_prompt_shows_the_model_what_was_kept_and_how_things_stand(fused, x):
    name = type(fused.model).__name__
    assert repr(fused) == f"<FusedModel of {name}, not in place>"
    fused.report = for_notebook(applied())
    kept = [row.id for row in (*fused.report.rewrites, *fused.report.fusions) if row.status is Status.KEPT]
    with fused, pytest.warns(UserWarning, match="gradients"):
        fused(x)
        assert repr(fused) == f"<FusedModel of {name}, in place; kept: {', '.join(kept)}; 1 of its calls ran the original ops>"


def test_right_kernels_give_the_models_own_results():
    model, args = toy()
    expected = model(*args)
    with torch.no_grad(), fuse(model, args):
        torch.testing.assert_close(model(*args), expected)


def test_state_and_attributes_are_the_same_before_during_and_after(fused):
    model = fused.model

    def state():
        return {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}

    before, attributes = state(), dict(model.__dict__)
    classes = {cls: dict(vars(cls)) for cls in type(model).__mro__[:-1]}
    with fused:
        during = state()
    for other in (during, state()):
        assert list(other) == list(before)
        assert all(other[key][0] == before[key][0] and torch.equal(other[key][1], before[key][1]) for key in before)
    assert model.__dict__ == attributes
    assert all(dict(vars(cls)) == content for cls, content in classes.items())


def test_revert_is_exact_after_an_exception(fused):
    attributes = dict(fused.model.__dict__)
    with pytest.raises(RuntimeError, match="inside"), fused:
        raise RuntimeError("inside")
    assert fused.model.__dict__ == attributes


def test_apply_and_revert_may_be_repeated(fused, x):
    attributes = dict(fused.model.__dict__)
    assert fused.apply().apply() is fused
    assert is_fused(fused.model, x)
    assert fused.revert() is fused.revert() is fused.model
    assert fused.model.__dict__ == attributes
    fused.apply()
    assert is_fused(fused.model, x)


def test_an_earlier_compile_is_put_back(x):
    model, args = toy()
    model.compile(backend="eager")
    before = model.__dict__["_compiled_call_impl"]
    fused = fuse(model, args, spoil=0.5)
    with pytest.raises(ZeroDivisionError), fused:
        assert is_fused(model, x)
        _ = 1 // 0
    assert model.__dict__["_compiled_call_impl"] is before
    assert not is_fused(model, x)


def grad(model, x):
    return model(x)


def train(model, x):
    model.train()
    with torch.no_grad():
        return model(x)


def other_shape(model, x):
    with torch.no_grad():
        return model(torch.cat((x, x)))


def other_stride(model, x):
    with torch.no_grad():
        return model(x.t().contiguous().t())


def other_name(model, x):
    with torch.no_grad():
        return model(x=x)


def autocast(model, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def negated_when_read(model, x):
    with torch.no_grad():
        return model(torch.complex(x, x).conj().imag.as_strided(x.shape, x.stride()))


def batched(model, x):
    with torch.no_grad():
        return torch.vmap(model)(x.unsqueeze(0))


CALLS = [
    (negated_when_read, "inputs"),
    (batched, "torch.func"),
    (grad, "gradients"),
    (train, "train"),
    (other_shape, "inputs"),
    (other_stride, "inputs"),
    (other_name, "inputs"),
    (autocast, "autocast"),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_call_that_was_not_verified_runs_the_original_and_says_so_once(fused, x, call, words):
    model = fused.model
    expected = call(copy.deepcopy(model), x)
    with fused:
        with pytest.warns(UserWarning, match=words) as caught:
            first = call(model, x)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = call(model, x)
        assert torch.equal(first, expected) and torch.equal(second, expected)
        assert list(fused.fallbacks.values()) == [2]
        model.eval()
        assert is_fused(model, x)


def test_tangents_flow_through_the_original(fused, x):
    def tangent(model):
        with torch.no_grad(), forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.clone()

    expected = tangent(copy.deepcopy(fused.model))
    with fused, pytest.warns(UserWarning, match="forward-mode"):
        assert torch.equal(tangent(fused.model), expected)
    with fused:
        assert is_fused(fused.model, x)


def test_gradients_flow_through_the_original(fused, x):
    with fused, pytest.warns(UserWarning, match="gradients"):
        fused.model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in fused.model.parameters())


def test_new_weights_are_used(x):
    model, args = toy()
    fused = fuse(model, args)
    other = Toy().eval()
    model.load_state_dict(other.state_dict())
    with torch.no_grad(), fused:
        torch.testing.assert_close(model(x), other(x))
    assert fused.fallbacks == {}


def test_a_model_in_another_dtype_runs_the_original_until_it_is_back(fused, x):
    """Its code may read the dtype of a weight, which keeps its place in the module: the graph would be another one."""
    with torch.no_grad(), fused:
        assert is_fused(fused.model, x)
        fused.model.double()
        with pytest.warns(UserWarning, match="is float64.*, and was float32"):
            assert torch.equal(fused.model(x.double()), fused._original(x.double()))
        with pytest.raises(RuntimeError):  # as without fusions
            fused.model(x)
        fused.model.float()
        assert is_fused(fused.model, x)


def test_replaced_submodules_run_the_original(fused, x):
    model = fused.model
    with fused:
        model.norms[0] = torch.nn.Identity()
        with torch.no_grad(), pytest.warns(UserWarning, match="not verified"):
            found = model(x)
    with torch.no_grad():
        assert torch.equal(found, model(x))


def test_a_replaced_submodule_brings_its_own_hooks(fused, x):
    model = fused.model
    before = model.norms[0]
    with torch.no_grad(), fused:
        model.norms[0] = copy.deepcopy(before)
        assert is_fused(model, x)
        model.norms[0].register_forward_hook(lambda _module, _inputs, output: 3 * output)
        with pytest.warns(UserWarning, match="hook"):
            assert not is_fused(model, x)
        model.norms[0] = before
        assert is_fused(model, x)


def test_a_replaced_submodule_takes_its_hooks_along(x):
    model, args = toy()
    before = model.norms[0]
    before.register_forward_hook(lambda _module, _inputs, output: 3 * output)
    with torch.no_grad(), fuse(model, args, spoil=0.5):
        assert is_fused(model, x)
        model.norms[0] = copy.deepcopy(before)
        model.norms[0]._forward_hooks.clear()
        with pytest.warns(UserWarning, match="hook"):
            assert not is_fused(model, x)
        assert not is_fused(model, x)
        model.norms[0] = before
        assert is_fused(model, x)


def test_a_hook_in_the_place_of_another_runs(x):
    model, args = toy()
    handle = model.norms[0].register_forward_hook(lambda _module, _inputs, output: 3 * output)
    with torch.no_grad(), fuse(model, args, spoil=0.5):
        assert is_fused(model, x)
        handle.remove()
        model.norms[0].register_forward_hook(lambda _module, _inputs, output: 5 * output)
        with pytest.warns(UserWarning, match="hook"):
            assert not is_fused(model, x)


def test_a_class_that_is_patched_runs_the_original(x, monkeypatch):
    class Norm(torch.nn.LayerNorm):
        def forward(self, value):
            return super().forward(value)

    model, args = toy()
    model.norms[0] = Norm(32)
    with torch.no_grad(), fuse(model, args, spoil=0.5):
        assert is_fused(model, x)
        monkeypatch.setattr(Norm, "forward", lambda _self, value: 3 * value)
        with pytest.warns(UserWarning, match="Norm.forward` was replaced"):
            assert not is_fused(model, x)


class ReadsAndWrites(torch.nn.Module):
    """Reads one input before it writes to the other; a kernel reads it afterwards."""

    def forward(self, x, y):
        doubled = y * 2.0
        x.add_(1.0)
        return torch.tanh(doubled + 3.0) * 0.5


def test_an_op_that_raises_once_an_attribute_was_changed_raises_as_in_eager():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GELU(approximate="tanh")).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), fusion_advisor.apply(model, (x,), keep="verified", compile=False) as fused:
        expected = model(x)
        model[0].padding = (1, 2, 3)
        with pytest.raises(RuntimeError, match=r"^expected padding to be a single integer") as raised, pytest.warns(UserWarning):
            model(x)
        assert type(raised.value) is RuntimeError
        model[0].padding = (1, 1)
        assert torch.equal(model(x), expected)
        assert sum(fused.fallbacks.values()) == 1


def test_inputs_that_share_memory_with_what_is_written_run_the_original():
    model = ReadsAndWrites().eval()
    base = torch.randn(4, 8)
    fused = fuse(model, (base.clone(), base.clone()))
    with torch.no_grad(), fused:
        model(base.clone(), base.clone())
        assert fused.fallbacks == {}
        one, two = base.clone(), base.clone()
        expected = model._call_impl(one, one.view(4, 8))
        with pytest.warns(UserWarning, match="share memory"):
            found = model(two, two.view(4, 8))
    assert torch.equal(found, expected) and torch.equal(one, two)


class Reshaped(torch.nn.Module):
    """Gives values between chains another layout in place, beside a view of the old one that is written to."""

    def forward(self, x):
        value = torch.tanh(x) * 2.0
        rows = value[1:]
        value.unsqueeze_(0).transpose_(1, 2)
        rows.add_(1.0)
        turned = torch.sigmoid(x) * 3.0
        turned.swapaxes_(0, 1)
        return value * 2.0 + 1.0, value, rows, turned * 2.0 + 1.0


def test_layouts_that_are_changed_in_place_are_views():
    model, x = Reshaped().eval(), torch.randn(4, 8)
    fused = fuse(model, (x,))
    with torch.no_grad(), fused:
        found, expected = model(x), model._call_impl(x)
    assert fused.fallbacks == {}
    torch.testing.assert_close(found, expected)
    assert [value.stride() for value in found] == [value.stride() for value in expected]


class Branches(torch.nn.Module):
    """One op of dynamo's graph is ``torch.cond``, whose branches are graphs of their own and which returns a list of one."""

    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x):
        chosen = torch.cond(x.sum() > 0, lambda value: value * self.factor, lambda value: value - self.factor, (x,))
        return torch.tanh(chosen) * 0.5 + chosen


def test_a_branch_that_changes_is_not_taken_for_the_one_that_was_verified():
    model, x = Branches().eval(), torch.rand(4, 8)
    fused = fuse(model, (x,))
    with torch.no_grad(), fused:
        for value in (x, -x):
            torch.testing.assert_close(model(value), model._call_impl(value))
        assert fused.fallbacks == {}
        model.factor = 7.0
        with pytest.warns(UserWarning, match="not verified"):
            torch.testing.assert_close(model(x), model._call_impl(x))


def test_everything_else_is_the_models_own(fused):
    fused.model.note = "mine"
    assert fused.note == "mine"
    assert fused.lins is fused.model.lins
    with pytest.raises(AttributeError):
        _ = fused.no_such_thing


def test_copies_and_pickles_are_plain_models(fused, x):
    with fused:
        copied = copy.deepcopy(fused.model)
        pickled = pickle.loads(pickle.dumps(fused.model))
        saved = io.BytesIO()
        torch.save(fused.model.state_dict(), saved)
        with torch.no_grad():
            expected = fused.model._call_impl(x)
            assert torch.equal(copied(x), expected)
            assert torch.equal(pickled(x), expected)
        assert is_fused(fused.model, x)
    saved.seek(0)
    assert list(torch.load(saved)) == list(fused.model.state_dict())


def test_a_whole_model_saved_while_it_is_fused_is_loaded_plain(fused, x):
    saved = io.BytesIO()
    with fused:
        torch.save(torch.nn.Sequential(fused.model), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(x), fused.model(x))


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda fused: torch.save(fused, io.BytesIO()), lambda fused: copy.deepcopy([fused])],
    ids=["copy", "deepcopy", "pickle", "torch.save", "inside a list"],
)
def test_the_fused_model_itself_is_not_copied_and_says_what_to_copy(fused, x, copied):
    with fused, pytest.raises(CannotCopy, match=r"copy or save the result of `fused.revert\(\)`, or its `state_dict"):
        copied(fused)
    with fused:
        assert is_fused(fused.model, x)


def test_a_models_own_deepcopy_does_not_answer_for_the_fused_model():
    traced = torch.fx.symbolic_trace(toy()[0])  # a GraphModule has a __deepcopy__
    with fuse(traced, toy()[1]) as fused:
        with pytest.raises(CannotCopy):
            copy.deepcopy(fused)
        assert "_compiled_call_impl" not in copy.deepcopy(traced).__dict__


def test_two_instances_do_not_influence_each_other(x):
    one, args = toy()
    two, _ = toy()
    plain, _ = toy()
    first, second = fuse(one, args, spoil=0.5), fuse(two, args, spoil=3.0)
    with torch.no_grad():
        expected = plain(x)
        with first, second:
            moved_one, moved_two = one(x) - expected, two(x) - expected
            assert torch.equal(plain(x), expected)
        assert moved_one.abs().max() > 0.1 and moved_two.abs().max() > 0.1
        assert not torch.allclose(moved_one, moved_two)
        with first:
            assert torch.equal(two(x), expected)
            assert torch.equal(one(x) - expected, moved_one)


def test_many_fused_models_of_one_class_all_run_fused(x):
    """Dynamo keeps eight graphs per code object and then silently runs eager; that must not be ours."""
    kept = []
    for _ in range(7):
        model, args = toy()
        kept.append(fuse(model, args, spoil=0.5).apply())
    assert all(is_fused(fused.model, x) for fused in kept)
    assert all(not fused.fallbacks for fused in kept)


def test_a_layout_that_changes_inside_falls_back_for_good(fused, x):
    def surprised(*_):
        raise LayoutChanged("fa_k: expected (6, 32)")

    fused._compiled = surprised
    with torch.no_grad(), fused, pytest.warns(UserWarning, match="laid out differently"):
        assert torch.equal(fused.model(x), fused._original(x))
        assert torch.equal(fused.model(x), fused._original(x))
    assert sum(fused.fallbacks.values()) == 2


def test_a_fused_gpt2_generates_as_before():
    model, inputs = gpt2()
    ids = inputs["input_ids"]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        logits = model(**inputs).logits
        with fuse(model, (), inputs) as fused, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-5, atol=1e-5)
            assert fused.fallbacks == {}
            assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
            assert torch.equal(fused.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert fused.fallbacks
    assert "_compiled_call_impl" not in model.__dict__


def test_a_model_with_a_graph_break_is_fused_on_both_sides(x):
    class Broken(Toy):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(y)

    torch.manual_seed(0)
    model = Broken().eval()
    with torch.no_grad():
        expected = model(x)
        with fuse(model, (x,)) as fused:
            torch.testing.assert_close(model(x), expected)
        assert fused.fallbacks == {}
        assert len(fused._rewritten.modules) == 2


def test_a_reverted_model_can_be_freed():
    model, args = toy()
    fused = fuse(model, args)
    with torch.no_grad(), fused:
        model(*args)
    gone = weakref.ref(model)
    del model, fused
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


class Counts(Toy):
    """Counts its calls, which dynamo compares at each; what it returns may depend on them."""

    def __init__(self, *args, adds=False):
        super().__init__(*args)
        self.calls, self.adds = 0, adds

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        return y + self.calls if self.adds else y


@pytest.mark.parametrize("adds", [False, True], ids=["the same graph", "another graph"])
def test_a_model_that_changes_at_each_call_is_not_compiled_for_ever_and_is_told_of(adds):
    """Dynamo by itself would run the original ops from its ninth graph on, and say nothing."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, (x,) = Counts(adds=adds).eval(), toy()[1]
    changes = "the model changed at 8 calls, and dynamo compiled a graph for each"
    with torch.no_grad(), fuse(model, (x,)) as fused, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        def check_call():
            refused, launches, called = sum(fused.fallbacks.values()), fused.launches, model.calls
            found = model(x)
            assert model.calls == called + 1
            torch.testing.assert_close(found, Toy.forward(model, x) + (model.calls if adds else 0))
            assert sum(fused.fallbacks.values()) - refused == (fused.launches == launches)  # one or the other

        for _ in range(14):
            check_call()
        assert fused.fallbacks[changes] >= 4
        assert fused.fallbacks.keys() <= {changes, "dynamo captured a graph that was not verified"}
        assert sum(changes in str(one.message) for one in told) == 1
        model.calls, refused = 3, fused.fallbacks[changes]
        check_call()  # dynamo has a graph of this one
        assert fused.fallbacks[changes] == refused
