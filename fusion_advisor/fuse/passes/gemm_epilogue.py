"""Activations that a GEMM of cuBLAS can compute in its epilogue: a linear's result goes through GELU or ReLU and nowhere else.

cuBLASLt applies them to the sums that it still has in registers, after the bias. A kernel of its own for 4,096 x 3,072 GELUs in
bf16 reads and writes 50 MB, 11 to 15 µs on an H200; in the epilogue they add 4 µs to a GEMM of 33, and a ReLU adds nothing. ATen
reaches it by ``_addmm_activation``. Its GELU is the tanh approximation on a GPU and the one with erf on a CPU.

In float32 that GELU is ten times as far from the truth as ATen's (relative error 2.2e-6 instead of 2.5e-7), and no faster. In 16
bits it is nearer to it, for the sums are not rounded before (1.7e-3 instead of 2.6e-3 in bf16), to the GELU with erf as well: but
that is another function, a few units in the last place off where x is about -2, and is taken for it only where the user allows
approximations.

This finds such places in a graph. Which of them are worth it is ``fuse.stages.try_epilogues``' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import first_reader, is_in_autocast, is_written_between
from fusion_advisor.fuse.passes.linear_sites import MOST_ROWS
from fusion_advisor.fuse.rewrite.record import EpilogueRewrite
from fusion_advisor.records.op_facts import PRODUCT_OPERANDS, overload_free

_ATEN = torch.ops.aten
_LINEAR, _ADDMM = _ATEN.linear.default, _ATEN.addmm.default
_VIEWS = (
    _ATEN.view.default,
    _ATEN.reshape.default,
    _ATEN._unsafe_view.default,
    _ATEN.flatten.using_ints,
    _ATEN.unflatten.int,
    _ATEN.alias.default,
)
"""Of what is contiguous: an element stays where it is."""
RELU = "relu"
GELU_OF: Mapping[str, str] = {"cuda": "gelu_tanh"}
"""Which GELU the epilogue computes, by device; elsewhere nothing is looked for."""
KERNELS = ("gelu_tanh", "gelu_erf")
"""Of the library: a chain that one of these computes is a GELU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueSite:
    """One linear with the activation after it."""

    product: Node
    activation: str
    """``relu``, ``gelu_tanh`` or ``gelu_erf``."""
    members: tuple[Node, ...]
    """The ops that one call replaces, in order: the product first, the activation's result last."""

    @property
    def operands(self) -> tuple[Node, Node, Node]:
        """What the call is given: x, the weight, the bias."""
        x, weight, bias = (self.product.args[place] for place in PRODUCT_OPERANDS[overload_free(str(self.product.target))])
        assert isinstance(x, Node) and isinstance(weight, Node) and isinstance(bias, Node)
        return x, weight, bias

    @property
    def result(self) -> Node:
        """The activation's."""
        return self.members[-1]

    @property
    def name(self) -> str:
        """``linear_relu``, ``addmm_gelu_tanh``."""
        return f"{'linear' if self.product.target is _LINEAR else 'addmm'}_{self.activation}"

    def call(self) -> Callable[..., torch.Tensor]:
        """Return a function of the operands that gives the activation's result."""
        return EpilogueCall(
            self.name, tuple(self.result.meta["val"].shape), use_gelu=self.activation != RELU,
            is_linear=self.product.target is _LINEAR,
        )  # fmt: skip


class EpilogueCall:
    """A product with a bias and an activation, in one GEMM of cuBLAS.

    Args:
        name: stands in the graph's code.
        shape: of the result.
        use_gelu: GELU instead of ReLU.
        is_linear: whether the weight is a linear's, which is transposed.

    Attributes:
        shape: see above.
        use_gelu: see above.
        is_linear: see above.
    """

    def __init__(self, name: str, shape: tuple[int, ...], *, use_gelu: bool, is_linear: bool) -> None:
        self.__name__ = self.__qualname__ = name
        self.shape, self.use_gelu, self.is_linear = shape, use_gelu, is_linear

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return the activation of ``x @ weight + bias``.

        Args:
            x: [..., K].
            weight: [N, K] of a linear, else [K, N].
            bias: [N].
        """
        rows, columns = (x.reshape(-1, x.shape[-1]), weight.t()) if self.is_linear else (x, weight)
        result: torch.Tensor = _ATEN._addmm_activation.default(bias, rows, columns, use_gelu=self.use_gelu)
        return result.view(self.shape)


def find_epilogue_sites(
    graph: Graph, chains: Iterable[tuple[str, tuple[Node, ...]]], device: str, *, fast_math: bool = False
) -> tuple[list[EpilogueSite], list[str]]:
    """Return where an epilogue could compute an activation, in the graph's order.

    Args:
        graph: as captured, or changed.
        chains: what kernels that were kept compute: (the kernel's name, the ops in order). An activation among more ops stays
            with its kernel.
        device: its type.
        fast_math: take the epilogue's GELU for the other one, in 16 bits.

    Returns:
        The sites, and a sentence for each place that was found and left alone.
    """
    if device not in GELU_OF:
        return [], []
    position = {node: number for number, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    found: list[tuple[str, tuple[Node, ...]]] = []
    for kernel, members in chains:
        taken.update(members)
        name = kernel if kernel in KERNELS else _activation(members[0]) if len(members) == 1 else ""
        if name:
            found.append((name, members))
    found += [(name, (node,)) for node in graph.nodes if node not in taken and (name := _activation(node))]
    sites, refusals = [], []
    for activation, members in sorted(found, key=lambda one: position[one[1][-1]]):
        product, between = _product(members)
        if product is None or not _is_alone(product, {*between, *members}, members[-1]):
            continue
        site = EpilogueSite(
            product=product,
            activation=activation,
            members=(product, *sorted({*between, *members}, key=position.__getitem__)),
        )
        refusal = _why_not(site, device, fast_math=fast_math)
        if refusal:
            refusals.append(refusal)
        elif _is_served(site):
            sites.append(site)
    return sites, refusals


def _activation(node: Node) -> str:
    if node.target is _ATEN.relu.default:
        return RELU
    if node.target is not _ATEN.gelu.default:
        return ""
    return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu_erf"


def _product(members: tuple[Node, ...]) -> tuple[Node | None, set[Node]]:
    """Return the linear whose result an activation reads, and the views between the two; None where it reads anything else."""
    between: set[Node] = set()
    sources: set[Node] = set()
    for source in {source for node in members for source in node.all_input_nodes if source not in members}:
        at = source
        while at.target in _VIEWS and _is_plain(at) and isinstance(before := at.args[0], Node):
            between.add(at)
            at = before
        sources.add(at)
    product = sources.pop() if len(sources) == 1 else None
    return (product, between) if product is not None and _has_bias(product) else (None, between)


def _has_bias(node: Node) -> bool:
    if node.target not in (_LINEAR, _ADDMM) or len(node.args) != 3 or node.kwargs:
        return False
    bias = node.args[PRODUCT_OPERANDS[overload_free(str(node.target))][2]]
    return isinstance(bias, Node) and bias.meta["val"].shape == node.meta["val"].shape[-1:]


def _is_alone(product: Node, others: set[Node], result: Node) -> bool:
    """Whether only the activation reads the product, and what the product reads stays as it is until the call runs."""
    is_read_elsewhere = any(user not in others for node in (product, *others) if node is not result for user in node.users)
    return not is_read_elsewhere and not is_written_between(product.all_input_nodes, product, first_reader(result))


def _is_served(site: EpilogueSite) -> bool:
    values: list[Any] = [node.meta["val"] for node in (*site.operands, site.product, site.result)]
    is_static = all(isinstance(size, int) for value in values for size in value.shape)
    rows = site.product.meta["val"].numel() // max(site.product.meta["val"].shape[-1], 1)
    # A linear on few rows is a GEMV kernel's, which takes in more than an activation.
    is_gemv = site.product.target is _LINEAR and rows <= MOST_ROWS
    is_one_dtype = len({value.dtype for value in values}) == 1  # autocast casts for a linear, not for what takes its place
    return is_static and is_one_dtype and not is_gemv and _is_plain(site.product) and _is_plain(site.result)


def _is_plain(node: Node) -> bool:
    return bool(node.meta["val"].is_contiguous())


def _why_not(site: EpilogueSite, device: str, *, fast_math: bool) -> str:
    if is_in_autocast(site.product):
        return "autocast, which the model enters by itself, casts for a linear and not for what would take its place"
    if site.activation == RELU:
        return ""
    is_narrow = site.product.meta["val"].element_size() == 2
    if site.activation != GELU_OF[device] and not (fast_math and is_narrow):
        remedy = "; --fast-math allows it" if is_narrow else ""
        return f"the model goes through {site.activation}, the epilogue's is {GELU_OF[device]}{remedy}"
    if device == "cuda" and not is_narrow:
        return "in float32 the epilogue's GELU is ten times as far from the truth as ATen's, and no faster"
    return ""


GEMM_EPILOGUE = EpilogueRewrite(
    id="gemm-epilogue",
    title="GEMM epilogues",
    find=find_epilogue_sites,
    after={"merge-gemms": "a merged GEMM is read in slices, and no single activation follows it"},
)
