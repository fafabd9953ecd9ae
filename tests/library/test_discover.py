"""The library as it is installed: every kernel's manifest and references fit, agree with each other, and can be scaffolded."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from fusion_advisor.errors import UsageError
from fusion_advisor.library.discover import BadReference, UnknownKernel, list_kernels, load_kernel, scaffold
from fusion_advisor.library.manifest import BadManifest
from fusion_advisor.library.patterns import lower_reference
from fusion_advisor.library.spec import Case
from fusion_advisor.lowering.rules.tables import CannotLower

NAMES = [spec.name for spec in list_kernels()]


OTHERWISE_MEANT = {"gemma", "divisor", "mask_blocks", "chunk_gate_last"}
"""The weight is an offset from 1, the scale divides, the mask is the opposite, halves are swapped: other numbers, same kernel."""


def arguments(spec, case, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    found = []
    for tensor in spec.laid_out(case).inputs:
        sizes = dict(case.sizes)
        if tensor.dtype == "int64":
            found.append(torch.zeros(spec.shape_of(tensor, case), dtype=torch.int64))
            continue
        by_dim = dict(zip(tensor.shape, spec.shape_of(tensor, case), strict=True))
        stored = torch.randn(
            [by_dim[dim] if isinstance(dim, str) else dim for dim in tensor.order], generator=generator, dtype=dtype
        )
        if tensor.dtype:
            stored = (stored > 0).to(getattr(torch, tensor.dtype))
        found.append(stored.permute([tensor.order.index(dim) for dim in tensor.shape]))
        assert list(found[-1].shape) == [sizes.get(dim, dim) for dim in tensor.shape]
    return found


def test_the_library_holds_the_kernels_that_models_need():
    activations = {"gelu_tanh", "gelu_erf", "quick_gelu", "silu", "relu_squared"}
    gated = {"swiglu", "geglu_tanh", "geglu_erf", "reglu"}
    norms = {"rmsnorm", "layernorm", "add_rmsnorm", "add_layernorm", "layernorm_gelu_erf", "layernorm_gelu_tanh"}
    others = {"softcap", "rope", "qk_norm_rope", "softmax", "log_softmax", "masked_softmax_additive", "masked_softmax_boolean"}
    scaled = {"scale_gelu_tanh", "scale_gelu_erf", "scale_silu"}
    assert activations | {f"bias_{name}" for name in activations} | scaled <= set(NAMES)
    assert gated | {f"{name}_packed" for name in gated} <= set(NAMES)
    assert norms | others <= set(NAMES)


@pytest.mark.parametrize("name", [spec.name for spec in list_kernels() if spec.gemv is None])
def test_cases_hold_what_kernels_get_wrong_and_what_users_measure(name):
    spec = load_kernel(name).spec
    checked = [[size for _, size in case.sizes] for case in spec.check]
    is_views = name.startswith("qkv_heads")  # empty, its results are views of one tensor
    assert is_views or [sizes for sizes in checked if 0 in sizes]
    assert [sizes for sizes in checked if any(size % 2 and size > 1 for size in sizes)]
    assert any(map(is_one_row, spec.check)) and any(map(is_one_row, spec.bench))
    assert min(sizes[-1] for sizes in checked) <= 2  # one column, or the two that a pair of halves needs
    assert [case for case in spec.check if case.orders]
    assert not is_reduced(spec) or max(map(columns_of, spec.check)) > 16384
    read = [2 * elements(spec, case) for case in spec.bench]
    assert max(read) > 50e6  # and as much is written
    assert [size for size in read if 2.5e6 < size < 50e6]


def elements(spec, case):
    """Of the largest input; where tables are read by ids, of what they are read for."""
    lengths = {tensor.shape[0] for tensor in spec.inputs} & {tensor.below for tensor in spec.inputs}
    if lengths:
        return math.prod(size for letter, size in case.sizes if letter not in lengths)
    return max(math.prod(spec.shape_of(tensor, case)) for tensor in spec.inputs)


@pytest.mark.parametrize("name", ["groupnorm", "groupnorm_silu"])
def test_a_group_norm_of_pixels_in_another_order_is_left_to_torch(name):
    kernel = load_kernel(name)
    sizes = (("B", 2), ("G", 2), ("K", 3), ("H", 4), ("W", 5))
    case = Case(sizes=sizes, dtypes=("float32",), orders=(("x", ("B", "G", "K", "W", "H")),))
    with pytest.raises(CannotLower):
        next(lower_reference(kernel.spec.laid_out(case), kernel.references[0][1], dict(sizes)))


def is_one_row(case):
    """Or one token: heads come in dozens."""
    sizes = dict(case.sizes)
    if "S" in sizes:
        return sizes["S"] == 1
    return math.prod(sizes.values()) == columns_of(case)


def columns_of(case):
    """A row is the last dim; a group of channels with their pixels is one."""
    sizes = dict(case.sizes)
    return math.prod(sizes[letter] for letter in "KHW") if {"B", "G", "K"} <= set(sizes) else case.sizes[-1][1]


def is_reduced(spec):
    function = load_kernel(spec.name).references[0][1]
    return next(lower_reference(spec, function, dict(spec.check[0].sizes))).program.is_reduced


@pytest.mark.parametrize("name", NAMES)
def test_variants_compute_the_same(name):
    kernel = load_kernel(name)
    for case in kernel.spec.check:
        tensors = arguments(kernel.spec, case)
        results = {variant: function(*tensors) for variant, function in kernel.references if variant not in OTHERWISE_MEANT}
        last = [value[-1] if isinstance(value, tuple) else value for value in results.values()]
        for value in last[1:]:
            torch.testing.assert_close(value, last[0], rtol=1e-5, atol=1e-6, equal_nan=True)
        widest = max(len(value) if isinstance(value, tuple) else 1 for value in results.values())
        assert widest == len(kernel.spec.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_references_keep_dtype_and_take_the_constants(name):
    kernel = load_kernel(name)
    for dtype in (torch.float32, torch.bfloat16):
        for _, function in kernel.references:
            found = function(*arguments(kernel.spec, kernel.spec.check[0], dtype), **dict(kernel.spec.constants))
            assert all(t.dtype == dtype for t in (found if isinstance(found, tuple) else (found,)))


def test_rmsnorm_variants_are_found_in_order():
    assert [variant for variant, _ in load_kernel("rmsnorm").references] == ["llama", "t5", "gemma", "builtin"]


def test_a_baseline_belongs_to_a_reference(tmp_path):
    kernel = load_kernel("dropout_add")
    assert [variant for variant, _ in kernel.baselines] == ["seeded"]
    assert load_kernel("rmsnorm").baselines == ()
    folder = scaffold("mine", tmp_path)
    with (folder / "reference.py").open("a") as file:
        file.write("\n\ndef baseline_other(x, weight, *, eps=1e-6):\n    return x\n")
    with pytest.raises(BadReference, match="baseline_other has no reference_other"):
        load_kernel("mine", (tmp_path,))


def test_loading_leaves_no_module_behind():
    before = set(sys.modules)
    load_kernel("rope")
    assert not [name for name in set(sys.modules) - before if "reference" in name]


def test_an_unknown_name_is_answered_with_a_near_one():
    with pytest.raises(UnknownKernel) as caught:
        load_kernel("rmsnrom")
    assert "rmsnorm" in caught.value.note_text


def test_a_scaffold_is_a_kernel(tmp_path):
    folder = scaffold("my_norm", tmp_path)
    kernel = load_kernel("my_norm", [tmp_path])
    assert kernel.spec.folder == folder
    result = kernel.references[0][1](*arguments(kernel.spec, kernel.spec.check[0]))
    assert result.shape == (7, 129)


def test_a_scaffold_overwrites_nothing(tmp_path):
    scaffold("my_norm", tmp_path)
    with pytest.raises(UsageError, match="exists"):
        scaffold("my_norm", tmp_path)
    with pytest.raises(UsageError, match="cannot name"):
        scaffold("../evil", tmp_path)


def test_a_name_twice_is_refused(tmp_path):
    scaffold("rmsnorm", tmp_path)
    with pytest.raises(BadManifest, match="also in"):
        list_kernels([tmp_path])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("x: torch.Tensor, weight", "y: torch.Tensor, weight", "takes \\(y, weight\\)"),
        ("eps: float", "epsilon: float", "epsilon"),
        ("def reference_", "def other_", "has no function"),
        ("import torch", "import torhc", "does not import"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(tmp_path, old, new, words):
    file = scaffold("my_norm", tmp_path) / "reference.py"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(BadReference, match=words):
        load_kernel("my_norm", [tmp_path])


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a directory"):
        list_kernels([tmp_path / "none"])
