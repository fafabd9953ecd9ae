"""What cannot be exported is refused with its reason, and leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fusion_advisor
from fusion_advisor.cli.common import core
from fusion_advisor.errors import BadFactory, CannotExport, ExportExists, LicenceForbids, NothingToExport, UsageError
from fusion_advisor.export.export import check_export, package_name
from fusion_advisor.export.formats.write import write_plan
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.records import Status
from tests.export.models import QUICK
from tests.tiny import Toy, toy


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a toy that kept a kernel: the fused model, its input, its folder."""
    folder = tmp_path_factory.mktemp("run")
    model, (x,) = toy()
    fused = fusion_advisor.apply(model, x, run_dir=folder, **QUICK)
    fused.revert()
    return fused, x, folder


def kept_rows(saved, **change):
    return tuple(replace(row, **change) if row.status is Status.KEPT else row for row in saved.report.fusions)


def test_a_run_that_kept_nothing_has_nothing_to_export(run, tmp_path):
    saved = load_plan(run[2])
    nothing = replace(saved, report=replace(saved.report, fusions=kept_rows(saved, status=Status.WITHIN_NOISE)))
    with pytest.raises(NothingToExport, match="kept no kernel"):
        check_export(nothing, tmp_path / "out", force=False)


def test_a_kernel_whose_licence_forbids_it_is_not_passed_on(run, tmp_path):
    saved = load_plan(run[2])
    check_export(saved, tmp_path / "out", force=False)
    for licence, is_fine in (("MIT", True), ("LicenseRef-Proprietary", False)):
        fusions = tuple(replace(one, match=replace(one.match, license=licence)) for one in saved.fusions)
        if is_fine:
            check_export(replace(saved, fusions=fusions), tmp_path / "out", force=False)
        else:
            with pytest.raises(LicenceForbids, match="LicenseRef-Proprietary"):
                check_export(replace(saved, fusions=fusions), tmp_path / "out", force=False)


def test_a_folder_that_is_there_is_left_alone_without_force(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ExportExists):
        run[0].export(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "mine.txt").read_text() == "mine"
    run[0].export(out, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (out / "mine.txt").exists()
    assert (out / "out" / "forward.py").is_file()


@pytest.mark.parametrize("form", ["package", "kernels", "patch", "pt2"])
def test_the_run_itself_is_not_replaced_even_with_force(form, run):
    """It would be deleted after its export, the folder above it with all other runs."""
    folder = run[2]
    for place in (folder, folder.parent):
        with pytest.raises(UsageError, match="holds the run"):
            write_plan(SimpleNamespace(), load_plan(folder), place, form=form, force=True)
    assert (folder / "report.json").is_file()


def test_a_file_is_not_replaced_even_with_force(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ExportExists):
        write_folder({"a.py": b""}, tmp_path / "out", force=True)


def test_nothing_is_left_where_writing_fails(tmp_path):
    with pytest.raises(TypeError):
        write_folder({"a.py": b"", "b.py": "text is no bytes"}, tmp_path / "out", force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_factory_that_is_gone_is_named(tmp_path):
    source = "import torch\nfrom tests.tiny import toy\n\ndef make():\n    model, x = toy()\n    return model, {'x': x[0]}\n"
    (tmp_path / "gone.py").write_text(source)
    loaded = core.load_workload(core.make_request(model_id=f"{tmp_path}/gone.py:make"))
    fused = fusion_advisor.apply(loaded.model, loaded.kwargs, run_dir=tmp_path / "run", **QUICK)
    fused.revert()
    (tmp_path / "run" / "request.json").write_text(core.dump_request(loaded.request))
    (tmp_path / "gone.py").unlink()
    with pytest.raises(BadFactory, match="there is no file"):
        core.export_run(tmp_path / "run", tmp_path / "out", force=False, trust_remote_code=False)
    assert not (tmp_path / "out").exists()


def test_an_output_whose_class_only_a_file_has_is_refused(tmp_path):
    """The package would import a module that nobody else has."""
    source = (
        "import dataclasses, torch\n\n@dataclasses.dataclass\nclass Scores:\n    best: torch.Tensor\n\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return Scores(torch.nn.functional.gelu(x * 2).softmax(-1))\n\n"
        "def make():\n    return Net().eval(), {'x': torch.randn(64, 64)}\n"
    )
    (tmp_path / "scored.py").write_text(source)
    loaded = core.load_workload(core.make_request(model_id=f"{tmp_path}/scored.py:make"))
    fused = fusion_advisor.apply(loaded.model, loaded.kwargs, **QUICK)
    with pytest.raises(CannotExport, match=r"a `Scores` of scored\.py, .* name the model scored:FACTORY"):
        fused.export(tmp_path / "out")
    fused.revert()
    assert not (tmp_path / "out").exists()


class Broken(Toy):
    """A toy with a graph break."""

    def forward(self, x):
        """Break in the middle."""
        y = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(y)


class Listed(torch.nn.Module):
    """Takes a list."""

    def forward(self, xs):
        """Compute something worth a kernel."""
        return torch.nn.functional.gelu(xs[0] + xs[1]).softmax(-1)


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (Broken(), {"x": torch.randn(4, 8, 32)}, "captured as 2 graphs"),
        (Listed(), {"xs": [torch.randn(64, 64), torch.randn(64, 64)]}, "`xs` is a list"),
    ],
)
def test_what_a_package_cannot_hold_is_said(model, inputs, reason, tmp_path):
    fused = fusion_advisor.apply(model.eval(), inputs, **QUICK)
    with pytest.raises(CannotExport, match=reason):
        fused.export(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert fused.is_applied
    fused.revert()


def test_a_package_without_a_model_of_its_own_takes_the_users(run, tmp_path):
    """The class of a factory's model has no configuration: apply works on the model itself, and MODEL names one for the tests."""
    fused, x, _ = run
    model, name = fused.model, "toy_of_this_test"
    fused.export(tmp_path / name)
    sys.path.insert(0, str(tmp_path / name))
    try:
        package = importlib.import_module(name)
        with torch.no_grad():
            own = model(x)
            package.apply(model)
            found = model(x)
            assert package.fallbacks(model) == {}
            assert torch.equal(model(x[:1]), model.forward.__self__.original(x[:1]))
            assert list(package.fallbacks(model).values()) == [1]
            package.revert(model)
            fused.apply()
            assert torch.equal(found, fused(x))
            fused.revert()
            assert torch.equal(model(x), own)
        other = Toy()
        other.extra = torch.nn.Linear(2, 2)
        with pytest.raises(package.ModelDiffers, match="extra"):
            package.apply(other.eval())
        assert "forward" not in vars(other)
        with pytest.raises(importlib.import_module(f"{name}.example").NoModel, match="MODEL="):
            importlib.import_module(f"{name}.example").make_model()
    finally:
        sys.path.remove(str(tmp_path / name))


def replace_a_forward(model):
    """As accelerate does, on the module itself."""
    model.norms[0].forward = lambda x: 2 * x
    return lambda: delattr(model.norms[0], "forward")


def hook_a_submodule(model):
    """As observers do."""
    return model.norms[0].register_forward_hook(lambda module, args, out: 2 * out).remove


class Doubled(torch.nn.LayerNorm):
    """Another class of the same attributes."""

    def forward(self, x):
        """Compute."""
        return 2 * super().forward(x)


def change_a_class(model):
    """As parametrizations do."""
    model.norms[0].__class__, before = Doubled, type(model.norms[0])
    return lambda: setattr(model.norms[0], "__class__", before)


def hook_all_modules(model):
    """As profilers do."""

    def double(module, args, out):
        return 2 * out if module is model.norms[0] else None

    return torch.nn.modules.module.register_module_forward_hook(double).remove


@torch.no_grad()
def test_what_runs_in_place_of_a_submodules_forward_or_around_it_is_not_passed_over(run, tmp_path, monkeypatch):
    """Before apply it is a difference between the models; after it, calls run the model's own forward."""
    fused, x, _ = run
    fused.export(tmp_path / "around_a_submodule")
    monkeypatch.syspath_prepend(tmp_path / "around_a_submodule")
    package, model = importlib.import_module("around_a_submodule"), fused.model
    for change, here, later in (
        (replace_a_forward, "a forward of its own", "the forward of a submodule was replaced"),
        (hook_a_submodule, "a hook", "a hook was added to a submodule"),
        (change_a_class, "Doubled", "a submodule has another class"),
        (hook_all_modules, "", "a hook for all modules"),
    ):
        back = change(model)
        right = model(x)
        if here:
            with pytest.raises(package.ModelDiffers, match=here):
                package.apply(model)
        back()
        package.apply(model)
        model(x)
        assert not package.fallbacks(model)
        back = change(model)
        assert torch.equal(model(x), right)
        (reason,) = package.fallbacks(model)
        assert reason.startswith(later)
        if here:  # dynamo itself runs no hook for all modules
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            assert torch.equal(compiled(x), right)
        back()
        model(x)
        assert package.fallbacks(model) == {reason: 1}
        package.revert(model)


def test_a_package_with_its_compiled_kernels_compiles_nothing(run, tmp_path, monkeypatch):
    name = "brings_its_code"
    run[0].export(tmp_path / name, with_cache=True)
    files = sorted(path.suffix for path in (tmp_path / name / name / "built").iterdir())
    assert files
    assert set(files) == {".so"}
    monkeypatch.setenv("PATH", "")  # there is no compiler
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / name)
    importlib.import_module(f"{name}.ops").prepare()
    assert not (tmp_path / "cache").exists()
    (source, *_) = (tmp_path / name / name / "kernels").glob("*.cpp")
    source.write_text(source.read_text() + "// another version\n")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler"):
        importlib.import_module(f"{name}._cpp")._loaded(source)


def test_an_old_torch_is_told_what_it_lacks(run, tmp_path):
    name = "needs_more_of_torch"
    run[0].export(tmp_path / name)
    path = tmp_path / name / name / "_requirements.py"
    path.write_text(path.read_text().replace("ATEN_OPS = (", 'ATEN_OPS = (\n    "aten.not_an_op.default",'))
    sys.path.insert(0, str(tmp_path / name))
    try:
        with pytest.raises(ImportError, match=r"torch .* has no op aten\.not_an_op\.default"):
            importlib.import_module(name)
    finally:
        sys.path.remove(str(tmp_path / name))


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("gpt2_fused", "gpt2_fused"),
        ("My-Model.v2", "my_model_v2"),
        ("2fast", "fused_2fast"),
        ("torch", "fused_torch"),
        ("class", "fused_class"),
        ("json", "fused_json"),
        ("transformers", "fused_transformers"),
        ("match", "match"),
    ],
)
def test_a_package_is_named_after_its_folder(folder, name, tmp_path):
    assert package_name(tmp_path / folder) == name


class NoRows(torch.nn.Module):
    """Two chains; the second one is called without elements."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x, more):
        """Run it."""
        return self.norm(torch.nn.functional.gelu(self.linear(x)) + x), torch.sigmoid(more * 2) + more


def test_a_kernel_without_elements_is_left_out_of_a_package(tmp_path, monkeypatch):
    model, inputs = NoRows().eval(), (torch.randn(4, 64), torch.randn(0, 64))
    with fusion_advisor.apply(model, inputs, **QUICK) as fused, torch.no_grad():
        (left_out,) = fused.export(tmp_path / "no_rows")
        expected = model(*inputs)
    assert left_out.endswith("it has no elements to compute")
    monkeypatch.syspath_prepend(tmp_path / "no_rows")
    exported = importlib.import_module("no_rows")
    with torch.no_grad():
        found = exported.apply(model)(*inputs)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
