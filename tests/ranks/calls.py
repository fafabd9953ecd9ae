"""What the processes of several tests call, and how far its logits are from the truth."""

from __future__ import annotations

import torch

from fusion_advisor.workload.inputs import make_inputs
from fusion_advisor.workload.request import WorkloadRequest

DECODE = WorkloadRequest(model_id="tiny", device="cpu", phase="decode", context=9)


def decode_inputs(model):
    """A token, and a cache that the model has filled with others."""
    parameter = next(model.parameters())
    return make_inputs(model, DECODE, device=parameter.device, dtype=parameter.dtype).kwargs


def error_of(call, kwargs, whole, truth_kwargs):
    """The relative L2 error of the logits against the whole model in fp64."""
    with torch.no_grad():
        truth = whole(**truth_kwargs).logits
        ours = call(**kwargs).logits.double()
    return float((ours - truth).norm() / truth.norm())
