"""The library's references as patterns: each kernel finds its own formula, in every dtype and layout that it declares."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fusion_advisor.library.discover import list_kernels, load_references, scaffold
from fusion_advisor.library.match import find_match
from fusion_advisor.library.patterns import (
    _example_sizes,
    example,
    kernel_patterns,
    library_patterns,
    lower_reference,
    trace_reference,
)
from fusion_advisor.library.spec import Input
from fusion_advisor.lowering.rules.tables import CannotLower

SPECS = {spec.name: spec for spec in list_kernels() if spec.gemv is None}


@pytest.fixture(scope="module")
def patterns():
    return library_patterns()[0]


def sizes(spec, size=6):
    return {dim: size + 2 * number for number, dim in enumerate(dict.fromkeys(d for i in spec.inputs for d in i.shape))}


@pytest.mark.parametrize("name", SPECS)
def test_every_variant_is_found_as_its_own_kernel_with_its_default_constants(patterns, name):
    spec = SPECS[name]
    for variant, function in load_references(spec).references:
        for lowered in lower_reference(spec, function, sizes(spec)):
            match = find_match(lowered.program, patterns)
            assert match is not None, variant
            assert match.kernel == name
            assert dict(match.constants) == pytest.approx(dict(spec.constants))
            assert {operand.name for operand in match.program.operands} <= {i.name for i in spec.inputs} | set(spec.outputs)


@pytest.mark.parametrize("name", SPECS)
def test_patterns_name_operands_once_and_constants_by_the_manifest(name):
    for pattern in kernel_patterns(SPECS[name]):
        assert len(set(pattern.operand_names)) == len(pattern.operand_names)
        assert {name for name in pattern.constant_names if name} == {name for name, _ in SPECS[name].constants}
        assert len(pattern.constant_names) == len(pattern.structure.constants)


def test_a_model_that_reads_only_the_last_output_matches_too(patterns):
    spec = SPECS["add_rmsnorm"]
    function = dict(load_references(spec).references)["llama"]
    both, last = lower_reference(spec, function, sizes(spec))
    assert len(both.outputs) == 2 and len(last.outputs) == 1
    assert find_match(last.program, patterns).kernel == "add_rmsnorm"


def test_results_that_are_views_of_one_value_are_no_kernel():
    """The projection of one token is queries, keys and values already: a kernel would write one tensor past another's end."""
    spec = SPECS["qkv_heads"]
    one_token = {"B": 1, "S": 1, "H": 3, "D": 8}
    for _, function in load_references(spec).references:
        with pytest.raises(CannotLower, match="views of one value"):
            list(lower_reference(spec, function, one_token))
        assert list(lower_reference(spec, function, {**one_token, "S": 2}))


def test_no_two_patterns_of_a_reference_are_equal(patterns):
    texts = [(pattern.kernel, pattern.variant, pattern.structure.text) for pattern in patterns]
    assert len(texts) == len(set(texts))


def test_no_chain_could_be_one_of_two_kernels(patterns):
    """Equal structures of two kernels differ in a constant that neither of them leaves open."""
    by_text = {}
    for pattern in patterns:
        by_text.setdefault(pattern.structure.text, []).append(pattern)
    for same in by_text.values():
        for one, other in itertools.combinations(same, 2):
            assert one.kernel == other.kernel or is_told_apart(one, other), (one.kernel, other.kernel)


def is_told_apart(one, other):
    pairs = zip(one.constant_names, one.structure.constants, other.constant_names, other.structure.constants, strict=True)
    return any(not name and not theirs and not math.isclose(mine, wanted, rel_tol=1e-3) for name, mine, theirs, wanted in pairs)


def test_a_kernel_that_is_there_twice_could_be_either(patterns):
    """The test above can fail."""
    twin = next(pattern for pattern in patterns if pattern.kernel == "quick_gelu")
    assert not is_told_apart(twin, twin)


def test_examples_are_laid_out_as_the_manifest_says():
    heads = Input(name="x", shape=("B", "H", "S", "D"), order=("B", "S", "H", "D"))
    made = example(heads, {"B": 2, "H": 3, "S": 4, "D": 5}, torch.half)
    assert (tuple(made.shape), made.stride(), made.dtype) == ((2, 3, 4, 5), (60, 5, 15, 1), torch.half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_reference_is_traced_as_it_is_written_whatever_autocast_is_around_the_users_call(dtype):
    """A rotation multiplies tensors of two dtypes; autocast to float16 on a CPU raises for one of them."""
    (spec,) = (one for one in list_kernels() if one.name == "qk_norm_rope")
    _, function = load_references(spec).references[0]
    sizes = next(_example_sizes(spec))

    def ops():
        graph = trace_reference(spec, function, sizes, dtype=torch.bfloat16).graph
        return [(str(node.target), str(node.args)) for node in graph.nodes]

    plain = ops()
    with torch.autocast("cpu", dtype):
        assert ops() == plain


def test_a_users_own_kernel_is_searched_beside_the_shipped_ones(tmp_path):
    scaffold("my_norm", tmp_path)
    patterns, sources = library_patterns((tmp_path,))
    assert "my_norm" in {pattern.kernel for pattern in patterns}
    assert set(SPECS) <= set(sources)


def test_kernels_written_by_hand_are_no_patterns():
    by_hand = {spec.name for spec in list_kernels()} - set(SPECS)
    assert "rmsnorm_linear" in by_hand
    assert not by_hand & {pattern.kernel for pattern in library_patterns()[0]}
