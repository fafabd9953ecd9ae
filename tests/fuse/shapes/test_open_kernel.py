"""The kernel of a fusion for all sizes of a piece: rendered again where it was made for one, and compiled ahead."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.registry import backend
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.codegen.triton.launch import variant_of
from fusion_advisor.fuse.shapes.open_kernel import OpenKernels, for_all_sizes, programs_at, tried_points
from fusion_advisor.ir.sized_program import NoOneProgram
from fusion_advisor.records import RenderedKernel, SizeRange
from tests.kernel_cases import programs as p

HEADER = Header(title="case", summary="a test", origin="generated from the chain")
RANGES = [SizeRange(name="batch", least=2, most=16), SizeRange(name="seq", least=2, most=4096)]


def fusion_of(program, name="triton", tuning=None):
    """As a point's own kernel would be; what was built is never bound here."""
    rendered = backend(name).render(program, HEADER, tuning=tuning or Tuning(), fast_math=False)
    kernel = RenderedKernel(
        name=rendered.entry, backend=name, path="kernels/F1.x", source=rendered.source, origin="a test", tuning="own",
        parameters=tuning or Tuning(),
    )  # fmt: skip
    return SimpleNamespace(planned=SimpleNamespace(program=program, header=HEADER), kernel=kernel, built=object())


def opened(fusion, at, ranges=RANGES, kernels=None):
    ends = [(str(point), at(*point)) for point in (tuple(one.least for one in ranges), tuple(one.most for one in ranges))]
    between = [at(*sizes) for sizes in ((3, 11), (5, 13), (11, 17))]
    tried = programs_at(tried_points(ranges), lambda point: at(*point))
    return for_all_sizes(fusion, ends, between, tried, [None] * len(between[0].operands), kernels or OpenKernels())


def rope(batch, seq):
    return p.rope(batch, 4, seq, 64, "bfloat16")


def softmax(batch, seq):
    return p.softmax(batch * seq, seq, "bfloat16")


@pytest.mark.parametrize(("at", "codes"), [(rope, "2 machine codes"), (softmax, "14 machine codes")])
def test_a_kernel_for_one_size_is_rendered_again_for_all(at, codes):
    fusion = fusion_of(at(4, 8))
    kernel, built = opened(fusion, at)
    assert kernel.name != fusion.kernel.name
    assert "do_not_specialize" in kernel.source
    assert "# ---- launch" in kernel.source
    assert f"def {kernel.name}(" in kernel.source
    assert kernel.tuning == f"{codes} for all sizes"
    assert kernel.build_ns > 0
    assert built.bind(at(7, 100))
    assert replace(kernel, name="", source="", tuning="", build_ns=0) == replace(fusion.kernel, name="", source="", tuning="")


def test_a_kernel_that_serves_all_sizes_stays():
    for name, at in (("cpp", rope), ("cpp", softmax), ("cuda", softmax), ("triton", lambda batch, _: rope(batch, 7))):
        fusion = fusion_of(at(4, 8), name)
        assert opened(fusion, at) == (fusion.kernel, fusion.built), name


def test_points_of_a_piece_share_a_kernel():
    kernels = OpenKernels()
    one, other = (opened(fusion_of(rope(*sizes)), rope, kernels=kernels) for sizes in ((2, 2), (16, 4096)))
    assert one is other
    assert len(kernels.built) == 1


def test_rows_that_are_walked_at_some_sizes_alone_are_refused():
    wide = [RANGES[0], SizeRange(name="seq", least=2, most=32768)]
    with pytest.raises(NoOneProgram, match=r"at \(16, 32768\) it takes a kernel of another form"):
        opened(fusion_of(softmax(4, 8)), softmax, wide)
    with pytest.raises(NoOneProgram, match="at the sizes where it was checked it takes"):
        opened(fusion_of(softmax(4, 32768)), softmax)


def test_a_kernel_that_was_checked_with_fewer_loops_is_rendered_with_all_of_them():
    fusion = fusion_of(rope(1, 1))
    kernel, _ = opened(fusion, rope, [SizeRange(name="batch", least=1, most=16), RANGES[1]])
    assert kernel.name != fusion.kernel.name
    assert kernel.source == opened(fusion_of(rope(3, 11)), rope)[0].source


def test_what_does_not_compile_is_refused():
    def tried():
        raise KernelBuildFailed(kernel="fa", target="cuda", cause="no")
        yield

    ends, between = [("there", rope(16, 4096))], [rope(3, 11)]
    with pytest.raises(NoOneProgram, match="did not compile"):
        for_all_sizes(fusion_of(rope(4, 8)), ends, between, tried(), [None] * 4, OpenKernels())


@pytest.mark.parametrize("at", [rope, softmax, lambda batch, seq: p.transposed_add(batch * 8, seq)])
def test_machine_code_is_made_ahead_for_every_size(at):
    rendered = TritonBackend().render(
        at(2, 2), HEADER, tuning=Tuning(), fast_math=False, elsewhere=[at(16, 4096), at(3, 11), at(5, 13)]
    )
    ahead = {variant_of(at(*point), rendered) for point in tried_points(RANGES)}
    number = random.Random(1)
    sizes = [(number.randint(2, 16), int(2 ** number.uniform(1, 12))) for _ in range(300)]
    assert {variant_of(at(*point), rendered) for point in sizes} <= ahead


def test_points_are_few_where_dims_are_many():
    many = [SizeRange(name=f"dim{n}", least=2, most=4096) for n in range(4)]
    points = tried_points(many)
    assert len(points) < 1100
    assert {(2,) * 4, (4096,) * 4} <= set(points)
    assert all(one.holds(size) for point in points for one, size in zip(many, point, strict=True))


def test_sizes_at_which_there_is_no_program_are_passed_over():
    def at(point):
        if point == (1,):
            raise NoOneProgram("its strides are of another kind")
        return point

    assert list(programs_at([(1,), (2,), (3,)], at)) == [(2,), (3,)]
