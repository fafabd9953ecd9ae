"""Rows of special numbers are tried once for a kernel; what depends on the sizes is checked at each of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion_advisor.records import Tolerance
from fusion_advisor.verify.check_chain import check_chain
from fusion_advisor.verify.known.passed_checks import CheckedSite, PassedChecks
from fusion_advisor.verify.special_inputs import CLASSES, holds_all_classes, special_inputs
from tests.kernel_cases import programs
from tests.verify.test_check_chain import chain_of, gelu, nan_at_one_element, off_at_one_element, right, wrong_tail, zero_tail

KEY = "the kernel"


def site(program, tuning="", function=gelu, roots=None):
    roots = (torch.randn(4, 8),) if roots is None else roots
    return CheckedSite(
        chain=chain_of(function, *roots), roots=roots, program=program, entry="fa_it_123456", tuning=tuning
    )  # fmt: skip


def key(program, **given):
    return site(program, **given).form()


def test_sizes_of_which_a_compiler_assumes_the_same_share_a_check():
    assert key(programs.rmsnorm(64, 512)) == key(programs.rmsnorm(1024, 512))
    assert key(programs.rmsnorm(7, 512)) == key(programs.rmsnorm(33, 512))


@pytest.mark.parametrize(
    "other",
    [
        programs.rmsnorm(64, 1024), programs.rmsnorm(1, 512), programs.rmsnorm(63, 512), programs.rmsnorm(68, 512),
        programs.rmsnorm(64, 512, "bfloat16"), programs.softmax(64, 512),
    ],
    ids=["columns", "one row", "odd rows", "a multiple of 4", "dtype", "formula"],
)  # fmt: skip
def test_another_width_another_program_or_other_assumptions_are_checked_anew(other):
    assert key(programs.rmsnorm(64, 512)) != key(other)


def test_another_launch_or_other_ops_are_checked_anew():
    own = key(programs.rmsnorm(64, 512))
    assert own != key(programs.rmsnorm(64, 512), tuning="8 warps")
    assert own != key(programs.rmsnorm(64, 512), function=lambda x: gelu(x) * 2.0)


def checked(fused, rows=64, known=True):
    torch.manual_seed(0)
    roots = (torch.randn(rows, 33),)
    passed = {KEY} if known else set()
    return check_chain(chain_of(gelu, *roots), fused, roots, seed=3, passed=passed, key=KEY), passed


@pytest.mark.parametrize("wrong", [off_at_one_element, nan_at_one_element, wrong_tail, zero_tail])
def test_a_kernel_that_is_wrong_at_the_sizes_of_a_further_point_is_found_there(wrong):
    """A check that was passed elsewhere leaves out neither random numbers nor edges."""
    assert checked(right)[0].is_passed
    assert not checked(wrong)[0].is_passed


def loses_nan_in_the_last_element(x):
    out = right(x)
    out.view(-1)[-1:] = torch.nan_to_num(out.view(-1)[-1:], nan=7.0)
    return out


def writes_to_its_input(x):
    out = right(x)
    x.view(-1)[-1] += 1.0
    return out


def differs_between_calls():
    count = iter(range(1000))

    def call(x):
        out = right(x)
        out.view(-1)[-1] = out.view(-1)[-1] * (1.0 + 1e-7 * (next(count) % 2))
        return out

    return call


@pytest.mark.parametrize("wrong", [loses_nan_in_the_last_element, writes_to_its_input, differs_between_calls()])
def test_masked_edges_and_memory_are_checked_at_every_size(wrong):
    assert not checked(wrong)[0].is_passed


def test_only_rows_of_special_numbers_are_left_out_and_the_words_say_so():
    seen = []

    def noting(x):
        seen.append(x.clone())
        return right(x)

    found, _ = checked(noting)
    assert "no rows of special numbers" in found.inputs
    assert not any(bool(x.isinf().any()) for x in seen) and any(bool(x.isnan().any()) for x in seen)
    again, _ = checked(noting, known=False)
    assert "no rows of special numbers" not in again.inputs and any(bool(x.isinf().any()) for x in seen)


def infinity_for_nan(x):
    return torch.nan_to_num(right(x), nan=math.inf, posinf=math.inf, neginf=-math.inf)


def test_a_kernel_is_known_once_it_has_passed_rows_of_all_classes():
    assert checked(right, known=False)[1] == {KEY}
    assert checked(infinity_for_nan, known=False)[1] == set()
    assert checked(right, rows=len(CLASSES) // 4, known=False)[1] == {KEY}
    assert checked(right, rows=len(CLASSES) // 4 - 1, known=False)[1] == set()  # its rows held some of the classes


@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_rows_of_all_classes_are_what_the_sets_hold(rows):
    roots = [torch.randn(rows, 8)]
    made = [one for title, one in special_inputs(roots, 0, is_in_place=False) if title.startswith("special rows")]
    assert holds_all_classes(roots) == (sum(len(root) for (root,) in made) >= len(CLASSES))


class Kernel:
    """Counts its calls."""

    def __init__(self, function=right):
        self.function, self.calls = function, 0

    def __call__(self, x):
        self.calls += 1
        return self.function(x)


def passed_at(known, kernel, roots, program=None, tolerance=None, fast_math=False):
    program = programs.gelu_tanh(tuple(roots[0].shape)) if program is None else program
    before = kernel.calls
    found = known.check(site(program, roots=roots), kernel, seed=1, fast_math=fast_math, tolerance=tolerance)
    return found.is_passed, kernel.calls - before


def test_an_equal_site_is_checked_on_its_own_tensors_alone():
    torch.manual_seed(0)
    known, kernel = PassedChecks(), Kernel()
    is_passed, calls = passed_at(known, kernel, (torch.randn(16, 32),))
    assert is_passed and calls > 5
    assert passed_at(known, kernel, (torch.randn(16, 32),)) == (True, 1)
    for other in ((torch.randn(16, 33),), (torch.randn(17, 32),), (torch.randn(32, 16).T,), (torch.randn(16, 32).double(),)):
        assert passed_at(known, kernel, other)[1] > 5, "other layouts"
    assert passed_at(known, kernel, (torch.randn(16, 32),), tolerance=Tolerance(rtol=1e-2, atol=1e-2))[1] > 5
    assert passed_at(known, kernel, (torch.randn(16, 32),), fast_math=True)[1] > 5


def test_a_kernel_that_is_wrong_on_the_tensors_of_an_equal_site_is_found():
    torch.manual_seed(0)
    known = PassedChecks()
    special = torch.randn(16, 32)
    wrong_there = Kernel(lambda x: right(x) + 1e-2 if torch.equal(x, special) else right(x))
    assert passed_at(known, wrong_there, (torch.randn(16, 32),))[0]
    is_passed, calls = passed_at(known, wrong_there, (special,))
    assert not is_passed and calls > 2


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (lambda a, b: a - b, lambda a, b: b - a),
        (lambda a, b: torch.clamp(a - b, min=0.5), lambda a, b: torch.clamp(a - b, max=0.5)),
        (lambda a, b: (a - b) * 2.0 + a, lambda a, b: (a - b) * 2.0 + b),
    ],
    ids=["order", "keyword", "another input"],
)  # fmt: skip
def test_other_ops_on_the_same_tensors_are_checked_anew_whatever_the_tensors_hold(first, other):
    """A site's own tensors may be zeros, where many ops come to the same."""
    torch.manual_seed(0)
    program, known, zeros = programs.gelu_tanh((16, 32)), PassedChecks(), (torch.zeros(16, 32), torch.zeros(16, 32))

    def kernel(a, b):
        return first(a.double(), b.double()).to(a.dtype)

    own = {"seed": 1, "fast_math": False, "tolerance": None}
    roots = (torch.randn(16, 32), torch.randn(16, 32))
    assert known.check(site(program, function=first, roots=roots), kernel, **own).is_passed
    again = known.check(site(program, function=first, roots=zeros), kernel, **own)
    assert again.is_passed and "an equal site" in again.inputs
    wrong = site(program, function=other, roots=zeros)
    assert wrong.form() != site(program, function=first, roots=zeros).form()
    found = known.check(wrong, kernel, **own)
    assert not found.is_passed


def test_places_that_no_trial_changes_are_part_of_what_is_equal():
    def write(table, rows, places):
        return table.index_copy_(0, places, rows)

    program = programs.gelu_tanh((4, 8))
    first, other = torch.arange(4), torch.arange(4) + 4

    def exact(places, is_in_place=True):
        one = site(program, function=write, roots=(torch.zeros(16, 8), torch.ones(4, 8), places))
        chain = replace(one.chain, in_place=(0,), written=(0,)) if is_in_place else one.chain
        return replace(one, chain=chain).exact()

    assert exact(first) == exact(first.clone()) and exact(first) != exact(other)
    assert exact(first) != exact(first, is_in_place=False)
    assert exact(first, is_in_place=False) == exact(other, is_in_place=False)


def test_a_kernel_that_did_not_pass_is_not_known():
    torch.manual_seed(0)
    known, kernel = PassedChecks(), Kernel(off_at_one_element)
    for _ in range(2):
        is_passed, calls = passed_at(known, kernel, (torch.randn(16, 32),))
        assert not is_passed and calls > 1
    assert known == PassedChecks()
