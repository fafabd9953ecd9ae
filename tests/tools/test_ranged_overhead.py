"""The tool that measures a call in a range: each case is served by it, on a static cache by a recording."""

from __future__ import annotations

import pytest

from tools.ranged_overhead import CASES, measure, served


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_served_by_the_range(case):
    assert measure(case, 1, 2) > 0
    fused, args, kwargs = served(case, 1)
    assert not isinstance(fused.shapes[0].find(args, kwargs), str)
