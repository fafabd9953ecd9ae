"""The workbench: what it observes, what it installs, and which sites it refuses."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_advisor.fuse.decide.choose import choose
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.keep_rule import keep_all
from fusion_advisor.fuse.decide.predict import launch_cost_ns, price_passes
from fusion_advisor.fuse.decide.session import Bench, replaced_sites, step_of
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.records import Status
from fusion_advisor.timing.interleaving import Difference
from tests.tiny import bench_of, evaluated, planned, profiled


def test_it_keeps_the_inputs_of_each_first_site():
    _, _, live = profiled("gpt2")
    plan = planned("gpt2")
    bench, _ = bench_of(live, plan)
    wanted = {index for fusion in plan.fusions for index in fusion.sites[0].inputs}
    assert set(bench.values) == wanted
    assert bench.surprises == {}
    for index, value in bench.values.items():
        assert tuple(value.shape) == bench.ops[index].outputs[0].shape


def test_a_site_whose_input_surprised_is_refused_and_the_others_go_on():
    _, _, live = profiled("gpt2")
    plan = planned("gpt2")
    bench, _ = bench_of(live, plan)
    fusion = next(fusion for fusion in plan.fusions if fusion.match.kernel == "gelu_tanh")
    bench.surprises[fusion.sites[1].inputs[0]] = "aten.addmm.default returned strides (1, 2), traced (2, 1)"
    built = evaluated(bench, fusion)
    assert [site.members for site in built.sites] == [fusion.chain.sites[0].op_indices]
    assert built.refusals == ("transformer.h.1.mlp.act: aten.addmm.default returned strides (1, 2), traced (2, 1)",)
    assert replaced_sites(bench.build([built], ())) == {fusion.id: 1}


def test_passes_run_in_their_own_order_whatever_is_asked():
    _, _, live = profiled("gpt2")
    bench = Bench(live, on_cuda=False)
    variant = bench.build((), tuple(reversed(PASSES)))
    assert list(variant.changed) == list(PASSES)
    assert variant.changed["drop-masks"] == 2  # a mask that is folded first can no longer be read
    assert bench.build((), ("fold-constants",)).changed["fold-constants"] > 0


def test_running_a_variant_runs_the_model():
    _, _, live = profiled("toy")
    bench = Bench(live, on_cuda=False)
    found = bench.run(bench.build((), ()))
    torch.testing.assert_close(found[0] if isinstance(found, tuple | list) else found, live.output)


class CountedBench(Bench):
    """Counts how often a set of passes is applied."""

    built = 0

    def build(self, *args, **kwargs):
        self.built += 1
        return super().build(*args, **kwargs)


def test_a_set_of_passes_is_applied_once_until_it_is_forgotten():
    _, _, live = profiled("gpt2")
    bench = CountedBench(live, on_cuda=False)
    one, again = bench.with_passes(("fold-constants", "drop-masks")), bench.with_passes(["drop-masks", "fold-constants"])
    assert one is again and bench.built == 1
    assert one.changed == bench.build((), ("drop-masks", "fold-constants")).changed
    assert bench.with_passes(()) is not one and bench.with_passes(()).changed == {}
    bench.forget_passes()
    assert bench.with_passes(("drop-masks", "fold-constants")) is not one


def test_what_may_hold_copies_of_weights_is_not_kept_for_another_time():
    _, _, live = profiled("gpt2")
    bench = CountedBench(live, on_cuda=False)
    frozen = next(name for name, rewrite in PASSES.items() if rewrite.needs_freeze)
    assert bench.with_passes((frozen,)) is not bench.with_passes((frozen,)) and bench.built == 2


def test_a_step_that_was_asked_for_a_moment_ago_is_not_built_again():
    _, _, live = profiled("gpt2")
    bench, plan = CountedBench(live, on_cuda=False), planned("gpt2")
    bench.observe(plan.fusions)
    kernels = [evaluated(bench, fusion) for fusion in plan.fusions[:2]]
    before, after = step_of(bench, kernels[:1], ["fold-constants"]), step_of(bench, kernels, ["fold-constants"])
    assert step_of(bench, list(kernels), ["fold-constants"]).variant is after.variant
    assert step_of(bench, kernels[:1], ["fold-constants"]).variant is before.variant and bench.built == 2
    others = [evaluated(bench, fusion) for fusion in plan.fusions[:2]]  # of the same plan, and other kernels all the same
    assert step_of(bench, others, ["fold-constants"]).variant is not after.variant
    assert step_of(bench, kernels[:1], ["fold-constants"]).variant is before.variant  # asked for after the other one
    assert step_of(bench, kernels[:1], []).variant is not before.variant and bench.built == 4
    bench.forget_passes()
    assert step_of(bench, kernels[:1], []).variant is not before.variant and bench.built == 5


def test_a_step_that_may_hold_copies_of_weights_is_built_each_time():
    _, _, live = profiled("gpt2")
    bench = CountedBench(live, on_cuda=False)
    frozen = next(name for name, rewrite in PASSES.items() if rewrite.needs_freeze)
    assert step_of(bench, (), [frozen]).variant is not step_of(bench, (), [frozen]).variant and bench.built == 2


def test_a_step_that_is_only_looked_at_has_no_code_and_runs_as_one_that_has():
    _, _, live = profiled("toy")
    bench = Bench(live, on_cuda=False)
    (lazy,), (eager,) = step_of(bench, (), ["fold-constants"]).variant.modules, bench.build((), ["fold-constants"]).modules
    assert "_code" not in vars(lazy) and "_code" in vars(eager)
    torch.testing.assert_close(step_of(bench, (), ["fold-constants"]).run()[0], live.output)
    assert lazy.code == eager.code


def test_passes_are_priced_with_the_sets_that_were_built_to_judge_them():
    capture, live = profiled("gpt2")[1:]
    bench = CountedBench(live, on_cuda=False)
    planted = Instruments(
        decide=lambda chosen, candidates, **_: replace(
            keep_all(chosen, candidates),
            verdicts={
                one.id: Verdict(id=one.id, status=Status.KEPT, reason="", delta_ns=-100, interval_ns=(-110, -90))
                for one in candidates
            },
        ),
        change_alone=lambda *_: Difference(median_ns=-100, low_ns=-110, high_ns=-90),
        saving_alone_ns=lambda *_: None,
    )
    decision, rewrites, _, _ = choose(
        bench, [], [], ApplyOptions(), Progress(), budget_s=0.01, instruments=planted, capture=capture
    )
    priced = [row for row in rewrites if row.status is Status.KEPT and row.predicted_saving_ns is not None]
    assert priced and bench.built <= len(rewrites) + 3
    cost_ns = launch_cost_ns(capture.launches, decision.untouched_ns, rewrites, most_ns=capture.bandwidth.launch_ns)
    assert price_passes(rewrites, Bench(live, on_cuda=False), capture, cost_ns) == rewrites


def test_no_set_of_passes_is_applied_twice_while_they_are_judged():
    _, _, live = profiled("gpt2")
    bench = CountedBench(live, on_cuda=False)
    planted = Instruments(
        decide=lambda chosen, candidates, **more: keep_all(chosen, list(more["estimates"]() and candidates)),
        change_alone=lambda *_: Difference(median_ns=-100, low_ns=-110, high_ns=-90),
    )
    _, rewrites, _, _ = choose(bench, [], [], ApplyOptions(), Progress(), budget_s=0.01, instruments=planted)
    tried = [row for row in rewrites if row.status is Status.KEPT]
    # all at once to find the sites, all at once for the layouts, and one set more for each pass, with none of them at first
    assert len(tried) > 1 and bench.built <= len(tried) + 3
