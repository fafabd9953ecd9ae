"""A recorder for machines without CUDA: recording computes nothing, and a replay works on the recorded memory only."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.cuda_graph.input_copies import flat


class FakeRecorder:
    """Counts what a CudaRecorder would do.

    Attributes:
        protected: tensors that the recorded call writes to; recording leaves them as they were.
        given_back: how often memory of graphs that are gone was given back.
        why_not: what ``refusal`` answers.
        fails: raised by the next ``record``.
    """

    def __init__(self, *protected):
        self.protected = protected
        self.why_not = None
        self.fails = None
        self.recorded = 0
        self.replayed = 0
        self.given_back = 0

    def protect(self, *tensors):
        """Add tensors that recorded calls write to."""
        self.protected = (*self.protected, *tensors)

    def refusal(self):
        return self.why_not

    def record(self, call):
        if self.fails is not None:
            raise self.fails
        self.recorded += 1
        before = [tensor.clone() for tensor in self.protected]
        result = call()
        outputs = [value for value in _listed(result) if isinstance(value, torch.Tensor)]
        for tensor, old in zip(self.protected, before, strict=True):
            tensor.copy_(old)
        held = {tensor.untyped_storage().data_ptr() for tensor in self.protected}
        for tensor in outputs:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in held:
                flat(tensor).fill_(float("nan"))  # nothing has run yet

        def replay():
            self.replayed += 1
            results = [value for value in _listed(call()) if isinstance(value, torch.Tensor)]
            with torch.inference_mode():  # a device writes to any memory
                for tensor, fresh in zip(outputs, results, strict=True):
                    if tensor is not fresh and tensor.data_ptr() != fresh.data_ptr():
                        flat(tensor).copy_(flat(fresh))

        return replay, result

    def pool_bytes(self):
        return 1 << 20

    def give_back(self):
        self.given_back += 1


def _listed(result):
    return list(result) if isinstance(result, list | tuple) else [result]
