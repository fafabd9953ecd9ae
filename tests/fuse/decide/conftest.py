"""A machine's clock that tests move themselves."""

from __future__ import annotations

import pytest

from tests.timing.planted import PlantedTimer


@pytest.fixture
def clock() -> PlantedTimer:
    return PlantedTimer()
