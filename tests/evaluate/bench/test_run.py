"""The bench: for real on the CPU with tiny shapes; what belongs to a GPU behind fakes, and once on one."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.cli.app import main
from fusion_advisor.cli.commands.bench import parse_shape
from fusion_advisor.cli.common.console import build_console
from fusion_advisor.errors import UnknownSchema, UsageError
from fusion_advisor.evaluate.bench import peers as bench_peers
from fusion_advisor.evaluate.bench import row as bench_row
from fusion_advisor.evaluate.bench import run as bench_module
from fusion_advisor.evaluate.bench.cases import plan_bench
from fusion_advisor.evaluate.bench.inputs import make_inputs
from fusion_advisor.evaluate.bench.plot import draw
from fusion_advisor.evaluate.bench.records import BenchRow, BenchRun, Entrant, dump_run, judged, limit_ns, read_run
from fusion_advisor.evaluate.bench.row import BenchOptions, Ceilings
from fusion_advisor.evaluate.bench.run import bench, run_alone
from fusion_advisor.evaluate.bench.view import bench_markdown, bench_tables, summary_line
from fusion_advisor.evaluate.kinds import KINDS
from fusion_advisor.library.discover import list_kernels, load_kernel
from fusion_advisor.library.linear import problem_of
from fusion_advisor.library.spec import Case
from fusion_advisor.records import Bandwidth, Environment, Timing
from fusion_advisor.timing.kernel_timer import WallClock, cache_bytes, interleaved, plan_rotation

CPU = torch.device("cpu")
H200 = Bandwidth(copy_bytes_per_s=4_265 * 10**9, launch_ns=1_100)
OPTIONS = BenchOptions(device=CPU, with_compile=False, rounds=3, budget_s=0.0)


class Silent:
    def __init__(self):
        self.steps = []

    def step(self, done, total, text):
        self.steps.append((done, total, text))


@pytest.fixture
def ceilings(monkeypatch):
    """A bandwidth without measuring it, and a small cache, so that few sets are made."""
    found = Ceilings(bandwidth=Bandwidth(copy_bytes_per_s=10**10, launch_ns=2_000), cache_bytes=2**16, clock=WallClock())
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda device: found)
    return found


def timing(us):
    ns = round(us * 1e3)
    return Timing(times_ns=(ns,) * 7, median_ns=ns, ci_low_ns=ns - 10, ci_high_ns=ns + 10, method="cuda_graph")


def row(sizes=(("R", 2048), ("C", 4096)), limit=8_969, kernel="rmsnorm", dtype="bfloat16", is_past_cache=True, **times):
    entrants = tuple(
        Entrant(name=name, timing=timing(us)) if us else Entrant(name=name, note=f"{name} is not there")
        for name, us in times.items()
    )
    return BenchRow(
        kernel=kernel, variant="llama", dtype=dtype, sizes=sizes, moved_bytes=2 * 2 * sizes[0][1] * sizes[1][1] + 8_192,
        limit_ns=limit, input_sets=4, is_past_cache=is_past_cache, entrants=entrants, **judged(entrants, limit),
    )  # fmt: skip


def run_of(*rows):
    return BenchRun(
        environment=Environment(device_name="NVIDIA H200", device_kind="cuda", torch="2.11.0", triton="3.6.0"),
        bandwidth=H200,
        cache_bytes=60 * 2**20,
        method=("How.",),
        peers=(("torch", "2.11.0"), ("liger-kernel", "0.8.5")),
        rows=rows,
    )


RUN = run_of(
    row(eager=118.4, compile=11.64, liger=11.04, triton=9.5, cuda=9.8),
    row((("R", 16384), ("C", 4096)), 64_042, eager=834.0, compile=73.1, liger=66.7, triton=0, cuda=70.0),
    row((("R", 1), ("C", 4096)), 1_106, is_past_cache=False, eager=11.8, compile=1.7, liger=1.57, triton=1.3, cuda=1.2),
)


def test_limit_is_bytes_over_bandwidth_plus_a_launch():
    assert limit_ns(268_443_648, H200) == round(268_443_648 / 4265e9 * 1e9) + 1_100
    assert limit_ns(0, H200) == 1_100


@pytest.mark.parametrize(
    ("input_bytes", "expected_sets", "is_past"),
    [(128 * 2**20, 2, True), (60 * 2**20, 4, True), (16 * 2**20, 12, True), (2 * 896, 512, False)],
)
def test_inputs_rotate_past_three_times_the_cache(input_bytes, expected_sets, is_past):
    rotation = plan_rotation(input_bytes, input_bytes, 60 * 2**20, 1_100 + input_bytes / 2132, 100 * 2**30)
    assert rotation.sets == expected_sets
    assert rotation.is_past_cache is is_past
    assert rotation.is_past_cache == (rotation.sets * input_bytes > 3 * 60 * 2**20)
    assert rotation.calls % rotation.sets == 0
    assert rotation.calls <= 512


def test_a_repetition_is_long_enough_and_fits_into_memory():
    long = plan_rotation(2**28, 2**28, 60 * 2**20, 126_000, 100 * 2**30)
    assert long.calls * 126_000 >= 1_000_000
    tight = plan_rotation(2**28, 2**28, 60 * 2**20, 126_000, 2**30)
    assert tight.sets * 2 * 2**28 <= 2**30
    assert plan_rotation(2**40, 2**40, 2**20, 1e9, 2**30).sets == 1


def test_contenders_take_turns():
    order = []
    clock = SimpleNamespace(time_ns=lambda repetition: repetition() or 100)
    times = interleaved(clock, [lambda n=n: order.append(n) for n in range(3)], 10, rounds=6, budget_s=10.0)
    assert times == [[10] * 6] * 3
    rounds = [tuple(order[at : at + 3]) for at in range(0, 18, 3)]
    assert all(sorted(turn) == [0, 1, 2] for turn in rounds)
    assert len(set(rounds)) > 3
    assert interleaved(clock, [], 1, rounds=3, budget_s=1.0) == []


def test_the_verdict():
    first, second, third = RUN.rows
    assert (first.winner, first.best_ours, first.best_peer) == ("triton", "triton", "liger")
    assert first.of_limit == pytest.approx(8_969 / 9_500)
    assert first.speedup == pytest.approx(11.04 / 9.5)
    assert (second.winner, second.best_ours) == ("liger", "cuda")
    assert second.speedup == pytest.approx(66.7 / 70.0)
    assert third.winner == "cuda"
    nothing = judged([Entrant(name="eager"), Entrant(name="triton")], 10)
    assert nothing == {"winner": "", "best_ours": "", "of_limit": None, "best_peer": "", "speedup": None}


def test_json_round_trip(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(dump_run(RUN))
    assert read_run(path) == RUN
    path.write_text(dump_run(RUN).replace("fusion-advisor-bench/1", "fusion-advisor-bench/9"))
    with pytest.raises(UnknownSchema):
        read_run(path)


def test_a_run_on_the_cpu(ceilings, tmp_path):
    jobs = [
        (load_kernel("swiglu").spec, Case(sizes=(("R", 4), ("C", 64)), dtypes=("float32", "bfloat16"))),
        (load_kernel("add_layernorm").spec, Case(sizes=(("R", 3), ("C", 40)), dtypes=("float32",))),
        (load_kernel("rope").spec, Case(sizes=(("B", 1), ("H", 2), ("S", 5), ("D", 8)), dtypes=("float32",))),
    ]
    progress, partial = Silent(), []
    run = bench(jobs, OPTIONS, progress, on_progress=partial.append)
    assert [row.kernel for row in run.rows] == ["swiglu", "swiglu", "add_layernorm", "rope"]
    assert [len(so_far.rows) for so_far in partial] == [1, 2, 3, 4]
    assert [step[:2] for step in progress.steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for found in run.rows:
        assert [entrant.name for entrant in found.entrants] == ["eager", "cpp"]
        assert all(entrant.timing is not None and entrant.timing.method == "wall" for entrant in found.entrants)
        assert found.winner in ("eager", "cpp")
        assert found.limit_ns == limit_ns(found.moved_bytes, ceilings.bandwidth)
        assert found.entrants[1].rel_l2 <= max(2 * found.entrants[0].rel_l2, 1e-2)
    assert run.rows[0].moved_bytes == 3 * 4 * 64 * 4
    assert run.rows[0].input_sets * 2 * 4 * 64 * 4 > 3 * 2**16
    assert run.rows[0].is_past_cache


def test_wrong_numbers_are_never_timed(ceilings, monkeypatch):
    right = bench_peers.ours

    def wrong(work, backend):
        contender = right(work, backend)
        call = contender.call
        contender.call = lambda number: [call(number)[0].mul_(1.01)]
        return contender

    monkeypatch.setattr(bench_peers, "ours", wrong)
    jobs = [(load_kernel("swiglu").spec, Case(sizes=(("R", 4), ("C", 64)), dtypes=("float32",)))]
    (found,) = bench(jobs, OPTIONS, Silent()).rows
    cpp = found.entrants[1]
    assert cpp.timing is None
    assert cpp.note.startswith("wrong numbers: relative error 1.0e-02 against fp64")
    assert (found.winner, found.best_ours, found.of_limit, found.speedup) == ("eager", "", None, None)


DROPOUT = Case(sizes=(("R", 256), ("C", 256)), dtypes=("float32",))


@pytest.mark.parametrize("name", ["dropout_add", "dropout_add_rmsnorm", "dropout_add_layernorm"])
def test_torch_s_own_dropout_is_what_ours_is_timed_against(name, ceilings):
    (found,) = bench([(load_kernel(name).spec, DROPOUT)], OPTIONS, Silent()).rows
    eager, cpp = found.entrants
    assert eager.timing is not None and cpp.timing is not None
    assert (eager.rel_l2, eager.note) == (None, bench_row.DRAWS_NOTE)
    assert cpp.rel_l2 < 1e-6 and not cpp.note


@pytest.mark.parametrize(("wrong", "what"), [
    (lambda x, residual, _seed, **_: residual + torch.nn.functional.dropout(x, 0.2), "mean square"),
    (lambda x, residual, _seed, **_: residual + x, "mean square"),
    (lambda x, residual, _seed, p: residual + 0.1 + torch.nn.functional.dropout(x, p), "mean"),
    (lambda x, residual, _seed, **_: residual * float("nan"), "mean"),
    (lambda x, _residual, _seed, p: torch.nn.functional.dropout(x, p)[0], "shape"),
])  # fmt: skip
def test_a_baseline_of_another_distribution_is_found_out(wrong, what, ceilings, tmp_path):
    bed = bench_row.set_up(load_kernel("dropout_add").spec, "seeded", DROPOUT, "float32", OPTIONS, ceilings, tmp_path)
    assert bed.work.baseline is not None
    right = bed.work.baseline(*bed.work.sets[0].inputs)
    assert bench_row._distribution([right], bed) == ""
    assert what in bench_row._distribution([wrong(*bed.work.sets[0].inputs, p=0.1)], bed)


def test_a_contender_that_fails_is_a_note(ceilings, monkeypatch):
    def fail(work, backend):
        raise RuntimeError("no such instruction\nand a trace")

    monkeypatch.setattr(bench_peers, "ours", fail)
    jobs = [(load_kernel("swiglu").spec, Case(sizes=(("R", 4), ("C", 64)), dtypes=("float32",)))]
    (found,) = bench(jobs, OPTIONS, Silent()).rows
    assert found.entrants[1].note == "RuntimeError: no such instruction"
    assert found.entrants[0].timing is not None


def test_who_takes_part_on_which_device():
    spec = load_kernel("rmsnorm").spec

    def names(**options):
        return [name for name, _ in bench_row.makers(spec, BenchOptions(**options))]

    cuda = torch.device("cuda", 0)
    assert names(device=cuda) == ["eager", "compile", "liger", "triton", "cuda"]
    assert names(device=cuda, backends=("cuda",), with_compile=False) == ["eager", "liger", "cuda"]
    assert names(device=CPU) == ["eager", "compile", "cpp"]
    spec = load_kernel("rmsnorm_linear").spec
    assert names(device=cuda) == ["eager", "compile", "cublas", "triton", "cuda", "chosen"]
    assert names(device=CPU) == ["eager", "compile"]


def test_linear_layers_against_torch_s_own_ops(ceilings, monkeypatch):
    """The contenders of a GPU, with cuBLAS's place taken by the CPU's GEMM: all of them call it, ours too."""
    options = BenchOptions(device=CPU, with_compile=False, rounds=3, budget_s=0.0)
    kind = KINDS["linear"]
    monkeypatch.setattr(bench_row, "makers", lambda spec, options: [
        ("eager", bench_peers.eager),
        *((name, bench_peers.peer(name, make)) for name, make in {**kind.peers_before, **kind.peers_after}.items()),
        ("triton", lambda work: bench_peers.ours(work, "triton")),
    ])  # fmt: skip
    for name in ("rmsnorm_linear", "rmsnorm_linear_bias", "rmsnorm_gate_up", "linear_residual"):
        jobs = [(load_kernel(name).spec, Case(sizes=(("M", 80), ("N", 24), ("K", 40)), dtypes=("bfloat16",)))]
        (found,) = bench(jobs, options, Silent()).rows
        eager, cublas, chosen, triton = found.entrants
        assert eager.timing is not None and cublas.timing is not None and chosen.timing is not None
        assert cublas.rel_l2 <= 2 * eager.rel_l2
        assert (chosen.note, chosen.tuning) == ("takes cuBLAS", "cublas (default)")
        assert triton.timing is None and triton.note.startswith("no kernel of ours")
        operands = problem_of(*jobs[0][:1], "llama", jobs[0][1], "bfloat16").operands
        assert found.moved_bytes == 2 * sum(math.prod(shape) for _, shape in operands)


def fake_ops():
    """liger-kernel's functions, in plain PyTorch."""

    def rms(x, weight, eps, offset, casting):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, eps)

    functions = {
        "LigerRMSNormFunction": rms,
        "LigerFusedAddRMSNormFunction": lambda x, r, w, eps, offset, casting: (rms(x + r, w, eps, offset, casting), x + r),
        "LigerLayerNormFunction": lambda x, w, b, eps: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps),
        "LigerSiLUMulFunction": lambda a, b: torch.nn.functional.silu(a) * b,
        "LigerFusedGateUpSiLUMulFunction": lambda y: (
            torch.nn.functional.silu(y[..., : y.shape[-1] // 2]) * y[..., y.shape[-1] // 2 :]
        ),
        "LigerGELUMulFunction": lambda a, b: torch.nn.functional.gelu(a, approximate="tanh") * b,
        "LigerReLUSquaredFunction": lambda x: torch.relu(x) ** 2,
        "LigerSoftmaxFunction": lambda x: torch.softmax(x, -1),
    }
    return SimpleNamespace(**{name: SimpleNamespace(apply=function) for name, function in functions.items()})


def test_liger_s_table_names_kernels_of_the_library():
    assert set(bench_peers.LIGER) <= {spec.name for spec in list_kernels()}


@pytest.mark.parametrize("name", bench_peers.LIGER)
def test_liger_s_ops_are_called_as_they_want(name, ceilings, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", fake_ops())
    kernel = load_kernel(name)
    letters = dict(zip("BHSDRC", (1, 4, 5, 8, 6, 24), strict=True))
    used = {dim for tensor in kernel.spec.inputs for dim in tensor.shape if isinstance(dim, str)}
    case = Case(sizes=tuple((k, v) for k, v in letters.items() if k in used), dtypes=("float32",))
    for variant, _ in kernel.references:
        if variant == "chunk_gate_last":  # liger-kernel takes the gate first
            continue
        bed = bench_row.set_up(kernel.spec, variant, case, "float32", OPTIONS, ceilings, tmp_path)
        entrant, repetition = bench_row._made_ready("liger", bench_peers.liger, bed, WallClock())
        assert repetition is not None, entrant.note
        assert entrant.rel_l2 < 1e-5


def test_what_liger_lacks_is_a_sentence(ceilings, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    case = Case(sizes=(("R", 4), ("C", 64)), dtypes=("float32",))
    for name, words in (("swiglu", bench_peers.NO_LIGER), ("gelu_erf", "liger-kernel has no op for gelu_erf")):
        spec = load_kernel(name).spec
        variant = load_kernel(name).references[0][0]
        bed = bench_row.set_up(spec, variant, case, "float32", OPTIONS, ceilings, tmp_path)
        entrant, repetition = bench_row._made_ready("liger", bench_peers.liger, bed, WallClock())
        assert repetition is None
        assert entrant.note == words


def test_a_rotation_s_cos_and_sin_belong_together():
    spec = load_kernel("rope").spec
    _, cos, sin = make_inputs(spec, {"B": 1, "H": 2, "S": 7, "D": 8}, torch.float32, CPU, seed=3)
    assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos), atol=1e-5)
    assert torch.equal(cos[..., :4], cos[..., 4:])


def test_plans():
    plan = plan_bench("rmsnorm", preset="published", device="cpu")
    assert len(plan.jobs) == 24
    assert {dict(case.sizes)["C"] for _, case in plan.jobs} >= {896, 8192}
    assert {dict(case.sizes)["R"] for _, case in plan.jobs} == {1, 2048, 16384}
    assert all(case.dtypes == ("float32",) for _, case in plan.jobs)
    everything = plan_bench(None, preset="published", device="cpu", dtypes=("bf16", "fp32"))
    assert {spec.name for spec, _ in everything.jobs} >= {"rmsnorm", "rope", "swiglu"}
    assert everything.jobs[0][1].dtypes == ("bfloat16", "float32")
    assert [dict(case.sizes) for _, case in plan_bench("swiglu", shapes=[{"C": 8, "R": 2}], device="cpu").jobs] == [
        {"R": 2, "C": 8}
    ]
    for wrong in (
        {"shapes": [{"R": 2}]},
        {"preset": "publish"},
        {"dtypes": ("fp8",)},
        {"backends": ("metal",)},
        {"variant": "mine"},
    ):
        with pytest.raises(UsageError):
            plan_bench("swiglu", device="cpu", **wrong)


@pytest.mark.parametrize("text", ["R", "R=", "R=-1", "R=2;C=3", "2=R", ""])
def test_shapes_that_are_none(text):
    with pytest.raises(UsageError):
        parse_shape(text)


def test_one_contender_in_a_loop(ceilings):
    spec, case = load_kernel("swiglu").spec, Case(sizes=(("R", 4), ("C", 64)), dtypes=("float32",))
    assert run_alone(spec, "builtin", case, "float32", OPTIONS, "cpp", 7).startswith("cpp ran 7 times over")
    assert run_alone(spec, "builtin", case, "float32", OPTIONS, "triton", 7) == "triton does not run on this device"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_fits(width, capsys):
    console = build_console(sys.stdout, "never", {"COLUMNS": str(width)})
    console.print(bench_tables(RUN, console))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "R=1 C=4096 *" in text
    assert "0.94" in text
    assert "our Triton (1 of 3 shapes): triton is not there" in " ".join(text.split())
    assert summary_line(RUN) == "3 rows: median 0.92 of the limit; level with the best peer or faster in 2 of 3."


def test_markdown():
    text = bench_markdown(RUN)
    assert "## rmsnorm (llama), bfloat16" in text
    assert "| R=2048 C=4096 | 33.6 MB | 8.97 | 118 | 11.64 | 11.04 | 9.50 | 9.80 | 0.94 | 1.16× | our Triton |" in text
    assert "| R=1 C=4096 \\* |" in text


def test_plots_are_written_and_are_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    both = run_of(*RUN.rows, row(dtype="float16", eager=100.0, triton=9.0), row(kernel="silent", eager=0))
    first = draw(both, tmp_path / "a")
    again = draw(both, tmp_path / "b")
    assert [path.name for path in first] == ["rmsnorm.png", "rmsnorm.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert b"<dc:date>" not in first[1].read_bytes()


def test_the_command(ceilings, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["kernels", "bench", "swiglu", "--device", "cpu", "--no-compile", "--shapes", "R=4,C=64"]
    assert main([*command, "-o", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "swiglu (builtin), float32" in told.out
    assert "pip install 'fusion-advisor[bench]'" in told.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
    assert read_run(tmp_path / "bench.json").rows[0].size_text == "R=4 C=64"
    assert main([*command, "--json"]) == 0
    assert '"schema": "fusion-advisor-bench/1"' in capsys.readouterr().out
    assert main([*command, "--which", "ref", "--iterations", "3"]) == 0
    assert capsys.readouterr().out.startswith("eager ran 3 times")
    assert main([*command, "-q"]) == 0
    assert capsys.readouterr().out.startswith("1 row: median")
    assert main(["kernels", "bench"]) == 2
    assert main(["kernels", "bench", "--all", "--shapes", "R=1"]) == 2


def test_the_cache_has_a_size():
    assert cache_bytes(CPU) >= 2**15


@pytest.mark.gpu
def test_end_to_end_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_bench("rmsnorm", shapes=[{"R": 1, "C": 4096}, {"R": 2048, "C": 4096}], dtypes=("bf16",), device="cuda")
    run = bench(plan.jobs, plan.options, Silent())
    assert [row.is_past_cache for row in run.rows] == [False, True]
    for found in run.rows:
        for name in ("eager", "compile", "triton", "cuda"):
            entrant = next(entrant for entrant in found.entrants if entrant.name == name)
            assert entrant.timing is not None, entrant.note
            assert entrant.timing.method == "cuda_graph"
        assert found.timing_of("eager").median_ns > found.timing_of("triton").median_ns
        assert 0.3 < found.of_limit < 1.3
    assert (tmp_path / "fusion-advisor" / "tuning.json").is_file()
