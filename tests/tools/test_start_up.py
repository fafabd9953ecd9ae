"""Starts are told apart from weights and imports, every failure has its reason, and no process outlives its limit."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, StaticCache

from tools.start_up.__main__ import WAYS, main, measure, run_way
from tools.start_up.child import Noted, Place, counters, host_options, runners
from tools.start_up.in_place import _INSTALL, FORMATS
from tools.start_up.table import facts_of, markdown, rest_s


@pytest.fixture
def place(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    return Place(tmp_path, "package", time.time())


def test_the_rest_is_all_but_weights_and_the_imports_of_others():
    phases = {"python": 0.5, "torch": 2.0, "transformers": 4.0, "weights": 8.0, "own imports": 0.25, "first step": 0.125}
    assert rest_s(phases) == 0.875


def test_a_phase_lasts_from_the_end_of_the_one_before(place):
    time.sleep(0.02)
    place.first_step(lambda: time.sleep(0.01))
    wall = facts_of(place.folder, "package")[0]["wall_s"]
    assert list(wall) == ["python", "torch", "first step"]
    assert wall["first step"] >= 0.03


def test_a_cache_counts_from_the_same_number_at_every_step():
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=7)
    cache = StaticCache(config=config, max_cache_len=4)
    states = torch.ones(1, 2, 1, 4)
    call = {"cache": cache, "input_ids": torch.zeros(1, 1, dtype=torch.int64)}
    for layer in range(2):
        cache.update(states, states, layer)
    restore = counters(torch, call)
    for _ in range(8):  # more steps than the cache has room for
        restore()
        for layer in range(2):
            cache.update(states, states, layer)
    assert int(cache.get_seq_length()) == 2


def test_a_failure_is_written_down_and_the_next_way_goes_on(place, capsys):
    with Noted(place, against="pt2"):
        raise ValueError("\n no room \n at all")
    assert facts_of(place.folder, "package") == [{"against": "pt2", "failed": "ValueError: no room"}]
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), Noted(place):
        raise KeyboardInterrupt


def test_a_process_over_its_limit_is_ended_and_leaves_its_reason(tmp_path):
    started = time.monotonic()
    run_way(tmp_path, "eager", 0.01)
    assert time.monotonic() - started < 30
    assert facts_of(tmp_path, "eager") == [{"failed": "over its limit of 0 s"}]


def test_without_time_left_no_process_starts(tmp_path):
    measure(tmp_path, ["apply", "plan"], total_s=1, limit_s=9, apply_s=9)
    assert facts_of(tmp_path, "plan") == [{"failed": "no time was left of 1 s"}]
    assert not (tmp_path / "plan.txt").exists()


def test_the_table_has_a_row_for_each_way_and_each_failure():
    start = {"wall_s": {"torch": 2.0, "weights": 3.0, "first step": 0.5}, "cpu_s": {"torch": 1.0, "first step": 0.25}}
    facts = {
        "apply": [
            {"export": "package", "seconds": 1.5, "left_out": ["cuda-graph: not recorded"]},
            {"export": "pt2", "failed": "CannotExport: no"},
            {"against": "package", "in_place_ms": 2.0, "other_ms": 2.02, "ratio": 1.01},
            {"against": "pt2", "failed": "RuntimeError: no pt2 was exported"},
        ],
        "package": [start, {"step_ms": 2.5, "fastest_ms": 2.0, "steps": 30}],
        "aoti": [{"failed": "over its limit of 60 s"}],
    }
    lines = markdown("gpt2", facts).splitlines()
    assert "| package | 5.50 | 2.00 | – | 3.00 | – | – | 0.50 | 0.50 (0.25) | 2.500 ms |" in lines
    assert "| package | 2.000 ms | 2.020 ms | 1.010 |" in lines
    assert "| pt2 (weights inside) | – | RuntimeError: no pt2 was exported | – |" in lines
    assert "| pt2 | – | CannotExport: no |" in lines
    assert lines[-1] == "- aoti: over its limit of 60 s"


def test_a_folder_with_something_in_it_and_an_unknown_way_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["gpt2", "--to", str(tmp_path / "new"), "--ways", "apply,nothing"])
    assert "no way is called nothing" in capsys.readouterr().err
    (tmp_path / "file").write_text(json.dumps(WAYS))
    with pytest.raises(SystemExit):
        main(["gpt2", "--to", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


def test_code_on_the_host_has_no_vector_instructions_for_a_gpu():
    """torch 2.11 would take half a minute to find out which there are, at the compilation and at each start."""
    assert host_options({"input_ids": SimpleNamespace(is_cuda=True), "use_cache": False}) == {"cpp.vec_isa_ok": False}
    assert host_options({"input_ids": torch.ones(1), "use_cache": False}) == {}


def test_every_way_can_be_run():
    assert set(WAYS) == set(runners())
    assert {way for ways in FORMATS.values() for way in ways} <= set(_INSTALL)
