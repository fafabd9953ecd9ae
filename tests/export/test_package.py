"""An exported package runs where fusion_advisor is not, and gives the fused model's own bits."""

from __future__ import annotations

from tests.export import models
from tests.export.committed import check_committed, masked
from tests.export.fresh import check_shown, in_a_fresh_environment


def test_packages_give_the_fused_models_bits_without_us(tmp_path):
    runs = {f"{make.__name__}_fused": models.fused(make) for make in (models.gpt2, models.llama, models.bert)}
    for name, (_, _, fused) in runs.items():
        assert fused.export(tmp_path / name) == ()
        assert fused.is_applied
        source = (tmp_path / name / name / "forward.py").read_text()
        assert source.count("for index in range(") == 1
        assert "test_torch_export_sees_the_ops" in (tmp_path / name / "tests" / "test_package.py").read_text()
    check_committed(tmp_path / "gpt2_fused")
    for shown in in_a_fresh_environment(tmp_path, runs).values():
        check_shown(shown)


def test_only_what_differs_from_run_to_run_is_masked():
    line = "One step: 1.25 ms eager, 934 µs with all: 1.34 times as fast. Measured on Xeon 8 with torch 2.13.0; fp32"
    right = "One step: TIME eager, TIME with all: RATIO times as fast. Measured on DEVICE with torch 2.13.0; fp32"
    assert masked(line) == right
    kept = "| F1 | gelu_tanh | 3 | -2.5 µs | https://arxiv.org/abs/1606.08415 |"
    assert masked(kept) == "| F | gelu_tanh | 3 | TIME | https://arxiv.org/abs/1606.08415 |"
