"""``--weights``: whole files or none."""

from __future__ import annotations

import pytest

from fusion_advisor.errors import BadWeights
from fusion_advisor.fleet.weights import Weight, read_weights


def test_jobs_and_their_hours(tmp_path):
    (tmp_path / "jobs.csv").write_text('\ufeffjob,gpu_hours,model,team\na,1.5,gpt2,x\n"b, c",1e3,,y\n', encoding="utf-8")
    assert read_weights(tmp_path / "jobs.csv") == (
        Weight(job="a", gpu_hours=1.5, model="gpt2"),
        Weight(job="b, c", gpu_hours=1000.0),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "job"),
        ("job\na\n", "gpu_hours"),
        ("job,gpu_hours\na,many\n", "line 2"),
        ("job,gpu_hours\na,1\nb,-1\n", "line 3"),
        ("job,gpu_hours\na,inf\n", "line 2"),
        ("job,gpu_hours\na\n", "line 2"),
        ("job,gpu_hours\na,1\na,2\n", "twice"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(tmp_path, text, why):
    (tmp_path / "jobs.csv").write_text(text)
    with pytest.raises(BadWeights, match=why):
        read_weights(tmp_path / "jobs.csv")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadWeights, match=r"none\.csv"):
        read_weights(tmp_path / "none.csv")
