"""Which launch parameters are tried, which are chosen, and what the file on disk survives."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fusion_advisor.autotune.cache import SCHEMA, TuningStore
from fusion_advisor.autotune.tune import MOST_TRIALS, Gpu, allocate, best_tuning, candidates, tuning_key
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.candidates import is_faster_in_cuda
from fusion_advisor.codegen.cuda.shared_memory import shared_memory_of
from fusion_advisor.codegen.layout_copy import rows_copy
from fusion_advisor.library.discover import list_kernels, load_kernel
from fusion_advisor.library.patterns import lower_reference
from tests.kernel_cases import programs
from tests.kernel_cases.lowered import lower_function
from tests.kernel_cases.window_cases import CASES

HEADER = Header(title="rmsnorm", summary="a test", origin="a test")
CUDA = torch.device("cuda", 0)


class CountingClock:
    """Adds up what launchers say they cost."""

    method = "fake"

    def __init__(self):
        self.spent_ns = 0

    def prepare(self, call, rotation):
        def repetition():
            for number in range(rotation.calls):
                call(number % rotation.sets)

        return repetition

    def time_ns(self, repetition):
        before = self.spent_ns
        repetition()
        return self.spent_ns - before


class FakeGpu(Gpu):
    """A GPU by name, with the tensors of a CPU."""

    def __init__(self, name="FAKE 100", cache_bytes=2**16, free_bytes=2**30):
        super().__init__(torch.device("cpu"))
        self._name, self._cache_bytes, self._free_bytes = name, cache_bytes, free_bytes

    def name(self):
        return self._name

    def cache_bytes(self):
        return self._cache_bytes

    def free_bytes(self):
        return self._free_bytes


def choose(program, cost_ns, store, declared=(), **more):
    """Tune with launchers that cost what ``cost_ns`` says; returns the result and the tunings that were built."""
    clock, built = CountingClock(), []

    def build(tuning):
        built.append(tuning)
        if cost_ns(tuning) is None:
            raise RuntimeError("too many resources requested for launch")

        def launch(*tensors):
            assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
            clock.spent_ns += cost_ns(tuning)

        return launch

    found = best_tuning(
        program, declared, "triton", CUDA, header=HEADER, store=store, clock=clock, build=build, gpu=FakeGpu(), **more
    )
    return found, built


def test_a_manifest_that_declares_more_is_measured_again(tmp_path):
    store, declared = TuningStore(tmp_path / "tuning.json"), [Tuning(block_cols=512, num_warps=1)]
    program = programs.bias_gelu_erf(2048, 3584)
    assert choose(program, lambda _: 1000, store)[0].source == "measured"
    found, built = choose(program, lambda tuning: 100 if tuning in declared else 1000, store, declared)
    assert (found.tuning, found.source) == (declared[0], "measured") and declared[0] in built
    again, built = choose(program, lambda _: 1000, store, declared)
    assert (again.tuning, again.source, built) == (declared[0], "stored", [])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize(
    "program",
    [
        programs.rmsnorm(16384, 4096, "bfloat16"),
        programs.rmsnorm(2048, 64, "float16"),
        programs.softmax(8, 20000),
        programs.gelu_tanh((2**20,), "bfloat16"),
        programs.rope(1, 32, 2048, 128, "bfloat16"),
        programs.rmsnorm(1, 1),
    ],
    ids=["rows", "narrow", "looped", "flat", "tiled", "one"],
)
def test_candidates_are_few_and_launch_differently(backend, program):
    found = candidates(program, backend)
    assert found[0][0] == Tuning()
    assert 1 <= len(found) <= MOST_TRIALS
    assert len({text for _, text in found}) == len(found)
    if program.dims[-1] > 32:
        assert len(found) >= 3


def sizes_of(text):
    return {name: int(number) for name, _, number in (item.partition("=") for item in text.split())}


def elements_of_a_thread(text):
    sizes = sizes_of(text)
    return sizes["BLOCK_COLS"] * sizes.get("BLOCK_ROWS", 1) / sizes["num_warps"] / 32


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("rope", [False, True])
def test_few_elements_get_threads_with_little_to_do(backend, rope):
    program = programs.rope(1, 32, 1, 128, "bfloat16") if rope else programs.gelu_tanh((4096,), "bfloat16")
    large = programs.rope(1, 32, 2048, 128, "bfloat16") if rope else programs.gelu_tanh((2**20,), "bfloat16")
    declared = Tuning(block_cols=2048, block_rows=32, num_warps=8)
    asked = [tuning for tuning, _ in candidates(program, backend, [declared])]
    assert asked[1] != declared and [tuning for tuning, _ in candidates(large, "triton", [declared])][1] == declared

    def each(text):
        sizes = sizes_of(text)
        return sizes["PACKS"] * sizes["VEC"] if backend == "cuda" else elements_of_a_thread(text)

    assert min(each(text) for _, text in candidates(program, backend)) <= 2
    assert min(each(text) for _, text in candidates(large, backend)) >= 4


@pytest.mark.parametrize("size", [56, 28])
def test_threads_that_read_windows_get_no_more_elements_than_in_the_first_launch(size):
    """Triton compiles larger tiles of 11 loads in twice the time, and they have no registers for them."""
    images = torch.randn(16, 64, size, size, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    inputs = (images, torch.randn(64, 1, 1, dtype=torch.bfloat16), torch.randn_like(images))
    pooled = candidates(lower_function(CASES["mean less itself, last"][0], *inputs)[0].program, "triton")
    plain = candidates(lower_function(lambda x, scale, residual: residual + scale * x, *inputs)[0].program, "triton")
    assert len(pooled) >= 3 and len(plain) >= 4
    assert max(elements_of_a_thread(text) for _, text in pooled) == elements_of_a_thread(pooled[0][1])
    assert max(elements_of_a_thread(text) for _, text in plain) > elements_of_a_thread(plain[0][1])


@pytest.mark.parametrize("cols", [40960, 200704])
def test_rows_that_are_walked_are_tried_with_at_least_the_warps_of_the_first_launch(cols):
    program = programs.softmax(64, cols)
    tunings = candidates(program, "triton")
    assert tunings[0][1] == "BLOCK_ROWS=1 BLOCK_COLS=4096 num_warps=8"
    assert len(tunings) == 3
    assert all(tuning.num_warps >= 16 and tuning.block_cols >= 4096 for tuning, _ in tunings[1:])


def test_a_manifest_s_tunables_come_before_derived_ones():
    program = programs.rmsnorm(16384, 4096, "bfloat16")
    declared = Tuning(num_warps=2)
    assert [tuning for tuning, _ in candidates(program, "triton", [Tuning(), declared])][1] == declared
    for spec in list_kernels():
        assert len(candidates(program, "cuda", spec.tunables)) <= MOST_TRIALS


@pytest.mark.parametrize(
    ("program", "block_rows"),
    [
        (programs.rope(1, 32, 2048, 64, "bfloat16"), 8),
        (programs.rope_pairs(1, 32, 2048, 64, "bfloat16"), 4),
        (programs.rope_qk(32, 8, 1, 2048, 64, "bfloat16"), 8),
        (programs.bias_gelu_erf(512, 256, "bfloat16"), 2),
    ],
)
def test_tiles_of_512_elements_are_tried_first(program, block_rows):
    assert candidates(program, "triton")[1][0] == Tuning(block_rows=block_rows, num_warps=4)


def test_small_blocks_take_both_halves_of_a_row():
    kernel = load_kernel("rope")
    _, reference = kernel.references[0]
    (lowered,) = lower_reference(kernel.spec, reference, {"B": 1, "H": 32, "S": 2048, "D": 128}, dtype=torch.bfloat16)
    assert candidates(lowered.program, "cuda")[0][1] == "THREADS=8 ROWS=16 PACKS=1 VEC=8"
    assert candidates(programs.rope(1, 32, 2048, 64, "bfloat16"), "cuda")[0][1] == "THREADS=8 ROWS=32 PACKS=2 VEC=8"


def test_few_narrow_rows_are_tried_four_to_a_block():
    tried = [tuning for tuning, _ in candidates(programs.rmsnorm(32, 128, "bfloat16"), "triton")]
    assert Tuning(block_rows=4, num_warps=4) in tried
    assert Tuning(block_rows=4, num_warps=4) not in [t for t, _ in candidates(programs.rmsnorm(4096, 128, "bfloat16"), "triton")]


def test_rows_are_shared_by_clusters_where_they_are_long_and_the_gpu_has_clusters():
    def clusters(program, arch):
        return [tuning.cluster for tuning, _ in candidates(program, "cuda", limits=shared_memory_of(arch)) if tuning.cluster]

    assert clusters(programs.softmax(2048, 50264, "bfloat16"), 90) == [4, 8, 4, 8]
    assert clusters(programs.softmax(2048, 300000, "bfloat16"), 90) == [8, 8]  # four blocks have no registers for it
    assert clusters(programs.softmax(1, 50264, "bfloat16"), 90) == [8, 8, 4, 4]
    found = candidates(programs.softmax(4096, 50264), "cuda", [Tuning(num_warps=4)] * 5, limits=shared_memory_of(90))
    assert [bool(tuning.cluster) for tuning, _ in found[:3]] == [False, True, True]
    assert not clusters(programs.softmax(2048, 10**6), 90)
    assert not clusters(programs.softmax(2048, 50264, "bfloat16"), 80)
    assert not clusters(programs.rmsnorm(2048, 4096, "bfloat16"), 90)


def test_cuda_is_worth_building_for_rows_read_twice_or_divided_by_channels_and_for_tanh():
    assert is_faster_in_cuda(programs.softmax(64, 16385, "bfloat16"))
    assert not is_faster_in_cuda(programs.softmax(64, 16384, "bfloat16"))
    assert not is_faster_in_cuda(programs.rope(1, 32, 2048, 64, "bfloat16"))
    found = set()
    for spec in list_kernels():
        if spec.gemv is None:
            reference = load_kernel(spec.name).references[0][1]
            made = (next(lower_reference(spec, reference, dict(case.sizes), dtype=torch.bfloat16)) for case in spec.bench)
            found |= {spec.name for lowered in made if is_faster_in_cuda(lowered.program)}
    assert found == {"groupnorm", "groupnorm_silu", "log_softmax", "softcap"}  # cross-entropy walks a row once, however wide


def test_the_fastest_is_chosen_stored_and_read_back(tmp_path):
    program, store = programs.rmsnorm(2048, 4096, "bfloat16"), TuningStore(tmp_path / "tuning.json")
    fast = candidates(program, "triton")[2][0]
    found, built = choose(program, lambda tuning: 500 if tuning == fast else 1000, store)
    assert found.tuning == fast
    assert found.source == "measured"
    assert found.text == f"measured, best of {len(built)}"
    assert dict(found.tried)[candidates(program, "triton")[2][1]] == pytest.approx(500)
    again, built = choose(program, lambda tuning: 1, store)
    assert (again.tuning, again.source, built) == (fast, "stored", [])
    (entry,) = json.loads(store.path.read_text())["entries"].values()
    assert entry["median_ns"] == pytest.approx(500)
    assert entry["default_ns"] == pytest.approx(1000)


def test_what_is_far_from_the_fastest_is_timed_a_few_times_only(tmp_path):
    program, seen = programs.rmsnorm(2048, 4096, "bfloat16"), Counter()
    names = [tuning for tuning, _ in candidates(program, "triton")]

    def cost_ns(tuning):
        seen[tuning] += 1
        return {names[0]: 1050, names[1]: 1200}.get(tuning, 1000)

    choose(program, cost_ns, TuningStore(tmp_path / "t.json"))
    assert seen[names[0]] == seen[names[2]] > 3 * seen[names[1]] > 0


def test_less_than_noise_leaves_the_backend_s_choice(tmp_path):
    program = programs.rmsnorm(2048, 4096, "bfloat16")
    found, _ = choose(program, lambda tuning: 1000 if tuning == Tuning() else 990, TuningStore(tmp_path / "t.json"))
    assert found.tuning == Tuning()
    assert found.source == "measured"


def test_configurations_that_cannot_run_are_left_out(tmp_path):
    program, store = programs.rmsnorm(2048, 4096, "bfloat16"), TuningStore(tmp_path / "t.json")
    found, _ = choose(program, lambda tuning: None if tuning == Tuning() else 10 * (tuning.num_warps or 1), store)
    assert found.tuning.num_warps == min(t.num_warps for t, _ in candidates(program, "triton")[1:])
    found, _ = choose(programs.softmax(4, 64), lambda tuning: None, store)
    assert (found.tuning, found.source, found.tried) == (Tuning(), "default", ())


def test_the_budget_ends_the_search_after_the_backend_s_choice(tmp_path):
    program = programs.rmsnorm(2048, 4096, "bfloat16")
    found, built = choose(program, lambda tuning: 1000, TuningStore(tmp_path / "t.json"), budget_s=0.0)
    assert built == [Tuning()]
    assert found.tuning == Tuning()


@pytest.mark.parametrize(("backend", "device"), [("cpp", "cpu"), ("triton", "cpu"), ("cpp", "cuda")])
def test_nothing_is_tried_where_nothing_can_be_chosen(backend, device, tmp_path):
    store = TuningStore(tmp_path / "t.json")
    found = best_tuning(programs.rmsnorm(), (), backend, device, header=HEADER, store=store)
    assert (found.tuning, found.source) == (Tuning(), "default")
    assert not store.path.exists()


def test_the_key_tells_apart_what_needs_another_choice():
    program = programs.rmsnorm(2048, 3584, "bfloat16")

    def key(other=program, title="rmsnorm", backend="triton", device="NVIDIA H200", fast=False, declared=()):
        return tuning_key(other, title, backend, device, fast_math=fast, declared=declared)

    assert key() == key(programs.rmsnorm(1500, 3584, "bfloat16"))  # one bucket: both are below 2048
    others = {
        key(programs.rmsnorm(2049, 3584, "bfloat16")),
        key(programs.rmsnorm(2048, 4096, "bfloat16")),
        key(programs.rmsnorm(2048, 3584, "float16")),
        key(programs.softmax(2048, 3584, "bfloat16")),
        key(title="other"),
        key(backend="cuda"),
        key(device="NVIDIA A100"),
        key(fast=True),
        key(declared=[Tuning(num_warps=4)]),
        key(declared=[Tuning(num_warps=4, cluster=2)]),  # which the repr of a Tuning leaves out
    }
    assert len(others) == 10
    assert key() not in others
    assert key(programs.bias_gelu_erf(2048, 3584)) == key(programs.bias_gelu_erf(2000, 4096))  # no row has to fit a block


def test_packs_of_a_stored_tuning_fit_every_width():
    for cols in (64, 3072, 4096, 16384):
        for tuning, text in candidates(programs.rmsnorm(16384, cols, "bfloat16"), "cuda"):
            found = dict(item.split("=") for item in text.split())
            assert tuning.num_warps in (None, 1)
            assert int(found["THREADS"]) * int(found["PACKS"]) * int(found["VEC"]) - cols < 32 * int(found["PACKS"]) * 8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema": "other/1", "entries": {}}',
        b'{"schema": "fusion-advisor-tuning/1", "entries": 3}',
    ],
)
def test_a_corrupt_file_is_a_warning_and_is_replaced(content, tmp_path):
    path, warnings = tmp_path / "tuning.json", []
    path.write_bytes(content)
    store = TuningStore(path, warnings.append)
    assert store.get("key") is None
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    store.put("key", Tuning(num_warps=8), median_ns=1, default_ns=2)
    assert TuningStore(path, pytest.fail).get("key") == Tuning(num_warps=8)


@pytest.mark.parametrize(
    "entry", [3, {}, {"tuning": {"num_warps": "8"}}, {"tuning": {"num_warps": True}}, {"tuning": {"num_warps": -1}},
              {"tuning": {"num_warps": 2**40}}, {"tuning": {"colour": 1}}]
)  # fmt: skip
def test_a_damaged_entry_is_a_warning(entry, tmp_path):
    path, warnings = tmp_path / "tuning.json", []
    path.write_text(json.dumps({"schema": SCHEMA, "entries": {"key": entry}}))
    assert TuningStore(path, warnings.append).get("key") is None
    assert len(warnings) == 1


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    warnings = []
    store = TuningStore(tmp_path / "file" / "tuning.json", warnings.append)
    store.put("key", Tuning(), median_ns=1, default_ns=1)
    assert "cannot be written" in warnings[-1]


def test_the_file_lies_in_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert TuningStore().path == tmp_path / "fusion-advisor" / "tuning.json"


def put_some(path, first):
    for number in range(first, first + 10):
        TuningStore(path).put(f"key{number}", Tuning(num_warps=4), median_ns=1, default_ns=1)


def test_processes_side_by_side_lose_nothing(tmp_path):
    path = tmp_path / "tuning.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=put_some, args=(path, 10 * number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(json.loads(path.read_text())["entries"]) == 30


def test_allocated_operands_hold_every_address():
    program = programs.rmsnorm(4, 24, row_stride=37)
    tensors = list(allocate(program, torch.device("cpu")))
    assert [tensor.dtype for tensor in tensors] == [getattr(torch, operand.dtype) for operand in program.operands]
    for value in (value for value in program.values if value.op == "load"):
        last = value.offset + sum((size - 1) * stride for size, stride in zip(program.dims, value.strides, strict=True))
        assert tensors[value.operand].numel() > last


def test_allocated_operands_hold_what_is_addressed_by_numbers():
    wide, rows = allocate(rows_copy(4, 13, 16, "bfloat16"), torch.device("cpu"))
    assert (wide.numel(), rows.numel()) == (3 * 16 + 13, 4 * 13)
    kernel = load_kernel("groupnorm")
    (_, reference), *_ = kernel.references
    whole, *_ = lower_reference(kernel.spec, reference, {"B": 2, "G": 2, "K": 3, "H": 2, "W": 2})
    # A channel is told by a column's number divided by the size of a picture.
    assert sorted(made.numel() for made in allocate(whole.program, torch.device("cpu"))) == [6, 6, 48, 48]


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_tuning_takes_less_than_two_seconds(backend, tmp_path):
    store = TuningStore(tmp_path / "tuning.json", pytest.fail)
    program = programs.rmsnorm(16384, 4096, "bfloat16")
    # The first build of a process also imports the compiler.
    best_tuning(programs.softmax(64, 64), (), backend, "cuda", header=replace(HEADER, title="warm"), store=store)
    found = best_tuning(program, (), backend, "cuda", header=HEADER, store=store)
    assert found.source == "measured"
    assert len(found.tried) >= 3
    assert found.tune_ns < 2e9
