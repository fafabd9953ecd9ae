"""How the committed examples are run again: their commands, their order, one at a time on each GPU, and what is replaced."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.gpus import gpu_of_worker, visible_gpus
from tools.rerun_examples import COMMITTED, EXAMPLES, SHOWN, Example, compact, examples, install, run, run_all


def test_each_example_is_run_with_its_own_command_the_longest_first() -> None:
    found = examples()
    assert len(found) == 14
    assert found[0].folder.name == "qwen2.5-7b-bf16-1x2048-h200"
    assert found[0].words[:2] == ("apply", "Qwen/Qwen2.5-7B") and "--offline" in found[0].words
    assert [one.folder.name for one in examples(["vit-bf16-1-h200"])] == ["vit-bf16-1-h200"]
    with pytest.raises(SystemExit, match="no such example: vit-bf61"):
        examples(["vit-bf61"])


def test_a_gpu_has_one_run_at_a_time_and_a_failed_run_does_not_count(tmp_path: Path) -> None:
    busy, seen, most = set[str](), [], []
    lock = threading.Lock()

    def runner(example: Example, gpu: str) -> bool:
        with lock:
            assert gpu not in busy
            busy.add(gpu)
            most.append(len(busy))
        time.sleep(0.01)
        with lock:
            busy.remove(gpu)
            seen.append(gpu)
        return example.words[0] != "3"

    chosen = [Example(folder=tmp_path / str(n), words=(str(n),)) for n in range(9)]
    good = run_all(chosen, ["0", "5"], runner)
    assert [one.words[0] for one in good] == ["0", "1", "2", "4", "5", "6", "7", "8"]
    assert set(seen) == {"0", "5"} and max(most) == 2


@pytest.mark.parametrize("name", ["gpt2-fp32-1x128-h200", SHOWN])
def test_a_run_takes_the_place_of_the_committed_one(tmp_path: Path, name: str) -> None:
    made, old = tmp_path / "made", tmp_path / name
    for folder, kernel in ((made, "F1_new.py"), (old, "F1_old.py")):
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels" / kernel).write_text("")
        for file in (*COMMITTED[1:], *(["report.html"] if folder is made or name == SHOWN else [])):
            (folder / file).write_text(json.dumps({"by": folder.name, "ns": [1, 2.5, 1e-7]}, indent=1))
    (made / "trace.before.json.gz").write_bytes(b"")
    install(made, Example(folder=old, words=()))
    assert {path.name for path in old.iterdir()} == {*COMMITTED, *(["report.html"] if name == SHOWN else [])}
    assert [path.name for path in (old / "kernels").iterdir()] == ["F1_new.py"]
    assert (old / "report.md").read_text() == (made / "report.md").read_text()
    assert (old / "report.json").read_text() == '{"by":"made","ns":[1,2.5,1e-07]}\n'


def test_the_committed_examples_are_slim() -> None:
    files = [path for path in EXAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8_000_000
    assert [path.parent.name for path in files if path.suffix == ".html"] == [SHOWN]
    for path in files:
        if path.suffix == ".json" and path.parent.name != "gpt2_fused":  # the exported package has files to be read
            assert path.read_text() == compact(path.read_text()), path


def test_a_run_that_fails_says_so_and_leaves_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run(Example(folder=Path("one"), words=("apply", "--no-such-option")), "0", tmp_path)
    said = capsys.readouterr().out
    assert "one: exit code 2" in said and "no-such-option" in said
    assert "no-such-option" in (tmp_path / "one.log").read_text()


def test_gpus_are_told_without_cuda_and_shared_out_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert visible_gpus() == []
    assert [gpu_of_worker(f"gw{n}", ["2", "5"]) for n in range(3)] == ["2", "5", "2"]
    assert gpu_of_worker("", ["2", "5"]) is None and gpu_of_worker("gw1", ["0"]) is None
