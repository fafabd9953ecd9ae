"""What wanted the cores, from the system's own tables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fusion_advisor.timing.machine_load import machine_load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from Linux's /proc")


def stat(folder, pid, name, ticks):
    (folder / str(pid)).mkdir(exist_ok=True)
    (folder / str(pid) / "stat").write_text(f"{pid} ({name}) R {' '.join(['0'] * 10)} {ticks} {ticks} 0 0\n")


def test_a_busy_program_is_named_with_its_cores_and_this_process_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    for pid, name in ((11, "cc1plus (x) y"), (12, "idle"), (os.getpid(), "python")):
        stat(tmp_path, pid, name, 100)
    writer = subprocess.Popen(  # while machine_load looks away
        [sys.executable, "-c", f"import time; time.sleep(0.3); p = {str(tmp_path)!r}\n"
         f"open(p + '/11/stat', 'w').write('11 (cc1plus (x) y) R {' '.join(['0'] * 10)} 400 400 0 0')\n"
         f"open(p + '/{os.getpid()}/stat', 'w').write('1 (python) R {' '.join(['0'] * 10)} 900 900 0 0')"]
    )  # fmt: skip
    found = machine_load(tmp_path, look_s=3.0)
    writer.wait()
    assert [name for name, _ in found.busiest] == ["cc1plus (x) y"]
    assert found.busiest[0][1] == pytest.approx(2.0, rel=0.3)
    assert found.cores >= 1 and found.wait_policy == "PASSIVE"


def test_a_system_without_such_tables_gives_no_names(tmp_path):
    assert machine_load(tmp_path / "none", look_s=0.0).busiest == ()
