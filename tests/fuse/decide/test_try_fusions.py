"""Which language a kernel is kept in, where it is tried in two."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fusion_advisor as fa
import fusion_advisor.fuse.decide.try_fusions as selection
from fusion_advisor.fuse.decide.trial import Trial
from fusion_advisor.fuse.decide.try_fusions import FASTEST, backends_of, faster_of, try_all
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.patterns import lower_reference
from fusion_advisor.records import Fusion, Receipt, RenderedKernel, Status
from tests.report.fixtures import applied, timing

RECEIPT = Receipt(sites_found=2, sites_matched=2, sites_replaced=0, launches_before=8, launches_after=0)
RIGHT = applied().fusions[0].numerics


def trial(backend, ns, status=Status.PLANNED):
    """As ``try_fusion`` gives it: a kernel that was timed alone, or one that came to nothing."""
    kernel = RenderedKernel(name="fa_k", backend=backend, path="", source="", origin="", tuning="VEC=8 (stored)")
    passed = status is Status.PLANNED
    timed = {"numerics": RIGHT, "chain_before": timing(9_000), "chain_after": timing(ns)} if ns else {}
    fusion = Fusion(
        id="F1", chain_id="C1", kernel="rmsnorm", status=status, reason="" if passed else f"{status} in {backend}",
        receipt=RECEIPT, rendered=(kernel,), **timed,
    )  # fmt: skip
    return Trial(fusion=fusion, built=SimpleNamespace(kernel=kernel) if passed else None)


def program_of(name):
    """A library kernel's Program at the first of its cases that are benchmarked."""
    kernel = load_kernel(name)
    return next(lower_reference(kernel.spec, kernel.references[0][1], dict(kernel.spec.bench[0].sizes))).program


@pytest.mark.parametrize(
    ("asked", "name", "on_cuda", "expected"),
    [
        (None, "rmsnorm", True, ("triton",)),
        (None, "groupnorm", True, ("triton", "cuda")),
        (None, "groupnorm", False, ("cpp",)),
        (FASTEST, "rmsnorm", True, ("triton", "cuda")),
        (FASTEST, "rmsnorm", False, ("cpp",)),
        ("cuda", "rmsnorm", True, ("cuda",)),
        ("triton", "groupnorm", True, ("triton",)),
        ("triton", "rmsnorm", False, ("triton",)),
    ],
)
def test_device_and_kernel_decide_what_is_tried(asked, name, on_cuda, expected):
    assert backends_of(asked, program_of(name), on_cuda=on_cuda, is_available=lambda _: True) == expected


def test_without_cuda_core_nothing_of_cuda_is_tried_unasked():
    def without_cuda(backend):
        return backend.name != "cuda"

    assert backends_of(None, program_of("groupnorm"), on_cuda=True, is_available=without_cuda) == ("triton",)
    asked = backends_of(FASTEST, program_of("groupnorm"), on_cuda=True, is_available=without_cuda)
    assert asked == ("triton", "cuda")  # and says what is missing


@pytest.mark.parametrize(
    ("triton_ns", "cuda_ns", "kept"), [(5_000, 4_000, "cuda"), (4_000, 5_000, "triton"), (5_000, 4_950, "triton")]
)
def test_the_faster_one_stays_and_the_preferred_one_within_noise(triton_ns, cuda_ns, kept):
    found = faster_of([trial("triton", triton_ns), trial("cuda", cuda_ns)])
    (kernel,) = found.fusion.rendered
    assert (kernel.backend, found.built.kernel.backend) == (kept, kept)
    own, other = (cuda_ns, triton_ns) if kept == "cuda" else (triton_ns, cuda_ns)
    name = "triton" if kept == "cuda" else "cuda"
    assert kernel.tuning == f"VEC=8 (stored); alone {own / 1000:.2f} µs, {name} {other / 1000:.2f} µs"


def test_what_came_to_nothing_in_one_language_stays_in_the_other():
    broken, good = trial("triton", 0, Status.BUILD_FAILED), trial("cuda", 4_000)
    assert faster_of([broken, good]) is good
    slower = trial("triton", 4_000, Status.SLOWER)
    assert faster_of([slower, trial("cuda", 0, Status.WRONG_NUMBERS)]) is slower
    assert faster_of([good]) is good


class Told(Progress):
    def __init__(self):
        self.notes, self.warnings = [], []

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)


def test_both_are_tried_and_a_failure_warns_only_where_nothing_is_left(monkeypatch, tmp_path):
    results = {
        "F1": {"triton": trial("triton", 5_000), "cuda": trial("cuda", 0, Status.BUILD_FAILED)},
        "F2": {"triton": trial("triton", 0, Status.WRONG_NUMBERS), "cuda": trial("cuda", 0, Status.BUILD_FAILED)},
        "F3": {"triton": torch.OutOfMemoryError("of logits"), "cuda": torch.OutOfMemoryError("of logits")},
        "F4": {"triton": torch.OutOfMemoryError("of logits"), "cuda": trial("cuda", 5_000)},
    }

    def tried(bench, planned, *, backend, **_):
        found = results[planned.id][backend]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(selection, "try_fusion", tried)
    bench = SimpleNamespace(on_cuda=True, observe=lambda fusions: None)
    match, chain = (
        SimpleNamespace(kernel="rmsnorm"),
        SimpleNamespace(id="C1", sites=(SimpleNamespace(source_file="", source_line=0),), launches=2),
    )
    fusions = [SimpleNamespace(id=name, match=match, program=None, chain=chain, sites=(), rows=()) for name in results]
    told = Told()
    options = ApplyOptions(backend=FASTEST, run_dir=tmp_path)
    found, built = try_all(bench, SimpleNamespace(fusions=fusions), options, told, lambda _: None)
    assert [fusion.status for fusion in found] == [Status.PLANNED, Status.WRONG_NUMBERS, Status.NOT_REPLACED, Status.PLANNED]
    assert found[2].reason == selection.NO_MEMORY
    assert [one.kernel.backend for one in built] == ["triton", "cuda"]
    assert [text.partition(":")[0] for text in told.notes] == ["F1 rmsnorm in cuda"]
    assert [text.partition(":")[0] for text in told.warnings] == ["F2 rmsnorm in triton", "F2 rmsnorm in cuda"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="builds kernels in two languages, and this machine has no CUDA device")
@pytest.mark.nvrtc
def test_a_group_norm_is_tried_in_both_languages_unasked():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.GroupNorm(32, 320), torch.nn.SiLU(), torch.nn.LayerNorm(64)).cuda().bfloat16().eval()
    x = torch.randn(4, 320, 64, 64, dtype=torch.bfloat16, device="cuda")
    want = model(x)
    with fa.apply(model, x, compile=False) as fused:
        (norm,) = [fusion for fusion in fused.report.fusions if fusion.kernel.startswith("groupnorm")]
        assert torch.equal(fused(x).isnan(), want.isnan())
        torch.testing.assert_close(fused(x), want, atol=0.05, rtol=0.05)
    (kernel,) = norm.rendered
    assert "; alone " in kernel.tuning and ("cuda" if kernel.backend == "triton" else "triton") in kernel.tuning
