"""Options that several commands share, with the same name and meaning everywhere.

A workload option left out is None here, so that the workload request's own defaults stay the only ones, and so that ``apply RUN``
can tell what was asked from what was not.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.common.console import Settings
from fusion_advisor.codegen.registry import NAMES
from fusion_advisor.errors import UsageError


class Color(enum.StrEnum):
    """When to colour."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Dtype(enum.StrEnum):
    """The model's dtype."""

    AUTO = "auto"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Phase(enum.StrEnum):
    """What one step is."""

    FORWARD = "forward"
    PREFILL = "prefill"
    DECODE = "decode"
    GENERATE = "generate"
    TRAIN = "train"


class Weights(enum.StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    HUB = "hub"
    LOCAL = "local"
    RANDOM = "random"


class Against(enum.StrEnum):
    """What the headline compares with."""

    EAGER = "eager"
    COMPILE = "compile"
    BOTH = "both"


class Keep(enum.StrEnum):
    """What may stay."""

    PAYING = "paying"
    VERIFIED = "verified"


if TYPE_CHECKING:

    class Backend(enum.StrEnum):
        """What kernels are written in: the registry's names."""

    class BackendChoice(enum.StrEnum):
        """What a run's kernels are written in: a backend, or ``fastest``, which tries all that run on the device."""

else:
    Backend = enum.StrEnum("Backend", {name.upper(): name for name in NAMES})
    BackendChoice = enum.StrEnum("BackendChoice", {name.upper(): name for name in (*NAMES, "fastest")})


def parse_share(option: str, text: str) -> float:
    """Read an option's ``0.5%`` or ``0.005``."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(detail=f"{option} {text} is not a share, 0 to below 100 %", help=f"write {option} 0.5% or 0.005")
    return value


def parse_seconds(option: str, text: str) -> float:
    """Read an option's ``2s``, ``500ms`` or ``2``, which is seconds; an hour at most."""
    number = text.strip()
    unit = next((unit for unit in ("ms", "s") if number.endswith(unit)), "")
    try:
        value = float(number.removesuffix(unit)) / (1000 if unit == "ms" else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise UsageError(detail=f"{option} {text} is not a time", help=f"write {option} 2s or 500ms, an hour at most")
    return value


def kernel_dirs(values: list[Path] | None) -> tuple[Path, ...]:
    """Return the user's kernel folders; the shipped one is searched anyway, and in a checkout may be named by hand."""
    from fusion_advisor.content import content_dir

    shipped = content_dir("kernels").resolve()
    return tuple(dict.fromkeys(path for path in values or () if path.resolve() != shipped))


_INPUT, _MEASURE, _ADVISE, _KEEP, _GATE, _OUTPUT = "Input", "Measure", "Advise", "Keep rule", "Gate", "Output"

RevisionOpt = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.", rich_help_panel=_INPUT)]
DtypeOpt = Annotated[Dtype | None, typer.Option("--dtype", help="auto: 16 bits on a GPU, fp32 on a CPU.", rich_help_panel=_INPUT)]
DeviceOpt = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_INPUT)]
BatchOpt = Annotated[int | None, typer.Option("--batch", metavar="N", min=1, help="Examples in a step.", rich_help_panel=_INPUT)]
SeqLenOpt = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", min=1, help="Tokens of each example.", rich_help_panel=_INPUT)
]
InputOpt = Annotated[
    str | None,
    typer.Option(
        "--input", metavar="FILE.py:FN", help="A function of yours that returns the inputs of a step.", rich_help_panel=_INPUT
    ),
]
PhaseOpt = Annotated[
    Phase | None, typer.Option("--phase", help="Kind of step; train is forward, loss and backward.", rich_help_panel=_INPUT)
]
ContextOpt = Annotated[
    int | None, typer.Option("--context", metavar="N", min=1, help="Tokens in the cache (decode).", rich_help_panel=_INPUT)
]
NewTokensOpt = Annotated[
    int | None, typer.Option("--new-tokens", metavar="N", min=1, help="Tokens to make (generate).", rich_help_panel=_INPUT)
]
LayersOpt = Annotated[
    int | None,
    typer.Option("--layers", metavar="N", min=1, help="Keep only the first N layers, for a quick look.", rich_help_panel=_INPUT),
]
SeedOpt = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of weights and inputs.", rich_help_panel=_INPUT)]
WeightsOpt = Annotated[
    Weights | None, typer.Option("--weights", help="random: seeded, from the configuration alone.", rich_help_panel=_INPUT)
]
TrustOpt = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's repository ships.", rich_help_panel=_INPUT)
]
OfflineOpt = Annotated[bool, typer.Option("--offline", help="Never ask the Hub.", rich_help_panel=_INPUT)]
WarmupOpt = Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Untimed steps first.", rich_help_panel=_MEASURE)]
RunsOpt = Annotated[int, typer.Option("--runs", metavar="N", min=3, help="Timed steps.", rich_help_panel=_MEASURE)]
MinTimeOpt = Annotated[
    str,
    typer.Option("--min-time", metavar="TIME", help="Time steps for at least 2s, say, beyond --runs.", rich_help_panel=_MEASURE),
]
StepsOpt = Annotated[
    int, typer.Option("--steps", metavar="N", min=1, max=100, help="Traced steps; the median is shown.", rich_help_panel=_MEASURE)
]
NvtxOpt = Annotated[
    bool,
    typer.Option(
        "--nvtx",
        help="Open NVTX ranges for Nsight Systems; timed steps get slower. -v prints the nsys line.",
        rich_help_panel=_MEASURE,
    ),
]
MinShareOpt = Annotated[
    str, typer.Option("--min-share", metavar="SHARE", help="No kernel for smaller chains.", rich_help_panel=_ADVISE)
]
TopOpt = Annotated[int, typer.Option("--top", metavar="N", min=1, help="At most N chains.", rich_help_panel=_ADVISE)]
OnlyOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="PATTERN", help="Only kernels (rms*) or rewrites (merge-*) named like this.", rich_help_panel=_ADVISE
    ),
]
SkipOpt = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="PATTERN", help="No kernels or rewrites named like this.", rich_help_panel=_ADVISE),
]
KernelsOpt = Annotated[
    list[Path] | None,
    typer.Option(
        "--kernels",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="A folder of your own kernels. Runs its code.",
        rich_help_panel=_ADVISE,
    ),
]
BackendOpt = Annotated[
    BackendChoice | None,
    typer.Option(
        "--backend",
        help="By default C++ on a CPU, Triton on a GPU, plus CUDA C++ for group norms, very wide rows and tanh; "
        "fastest tries both for each kernel.",
        rich_help_panel=_ADVISE,
    ),
]
ExactOpt = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Round each op's result as eager does: kernels that reorder no sum give eager's bits, and the report says which.",
        rich_help_panel=_ADVISE,
    ),
]
FastMathOpt = Annotated[
    bool,
    typer.Option(
        "--fast-math",
        help="Allow approximate instructions, and GELU by tanh for GELU with erf inside a GEMM.",
        rich_help_panel=_ADVISE,
    ),
]
KeepOpt = Annotated[
    Keep,
    typer.Option("--keep", help="verified: all with right numbers, at any speed; for tests.", rich_help_panel=_KEEP),
]
MinGainOpt = Annotated[
    str, typer.Option("--min-gain", metavar="SHARE", help="A rewrite must save this share of the step.", rich_help_panel=_KEEP)
]
ConfidenceOpt = Annotated[
    float, typer.Option("--confidence", help="Level of the gain's interval, above 0.5, below 1.", rich_help_panel=_KEEP)
]
RtolOpt = Annotated[
    float | None,
    typer.Option(
        "--rtol", metavar="X", help="With --atol, a limit on each element's error, instead of eager's own.", rich_help_panel=_KEEP
    ),
]
AtolOpt = Annotated[
    float | None, typer.Option("--atol", metavar="X", help="|error| ≤ atol + rtol × |oracle|.", rich_help_panel=_KEEP)
]
StrictOpt = Annotated[
    bool, typer.Option("--strict", help="Wrong numbers (exit 7) or a failed build (exit 8) are errors.", rich_help_panel=_KEEP)
]
DryRunOpt = Annotated[
    bool, typer.Option("--dry-run", help="Render, build and check kernels; time no step, change no model.", rich_help_panel=_KEEP)
]

GraphOpt = Annotated[
    bool,
    typer.Option("--graph/--no-graph", help="Try a CUDA graph around the step; keep it if it pays.", rich_help_panel=_KEEP),
]
CompileOpt = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Also time torch.compile and, on a GPU, eager in a CUDA graph and Liger (the default); if given, ours under it.",
        rich_help_panel=_MEASURE,
    ),
]
BaselineOpt = Annotated[
    Against,
    typer.Option("--baseline", help="The headline's rival; all but eager measure torch.compile.", rich_help_panel=_MEASURE),
]
CompileLimitOpt = Annotated[
    str | None,
    typer.Option("--compile-limit", metavar="TIME", help="Give a mode of torch.compile up after it.", rich_help_panel=_MEASURE),
]
MaxAutotuneOpt = Annotated[
    bool, typer.Option("--max-autotune", help="torch.compile's max-autotune mode too: minutes.", rich_help_panel=_MEASURE)
]
FreezeOpt = Annotated[
    bool, typer.Option("--freeze", help="Fold and copy weights: write to none, or call fused.refresh().", rich_help_panel=_KEEP)
]
DropLogitsOpt = Annotated[
    bool, typer.Option("--drop-logits", help="A training step returns None for its logits.", rich_help_panel=_KEEP)
]
MemoryBudgetOpt = Annotated[
    float, typer.Option("--memory-budget", help="Share of a training step's activations to keep.", rich_help_panel=_KEEP)
]
FreshOpt = Annotated[
    bool, typer.Option("--fresh", help="Time every rewrite again, also where its verdict is remembered.", rich_help_panel=_KEEP)
]
EffortOpt = Annotated[
    bool | None,
    typer.Option("--quick/--thorough", help="Choose by rewrites' own times; or time each for longer.", rich_help_panel=_KEEP),
]

FailOnOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="GATE",
        help="Exit 10 if exceeded: speedup<1.05, regression>2%, numerics.",
        rich_help_panel=_GATE,
    ),
]
AbsoluteOpt = Annotated[
    bool,
    typer.Option("--absolute", help="Gates judge milliseconds too (step>15ms), not only ratios.", rich_help_panel=_GATE),
]


class Bar(enum.StrEnum):
    """How progress is shown."""

    AUTO = "auto"
    BAR = "bar"
    PLAIN = "plain"
    NONE = "none"


ProgressOpt = Annotated[Bar, typer.Option("--progress", help="auto: a bar in a terminal.", rich_help_panel=_OUTPUT)]
OpenOpt = Annotated[bool, typer.Option("--open/--no-open", help="Open the HTML in a browser when done.", rich_help_panel=_OUTPUT)]
OutputOpt = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="DIR", help="Instead of ./fusion-runs/<run id>.", rich_help_panel=_OUTPUT)
]
FormatOpt = Annotated[
    list[str] | None,
    typer.Option("--format", metavar="LIST", help="html, md, json, csv; repeat or comma.", rich_help_panel=_OUTPUT),
]
EmbedTraceOpt = Annotated[
    bool,
    typer.Option("--embed-trace", help="Put the profiler's traces into the HTML, up to 13.5 MB.", rich_help_panel=_OUTPUT),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout, nothing else.", rich_help_panel=_OUTPUT)]
ForceOpt = Annotated[bool, typer.Option("--force", help="Overwrite an existing run.", rich_help_panel=_OUTPUT)]
QuietOpt = Annotated[bool, typer.Option("-q", "--quiet", help="Warnings and one line of result.", rich_help_panel=_OUTPUT)]
VerboseOpt = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="-v more, -vv tracebacks too.", rich_help_panel=_OUTPUT)
]
ColorOpt = Annotated[
    Color,
    typer.Option(
        "--color",
        envvar="FUSION_ADVISOR_COLOR",
        show_envvar=False,
        help="auto, always or never.",
        rich_help_panel=_OUTPUT,
    ),
]


def _configure(context: typer.Context, path: Path | None) -> None:
    """Read the configuration before the other options, whose defaults it may give."""
    if not context.resilient_parsing:
        from fusion_advisor.cli.common.config import configure

        configure(context, path)


def _show_config(context: typer.Context, is_asked: bool) -> bool:
    """Leave arguments open where only the configuration is asked for."""
    if is_asked:
        for parameter in context.command.params:
            if not parameter.opts[0].startswith("-"):
                parameter.required = False
    return is_asked


ConfigOpt = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=_configure,
        help="Options from here instead of ./fusion-advisor.toml.",
        rich_help_panel=_OUTPUT,
    ),
]
_SHOWN = "Print each option's value and source; run nothing."
ShowConfigOpt = Annotated[
    bool, typer.Option("--show-config", is_eager=True, callback=_show_config, help=_SHOWN, rich_help_panel=_OUTPUT)
]


def apply_output(
    context: typer.Context,
    *,
    quiet: bool = False,
    verbose: int = 0,
    color: Color = Color.AUTO,
    progress: Bar = Bar.AUTO,
    show_config: bool = False,
) -> Settings:
    """Fill in the settings that ``main`` reads when it has to print an error; end here where only they are asked for."""
    settings: Settings = context.obj
    if show_config:
        settings.color = color.value
        from fusion_advisor.cli.common.config import print_settings

        print_settings(context, settings)
        raise typer.Exit
    if quiet and verbose:
        raise UsageError(detail="--quiet and --verbose contradict each other", help="leave one out")
    settings.verbosity, settings.is_quiet = verbose, quiet
    settings.color, settings.progress = color.value, progress.value
    return settings
