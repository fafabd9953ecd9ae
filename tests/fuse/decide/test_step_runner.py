"""Sets of rewrites become calls of the step."""

from __future__ import annotations

from types import SimpleNamespace

from fusion_advisor.fuse.decide.step_runner import Candidate, StepRunner, come_again


class CountedBench:
    """Builds a variant that is the passes in it, and counts."""

    def __init__(self):
        self.on_cuda = False
        self.timer = SimpleNamespace(method="wall")
        self.live = SimpleNamespace(written=SimpleNamespace(rewind=lambda: None))
        self.built = []

    def build(self, _fusions, passes):
        self.built.append(tuple(passes))
        return self.built[-1]

    def with_passes(self, passes):
        return self.build((), passes)

    def run(self, variant):
        return variant


def test_a_set_that_comes_again_is_built_once():
    bench, (one, two) = CountedBench(), (Candidate(id=name, graph_pass=name) for name in ("one", "two"))
    calls = StepRunner(bench, ["given"]).calls([(), (), (one,), (one, two), (two, one), [one]])
    assert [call() for call in calls] == [
        ("given",), ("given",), ("given", "one"), ("given", "one", "two"), ("given", "two", "one"), ("given", "one")
    ]  # fmt: skip
    assert len(bench.built) == 4


def test_the_step_that_is_timed_against_itself_is_warmed_up_once():
    bench, one = CountedBench(), Candidate(id="one", graph_pass="one")
    assert come_again(StepRunner(bench).calls([(), (), (one,), ()])) == [False, True, False, True]
