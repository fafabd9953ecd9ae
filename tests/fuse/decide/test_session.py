"""The workbench: what it observes, what it installs, and which sites it refuses."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.decide.choose import choose
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.keep_rule import keep_all
from fusion_advisor.fuse.decide.session import Bench, replaced_sites
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
