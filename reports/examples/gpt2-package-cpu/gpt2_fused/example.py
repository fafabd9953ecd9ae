"""A model like the exported one, and inputs like its call's, for the tests and the benchmark."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ._adapter import EXPECTED, OBJECTS
from ._objects import made_of
from .forward import TENSORS, VALUES

BELOW = {'input_ids': 96}
"""Integers are drawn below these."""


class NoModel(RuntimeError):
    """No model can be made here."""


def make_model() -> torch.nn.Module:
    """Make the model with random weights from its configuration, or as the variable MODEL=file.py:function says.

    Raises:
        NoModel: it has no configuration that its class is made from, and MODEL is not set.
    """
    place = os.environ.get("MODEL", "")
    torch.manual_seed(0)
    if place:
        file, _, name = place.rpartition(":")
        spec = importlib.util.spec_from_file_location("model_of_the_user", Path(file).resolve())
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where inspect looks for the source of its classes
        spec.loader.exec_module(module)
        made = getattr(module, name)()
        model = made[0] if isinstance(made, tuple) else made
    else:
        model = _from_config()
    dtypes = {name: value[1] for name, value in EXPECTED["tensors"].items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = getattr(torch, dtypes.get(name, str(tensor.dtype)).removeprefix("torch."))
        if tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)
    return model.to(EXPECTED["device"]).eval()


def _from_config() -> torch.nn.Module:
    home, _, name = EXPECTED["model_class"].rpartition(".")
    config = EXPECTED["config_class"]
    if not config:
        raise NoModel("set MODEL=file.py:function to a function that returns the model")
    config_home, _, config_name = config.rpartition(".")
    made = getattr(importlib.import_module(config_home), config_name).from_dict(EXPECTED["config"])
    return getattr(importlib.import_module(home), name)(made)


def make_inputs(seed: int = 0, *, wide: bool = False) -> dict[str, Any]:
    """Make the keyword arguments of a call that the kernels serve; wide: the same values in float64."""
    generator = torch.Generator().manual_seed(seed)
    device, made = torch.device(EXPECTED["device"]), dict[str, Any]()
    for name, laid in TENSORS.items():
        if laid.dtype.is_floating_point:
            values = torch.randn(laid.shape, generator=generator)
        else:
            values = torch.randint(0, BELOW.get(name, 2), laid.shape, generator=generator)
        tensor = laid.filled(values, device)
        made[name] = tensor.double() if wide and tensor.is_floating_point() else tensor
    objects = {name: made_of(spec, made.__getitem__, device) for name, spec in OBJECTS.items()}
    return {**VALUES, **objects, **{name: tensor for name, tensor in made.items() if "." not in name}}
