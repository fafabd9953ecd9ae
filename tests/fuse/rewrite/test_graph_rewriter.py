"""Rewriting graphs: every subset computes the same, the captured graph stays as it is, layouts are kept and checked."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import replaced_sites
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged, SiteRewrite, fused_call, rewrite_region
from fusion_advisor.records import TensorMeta
from tests.tiny import bench_of, names, planned, profiled, region_of


@pytest.mark.parametrize("name", ["toy", "gpt2", "qwen2"])
def test_every_subset_gives_the_same_outputs_and_leaves_the_capture_alone(name):
    _, _, live = profiled(name)
    bench, built = bench_of(live, planned(name))
    before = [region.graph.code for region in live.regions]
    expected = bench.run(bench.build((), ()))
    subsets = [list(itertools.compress(built, mask)) for mask in itertools.product((0, 1), repeat=len(built))]
    if len(subsets) > 32:  # all pairs, all without one, none and all
        subsets = (
            [list(pair) for pair in itertools.combinations(built, 2)]
            + [[x for x in built if x is not y] for y in built]
            + [built, []]
        )
    for subset in subsets:
        variant = bench.build(subset, tuple(PASSES) if len(subset) % 2 else ())
        torch.testing.assert_close(bench.run(variant), expected, rtol=2e-5, atol=2e-5)
        counts = replaced_sites(bench.build(subset, [name for name in PASSES if not name.startswith("fold-")]))
        assert counts == {fusion.planned.id: len(fusion.planned.chain.sites) for fusion in subset}
    assert [region.graph.code for region in live.regions] == before
    assert len(subsets) >= 2 ** min(len(built), 3)


def test_the_replaced_ops_are_gone():
    _, _, live = profiled("gpt2")
    bench, built = bench_of(live, planned("gpt2"))
    module = bench.build(built, ()).modules[0]
    left = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert not any(word in target for target in left for word in ("aten.tanh", "aten.pow", "aten.layer_norm"))
    assert sum("addmm" in target for target in left) == sum(
        "addmm" in str(node.target) for node in live.regions[0].graph.graph.nodes
    )


def test_graph_code_reads_well():
    _, _, live = profiled("gpt2")
    bench, built = bench_of(live, planned("gpt2"))
    fused = [node for node in bench.build(built, ()).modules[0].graph.nodes if "fusion_id" in node.meta]
    assert {node.target.__name__ for node in fused} >= {"fa_gelu_tanh", "fa_add_layernorm"}
    assert all("nn_module_stack" in node.meta for node in fused)


def one_site(function, inputs, members, outputs, reads, call):
    region, ops, index_of = region_of(function, *inputs)
    picked = [op.index for op in ops if op.role == "op"]
    site = SiteRewrite(
        fusion_id="F1",
        members=tuple(picked[m] for m in members),
        inputs=reads,
        outputs=tuple(picked[o] for o in outputs),
        call=call,
    )
    return rewrite_region(region, index_of, [site], [])[0], names(ops, site.members)


def test_a_view_inside_that_is_read_outside_is_made_again():
    def function(x):
        y = torch.tanh(x)
        v = y.view(-1)
        return v, (v * 2).view(3, 4)

    def call(x):
        y = torch.tanh(x)
        return [y, (y * 2).view(-1)]

    call.__name__ = "fa_test"
    x = torch.randn(3, 4)
    module, _ = one_site(function, (x,), (0, 1, 2), (0, 2), (0,), call)
    one, two = module(x)
    torch.testing.assert_close((one, two), function(x))


def test_a_view_that_reads_a_second_value_is_made_again_after_that():
    def function(x, y):
        h = torch.tanh(x)
        read_first = h @ h
        late = y @ y  # after the call, which the product above waits for
        return h.type_as(late), torch.exp(h), read_first

    def call(x):
        return [torch.tanh(x), torch.exp(torch.tanh(x))]

    call.__name__ = "fa_test"
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    module, members = one_site(function, (x, y), (0, 3, 4), (0, 4), (0,), call)
    assert members == ["tanh", "exp"]
    torch.testing.assert_close(module(x, y), function(x, y))
    assert not any("aten.tanh" in str(node.target) for node in module.graph.nodes)


def test_two_outputs_reach_their_own_readers():
    def function(x):
        y = torch.tanh(x)
        z = torch.exp(y)
        return y.sum() - z @ z

    def call(x):
        return [torch.tanh(x), torch.exp(torch.tanh(x))]

    x = torch.randn(4, 4)
    module, _ = one_site(function, (x,), (0, 1), (0, 1), (0,), call)
    torch.testing.assert_close(module(x), function(x))
    assert "tanh" not in module.code.replace("call", "")


def test_an_op_inside_is_no_view_of_the_output_that_it_reads():
    """It reads a view, too, that is only made behind the place of the call."""

    def function(x, y):
        h = x * 2
        read_first = h @ h
        return read_first, h + y.t()

    def call(x, y):
        return [x * 2, x * 2 + y.t()]

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    module, _ = one_site(function, (x, y), (0, 3), (0, 3), (0, 1), call)
    torch.testing.assert_close(module(x, y), function(x, y))


def test_writes_survive_dead_code():
    def function(x, cache):
        cache.copy_(x * 2)
        return x + 1

    region, _, index_of = region_of(function, torch.randn(3), torch.zeros(3))
    module, _ = rewrite_region(region, index_of, [], [])
    cache = torch.zeros(3)
    module(torch.ones(3), cache)
    assert torch.equal(cache, torch.full((3,), 2.0))


class InAutocast(torch.nn.Module):
    """A linear in bfloat16, whose parameters are float32."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(torch.tanh(x))


def test_autocast_survives_dead_code():
    model, x = InAutocast().eval(), torch.randn(4, 8)
    with torch.no_grad():
        (region,) = capture_regions(model, (x,), {}).regions
        module, _ = rewrite_region(region, {node: index for index, node in enumerate(region.graph.graph.nodes)}, [], [])
        (found,) = module(*region.example_args)
        assert found.dtype == torch.bfloat16 and torch.equal(found, model(x))


def step_with_a_cache(x, at, cache):
    turned = torch.tanh(x)
    cache.index_copy_(0, at, turned * 2)
    return turned + 1


def test_a_call_that_writes_takes_the_place_of_the_write_and_is_never_dead_code():
    def call(x, at, cache):
        cache[at] = torch.tanh(x) * 2
        return [torch.tanh(x), cache]

    inputs = torch.randn(2, 4), torch.tensor([4, 1]), torch.randn(6, 4)
    module, _ = one_site(step_with_a_cache, inputs, (0, 1, 2), (0, 2), (0, 1, 2), call)
    caches = [inputs[2].clone(), inputs[2].clone()]
    found, expected = module(*inputs[:2], caches[0]), step_with_a_cache(*inputs[:2], caches[1])
    torch.testing.assert_close(found, expected)
    assert torch.equal(*caches) and not torch.equal(caches[0], inputs[2])
    assert "index_copy_" not in module.code
    (node,) = [node for node in module.graph.nodes if "fusion_id" in node.meta]
    cache = [node for node in module.graph.nodes if node.op == "placeholder"][2]
    assert written_storages(node) == storages(cache)
    assert [user.args[1] for user in node.users] == [0]  # nobody reads the cache, and the call stays


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_a_write_reads_is_computed_where_the_write_stood(order):
    """The position is a chain of its own and must be read off the count before that moves on, whichever is rewritten first."""

    def function(x, count, cache):
        at = count + 1
        turned = torch.tanh(x)
        cache.index_copy_(0, at, turned)
        count.add_(1)
        return cache.sum() + turned.sum()

    def call(x, at, cache):
        cache[at] = torch.tanh(x)
        return [torch.tanh(x), cache]

    inputs = torch.randn(1, 4), torch.tensor([2]), torch.zeros(6, 4)
    region, ops, index_of = region_of(function, *inputs)
    added, turned, written = [op.index for op in ops if op.target.startswith(("aten.add.T", "aten.tanh", "aten.index_copy_"))][:3]
    sites = [
        SiteRewrite(fusion_id="F1", members=(turned, written), inputs=(0, added, 2), outputs=(turned, written), call=call),
        SiteRewrite(fusion_id="F2", members=(added,), inputs=(1,), outputs=(added,), call=lambda count: count + 1),
    ]
    module, _ = rewrite_region(region, index_of, [sites[n] for n in order], [])
    ours, theirs = [[x.clone() for x in inputs] for _ in range(2)]
    torch.testing.assert_close(module(*ours), function(*theirs))
    assert all(map(torch.equal, ours, theirs)) and "index_copy_" not in module.code


def test_what_is_written_in_place_is_given_and_given_back():
    cache, x = torch.zeros(3, 4), torch.ones(3, 4)
    call = fused_call("fa_k", lambda x, out, cache: (out.copy_(x), cache.copy_(x * 2)), [X, X], [X, X], in_place=[1])
    one, two = call(x, cache)
    assert two is cache and torch.equal(cache, x * 2) and torch.equal(one, x)
    alone = fused_call("fa_k", lambda x, cache: cache.copy_(x), [X, X], [X], in_place=[0], is_poisoned=True)
    assert alone(x, cache) is cache and torch.equal(cache, x)
    with pytest.raises(LayoutChanged, match="fa_k"):
        call(x, torch.zeros(4, 3).t())
    assert torch.equal(cache, x)


X = TensorMeta(shape=(3, 4), stride=(4, 1), dtype="float32")
T = TensorMeta(shape=(3, 4), stride=(1, 3), dtype="float32")


def test_outputs_have_the_strides_of_the_original_ops():
    call = fused_call("fa_k", lambda x, out: out.copy_(x), [X], [T])
    x = torch.randn(3, 4)
    assert call(x).stride() == (1, 3)
    assert torch.equal(call(x), x)
    assert call.__name__ == "fa_k"


def test_several_outputs_come_as_a_list():
    one, two = fused_call("fa_k", lambda x, a, b: (a.copy_(x), b.copy_(x * 2)), [X], [X, T])(torch.ones(3, 4))
    assert torch.equal(one * 2, two)


@pytest.mark.parametrize(
    "other",
    [torch.randn(4, 3).t(), torch.randn(3, 5), torch.randn(3, 4).double(), torch.randn(12)],
    ids=["stride", "shape", "dtype", "rank"],
)
def test_a_layout_that_was_not_verified_is_refused(other):
    ran = []
    with pytest.raises(LayoutChanged, match="fa_k"):
        fused_call("fa_k", lambda *_: ran.append(1), [X], [X])(other)
    assert not ran


def test_the_stride_of_a_dim_of_one_element_means_nothing():
    meta = TensorMeta(shape=(3, 1, 4), stride=(4, 4, 1), dtype="float32")
    call = fused_call("fa_k", lambda x, out: out.copy_(x), [meta], [meta])
    x = torch.randn(3, 4).as_strided((3, 1, 4), (4, 99, 1))
    assert torch.equal(call(x), x)
    with pytest.raises(LayoutChanged):
        call(torch.randn(4, 3).t().reshape(3, 4).as_strided((3, 1, 4), (1, 4, 3)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_poisoned_outputs_show_what_was_left_out(dtype):
    meta = TensorMeta(shape=(3, 4), stride=(4, 1), dtype=dtype)
    out = fused_call("fa_k", lambda x, out: None, [X], [meta], is_poisoned=True)(torch.zeros(3, 4))
    assert bool(out.isnan().all()) if out.is_floating_point() else bool((out != 0).all())


LAYOUTS = [
    ((2, 3), (3, 1)),
    ((2, 3), (1, 2)),
    ((2, 3), (4, 1)),
    ((2, 3), (0, 1)),
    ((2, 1, 3), (3, 7, 1)),
    ((0, 3), (3, 1)),
    ((), ()),
]


@pytest.mark.parametrize(("shape", "stride"), LAYOUTS)
@pytest.mark.parametrize("count", [1, 2])
def test_outputs_have_the_strides_that_were_verified(shape, stride, count):
    meta = TensorMeta(shape=shape, stride=stride, dtype="float32")
    x = torch.empty_strided(shape, stride)
    call = fused_call("fa_k", lambda *_: None, [meta], [meta] * count)
    results = call(x) if count > 1 else [call(x)]
    for out in results:
        assert (tuple(out.shape), out.stride(), out.dtype) == (shape, stride, torch.float32)
        assert out.numel() == 0 or out.data_ptr() != x.data_ptr()
