"""What an op can be given: a gradient's formula reads a result of the forward pass, which has a range of its own.

``_log_softmax_backward_data`` reads logarithms of probabilities. No positive number is one. At 80 a result of 1e35 shows how an
exponential is rounded, and nothing of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_advisor.verify.subgraph_oracle import OriginalChain, extent

_LOG_SOFTMAX = torch.ops.aten._log_softmax_backward_data.default

_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
_LAYER_NORM = torch.ops.aten.native_layer_norm.default


def has_moments(chain: OriginalChain) -> bool:
    """Whether an op of a chain writes or reads a row's mean.

    Args:
        chain: the original ops of a site.
    """
    return any(node.target in (_LAYER_NORM, _LAYER_NORM_BACKWARD) for node in chain.nodes)


def log_probabilities(chain: OriginalChain) -> frozenset[int]:
    """Return the numbers of the roots that an op of a chain reads as logarithms of probabilities.

    Args:
        chain: the original ops of a site.
    """
    read = {node.args[1] for node in chain.nodes if node.target is _LOG_SOFTMAX}
    return frozenset(number for node, number, _, _ in chain.outer if node in read)


def within_domain(chain: OriginalChain, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return inputs of which each is something that the ops can be given: those that cannot be positive are made negative.

    Args:
        chain: the original ops of a site.
        inputs: one for each root, any layout; they stay as they are.

    Returns:
        The same tensors, and copies of the same layout where numbers had to change.
    """
    found = list(inputs)
    for number in log_probabilities(chain):
        root = found[number]
        if bool((root > 0).any()):
            memory = root.as_strided((extent(root),), (1,)).abs().neg()
            found[number] = memory.as_strided(root.shape, root.stride())
    return found
