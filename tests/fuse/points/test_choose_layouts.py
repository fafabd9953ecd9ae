"""Changes of layouts in a piece: kept where they pay over its points, compared with the graph as it was captured."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.capture.graph.channels_last import lay_channels_last
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.apply_shapes import check_ranges
from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.passes import registry
from fusion_advisor.fuse.points.choose_layouts import choose_layouts
from fusion_advisor.fuse.points.decide import RangeWork
from fusion_advisor.fuse.points.in_full import decided
from fusion_advisor.fuse.points.piece_points import PiecePoints
from fusion_advisor.fuse.points.time_limit import TimeLimit
from fusion_advisor.fuse.rewrite.region_copy import copy_of
from fusion_advisor.fuse.shapes.layouts import changed_region, copies_of, open_result
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece
from fusion_advisor.records import SizeRange
from fusion_advisor.runtime.torch_internals import module_call, symbolic_sizes
from fusion_advisor.timing.host_timer import WallTimer
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.load import describe_live
from tests.fuse.points.test_piece_points import BANDWIDTH, Noting, options_for

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")

LINEAR = torch.ops.aten.linear.default


class LastToken(torch.nn.Module):
    """Two linears and a gate on every token, of which the last one is read; what is before them is returned whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, hidden_states):
        x = torch.nn.functional.silu(hidden_states) * 1.5
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))[:, -1:], x


class Rows(TorchDispatchMode):
    """Counts ops, and the rows that products compute."""

    def __init__(self):
        super().__init__()
        self.rows = self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.ops += 1
        self.rows += result.shape[0] if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else 0
        return result


class OfRows(WallTimer):
    """A clock on which each row of a product and each op takes a planted time."""

    def __init__(self, row_ns, op_ns):
        self.row_ns, self.op_ns = row_ns, op_ns

    def time_ns(self, call):
        with Rows() as seen:
            call()
        return self.row_ns * seen.rows + self.op_ns * seen.ops


def work_on(row_ns=1000, op_ns=10, kept=(), maker=LastToken, in_graph=False, x=None, shapes="batch=2..8,seq=2..64", **given):
    """The work on the ranges of a model's batch and length, by a planted clock."""
    torch.compiler.reset()
    model, args = maker().eval(), (torch.randn(5, 7, 32) if x is None else x,)
    loaded = describe_live(model, (), {"hidden_states": args[0]})
    options = options_for(shapes, **{"keep": "paying", **given})
    (call,) = check_ranges(loaded, options)
    call = replace(call, name="" if in_graph else "decode")
    return RangeWork(
        loaded=loaded, options=options, ranged=call, bandwidth=BANDWIDTH, progress=Noting(), limit=TimeLimit(),
        instruments=replace(MEASURED, timer=OfRows(row_ns, op_ns)), original=module_call.original_call(model),
        passed=PassedChecks(), kept=kept,
    )  # fmt: skip


def chosen(points=({"batch": 2, "seq": 2}, {"batch": 8, "seq": 64}), **given):
    """What is chosen for the one piece of a model, the piece's graph and the lines of progress."""
    work = work_on(**given)
    with torch.no_grad():
        piece = work.ranged.finder(work.capture).next()
        opened, captured = piece.opened, piece.opened.as_captured()
        found = choose_layouts(work, piece, points)
        assert (opened.region is not captured.region) == bool(found)
    return found, opened, work.progress


def rows_of_linears(opened):
    return [node.meta["val"].shape[1] for node in opened.region.graph.graph.nodes if node.target is LINEAR]


@pytest.mark.parametrize("in_graph", [False, True], ids=["launch by launch", "in graphs"])
def test_rows_that_nobody_reads_go_where_that_pays_over_all_points(in_graph):
    found, opened, progress = chosen(in_graph=in_graph)
    assert found == ["narrow-rows"] and rows_of_linears(opened) == [1, 1, 1]
    assert progress.count("narrowed rows, as captured") == 1 and progress.notes[-1].endswith("kept")
    model = LastToken().eval()
    for batch, seq in ((2, 2), (3, 17), (8, 64)):
        x = torch.randn(batch, seq, 32)
        with torch.no_grad():
            torch.testing.assert_close(opened.region.graph(*given_by(opened, x))[0], model(x)[0], rtol=1e-5, atol=1e-6)


def given_by(opened, x):
    """What a piece's graph is called with for an input: its sizes, and the parameters as they are."""
    names = {symbol: x.shape[("batch", "seq").index(name)] for symbol, name in opened.names.items()}
    inputs = [node for node in opened.region.graph.graph.nodes if node.op == "placeholder"]
    sizes = [names.get(symbolic_sizes.symbol_of(node.meta["val"])) for node in inputs]
    pairs = zip(sizes, opened.region.example_args, strict=True)
    return [size or (x if example.dim() == 3 else example) for size, example in pairs]


def test_they_stay_where_the_launches_of_the_change_cost_more():
    found, opened, progress = chosen(row_ns=1, op_ns=100_000)
    assert found == [] and progress.notes[-1].endswith("left out")
    assert all(not isinstance(rows, int) for rows in rows_of_linears(opened))


def test_a_small_loss_at_the_smallest_sizes_does_not_outweigh_a_gain_at_the_largest():
    found, _, progress = chosen(row_ns=100, op_ns=300)
    assert found == ["narrow-rows"]
    assert " 0." in progress.notes[-1] and "at batch=2, seq=2" in progress.notes[-1]


@pytest.mark.parametrize("given", [{"exact": True}, {"skip": ("narrow-*",)}], ids=["exact", "skip"])
def test_what_may_change_bits_or_is_not_wanted_is_not_tried(given):
    found, _, progress = chosen(**given)
    assert found == [] and progress.count("narrowed rows") == 0


def test_without_times_all_changes_are_made():
    found, opened, _ = chosen(keep="verified", row_ns=0, effort="usual")
    assert found[0] == "narrow-rows" and rows_of_linears(opened)[-1] == 1


def same(regions, room):
    """A change of layouts that changes nothing."""
    changed = copy_of(regions[0])
    changed.changed = 1
    return [[changed]]


@pytest.mark.parametrize(
    ("given", "is_merged"),
    [({}, False), ({"kept": ("merge-gemms",)}, True), ({"effort": "usual"}, True), ({"in_graph": True}, True)],
    ids=["quick", "as the example", "usual", "in graphs"],
)
def test_with_quick_the_example_says_which_linears_are_merged(monkeypatch, given, is_merged):
    monkeypatch.setitem(registry.LAYOUT_CHANGES, "merge-gemms", replace(registry.MERGE_GEMMS, change=same))
    assert chosen(keep="verified", **given)[0] == ["narrow-rows", "merge-gemms"][: 1 + is_merged]


def wrong(regions, room):
    """A change of layouts after which a gate is another function."""
    changed = copy_of(regions[0])
    for node in changed.region.graph.graph.nodes:
        if node.target is torch.ops.aten.silu.default:
            node.target = torch.ops.aten.sigmoid.default
    changed.region.graph.recompile()
    changed.changed = 1
    return [[changed]]


def test_a_change_is_compared_with_the_graph_as_it_was_captured(monkeypatch):
    monkeypatch.setitem(registry.LAYOUT_CHANGES, "narrow-rows", replace(registry.NARROW_ROWS, change=wrong))
    work = work_on(keep="verified")
    with torch.no_grad():
        piece = work.ranged.finder(work.capture).next()
        captured = piece.opened.as_captured()
        assert choose_layouts(work, piece, [{"batch": 8, "seq": 64}]) == ["narrow-rows"]
        one = decided(work, Workpiece(piece, captured=captured), {"batch": 8, "seq": 64}, ["narrow-rows"], {})
    assert one.row.reason.startswith("all rewrites together: relative error")


def curious(regions, room):
    """A change of layouts that asks whether a size is one."""
    changed = copy_of(regions[0])
    sizes = [size for node in changed.region.graph.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
    changed.changed = int(any(size == 5 for size in sizes))
    return [[changed]]


def test_a_change_that_looks_at_a_size_is_left_out_and_the_piece_is_captured_again(monkeypatch):
    monkeypatch.setitem(registry.LAYOUT_CHANGES, "narrow-rows", replace(registry.NARROW_ROWS, change=curious))
    work = work_on(keep="verified")
    with torch.no_grad():
        piece = work.ranged.finder(work.capture).next()
        points = PiecePoints(work, piece)
    assert "narrow-rows" in work.refused and points.piece.opened is not piece.opened
    assert work.progress.count("captured with open sizes") == 2


class Turned(torch.nn.Module):
    """Channels that are turned into rows, which two norms and a linear read by way of sums, as in an encoder of sounds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.linear = torch.nn.LayerNorm(7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 7)

    def forward(self, hidden_states):
        x = torch.nn.functional.gelu(hidden_states).permute(0, 2, 1) + 1.0
        x = x + self.linear(self.first(x))
        return self.second(x + torch.tanh(self.first(x)))


@pytest.mark.parametrize("kept", [(), ("contiguous-rows",)], ids=["left alone", "as the example"])
def test_rows_that_the_example_copies_once_are_copied_once_at_all_sizes(kept):
    with torch.no_grad():
        work, piece = on_a_batch(Turned, torch.randn(5, 7, 1024), kept=kept)
        assert choose_layouts(work, piece, [{"batch": 2}, {"batch": 8}]) == [*kept]
        region = piece.opened.region
        values = [node.meta["val"] for node in region.graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
        assert values and all((value.stride(-1) == 1) == bool(kept) for value in values)
        assert not isinstance(values[-1].shape[0], int)
        for batch in (2, 3, 9):
            x = torch.randn(batch, 7, 1024)
            ours, theirs = region.graph(*with_input(region, x))[0], Turned().eval()(x)
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def convolutions():
    return torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3) for _ in range(4)), torch.nn.Flatten()), (8, 12, 12), 4


def blocks():
    layers = [part for _ in range(3) for part in (torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())]
    return (
        torch.nn.Sequential(*layers, torch.nn.MaxPool2d(3, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()),
        (8, 12, 12),
        3,
    )


def series():
    layers = torch.nn.Conv1d(8, 16, 3, padding=1), torch.nn.GELU(), torch.nn.Conv1d(16, 16, 3, 2, 1), torch.nn.GELU()
    return torch.nn.Sequential(*layers), (8, 24), 2


def resized():
    conv, larger = functools.partial(torch.nn.Conv2d, 8, 8, 3), functools.partial(torch.nn.Upsample, scale_factor=2)
    layers = conv(), larger(), conv(), larger(mode="bilinear"), torch.nn.ZeroPad2d(1), conv(), torch.nn.Unfold(3, stride=2)
    return torch.nn.Sequential(*layers), (8, 12, 12), 3


CHANNELS_LAST = copies_of(
    "channels-last", functools.partial(lay_channels_last, is_quicker=lambda _: True, fake_result=open_result)
)


def opened_net(maker, names):
    """A net, its call captured with some open dims, and how many convolutions it has."""
    torch.manual_seed(0)
    net, shape, count = maker()
    dims = (*names, *[""] * (1 + len(shape) - len(names)))
    sizes = [5, shape[0], 13, 17][: len(names)]
    opened = capture_open(net.eval(), (), {"input": torch.randn(*sizes, *shape[len(sizes) - 1 :])}, {"input": dims})
    return net, opened, count


@pytest.mark.parametrize("names", [("batch",), ("batch", "", "height"), ("batch", "", "height", "width")])
@pytest.mark.parametrize("maker", [convolutions, blocks, series, resized])
def test_images_and_series_of_open_sizes_are_laid_channels_last(maker, names):
    with torch.no_grad():
        net, opened, count = opened_net(maker, names[: 3 if maker is series else 4])
        _, shape, _ = maker()
        region = changed_region(opened, CHANNELS_LAST, box(batch=(1, 9), height=(11, 30), width=(11, 30)))
        assert not isinstance(region.graph.graph.find_nodes(op="output")[0].args[0][0].meta["val"].shape[0], int)
        laid = [node.meta["val"] for node in region.graph.graph.nodes if node.target is torch.ops.aten.conv2d.default]
        assert len(laid) == count and all(value.stride(1) == 1 for value in laid)
        for batch, *sizes in ((1, 12, 11), (2, 11, 30), (3, 13, 12), (9, 30, 11)):
            if not opened.holds({"batch": batch, "height": sizes[0], "width": sizes[1]}):
                continue  # an image alone is another piece
            open_sizes = [size for size, name in zip((batch, 0, *sizes), names, strict=False) if name]
            x = torch.randn(batch, shape[0], *[*sizes[: max(len(names) - 2, 0)], *shape[1:]][: len(shape) - 1])
            ours, theirs = region.graph(*with_input(region, x, open_sizes))[0], net(x)
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [{"batch": (2, 9), "height": (1, 30)}, {"batch": (2, 9)}, {}])
def test_a_piece_with_series_of_one_step_has_no_copies_that_ask_for_it(sizes):
    with torch.no_grad():
        _, opened, _ = opened_net(series, ("batch", "", "height"))
        with pytest.raises(LooksAtSizes, match="channels-last"):
            changed_region(opened, CHANNELS_LAST, box(**sizes))


class Ended(torch.nn.Module):
    """Convolutions, and what follows them."""

    def __init__(self, end):
        super().__init__()
        torch.manual_seed(0)
        self.convolutions, self.end = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3) for _ in range(3))), end

    def forward(self, hidden_states):
        return self.end(self.convolutions(hidden_states))


ENDS = {
    "kept": (lambda images: images * 2.0, True),
    "rolled": (lambda images: images.roll(1, 3), False),  # keeps channels last on a CPU, and torch says that it does not
    "rolled and viewed": (lambda images: images.roll(1, 3).view(len(images), -1) * 2.0, False),
    "rolled ahead": (lambda images: images.view(len(images), -1, 8).roll(1, 2) * 2.0, True),
}


@pytest.mark.parametrize("name", ENDS)
def test_copies_after_which_an_op_lies_otherwise_than_torch_says_are_left_out(name):
    end, is_laid = ENDS[name]
    with torch.no_grad():
        work, piece = on_a_batch(lambda: Ended(end), torch.randn(5, 8, 12, 12), effort="usual")
        found = choose_layouts(work, piece, [{"batch": 2}, {"batch": 9}], [CHANNELS_LAST])
        assert found == ["channels-last"] * is_laid and sum(
            "left out, for roll lies" in note for note in work.progress.notes
        ) == (not is_laid)
        for batch in (2, 3, 9):
            x = torch.randn(batch, 8, 12, 12)
            ours, theirs = piece.opened.region.graph(*with_input(piece.opened.region, x))[0], Ended(end)(x)
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def on_a_batch(maker, x, **given):
    """The work on the ranges of a model's batch, and their first piece."""
    work = work_on(keep="verified", maker=maker, x=x, shapes={"hidden_states": ("batch=2..9", *[None] * (x.dim() - 1))}, **given)
    return work, work.ranged.finder(work.capture).next()


def box(**ranges):
    return tuple(SizeRange(name=name, least=least, most=most) for name, (least, most) in ranges.items())


def with_input(region, x, sizes=()):
    """What a region with one input is called with: its open sizes in their order, or the batch."""
    numbers = iter(sizes or [len(x)])
    pairs = zip(region.roles, region.example_args, strict=True)
    return [
        x if role == "input" and isinstance(one, torch.Tensor) else one if isinstance(one, torch.Tensor) else next(numbers)
        for role, one in pairs
    ]
