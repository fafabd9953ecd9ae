"""Code is replaced after the model was fused, one way in each case: the call runs the original ops, so the new code runs."""

from __future__ import annotations

import functools
import types
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.errors import CannotCapture
from tests.tiny import fuse


def helper(x, k=2.0):
    return x * k


def deco(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Other:
    def go(self, x):
        return x * 1.5


class Base(torch.nn.Module):
    def of_base(self, x, k=1.0):
        return x * 0.5 + k


class Sub(Base):
    FACTOR = 0.5

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(16, 16)
        self.other = Other()

    def of_class(self, x):
        return helper(x) + 1

    def __hidden(self, x):
        return x * 1.25

    @deco
    def decorated(self, x):
        return x + 0.125

    @property
    def scale(self):
        return 3.0

    @staticmethod
    def static(x):
        return x - 1

    def forward(self, x):
        x = torch.tanh(self.of_base(self.of_class(self.lin(x))) * self.FACTOR)
        return self.other.go(self.__hidden(self.decorated(self.static(x * self.scale))))


class Another(Sub):
    def forward(self, x):
        return x * 50.0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Sub()
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        return torch.sigmoid(self.layer(x) * 0.25 + self.norm(x))


def new(self, x):
    return x * 50.0


def new_static(x, k=2.0):
    return x * 50.0


def bound(layer):
    return types.MethodType(new, layer)


REPLACED = {
    "helper method": lambda patch, model: patch.setattr(Sub, "of_class", new),
    "base's method": lambda patch, model: patch.setattr(Base, "of_base", new),
    "override of a base's method": lambda patch, model: patch.setattr(Sub, "of_base", new, raising=False),
    "private method": lambda patch, model: patch.setattr(Sub, "_Sub__hidden", new),
    "__call__": lambda patch, model: patch.setattr(Sub, "__call__", new),
    "forward": lambda patch, model: patch.setattr(Sub, "forward", new),
    "code of forward": lambda patch, model: patch.setattr(Sub.forward, "__code__", new.__code__),
    "code of the model's forward": lambda patch, model: patch.setattr(Model.forward, "__code__", new.__code__),
    "code of a method": lambda patch, model: patch.setattr(Sub.of_class, "__code__", new.__code__),
    "code inside a decorator": lambda patch, model: patch.setattr(Sub.decorated.__wrapped__, "__code__", new.__code__),
    "property": lambda patch, model: patch.setattr(Sub, "scale", property(lambda self: 50.0)),
    "static method": lambda patch, model: patch.setattr(Sub, "static", staticmethod(new_static)),
    "class constant": lambda patch, model: patch.setattr(Sub, "FACTOR", 50.0),
    "defaults": lambda patch, model: patch.setattr(Base.of_base, "__defaults__", (50.0,)),
    "function of the module": lambda patch, model: patch.setitem(globals(), "helper", new_static),
    "code of a function of the module": lambda patch, model: patch.setattr(helper, "__code__", new_static.__code__),
    "forward of one instance": lambda patch, model: patch.setattr(model.layer, "forward", new_static),
    "bound forward of one instance": lambda patch, model: patch.setattr(
        model.layer, "forward", types.MethodType(new, model.layer)
    ),
    "method of one instance": lambda patch, model: patch.setattr(model.layer, "of_class", new_static),
    "method of an object that a module holds": lambda patch, model: patch.setattr(Other, "go", new),
    "code of such a method": lambda patch, model: patch.setattr(Other.go, "__code__", new.__code__),
    "class of one instance": lambda patch, model: patch.setattr(model.layer, "__class__", Another),
}


@pytest.fixture
def fused():
    torch.manual_seed(0)
    return fuse(Model().eval(), (torch.randn(4, 16),))


@pytest.mark.parametrize("how", REPLACED)
def test_new_code_runs_at_once_and_the_old_one_is_fused_again(how, fused, monkeypatch):
    model, x = fused.model, torch.randn(4, 16)
    with torch.no_grad(), fused:
        want = model(x)
        assert not fused.fallbacks
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            REPLACED[how](patch, model)
            changed = model(x)
            assert torch.allclose(changed, model._call_impl(x), atol=1e-4) or how == "__call__"
            assert not torch.allclose(changed, want, atol=1e-3)
            assert fused.fallbacks
        count = sum(fused.fallbacks.values())
        torch.testing.assert_close(model(x), want)
        assert sum(fused.fallbacks.values()) == count


def test_an_attribute_that_a_class_gets_and_nobody_reads_changes_nothing(fused, monkeypatch):
    with torch.no_grad(), fused:
        monkeypatch.setattr(Sub, "unrelated", new, raising=False)
        fused(torch.randn(4, 16))
        assert not fused.fallbacks


class SeeFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class SeeOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A tensor that sees the functions that it is given to."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


seen: list[str] = []


@pytest.mark.parametrize("mode", [SeeFunctions, SeeOps])
def test_a_mode_sees_the_models_own_ops(mode, fused):
    x = torch.randn(4, 16)
    seen.clear()
    with torch.no_grad(), fused:
        with mode():
            fused.model._call_impl(x)
            want = seen.copy()
            seen.clear()
            with pytest.warns(UserWarning, match="Mode is active"):
                fused(x)
        assert seen == want
        assert any("tanh" in name for name in seen)
        fused(x)
        assert sum(fused.fallbacks.values()) == 1
    seen.clear()


def test_a_tensor_that_handles_its_ops_gets_the_models_own(fused):
    x = torch.randn(4, 16).as_subclass(Named)
    with torch.no_grad(), fused, pytest.warns(UserWarning, match="handles its ops by itself"):
        result = fused(x)
    assert type(result) is Named and "tanh" in seen
    seen.clear()


@pytest.mark.parametrize("where", ["input", "parameter", "buffer", "mode"])
def test_apply_says_that_it_cannot_capture_what_handles_its_own_ops(where):
    model, x = Model().eval(), torch.randn(4, 16)
    if where == "input":
        x = x.as_subclass(Named)
    elif where == "parameter":
        model.layer.lin.weight = torch.nn.Parameter(model.layer.lin.weight.detach().as_subclass(Named))
    elif where == "buffer":
        model.register_buffer("unused", x.as_subclass(Named))
    else:
        with SeeFunctions(), pytest.raises(CannotCapture, match="Mode is active"):
            capture_regions(model, (x,), {})
        return
    with pytest.raises(CannotCapture, match="Named"):
        capture_regions(model, (x,), {})
