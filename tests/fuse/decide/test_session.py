"""The workbench: what it observes, what it installs, and which sites it refuses."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.decide.session import Bench, replaced_sites
from fusion_advisor.fuse.passes.registry import PASSES
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
