"""The dispatcher: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusion_advisor.runtime.torch_internals import dispatcher, fake_mode

LINEARS = [((5, 6), True), ((2, 5, 6), True), ((2, 5, 6), False), ((2, 3, 5, 6), True), ((6,), False)]


@pytest.mark.parametrize(("shape", "has_bias"), LINEARS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_gradients_a_linear_is_one_step_of_a_trace_with_the_same_result(device, shape, has_bias):
    def traced(context, *, needs_grad):
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            x, weight, bias = (torch.empty(size, device=device) for size in (shape, (4, 6), (4,)))
            weight.requires_grad_()
            with context, enable_python_dispatcher(), torch.set_grad_enabled(needs_grad), dispatcher.OpLog() as watch:
                found = [torch.nn.functional.linear(x, weight, bias if has_bias else None) for _ in range(2)]
        layouts = [(one.shape, one.stride(), one.dtype, one.device.type, one.requires_grad) for one in found]
        return [name for name, _ in watch.seen], layouts

    # Autograd asks for the device's guard, which a build for CPUs does not have.
    for needs_grad in (False, True) if device == "cpu" or torch.cuda.is_available() else (False,):
        plain, expected = traced(contextlib.nullcontext(), needs_grad=needs_grad)
        ops, layouts = traced(dispatcher.linear_in_one_step(), needs_grad=needs_grad)
        assert layouts == expected
        assert "aten.linear.default" not in plain
        assert ops == (plain if needs_grad else ["aten.linear.default"] * 2)
        assert traced(contextlib.nullcontext(), needs_grad=needs_grad) == (plain, expected)


def test_a_linear_in_one_step_leaves_calls_and_other_tensors_alone():
    from torch._dispatch.python import enable_python_dispatcher

    x, weight = torch.randn(2, 6), torch.randn(4, 6, requires_grad=True)
    with dispatcher.linear_in_one_step(), enable_python_dispatcher(), torch.no_grad(), dispatcher.OpLog() as watch:
        torch.nn.functional.linear(x, weight)
    assert "aten.mm.default" in [name for name, _ in watch.seen]
    expected = torch.nn.functional.linear(x, weight)
    with dispatcher.linear_in_one_step(), dispatcher.linear_in_one_step():
        found = torch.nn.functional.linear(x, weight)
    assert torch.equal(found, expected) and found.requires_grad


def test_a_linear_in_one_step_is_taken_away_by_the_last_of_several_threads():
    keys = set(torch.ops.aten.linear.default.py_kernels)
    failures, before = [], sys.getswitchinterval()

    def enter():
        try:
            for _ in range(100):
                with dispatcher.linear_in_one_step():
                    assert len(torch.ops.aten.linear.default.py_kernels) > len(keys)
        except Exception as error:  # noqa: BLE001 - a thread's error is nobody's otherwise
            failures.append(error)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures and set(torch.ops.aten.linear.default.py_kernels) == keys


def test_fake_and_wrapped_tensors_are_told_from_real_ones():
    seen = []
    torch.vmap(lambda row: (seen.append(fake_mode.has_no_numbers(row)), row)[1])(torch.zeros(2, 3))
    assert seen == [True] and not fake_mode.has_no_numbers(torch.zeros(3)) and not fake_mode.has_no_numbers(None)
    (fake,) = fake_mode.fake_tensors([torch.zeros(3)])
    assert fake_mode.is_fake(fake) and not fake_mode.is_fake(torch.zeros(3)) and not fake_mode.is_fake(None)


def test_modes_and_tensor_classes_that_see_their_ops():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    class Own(torch.Tensor):
        pass

    assert not dispatcher.is_mode_active()
    with torch.device("cpu"):
        assert not dispatcher.is_mode_active()
        with Mode():
            assert dispatcher.is_mode_active()
    with dispatcher.OpLog():
        assert dispatcher.is_mode_active()
    assert dispatcher.sees_its_ops(Own)
    assert not any(map(dispatcher.sees_its_ops, (torch.Tensor, torch.nn.Parameter)))


def test_transforms_and_tangents_are_seen():
    seen = []

    def look(value):
        seen.append(dispatcher.is_transformed())
        return value.sum()

    torch.vmap(look)(torch.zeros(2, 3))
    torch.func.grad(look)(torch.zeros(3))
    with torch.autograd.forward_ad.dual_level():
        look(torch.zeros(3))
    look(torch.zeros(3))
    assert seen == [True, True, True, False]


def test_a_namespace_is_free_again_once_its_ops_are_forgotten():
    kept = []
    for number in (1, 2):
        library = torch.library.Library("of_a_test_of_the_dispatcher", "DEF")
        library.define("plus(Tensor x) -> Tensor")
        library.impl("plus", lambda x, number=number: x + number, "CPU")
        op = torch.ops.of_a_test_of_the_dispatcher.plus.default
        kept.append((library, op))
        assert torch.equal(op(torch.zeros(2)), torch.full((2,), float(number)))
        dispatcher.forget_ops(library)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_is_seen_for_each_kind_of_device(kind):
    assert not dispatcher.is_autocast_on()
    before = torch.is_autocast_enabled(kind)
    try:
        torch.set_autocast_enabled(kind, True)
        assert dispatcher.is_autocast_on()
    finally:
        torch.set_autocast_enabled(kind, before)
    assert not dispatcher.is_autocast_on()


def test_batches_of_both_kinds_are_recognised():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(dispatcher.is_batched(gradient))
            return gradient

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Noting.apply(x), x, torch.ones(3))
    torch.autograd.grad(Noting.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.vmap(lambda row: seen.append(dispatcher.is_batched(row)) or row)(torch.eye(3))
    assert seen == [False, True, True]


def test_casts_to_a_narrower_dtype_stay_wide():
    x, ids = torch.randn(2, 3, dtype=torch.float64), torch.arange(3)
    plain = torch.randn(3, generator=torch.Generator().manual_seed(0))
    with dispatcher.StaysWide(torch.float64):
        wide = [x.half(), x.to(torch.float32), ids.float(), x.sum(dtype=torch.float32), x.softmax(-1, dtype=torch.float32)]
        wide += [torch.zeros_like(x, dtype=torch.bfloat16), torch.zeros(3), x.type_as(plain)]
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(0))
        others = [x.long(), x > 0, ids + 1, x.to(torch.complex64), torch.arange(3)]
    assert {one.dtype for one in wide} == {torch.float64} and torch.equal(wide[0], x)
    assert torch.equal(drawn, plain.double())
    assert [one.dtype for one in others] == [torch.int64, torch.bool, torch.int64, torch.complex64, torch.int64]
    with dispatcher.StaysWide(torch.float32):
        assert x.float().bfloat16().dtype == torch.float32 and x.double().dtype == torch.float64


@pytest.mark.parametrize("mode", [dispatcher.DrawsAgain, dispatcher.StaysWide])
def test_a_wide_copy_draws_the_numbers_of_the_narrow_model(mode):
    def drawn(x, values):
        values.exponential_()
        yield from (values, torch.randn(40), torch.rand_like(x, dtype=torch.float16), torch.normal(x, x.abs()))
        yield from (
            x.sigmoid().bernoulli(),
            torch.multinomial(x.abs(), 3),
            torch.randperm(9),
            torch.ops.aten.native_dropout(x, 0.5, True)[0],
        )
        yield torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 10)] * 3)

    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    with dispatcher.DrawLog() as log:
        narrow = list(drawn(x, torch.empty_like(x)))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    with mode(torch.float64, log.seen):
        wide = list(drawn(x.double(), torch.empty_like(x.double())))
    assert torch.equal(torch.get_rng_state(), after)
    assert {one.dtype for one in wide} == {torch.float64, torch.int64}
    for one, other in zip(narrow, wide, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-7)
    exact = torch.nn.functional.scaled_dot_product_attention(*[x.double().view(1, 1, 4, 10)] * 3)
    assert torch.equal(wide[-1], exact)  # no dropout: it draws nothing, and runs wide


def test_a_copy_that_draws_otherwise_raises():
    with dispatcher.DrawLog() as log:
        torch.rand(3)
    for call in (lambda: torch.randn(3), lambda: [torch.rand(3) for _ in range(2)]):
        with pytest.raises(RuntimeError, match="wider copy"), dispatcher.DrawsAgain(torch.float64, log.seen):
            call()


def test_autocast_casts_nothing_of_a_wide_copy():
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad(), dispatcher.StaysWide(torch.float32), torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.float32 and torch.equal(found, layer(x))


def test_hooks_on_what_is_kept_are_seen_where_they_are_active():
    assert not dispatcher.saves_through_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert dispatcher.saves_through_hooks()
    assert not dispatcher.saves_through_hooks()


def test_hooks_on_what_is_kept_are_taken_away_and_put_back_in_their_order():
    seen = []

    def note(name):
        def pack(tensor):
            seen.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    x = torch.randn(3, requires_grad=True)
    with note("outer"):
        with note("inner"):
            with dispatcher.without_saved_hooks():
                assert not dispatcher.saves_through_hooks()
                x.sin()
            x.sin()
        x.sin()
    assert seen == ["inner", "outer"] and not dispatcher.saves_through_hooks()


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_second_pass_of_a_checkpoint_ends_where_the_context_does(is_whole):
    passed = []

    def run(x):
        with dispatcher.whole_second_pass() if is_whole else contextlib.nullcontext():
            result = x.exp()
            passed.append("context")
        passed.append("function")
        return result

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert passed == ["context", "function", *(["context"] if is_whole else [])]
    assert not dispatcher.saves_through_hooks()


def test_hooks_on_leaves_get_tensors_alone_and_can_be_removed():
    leaf, seen = torch.ones(2, requires_grad=True), []
    handle = leaf.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    result = leaf * 3
    for _ in range(2):
        dispatcher.call_hooks_with_tensors_alone(source for source, _ in result.grad_fn.next_functions)
    (hook,) = leaf._backward_hooks.values()
    assert hook(None) is None and not seen
    result.sum().backward(retain_graph=True)
    assert len(seen) == 1 and torch.equal(leaf.grad, torch.full((2,), 6.0))
    handle.remove()
    result.sum().backward()
    assert len(seen) == 1 and torch.equal(leaf.grad, torch.full((2,), 9.0))


def test_hooks_on_leaves_wait_and_are_called_again():
    leaf, seen = nn.Parameter(torch.ones(2)), []
    handles = [leaf.register_hook(lambda _: seen.append("before"))]
    handles.append(leaf.register_post_accumulate_grad_hook(lambda _: seen.append("after")))
    leaf.sum().backward()  # its node of autograd's is there
    for is_raising in (False, True):
        with contextlib.suppress(KeyError), dispatcher.hooks_on_leaves_paused([leaf, nn.Parameter(torch.ones(1))]):
            leaf.sum().backward()
            if is_raising:
                raise KeyError
        leaf.sum().backward()
    assert seen == 3 * ["before", "after"]
    for handle in handles:
        handle.remove()
    leaf.sum().backward()
    assert len(seen) == 6


@pytest.mark.parametrize("mode", [dispatcher.OpLog, lambda: dispatcher.StaysWide(torch.float64)])
def test_under_a_mode_of_ours_dynamo_gives_no_function_up(mode):
    """Under any other mode it looks at a function's code never again: a call of another dtype gets no graph."""

    def softened(x):
        return x.sin() + 1

    torch.compiler.reset()
    compiled = torch.compile(softened, backend="eager", fullgraph=True)
    with mode():
        compiled(torch.ones(3))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled(torch.ones(3, dtype=torch.float64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
