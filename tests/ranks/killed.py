"""Run by ``test_torchrun.py`` in each of two processes: rank 1 is killed in a phase, rank 0 says how it ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from fusion_advisor.errors import RankFailed
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.run import apply_on_ranks, placed
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.request import WorkloadRequest
from tests.ranks import models


class Killing(Progress):
    """Kills this process when a phase begins, or in its middle; notes the time on the other rank."""

    def __init__(self, phase, rank):
        self.at, self.rank = phase, rank
        self.began_s = time.monotonic()

    def phase(self, name):
        if name == self.at:
            self.began_s = time.monotonic()
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def main(phase):
    """Print how rank 0 ended."""
    ranks = join()
    progress = Killing(phase, ranks.rank)
    model, kwargs = models.tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forward = dict(vars(model))
    try:
        with ranks.ending_together():
            progress.phase("load")
            loaded = replace(describe_live(model, (), kwargs), request=WorkloadRequest(model_id="tiny", device="cpu"))
            apply_on_ranks(ranks, placed(loaded, ranks), ApplyOptions(effort="quick", steps=1), progress, lambda _: None)
    except RankFailed as error:
        after = model.state_dict()
        is_same = forward.keys() == vars(model).keys() and all(bool((before[name] == after[name]).all()) for name in before)
        seconds = time.monotonic() - progress.began_s
        sys.stdout.write(f"ENDED {ranks.rank} {seconds:.1f} {'as-before' if is_same else 'changed'} {error}\n")
        sys.stdout.flush()
        os._exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
