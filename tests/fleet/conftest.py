"""A small fleet of traces, made once for the session."""

from __future__ import annotations

import pytest

from fusion_advisor.fleet.run import FleetOptions, run_fleet
from tools.make_fleet import make


@pytest.fixture(scope="session")
def traces(tmp_path_factory):
    """Some 40 small traces of 11 jobs, five of them broken and five hostile."""
    folder = tmp_path_factory.mktemp("fleet")
    make(folder, 40, broken=5, hostile=5, launches=60)
    return folder


@pytest.fixture(scope="session")
def once(traces, tmp_path_factory):
    """The options of one whole run over the traces, its report, and its states."""
    folder = tmp_path_factory.mktemp("run")
    states = []
    options = FleetOptions(patterns=(f"{traces}/**/*.json.gz",), output=folder, processes=2)
    return options, run_fleet(options, states.append), states
