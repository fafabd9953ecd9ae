"""Synthetic reports: every name and figure here is made up, and says so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from fusion_advisor.records import (
    Bandwidth,
    Baseline,
    Chain,
    DataQuality,
    Environment,
    Fusion,
    GraphBreak,
    GraphRewrite,
    Match,
    ModelCheck,
    ModuleTime,
    NoMatch,
    Numerics,
    Receipt,
    RenderedKernel,
    Report,
    ShapePiece,
    ShapePoint,
    ShapeRanges,
    Site,
    SizeRange,
    Status,
    StepProfile,
    TensorMeta,
    Timeline,
    Timing,
    Training,
    WarmUp,
    Workload,
)
from fusion_advisor.records.serialize import read_report

HOSTILE = (
    "</script><img src=x onerror=alert(1)>{{7*7}}{% raw %}\u2028<!--\u202egnp.exe\x1b[31mred\x1b[0m`|`@octocat #1 [/] [bold]\x07"
)
LONG = "n" * 10_000
EXAMPLES = sorted((Path(__file__).parents[2] / "reports" / "examples").glob("*/report.json"))
"""Committed reports of real runs."""

_TRITON = '''"""add -> tanh -> mul, made from the chain C1."""
import triton
import triton.language as tl


@triton.jit
def fa_gelu_tanh_1a2b(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    x = tl.load(x_ptr + at, mask=keep).to(tl.float32)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + at, 0.5 * x * (1.0 + (1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))), mask=keep)
'''

_CUDA = """extern "C" __global__ void fa_softcap_9c(const float* __restrict__ x, float* __restrict__ y, long n) {
  long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 30.0f * tanhf(x[i] / 30.0f);  // one thread an element
}
"""


def timing(median_ns: int, spread: float = 0.004, runs: int = 40, method: str = "cuda_graph") -> Timing:
    """Made-up measurements round a median, the same each time."""
    times = tuple(round(median_ns * (1 + spread * math.sin(7.3 * i) * (1 + (i % 9 == 0)))) for i in range(runs))
    return Timing(
        times_ns=times,
        median_ns=median_ns,
        ci_low_ns=round(median_ns * (1 - spread / 2)),
        ci_high_ns=round(median_ns * (1 + spread / 2)),
        method=method,
    )


def _site(path: str, line: int, ns: int, text: str = "return 0.5 * x * (1.0 + torch.tanh(inner))") -> Site:
    return Site(
        op_indices=(line, line + 1, line + 2),
        module_path=path,
        source_file="transformers/models/synthetic/modeling_synthetic.py",
        source_line=line,
        source_text=text,
        device_ns=ns,
    )


def chain(at: int, ops: tuple[str, ...], sites: int, device_ns: int, share: float, *, reduction: bool = False) -> Chain:
    """A chain whose bytes and floor hang together with its time."""
    floor_bytes = int(device_ns * 1.6)
    floor_ns = int(floor_bytes / 4.0 + sites * 1500)
    return Chain(
        id=f"C{at}",
        ops=ops,
        sites=tuple(_site(f"model.layers.{i}.mlp.act", 120 + at, device_ns // sites) for i in range(sites)),
        launches=sites * len(ops),
        device_ns=device_ns,
        share=share,
        moved_bytes=floor_bytes * 3,
        floor_bytes=floor_bytes,
        floor_ns=floor_ns,
        saving_bound_ns=device_ns - floor_ns,
        is_reduction=reduction,
        dtype="bfloat16",
        shape=(8, 512, 3072),
    )


def numerics(*, is_passed: bool = True, fused: float = 3.9e-3) -> Numerics:
    return Numerics(
        oracle="float64",
        fused_max_abs=fused,
        eager_max_abs=7.8e-3,
        fused_rel_l2=fused / 3,
        eager_rel_l2=2.1e-3,
        elements=12_582_912,
        limit="rel L2 <= max(2 x eager's 2.1e-3, 1e-3)",
        is_passed=is_passed,
        nonfinite_mismatches=0 if is_passed else 3,
        inputs="the site's own tensors; random x3",
        fused_ulps=(12_000_000, 500_000, 60_000, 20_000, 2_900, 10, 2),
        eager_ulps=(11_000_000, 1_200_000, 300_000, 70_000, 12_000, 900, 12),
    )


def _environment() -> Environment:
    return Environment(
        device_name="Synthetic Accelerator 9000",
        device_kind="cuda",
        capability="9.0",
        device_memory_bytes=141_000_000_000,
        python="3.11.9",
        torch="2.13.0",
        triton="3.6.0",
        transformers="5.10.0",
        cuda="12.8",
        driver="570.00",
        compiler="g++ 12.2",
        os="Linux x86_64",
        cores=16,
        tool="0.1.0",
        commit="0123456789ab, changed",
        templates="ba9876543210",
        container="docker",
    )


def _workload() -> Workload:
    return Workload(
        model_id="synthetic-org/made-up-gpt",
        phase="prefill",
        dtype="bfloat16",
        device="cuda",
        batch=8,
        seq_len=512,
        seed=0,
        revision="0123456789abcdef0123456789abcdef01234567",
        weights="random",
        inputs=(("input_ids", TensorMeta(shape=(8, 512), stride=(512, 1), dtype="int64", device="cuda")),),
        parameter_bytes=248_000_000,
        parameter_count=124_000_000,
    )


def _kernels(scale: float) -> tuple[tuple[str, str, int, int], ...]:
    return (
        ("sm90_xmma_gemm_bf16bf16_bf16f32_tn_n_tilesize128x128x64", "gemm", 97, 9_100_000),
        ("flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention", 24, 2_400_000),
        (
            "void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<float, float>>",
            "pointwise",
            312,
            int(3_900_000 * scale),
        ),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps>>", "reduction", 98, int(1_500_000 * scale)),
        ("void at::native::CatArrayBatchedCopy<OpaqueType<2u>>", "memory", 48, int(600_000 * scale)),
    )


def timeline(kernels: tuple[tuple[str, str, int, int], ...], wall_ns: int) -> Timeline:
    """Every launch of these kernels, spread over a step of this length, its call some microseconds ahead."""
    order = sorted((at / row[2] + k / 100, k, row[3] // row[2]) for k, row in enumerate(kernels) for at in range(row[2]))
    spare = (wall_ns - sum(row[3] for row in kernels)) // len(order)
    start, now = [], 0
    for at, (_, _, ns) in enumerate(order):
        start.append(now)
        now += ns + max(0, round(spare * (0.2 + (at * 37 % 101) / 80) * 0.9))
    return Timeline(
        kernel=tuple(k for _, k, _ in order),
        start_ns=tuple(start),
        duration_ns=tuple(ns for _, _, ns in order),
        call_start_ns=tuple(begun - 4_000 - (at * 53 % 97) * 80 for at, begun in enumerate(start)),
        call_ns=tuple(3_000 + (at * 29 % 31) * 100 for at in range(len(start))),
    )


def step(label: str, scale: float, launches: int, wall_ns: int, *, fused_ns: int = 0) -> StepProfile:
    kernels = _kernels(scale)
    if fused_ns:
        kernels = tuple(sorted((*kernels, ("fa_gelu_tanh_1a2b", "fused", 24, fused_ns)), key=lambda row: -row[3]))
    return StepProfile(
        timeline=timeline(kernels, wall_ns) if label != "captured" else None,
        label=label,
        device_ns=sum(row[3] for row in kernels),
        launches=launches,
        categories=tuple((row[1], row[2], row[3]) for row in kernels),
        kernels=kernels,
        wall=timing(wall_ns, method="wall"),
        device=timing(int(wall_ns * 0.97)),
        peak_memory_bytes=9_810_000_000 if not fused_ns else 9_400_000_000,
    )


def profiled() -> Report:
    """A profile of a made-up model: chains ranked, nothing applied."""
    chains = (
        chain(1, ("add", "tanh", "mul"), 24, 2_410_000, 0.131),
        chain(2, ("to", "pow", "mean", "rsqrt", "mul", "to", "mul"), 49, 1_980_000, 0.108, reduction=True),
        chain(3, ("silu", "mul"), 24, 1_020_000, 0.055),
        chain(4, ("amax", "sub", "exp", "sum", "div"), 3, 110_000, 0.006, reduction=True),
        chain(5, ("neg", "cat", "mul", "add"), 48, 90_000, 0.005),
    )
    return Report(
        run_id="20300102-030405-7f3a9c",
        config_hash="7f3a9c",
        status="profiled",
        command="fusion-advisor profile synthetic-org/made-up-gpt --phase prefill --batch 8 --seq-len 512 --seed 0",
        workload=_workload(),
        environment=_environment(),
        quality=DataQuality(
            launches=1204,
            kernels=1204,
            joined_share=0.998,
            eager_device_ns=17_500_000,
            captured_device_ns=17_650_000,
            reconciliation="The captured step takes 0.15 ms more than eager's: it builds the causal mask that eager skips.",
        ),
        bandwidth=Bandwidth(copy_bytes_per_s=3_982_000_000_000, launch_ns=1_700),
        before=step("eager", 1.0, 1204, 18_420_000),
        captured=step("captured", 1.03, 1214, 18_500_000),
        after=None,
        chains=chains,
        answers=(
            Match(chain_id="C1", kernel="gelu_tanh", is_library=True, variant="tanh"),
            Match(chain_id="C2", kernel="rms_norm", is_library=True, variant="llama", constants=(("eps", 1e-06),)),
            Match(chain_id="C3", kernel="swiglu", is_library=True),
            Match(chain_id="C4", kernel="amax_sub_exp_9c1d", is_library=False),
            NoMatch(chain_id="C5", code="FA603", reason="cat joins two tensors that no address expression can stand for"),
        ),
        noise_share=0.004,
        durations_s=(("load", 6.1), ("baseline", 3.2), ("trace", 4.8), ("match", 0.2)),
        notes=(
            "Wall times are un-profiled runs; shares come from one traced step.",
            "Intervals are 95% bootstrap intervals of the median.",
        ),
    )


def with_a_copy(report: Report) -> Report:
    """A report whose first rewrite of the graph put in a kernel."""
    kernel = RenderedKernel(
        name="fa_permuted_copy_0a1b2c",
        backend="cuda",
        path="kernels/fold-constants_permuted_copy_0a1b2c.cu",
        source=_CUDA.replace("softcap_9c", "permuted_copy_0a1b2c"),
        origin="generated for what a GEMM over patches reads and gives",
        tuning="block 4 x 32 (default)",
    )
    first, *others = report.rewrites
    return replace(report, rewrites=(replace(first, rendered=(kernel,)), *others))


def applied() -> Report:
    """The same made-up model with every kind of verdict."""
    base = profiled()
    source = tuple(
        (118 + i, text)
        for i, text in enumerate(
            (
                "def forward(self, x):",
                "    inner = k0 * (x + k1 * x**3)",
                "    # tanh form",
                "    return 0.5 * x * (1.0 + torch.tanh(inner))",
            )
        )
    )
    rendered = RenderedKernel(
        name="fa_gelu_tanh_1a2b",
        backend="triton",
        path="kernels/F1_gelu_tanh.py",
        source=_TRITON,
        origin="library: gelu_tanh",
        build_ns=812_000_000,
        tuning="BLOCK=1024, 4 warps; fastest of 6",
    )
    fusions = (
        Fusion(
            id="F1",
            chain_id="C2",
            kernel="rms_norm",
            status=Status.KEPT,
            reason="The step is 1.48 ms faster and the whole interval is past the noise.",
            receipt=Receipt(sites_found=49, sites_matched=49, sites_replaced=49, launches_before=343, launches_after=49),
            rendered=(replace(rendered, name="fa_rms_norm_77", path="kernels/F1_rms_norm.py", origin="library: rms_norm"),),
            numerics=numerics(),
            chain_before=timing(40_400),
            chain_after=timing(8_400),
            step_delta_ns=-1_480_000,
            step_delta_ci_ns=(-1_530_000, -1_440_000),
            predicted_saving_ns=1_560_000,
            predicted_low_ns=1_430_000,
            predicted_high_ns=1_690_000,
            original_source=source,
        ),
        Fusion(
            id="F2",
            chain_id="C1",
            kernel="gelu_tanh",
            status=Status.KEPT,
            reason="The step is 1.39 ms faster and the whole interval is past the noise.",
            receipt=Receipt(
                sites_found=24,
                sites_matched=23,
                sites_replaced=23,
                launches_before=72,
                launches_after=23,
                refusals=("model.layers.23.mlp.act: its input is written in place between the ops.",),
            ),
            rendered=(rendered,),
            numerics=numerics(fused=2.2e-3),
            chain_before=timing(100_400),
            chain_after=timing(38_700),
            step_delta_ns=-1_390_000,
            step_delta_ci_ns=(-1_450_000, -1_330_000),
            predicted_saving_ns=1_420_000,
            original_source=source,
        ),
        Fusion(
            id="F3",
            chain_id="C3",
            kernel="swiglu",
            status=Status.WITHIN_NOISE,
            reason="The step changed by less than the keep rule's threshold, so it was removed.",
            receipt=Receipt(sites_found=24, sites_matched=24, sites_replaced=24, launches_before=48, launches_after=0),
            rendered=(replace(rendered, name="fa_swiglu_3c", path="kernels/F3_swiglu.py"),),
            numerics=numerics(),
            chain_before=timing(42_500),
            chain_after=timing(40_600),
            step_delta_ns=-40_000,
            step_delta_ci_ns=(-110_000, 30_000),
            predicted_saving_ns=45_000,
        ),
        Fusion(
            id="F4",
            chain_id="C4",
            kernel="amax_sub_exp_9c1d",
            status=Status.WRONG_NUMBERS,
            reason="Three elements are NaN where the oracle is finite, so it was removed and never timed.",
            receipt=Receipt(sites_found=3, sites_matched=3, sites_replaced=0, launches_before=15, launches_after=0),
            rendered=(
                RenderedKernel(
                    name="fa_softcap_9c", backend="cuda", path="kernels/F4.cu", source=_CUDA, origin="generated from the chain"
                ),
            ),
            numerics=numerics(is_passed=False, fused=math.inf),
        ),
    )
    return replace(
        base,
        status="applied",
        command=base.command.replace("profile", "apply"),
        after=step("fused", 0.35, 862, 15_520_000, fused_ns=1_100_000),
        fusions=fusions,
        rewrites=(
            GraphRewrite(
                id="fold-constants",
                name="folded constants",
                status=Status.KEPT,
                reason="The rotary table depends on no input.",
                sites=1,
                predicted_saving_ns=75_000,
                predicted_low_ns=66_000,
                predicted_high_ns=84_000,
                step_delta_ns=-60_000,
                step_delta_ci_ns=(-80_000, -45_000),
            ),
            GraphRewrite(
                id="drop-masks",
                name="causal mask → flag",
                status=Status.NOT_MATCHED,
                reason="No mask was built in this graph.",
                sites=0,
            ),
        ),
        model_check=ModelCheck(
            oracle="float32 copy",
            outputs=("logits",),
            fused_rel_l2=4.1e-3,
            eager_rel_l2=4.4e-3,
            fused_max_abs=0.0312,
            eager_max_abs=0.0351,
            fused_vs_eager_max_abs=0.0078,
            cosine=0.999998,
            argmax_agreement=1.0,
            top5_agreement=0.998,
            nonfinite_mismatches=0,
            limit="rel L2 <= max(2 x eager's 4.4e-3, 1e-3)",
            is_passed=True,
        ),
        step_before=timing(18_500_000),
        step_after=timing(15_570_000),
        baselines=baselines(),
        warm_up=WarmUp(phases_s=(("read the plan", 0.3), ("capture", 2.6), ("kernels", 0.5), ("first step", 0.4)), build_s=2.4),
        launch_cost_ns=640,
    )


def baselines(compiled_ns: int = 16_900_000) -> tuple[Baseline, ...]:
    """Every way to run the made-up step, one of which could not be run."""

    def row(name: str, wall_ns: int, first_s: float, **more: float) -> Baseline:
        return Baseline(name=name, step=replace(step(name, 0.35, 862, wall_ns, **more), timeline=None), first_call_s=first_s)

    return (
        row("eager", 18_420_000, 0.018),
        row("torch.compile default", compiled_ns + 700_000, 18.2),
        row("torch.compile reduce-overhead", compiled_ns, 19.4),
        Baseline(name="Liger", note="Liger has no kernels for made-up"),
        row("ours", 15_520_000, 3.8, fused_ns=1_100_000),
    )


def beaten() -> Report:
    """The same run where torch.compile is faster than what was kept."""
    return replace(applied(), baselines=baselines(compiled_ns=13_000_000))


def training() -> Report:
    """A training step: nothing is captured, modules stand in the place of chains."""
    base = profiled()
    rows = (
        ModuleTime(path="transformer.h.*.mlp.c_fc", modules=24, launches=96, forward_ns=4_000_000, backward_ns=8_000_000),
        ModuleTime(path="transformer.h.*.ln_1", modules=24, launches=72, forward_ns=1_000_000, backward_ns=2_500_000),
        ModuleTime(path="", modules=1, launches=9, forward_ns=120_000, backward_ns=380_000),
        ModuleTime(path=HOSTILE, modules=1, launches=1, forward_ns=0, backward_ns=4_000),
    )
    forward, backward = (sum(getattr(row, side) for row in rows) for side in ("forward_ns", "backward_ns"))
    return replace(
        base,
        workload=replace(base.workload, phase="train"),
        captured=None,
        chains=(),
        answers=(),
        findings=(),
        launch_verdict=None,
        training=Training(loss="the model's own", forward_ns=forward, backward_ns=backward, modules=rows),
    )


def trained() -> Report:
    """A training step whose passes were both rewritten: chains and rewrites name the pass that they belong to."""
    base = applied()
    passes = {chain.id: ("forward", "backward")[number % 2] for number, chain in enumerate(base.chains)}
    assert base.model_check is not None
    names = ("loss", "gradient of transformer.h.3.ln_1.weight", "gradient of transformer.wte.weight")
    check = replace(base.model_check, oracle="float64", outputs=names, worst=names[1], argmax_agreement=None)
    return replace(
        base,
        workload=replace(base.workload, phase="train"),
        chains=tuple(replace(chain, training_pass=passes[chain.id]) for chain in base.chains),
        fusions=tuple(replace(fusion, training_pass=passes[fusion.chain_id]) for fusion in base.fusions),
        rewrites=tuple(replace(row, id=f"{row.id}-backward", training_pass="backward") for row in base.rewrites),
        training=training().training,
        model_check=check,
    )


def on_cpu() -> Report:
    """A quick look on a CPU: layers cut, a graph break, nothing kept."""
    base = applied()
    assert base.after is not None
    fusion = replace(base.fusions[2], id="F1", chain_id="C3")
    wall = timing(18_410_000, method="wall")
    uneven = replace(wall, times_ns=wall.times_ns[17:] + wall.times_ns[:17])  # its noise is its own, not that of the step before
    return replace(
        base,
        environment=replace(
            base.environment,
            device_name="Synthetic CPU, 2 cores",
            device_kind="cpu",
            capability="",
            cuda="",
            driver="",
            device_memory_bytes=0,
            triton="",
        ),
        workload=replace(base.workload, device="cpu", layers=2, total_layers=24),
        quality=replace(
            base.quality,
            launches=1204,
            kernels=1201,
            joined_share=0.931,
            graph_breaks=(
                GraphBreak(reason="call to a Python builtin that dynamo cannot trace", source="modeling_synthetic.py:77"),
            ),
            warnings=("3 launches have no event in the trace.",),
        ),
        fusions=(fusion,),
        rewrites=(),
        after=replace(base.before, label="fused", wall=uneven, device=None),
        before=replace(base.before, device=None),
        captured=None,
        step_after=timing(18_480_000, method="wall"),
        baselines=(),
        warm_up=None,
    )


def real() -> Report:
    """A run on an H200 as an earlier version wrote it, without timelines, clocks and counts of units: nothing is made up."""
    return read_report(Path(__file__).parent.parent / "data" / "runs" / "qwen2.5-7b-bf16-1x512-h200.json")


def empty() -> Report:
    """A model with no chain worth ranking."""
    base = profiled()
    nothing = StepProfile(label="eager", device_ns=0, launches=0, categories=(), kernels=())
    return replace(
        base, chains=(), answers=(), before=nothing, captured=None, noise_share=None, durations_s=(), notes=(), command=""
    )


def hostile() -> Report:
    """Every free text is an attack or far too long."""
    base = applied()
    site = replace(base.chains[0].sites[0], module_path=HOSTILE, source_file=HOSTILE, source_text=HOSTILE)
    chains = (
        replace(base.chains[0], ops=(HOSTILE, LONG, "mul"), sites=(site, replace(site, module_path=LONG)), dtype=HOSTILE),
        *base.chains[1:],
    )
    fusion = base.fusions[1]
    nasty = replace(
        fusion,
        kernel=HOSTILE,
        reason=HOSTILE,
        receipt=replace(fusion.receipt, refusals=(HOSTILE, LONG)),
        rendered=(
            replace(
                fusion.rendered[0],
                name=LONG,
                source=f"# {HOSTILE}\n```\n</pre>{LONG}\n",
                path=HOSTILE,
                origin=HOSTILE,
                tuning=HOSTILE,
            ),
        ),
        original_source=((1, HOSTILE), (2, LONG)),
    )
    kernels = ((HOSTILE, HOSTILE, 1, 5_000_000), (LONG, "gemm", 2, 4_000_000), *base.before.kernels)
    return replace(
        base,
        run_id="20300102-030405-badbad",
        command=f"fusion-advisor apply {HOSTILE}",
        workload=replace(base.workload, model_id=HOSTILE, revision=HOSTILE, inputs=((HOSTILE, base.workload.inputs[0][1]),)),
        environment=replace(base.environment, device_name=HOSTILE, compiler=LONG),
        quality=replace(
            base.quality,
            reconciliation=HOSTILE,
            warnings=(HOSTILE, LONG),
            graph_breaks=(GraphBreak(reason=HOSTILE, source=LONG),),
        ),
        before=replace(base.before, kernels=kernels, categories=((HOSTILE, 1, 5_000_000), *base.before.categories)),
        chains=chains,
        answers=(
            Match(chain_id="C1", kernel=HOSTILE, is_library=False),
            NoMatch(chain_id="C2", code="FA601", reason=HOSTILE),
            *base.answers[2:],
        ),
        fusions=(base.fusions[0], nasty, *base.fusions[2:]),
        rewrites=(replace(base.rewrites[0], name=HOSTILE, reason=LONG),),
        baselines=(*base.baselines, Baseline(name=HOSTILE, note=LONG)),
        warnings=(HOSTILE,),
        notes=(HOSTILE, LONG),
        shapes=hostile_shapes(),
    )


def ranges(batch: tuple[int, int], seq: tuple[int, int], names: tuple[str, str] = ("batch", "seq")) -> tuple[SizeRange, ...]:
    """Ranges of two dims."""
    ends = zip(names, (batch, seq), strict=True)
    return tuple(SizeRange(name=name, least=least, most=most) for name, (least, most) in ends)


def point(batch: int, seq: int, eager_ns: int, ours_ns: int, *rewrites: str, spread: float = 0.02, **more: object) -> ShapePoint:
    """A timed point; its rounds differ from each other as a real one's do."""
    eager, ours = timing(eager_ns, spread, runs=20, method="cuda_events"), timing(ours_ns, spread, runs=20, method="cuda_events")
    uneven = replace(ours, times_ns=ours.times_ns[7:] + ours.times_ns[:7])
    made = ShapePoint(
        sizes=(("batch", batch), ("seq", seq)), rewrites=rewrites, eager=eager, ours=uneven, rel_l2=2.3e-3, eager_rel_l2=2.5e-3
    )
    return replace(made, **more)  # type: ignore[arg-type]


def shapes() -> ShapeRanges:
    """Ranges in four pieces: faster, slower from some size on, within noise, wrong numbers, and a piece without a graph."""
    one_size = ("merge-gemms", "it decides by one size")
    large = "the original ops take 21.40 ms, ours 22.90 ms"
    wrong = "all rewrites together: relative error 4.10e-02; the limit is: 1.5 times eager's 2.5e-3"
    return ShapeRanges(
        asked=ranges((1, 16), (1, 4096)),
        dims=(("input_ids", ("batch", "seq")), ("attention_mask", ("batch", "seq")), ("table", ("", "seq"))),
        pieces=(
            ShapePiece(
                ranges=ranges((2, 16), (2, 4096)),
                points=(
                    point(2, 2, 1_420_000, 1_000_000, "add_layernorm", "gelu_tanh", "drop-masks"),
                    point(5, 90, 2_640_000, 2_200_000, "add_layernorm", "add_layernorm", "gelu_tanh", dropped=(one_size,)),
                    point(16, 1024, 21_400_000, 22_900_000, "gelu_tanh", reason=large),
                ),
            ),
            ShapePiece(
                ranges=ranges((2, 16), (1, 1)),
                points=(point(2, 1, 1_400_000, 990_000, "embedding_add_layer_norm_633b", "gelu_tanh", dropped=(one_size,)),),
            ),
            ShapePiece(
                ranges=ranges((1, 1), (2, 4096)),
                points=(
                    point(1, 2, 1_390_000, 1_385_000, "embedding_add_layer_norm_321a"),
                    point(1, 4096, 9_800_000, 8_900_000, "gelu_tanh", reason=wrong, eager=None, ours=None, rel_l2=0.041),
                ),
            ),
            ShapePiece(ranges=ranges((1, 1), (1, 1)), refusal="dynamo takes seq for a constant: it is compared with 1"),
        ),
        seconds=96.844,
    )


def sized() -> Report:
    """A small run that serves ranges of sizes."""
    base = applied()
    assert base.after is not None
    fusion = replace(base.fusions[0], rendered=(), original_source=())
    kept = next(chain for chain in base.chains if chain.id == fusion.chain_id)
    return replace(
        base,
        chains=(replace(kept, sites=kept.sites[:2]),),
        answers=tuple(answer for answer in base.answers if answer.chain_id == kept.id),
        before=replace(base.before, timeline=None),
        captured=None,
        after=replace(base.after, timeline=None),
        fusions=(fusion,),
        rewrites=(),
        baselines=(),
        findings=(),
        warm_up=None,
        shapes=shapes(),
    )


def generated_shapes() -> ShapeRanges:
    """Ranges of both steps of ``generate``: a prefill that is faster, a decode step that is slower from some size on."""
    prefill = ranges((1, 8), (1, 512))
    decode = ranges((1, 8), (1, 512), ("batch", "cached"))
    slower = "the original ops take 3.00 ms, ours 3.30 ms"
    return ShapeRanges(
        asked=(*prefill, decode[1]),
        dims=(("prefill input_ids", ("batch", "seq")), ("decode cache.layers.0.keys", ("batch", "", "cached", ""))),
        pieces=(
            ShapePiece(
                call="prefill",
                ranges=prefill,
                points=(point(1, 1, 1_200_000, 1_000_000, "swiglu"), point(8, 512, 9_000_000, 8_000_000, "swiglu")),
            ),
            ShapePiece(
                call="decode",
                ranges=decode,
                points=(
                    replace(point(1, 1, 1_500_000, 1_000_000, "swiglu"), sizes=(("batch", 1), ("cached", 1))),
                    replace(point(8, 512, 3_000_000, 3_300_000, "swiglu"), sizes=(("batch", 8), ("cached", 512)), reason=slower),
                ),
            ),
        ),
        seconds=20.0,
    )


def padded_shapes() -> ShapeRanges:
    """Ranges of a model whose calls run as CUDA graphs: one piece is padded, one in part, the others not, for two reasons."""
    many, rows, token, alone = shapes().pieces
    seq = tuple(range(8, 64, 8)) + tuple(range(64, 4097, 128))
    refused = "what the padding holds changes results at batch=2, seq=9"
    slow = "its launches take 21.40 ms, the larger graph 22.10 ms"
    grows = "each call makes new tensors of its cache, at addresses that no CUDA graph knows"
    return replace(
        shapes(),
        pieces=(
            replace(
                many, padded=("batch", "seq"), capacities=(("batch", (2, 3, 4, 5, 6, 8, 16)), ("seq", seq)), padding_seconds=4.21,
                not_padded=(("batch, seq near batch=16, seq=1024", slow),),
            ),
            replace(rows, padded=("batch",), capacities=(("batch", (2, 3, 4, 5, 6, 8, 16)),), padding_seconds=1.04),
            replace(token, not_padded=(("seq", refused),), padding_seconds=2.5),
            replace(many, call="decode", not_padded=(("batch", grows), ("seq", grows))),
            replace(rows, call="padded decode", not_padded=(("batch", grows), ("seq", grows))),
            alone,
        ),
    )  # fmt: skip


def hostile_shapes() -> ShapeRanges:
    """Ranges whose every text is an attack or far too long, at the largest sizes that a file may hold."""
    names = (HOSTILE, LONG)
    sizes = ((HOSTILE, 1), (LONG, 2**62))
    padded = {"padded": names, "capacities": ((HOSTILE, (1, 2**62)),), "not_padded": ((LONG, HOSTILE), (HOSTILE, LONG))}
    nasty = replace(point(1, 1, 1, 10**12, HOSTILE, LONG, "_0a1b"), sizes=sizes, dropped=((HOSTILE, HOSTILE), ("", LONG)))
    return ShapeRanges(
        asked=ranges((1, 2**62), (1, 2**62), names),
        dims=((HOSTILE, names), (LONG, ())),
        pieces=(
            ShapePiece(ranges=ranges((1, 1), (1, 2**62), names), points=(nasty, replace(nasty, reason=HOSTILE)), **padded),
            ShapePiece(ranges=ranges((2, 2), (1, 1), names), refusal=LONG, padding_seconds=1e300),
        ),
        seconds=1e300,
    )


def failed_numbers() -> Report:
    """A run whose whole-model check failed and which was interrupted."""
    base = applied()
    assert base.model_check is not None
    check = replace(base.model_check, is_passed=False, fused_rel_l2=math.nan, nonfinite_mismatches=12, argmax_agreement=0.41)
    return replace(base, status="interrupted", model_check=check, warnings=("The run was stopped by Ctrl-C after F2.",))


ALL = {
    "profiled": profiled,
    "applied": applied,
    "beaten": beaten,
    "on_cpu": on_cpu,
    "training": training,
    "trained": trained,
    "empty": empty,
    "hostile": hostile,
    "failed_numbers": failed_numbers,
    "sized": sized,
}
