"""The command line alone and under torchrun: who joins, who speaks, and where each rank writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusion_advisor.cli.common import ranks
from fusion_advisor.cli.common.console import Settings
from fusion_advisor.errors import NotUnderTorchrun, UsageError
from fusion_advisor.ranks.run import check_start
from fusion_advisor.workload.request import WorkloadRequest
from tests.ranks.two import both

ROOT = Path(__file__).parents[2]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}


def test_a_run_without_torchrun_imports_nothing_of_the_ranks():
    code = (
        "import sys\nfrom fusion_advisor.cli.common import ranks, runner\n"
        "from fusion_advisor.workload.request import WorkloadRequest\n"
        "with ranks.joined(WorkloadRequest(model_id='m')) as group: assert group is None\n"
        "import fusion_advisor.fuse.pipeline\n"
        "sys.exit(' '.join(name for name in sys.modules if name.startswith('fusion_advisor.ranks')) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_one_of_several_processes_speaks():
    assert ranks.is_first({}) and not ranks.is_several({})
    assert not ranks.is_several({"RANK": "1", "WORLD_SIZE": "2"})  # a batch system's, not torchrun's
    assert not ranks.is_several({**TORCHRUN, "WORLD_SIZE": "1"})
    assert ranks.is_several(TORCHRUN) and ranks.is_first({**TORCHRUN, "RANK": "0"})
    assert not ranks.is_first({**TORCHRUN, "RANK": "1"})


def test_splitting_asks_for_torchrun():
    with (
        pytest.raises(NotUnderTorchrun, match="the environment has no RANK"),
        ranks.joined(WorkloadRequest(model_id="m", tp="auto")),
    ):
        pass


def test_the_other_ranks_write_inside_rank_0s_folder():
    runs = Path("fusion-runs")
    first, second = both(lambda group: ranks.folder_of(group, f"run-{group.rank}", None, runs))
    assert first == ("run-0", None) and second == ("run-0", runs / "run-0" / "rank1")
    first, second = both(lambda group: ranks.folder_of(group, f"run-{group.rank}", Path("out"), runs))
    assert first == ("run-0", Path("out")) and second == ("run-0", Path("out/rank1"))
    assert ranks.folder_of(None, "run-9", None, runs) == ("run-9", None)


def test_ranks_start_with_one_request_and_a_phase_that_runs_on_several():
    assert both(lambda group: check_start(group, WorkloadRequest(model_id="m"))) == [None, None]
    found = both(lambda group: check_start(group, WorkloadRequest(model_id="m", seq_len=8 + group.rank)))
    assert all("differs from rank 0 in the request" in str(one) for one in found)
    with pytest.raises(UsageError, match="--phase generate does not run on several ranks"):
        check_start(SimpleNamespace(), WorkloadRequest(model_id="m", phase="generate"))


def test_a_rank_that_speaks_shows_its_progress():
    settings = Settings()
    ranks.quiet_unless_first(settings)
    assert settings.progress == "auto"
