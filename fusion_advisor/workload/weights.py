"""Build a model with seeded random weights, or with the ones that were found."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from fusion_advisor.errors import MissingWeights
from fusion_advisor.workload.device import is_out_of_memory
from fusion_advisor.workload.hub import hub_error, is_offline
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.resolve import Source

_STD = 0.02
# No initial scale or bias is larger; what is comes from memory that no initialiser wrote.
_LARGEST_INITIAL = 100.0


def build_random(
    model_class: Any, config: Any, *, device: torch.device, dtype: torch.dtype, seed: int, trust_remote_code: bool = False
) -> nn.Module:
    """Build a model on ``device`` in ``dtype`` and fill it from a seeded generator there.

    Matrices and embeddings are normal with standard deviation 0.02. Vectors keep the centre their model gives them (1 for a
    norm's weight, 0 for a bias and for Gemma's ``1 + weight`` norms) with normal noise of 0.02 on top: a fused kernel that
    forgets a bias or a norm's weight must not pass for right because they are zeros and ones. Buffers (rotary frequencies,
    running statistics) are computed as usual; tied weights are tied.
    """
    with seeded(seed, device), quiet_transformers():
        # Torch's and transformers' own initialisers would take minutes for 7B parameters that are overwritten below.
        with torch.device(device), no_init_weights():
            model: Any = model_class.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
        model.tie_weights()
        # transformers' initialisers leave tensors with this mark alone: matrices are skipped, vectors and buffers are computed.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter._is_hf_initialized = True
        model.initialize_weights()
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                _fill(parameter, generator)
                if hasattr(parameter, "_is_hf_initialized"):
                    del parameter._is_hf_initialized
    return model


def load_weights(
    model_class: Any, source: Source, request: WorkloadRequest, *, config: Any, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Load the weights that were found, onto ``device`` and in ``dtype``.

    Raises:
        GatedModel: the repository is listed, but this token may not read its files.
        MissingWeights: they cannot be read or fetched.
    """
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "trust_remote_code": request.trust_remote_code,
        "local_files_only": is_offline(request),
    }
    if source.place == request.model_id and source.revision:
        options["revision"] = source.revision
    # With accelerate the shards go straight to the device; without it they pass through host memory once.
    if device.type == "cuda" and find_spec("accelerate") is not None:
        options["device_map"] = str(device)
    with quiet_transformers(), seeded(request.seed, device):
        try:
            model = model_class.from_pretrained(source.place, **options)
        except Exception as error:  # safetensors, pickle, the Hub's client and transformers raise their own
            # The caller phrases an allocation failure with the device's figures.
            if is_out_of_memory(error):
                raise
            if known := hub_error(error, request):
                raise known from error
            detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise MissingWeights(model_id=request.model_id, detail=detail) from error
        return model.to(device)


def weight_bytes(model_class: Any, config: Any, dtype: torch.dtype) -> int:
    """Return the size of the weights without allocating them; tied ones count once, and 0 stands for unknown."""
    try:
        with torch.device("meta"), no_init_weights(), quiet_transformers():
            model = model_class.from_config(config, trust_remote_code=False, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        # A constructor that reads a tensor's value cannot run on the meta device; it can on a real one.
        return 0
    model.tie_weights()
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators inside, and put them back after."""
    devices = [device.index] if device.type == "cuda" and device.index is not None else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' load reports and bars off the terminal inside."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _fill(parameter: torch.Tensor, generator: torch.Generator) -> None:
    if not parameter.is_floating_point() or parameter.numel() == 0:
        return
    if parameter.ndim > 1:
        parameter.normal_(std=_STD, generator=generator)
        return
    noise = torch.empty_like(parameter).normal_(std=_STD, generator=generator)
    parameter.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    parameter.clamp_(-_LARGEST_INITIAL, _LARGEST_INITIAL).add_(noise)
