"""Contenders on a CPU: one that fails has a sentence, all others are timed in turn; ours with a compiler for the rest."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.fuse import after_side
from fusion_advisor.fuse.baselines.contenders import LIMITS_S, Contender, ours_compiled, peers
from fusion_advisor.fuse.baselines.inductor_hybrid import compile_rest
from fusion_advisor.fuse.baselines.liger import NotAvailable
from fusion_advisor.fuse.baselines.measure_contenders import measure_all, named
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.rewrite.device_memory import needed_bytes
from fusion_advisor.records import COMPILED, EAGER, OURS, OURS_COMPILED, Clocks, ClockSample, StepProfile
from fusion_advisor.runtime.torch_internals import dynamo, inductor
from fusion_advisor.timing.wall_timer import as_timing, nothing
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.weight_packing import leave_room
from tests.fuse.test_pipeline import Model, keep_all, keep_none, loaded, pytestmark, quick, verdicts  # noqa: F401
from tests.tiny import bench_of, patterns, profile_live

STEP = StepProfile(label="known", device_ns=7, launches=1, categories=(), kernels=())


def measured(*contenders, **more):
    return measure_all(contenders, needed_bytes=10, on_cuda=False, runs=8, budget_s=0.01, **more)


def test_contenders_take_turns_and_a_failing_one_has_a_sentence():
    ran = []

    def broken():
        raise RuntimeError("the compiler fell over\nin many lines")

    def absent():
        raise NotAvailable("there is none here")

    rows = measured(
        Contender(name="a", make=lambda: lambda: ran.append("a"), step=STEP),
        Contender(name="b", make=broken, step=STEP),
        Contender(name="c", make=absent, step=STEP),
        Contender(name="d", make=lambda: lambda: ran.append("d"), step=STEP, note="its note"),
        rewind=lambda: ran.append("-"),
    )
    assert [row.name for row in rows] == ["a", "b", "c", "d"]
    assert rows[1].step is None
    assert re.fullmatch(r"RuntimeError in broken \(test_contenders\.py:\d+\): the compiler fell over", rows[1].note)
    assert rows[2].note == "there is none here"
    assert len(rows[0].step.wall.times_ns) == len(rows[3].step.wall.times_ns) == 8
    assert rows[0].first_call_s is not None and rows[3].note == "its note"
    assert all(before == "-" for before, call in itertools.pairwise(ran) if call != "-")
    timed = [call for call in ran if call != "-"][-16:]
    assert all({*pair} == {"a", "d"} for pair in zip(timed[::2], timed[1::2], strict=True))


def failing_deep_down(with_message):
    def innermost():
        raise AssertionError("the shape is unknown" if with_message else "")

    def compiler():
        try:
            innermost()
        except AssertionError as error:
            raise RuntimeError(f"backend='inductor' raised:\nAssertionError: {error}\n\nSet TORCH_LOGS for more") from error

    return innermost if not with_message else compiler


@pytest.mark.parametrize(
    ("with_message", "words"),
    [
        (False, r"AssertionError in innermost \(test_contenders\.py:\d+\), without a message"),
        (
            True,
            r"RuntimeError in innermost \(test_contenders\.py:\d+\): backend='inductor' raised: AssertionError: the.*unknown",
        ),
    ],
)
def test_an_error_names_the_innermost_frame_and_the_log_has_all_of_them(with_message, words, caplog):
    with caplog.at_level("INFO", logger="fusion_advisor"):
        _, row = measured(
            Contender(name="fine", make=lambda: nothing, step=STEP),
            Contender(name="deep", make=failing_deep_down(with_message), step=STEP),
        )
    assert re.fullmatch(words, row.note)
    assert "deep" in caplog.text and "Traceback" in caplog.text and "in innermost" in caplog.text


def test_what_is_not_available_leaves_no_traceback(caplog):
    def absent():
        raise NotAvailable("there is none here")

    with caplog.at_level("INFO", logger="fusion_advisor"):
        measured(Contender(name="fine", make=lambda: nothing, step=STEP), Contender(name="absent", make=absent, step=STEP))
    assert "Traceback" not in caplog.text


def test_a_compiler_that_never_ends_is_given_up():
    def endless():
        while True:
            time.sleep(0.001)

    contenders = [
        Contender(name="eager", make=lambda: nothing, step=STEP, is_required=True),
        Contender(name=OURS_COMPILED, make=endless, step=STEP, limit_s=0.05),
    ]
    _, given_up = measure_all(contenders, needed_bytes=0, on_cuda=False, runs=3, budget_s=0.01)
    assert given_up.step is None and "given up" in given_up.note


def test_the_run_ends_where_a_required_one_fails():
    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        measured(Contender(name=OURS, make=broken, is_required=True))


def names(contenders):
    return [one.name for one in contenders]


def test_what_a_cpu_has_none_of_is_told():
    load = describe_live(torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    found = peers(load, lambda: None, on_cuda=False, max_autotune=True, rewind=nothing)
    assert names(found) == [
        "eager + CUDA graph",
        f"{COMPILED}default",
        f"{COMPILED}reduce-overhead",
        f"{COMPILED}max-autotune",
        "Liger",
    ]
    assert [one.limit_s for one in found] == [None, *(LIMITS_S[name.removeprefix(COMPILED)] for name in names(found)[1:4]), None]
    given = peers(load, lambda: None, on_cuda=False, max_autotune=False, rewind=nothing, limit_s=7.0)
    assert names(given) == [*names(found)[:3], "Liger"]
    assert [one.limit_s for one in given] == [None, 7.0, 7.0, None]
    for name, words in (("eager + CUDA graph", "no CUDA graphs"), (f"{COMPILED}reduce-overhead", "none"), ("Liger", "CUDA only")):
        with pytest.raises(NotAvailable, match=words):
            next(one for one in found if one.name == name).make()


def test_weights_that_share_storage_are_needed_once():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(2, 8)
    assert needed_bytes(model, (x,), {"again": x[:1]}) == 8 * 8 * 4 + 2 * 8 * 4


def fused_bench():
    torch.manual_seed(0)
    model = Model().eval()
    x = torch.randn(2, 48, 64)
    capture, live = profile_live(model, (x,))
    plan = make_plan(capture, patterns(), min_share=0.0)
    bench, built = bench_of(live, plan)
    return model, x, bench, bench.build(built, ["drop-masks", "fold-constants"])


def traced_on_fake_tensors(graph_module, inputs):
    """Inductor's own tracing without its code generation, which takes half a minute on a CPU."""
    from torch._dynamo.backends.debugging import aot_eager

    with torch.no_grad():
        return aot_eager(graph_module, inputs)


def test_ours_with_a_compiler_for_the_rest_computes_the_same():
    model, x, bench, variant = fused_bench()
    expected = model(x)
    load = describe_live(model, (x,))
    contender = ours_compiled(load, bench, variant, is_graphed=False, compiler=traced_on_fake_tensors)
    assert contender.name == OURS_COMPILED
    with torch.no_grad():
        call = contender.make()
        torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call(), expected, rtol=1e-5, atol=1e-5)
    assert "_compiled_call_impl" not in model.__dict__


def test_kernels_stay_calls_of_their_own_in_what_is_compiled():
    _, _, bench, variant = fused_bench()
    seen = []

    def compiler(graph_module, inputs):
        seen.append([str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"])
        return graph_module.forward

    compile_rest(bench.live.regions, variant.modules, compiler)
    calls = sum("fusion_id" in node.meta for module in variant.modules for node in module.graph.nodes)
    assert sum(name.startswith("fusion_advisor_rest") for names in seen for name in names) == calls >= 2
    assert all("fusion_id" not in name for names in seen for name in names)


def test_what_is_kept_is_an_input_also_behind_a_first_op_that_is_replaced():
    graph, x, weight = torch.fx.Graph(), torch.randn(3), torch.randn(3)
    given = graph.placeholder("x")
    first = graph.call_function(torch.neg, (given,))
    first.meta = {"fusion_id": "F1", "results": [torch.empty_like(x)]}
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (first, graph.get_attr("weight"))),))
    module = torch.fx.GraphModule({"weight": weight}, graph)
    seen = []

    def compiler(graph_module, inputs):
        seen.append([node.op for node in graph_module.graph.nodes])
        graph_module.graph.lint()
        return graph_module.forward

    region = SimpleNamespace(index=0, example_args=(x,))
    (compiled,) = compile_rest([region], [module], compiler)
    assert seen[0][:2] == ["placeholder", "placeholder"] and "get_attr" not in seen[0]
    torch.testing.assert_close(compiled(x)[0], weight - x)


def test_what_the_run_needs_is_timed_before_a_compiler_starts():
    made, early = [], []

    def contender(name, **more):
        return Contender(name=name, make=lambda: made.append(name) or nothing, step=STEP, **more)

    def on_required(rows):
        early.append((list(made), [row.name for row in rows], [row.step.wall.median_ns > 0 for row in rows]))

    rows = measured(
        contender("one", is_required=True), contender("peer"), contender("two", is_required=True), on_required=on_required
    )
    assert early == [(["one", "two"], ["one", "two"], [True, True])]
    assert [row.name for row in rows] == ["one", "peer", "two"]
    assert made == ["one", "two", "peer"]
    early.clear()
    measured(contender("one", is_required=True), on_required=on_required)
    assert early == []  # nothing would be gained


def test_what_a_compiler_made_ready_is_told_before_the_next_one_starts():
    made, early = [], []

    def contender(name, **more):
        return Contender(name=name, make=lambda: made.append(name) or nothing, step=STEP, **more)

    peers = [
        contender("default", is_compiled=True),
        contender("eager in a graph"),
        contender("reduce-overhead", is_compiled=True),
    ]
    measured(
        contender("ours", is_required=True),
        *peers,
        on_required=lambda rows: early.append((len(made), [row.name for row in rows])),
    )
    assert early == [
        (1, ["ours"]),
        (2, ["ours", "default"]),
        (4, ["ours", "default", "eager in a graph", "reduce-overhead"]),
    ]


@pytest.mark.parametrize("is_held", [True, False])
def test_ways_that_the_power_limit_holds_down_are_timed_after_rests_too_once_all_are_ready(is_held):
    clocks = Clocks(samples=(ClockSample(reasons=("sw_power_cap",) if is_held else ()),))
    rested = []

    def after_rests(calls, **more):
        rested.append((len(calls), more["budget_s"]))
        return [as_timing([number] * 6, "wall", rest=2.0) for number, _ in enumerate(calls)]

    def walls(calls, **_):
        return [as_timing([9] * 6, "wall", clocks) for _ in calls]

    early = []
    rows = measured(
        Contender(name="peer", make=lambda: nothing, step=STEP),
        Contender(name="ours", make=lambda: nothing, step=STEP, is_required=True),
        on_required=early.extend,
        instruments=Instruments(walls=walls, rested_walls=after_rests),
    )
    assert [row.step.rested for row in early] == [None]
    assert rested == ([(2, 0.005)] if is_held else [])
    assert [row.step.rested and row.step.rested.median_ns for row in rows] == ([1, 0] if is_held else [None, None])
    assert all(row.step.wall.median_ns == 9 for row in rows)


@pytest.mark.parametrize(("known", "asked"), [(True, [True, True]), (False, [False, None]), (None, [None, None])])
def test_the_power_limit_is_looked_for_again_only_where_others_come_that_may_meet_it(known, asked):
    seen = []

    def walls(calls, *, is_held, **_):
        seen.append(is_held)
        return [as_timing([9] * 6, "wall") for _ in calls]

    ours = Contender(name="ours", make=lambda: nothing, step=STEP, is_required=True)
    peer = Contender(name="peer", make=lambda: nothing, step=STEP)
    measured(ours, peer, instruments=Instruments(walls=walls), is_held=known)
    assert seen == asked
    measured(ours, instruments=Instruments(walls=walls), is_held=known)
    assert seen[2:] == [known]


class Odd(torch.nn.Module):
    """A head of an odd width, for a padded GEMM: its weight is seen through a view of more rows."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(16, 13, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return torch.tanh(self.head(x))


def test_what_a_graph_keeps_is_an_input_so_that_no_compiler_reads_it_number_by_number():
    model, x = Odd(), torch.randn(4, 16, dtype=torch.bfloat16)
    leave_room(model)
    _, live = profile_live(model, (x,))
    variant = Bench(live, on_cuda=False).build((), ["pad-gemm"])
    assert variant.changed["pad-gemm"]
    seen = []

    def compiler(graph_module, inputs):
        seen.append((graph_module, inputs))
        return traced_on_fake_tensors(graph_module, inputs)

    (module,) = compile_rest(live.regions, variant.modules, compiler)
    ((graph_module, inputs),) = seen
    assert not list(graph_module.buffers())
    assert all(node.op != "get_attr" for node in graph_module.graph.nodes)
    assert tuple(inputs[-1].shape) == (16, 16)
    assert inputs[-1].data_ptr() == model.head.weight.data_ptr()
    (result,) = module.forward(*live.regions[0].example_args)
    torch.testing.assert_close(result, model(x), rtol=1e-2, atol=1e-2)


def test_what_is_folded_becomes_an_input():
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.arange(8.0))

        def forward(self, x):
            return x * torch.cos(self.steps * 0.5)

    model, x = Positions(), torch.randn(3, 8)
    _, live = profile_live(model, (x,))
    bench = Bench(live, on_cuda=False)
    variant = bench.build((), ["fold-frozen"])
    assert variant.changed["fold-frozen"]
    (module,) = compile_rest(live.regions, variant.modules, traced_on_fake_tensors)
    result = module.forward(*live.regions[0].example_args)
    torch.testing.assert_close(result[0] if isinstance(result, tuple | list) else result, model(x))


@pytest.mark.parametrize(
    ("status", "asked"),
    [(keep_all, {"baseline": "both", "compile": True}), (keep_all, {"baseline": "both"}), (keep_none, {"compile": True})],
    ids=["and ours under it", "peers alone", "nothing kept"],
)
def test_apply_measures_every_way_in_one_table(loaded, quick, monkeypatch, status, asked):  # noqa: F811
    monkeypatch.setattr(inductor, "empty_compile_caches", contextlib.nullcontext)
    monkeypatch.setattr(
        after_side, "ours_compiled", lambda *_, **__: Contender(name=OURS_COMPILED, make=lambda: nothing, step=STEP)
    )
    compiled = dynamo.compiled_call
    monkeypatch.setattr(
        dynamo,
        "compiled_call",
        lambda model, backend, mode=None: compiled(model, "eager" if backend == "inductor" else backend),
    )
    so_far = []
    asked = {"compile": None, **asked}
    report = apply_workload(loaded, replace(quick, **asked), on_report=so_far.append, instruments=verdicts(status)).report
    assert report.baseline == asked.get("baseline", "eager")
    names = [row.name for row in report.baselines]
    ours = [OURS, *([OURS_COMPILED] if asked["compile"] else [])] if status is keep_all else []
    assert names == [EAGER, "eager + CUDA graph", f"{COMPILED}default", f"{COMPILED}reduce-overhead", "Liger", *ours]
    for row in report.baselines:
        assert (row.step is None) == (row.name in ("eager + CUDA graph", f"{COMPILED}reduce-overhead", "Liger"))
        assert row.note if row.step is None else row.step.wall is not None and row.first_call_s is not None
    assert report.before.wall == named(report.baselines, EAGER).step.wall
    if status is keep_all:
        assert report.after.wall == named(report.baselines, OURS).step.wall
        phases = [name for name, _ in report.warm_up.phases_s]
        assert phases[:5] == ["read the plan", "capture", "kernels", "install", "first step"]
        assert set(phases[5:]) <= {"between them"}
        assert named(report.baselines, OURS).first_call_s == pytest.approx(report.warm_up.seconds, abs=1e-3)
        early, later = so_far[-2:]  # what a run that is ended while compilers work has found
        assert f"{COMPILED}default" in [row.name for row in later.baselines] and later.answer_s == early.answer_s
        assert (early.status, [row.name for row in early.baselines]) == ("interrupted", [EAGER, OURS])
        assert early.after.wall.median_ns > 0 and early.model_check == report.model_check
    else:
        assert report.warm_up is None and report.after.label == "unchanged"


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "names"), [(False, [EAGER, OURS]), (None, [EAGER, f"{COMPILED}default", OURS])])
def test_without_being_asked_a_cpu_compares_with_the_default_mode(loaded, quick, asked, names):  # noqa: F811
    report = apply_workload(loaded, replace(quick, compile=asked), instruments=verdicts(keep_all)).report
    assert [row.name for row in report.baselines] == names


@pytest.mark.gpu
def test_on_a_gpu_every_way_runs():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512
    )
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    load = describe_live(model, (), {"input_ids": torch.randint(512, (1, 64), device="cuda"), "use_cache": False})
    from fusion_advisor.fuse.plan.options import ApplyOptions

    run = apply_workload(load, ApplyOptions(runs=20, min_share=0.0, compile=True))
    run.revert()
    for row in run.report.baselines:
        assert row.note or row.step is not None, row.name
        if row.step is not None:
            assert row.step.device_ns > 0 and row.step.peak_memory_bytes > 0 and row.step.wall.median_ns > 0, row.name
    ran = {row.name for row in run.report.baselines if row.step is not None}
    assert {EAGER, "eager + CUDA graph", f"{COMPILED}default", f"{COMPILED}reduce-overhead"} <= ran
