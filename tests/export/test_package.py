"""An exported package runs where fusion_advisor is not, and gives the fused model's own bits."""

from __future__ import annotations

from tests.export import models
from tests.export.fresh import check_shown, in_a_fresh_environment


def test_packages_give_the_fused_models_bits_without_us(tmp_path):
    runs = {f"{make.__name__}_fused": models.fused(make) for make in (models.gpt2, models.llama, models.bert)}
    for name, (_, _, fused) in runs.items():
        assert fused.export(tmp_path / name) == ()
        assert fused.is_applied
        source = (tmp_path / name / name / "forward.py").read_text()
        assert source.count("for index in range(") == 1
    for shown in in_a_fresh_environment(tmp_path, runs).values():
        check_shown(shown)
