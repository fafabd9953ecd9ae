"""A recorder of passes for machines without CUDA, and steps whose passes it records."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.cuda_graph.recording import flat


class FakePasses:
    """Records a pass: nothing is computed then, and a replay computes on the recorded memory alone.

    Attributes:
        why_not: what ``refusal`` answers.
        fails: raised by the next ``record``.
        recorded: passes.
        replayed: passes.
    """

    def __init__(self):
        self.why_not, self.fails = None, None
        self.recorded = self.replayed = 0

    def refusal(self):
        return self.why_not

    def record(self, call):
        if self.fails is not None:
            raise self.fails
        self.recorded += 1
        state = torch.get_rng_state()
        results = list(call())
        torch.set_rng_state(state)  # nothing has run
        given = {value.untyped_storage().data_ptr() for value in _arguments(call)}
        own = [value for value in results if isinstance(value, torch.Tensor)]
        own = [value for value in own if value.untyped_storage().data_ptr() not in given]
        for value in own:
            if value.is_floating_point():
                flat(value).fill_(float("nan"))

        def replay():
            self.replayed += 1
            fresh = [value for value in call() if isinstance(value, torch.Tensor)]
            fresh = [value for value in fresh if value.untyped_storage().data_ptr() not in given]
            for old, new in zip(own, fresh, strict=True):
                flat(old).copy_(flat(new))

        return replay, results

    def pool_bytes(self):
        return 1 << 20


def _arguments(call):
    """The tensors that a recorded call closes over."""
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    return [one for cell in cells if isinstance(cell, list) for one in cell if isinstance(one, torch.Tensor)]
