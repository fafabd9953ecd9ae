"""Loads an exported repository by the ``kernels`` library's own loader and puts its layers into a model of transformers.

Called as ``python with_kernels.py REPOSITORY gpt2|bert LAYER`` where that library is installed; prints how near the model comes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers.activations import GELUActivation, NewGELUActivation

from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from tests.export import models

CLASSES = {"NewGELU": NewGELUActivation, "GeLU": GELUActivation}


def main(folder, make, layer):
    here = Path(folder).resolve()
    kernel = get_local_kernel(here)
    use_kernel_forward_from_hub(layer)(CLASSES[layer])  # transformers does so with the version of the library that it asks for
    model, inputs = getattr(models, make)()
    with torch.no_grad():
        before = model(**inputs)[0]
        wide = getattr(models, make)()[0].double()(**inputs)[0]
        with use_kernel_mapping({layer: {"cpu": LocalLayerRepository(here, layer_name=layer)}}):
            model = kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cpu", use_fallback=True)
        replaced = [module for module in model.modules() if "forward" in vars(module)]
        served = []
        site = getattr(kernel.layers.sites, next(name for name in vars(kernel.layers.sites) if "gelu" in name))
        own = site.__class__.__call__
        found = model(**inputs)[0]
        for module in replaced:
            served.append(own(site, module, torch.randn(2, 16, {"gpt2": 256, "bert": 96}[make])) is not None)
            other = torch.randn(3, 5)
            assert torch.equal(module(other), type(module).forward(module, other))
    error, eager = ((one.double() - wide).norm() / wide.norm() for one in (found, before))
    sys.stdout.write(f"{len(replaced)} layers replaced, served {served}, error {error:.2e}, eager's {eager:.2e}\n")
    sys.stdout.write(f"same bits as eager: {torch.equal(found, before)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
