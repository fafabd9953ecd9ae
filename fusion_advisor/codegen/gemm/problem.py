"""A linear layer with what stands around it: the problem, and the launch parameters of its hand-written kernels.

``out = epilogue(prologue(x) @ weight.T)``: RMSNorm before, bias, gate and residual after. Up to some 16 rows the time goes into
reading the weight, so a kernel is as good as its loads; beyond, a GEMM is. A GEMV is no loop over one output row's elements and
so no :class:`~fusion_advisor.ir.program.Program`; these records take its place between choosing, rendering and launching.

The norm costs no pass of its own: a row's ``rsqrt(mean(x²) + eps)`` is one factor for all its results, so the kernels sum up
``x²`` along with ``x * norm_weight`` and multiply at the end. Eager rounds the normed row twice, this rounds it once or never.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple, dataclass
from typing import Literal

from fusion_advisor.codegen.common.interface import Header, identifier
from fusion_advisor.ir.program import ITEM_BYTES

Form = Literal["cuda_fma", "cuda_mma", "cuda_wgmma", "triton_fma", "triton_dot", "cublas", "cuda_cublas", "triton_cublas"]
FORMS: dict[str, tuple[Form, ...]] = {"cuda": ("cuda_fma", "cuda_mma", "cuda_wgmma"), "triton": ("triton_fma", "triton_dot")}
AROUND: dict[str, Form] = {"cuda": "cuda_cublas", "triton": "triton_cublas"}
MOST_ROWS = 64
"""Above, cuBLAS is at its limit, and no GEMV kernel is offered: only a GEMM that computes a gate as well."""
CROSSOVER_ROWS = 8
"""Up to here one of ours is taken where nothing was measured.

On an H200 (bfloat16, layers of Qwen2.5-7B, RMSNorm + cuBLAS against one kernel) ours took 8.2 against 18.8 µs at 1 row and
11.7 against 18.7 at 8 for 3584 x 3584, 65.5 against 83.5 and 72 against 86.5 for gate and up; at 16 rows some layers win by a
few percent, at 32 one does, at 64 none.
"""
_FMA_ROWS = 8
_FMA_BEST_ROWS = 2
"""Up to here multiplying in float32 keeps up with memory, which tensor cores do at any number of rows: 35.5 against 37.0 µs at 2
rows of 18944 x 3584, 45.0 against 37.7 at 4."""
_HALF = ("float16", "bfloat16")
_LAST_STEP = 2**16
"""More columns than a block's step, of which the last may begin at a row's end."""
_SHARED_BYTES = 48 * 1024
"""Static shared memory of a block."""
_SMS = 132
"""Multiprocessors of an H100 or H200; on another GPU the blocks are as right, only less even."""
_MOST_LINES = 48
"""Rows of the weight that a warp of tensor cores has registers for, in blocks of up to 512 threads."""
TILE_TOKENS = 128
"""Rows of x for a block of ``cuda_wgmma``."""
TILE_COLUMNS = 64
"""Of x and of the weight: 128 bytes, the span of the swizzle."""
_WGMMA_ROWS = (128, 112, 96, 80, 64)
_WGMMA_STAGES = 6
_WGMMA_SHARED_BYTES = 227 * 1024 - 1024
"""Of a block on Hopper, less what barriers and alignment take."""
_TILE_COST = 4
"""Cost of storing a tile's results, in rows of the weight that are multiplied in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvProblem:
    """What is computed. All tensors are contiguous and of one dtype; sums are float32.

    Operands, in order: ``x (m, k)``, ``norm_weight (k)``, ``weight (n, k)``, ``bias (n)``, ``residual (m, n)``, ``out (m, n)``,
    less those that the problem lacks. Gated, weight and bias have ``2 n`` rows, the gate's first: ``out = silu(gate) * up``.
    """

    m: int
    n: int
    k: int
    dtype: str
    has_norm: bool = False
    eps: float = 1e-6
    norm_offset: float = 0.0
    """Added to the norm's weight: 1 for Gemma."""
    has_bias: bool = False
    is_gated: bool = False
    has_residual: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight."""
        return 2 * self.n if self.is_gated else self.n

    @property
    def operands(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) in the order of a launch; the output is last."""
        found: list[tuple[str, tuple[int, ...]]] = [("x", (self.m, self.k))]
        if self.has_norm:
            found.append(("norm_weight", (self.k,)))
        found.append(("weight", (self.weight_rows, self.k)))
        if self.has_bias:
            found.append(("bias", (self.weight_rows,)))
        if self.has_residual:
            found.append(("residual", (self.m, self.n)))
        return (*found, ("out", (self.m, self.n)))

    @property
    def weight_bytes(self) -> int:
        """What has to be read at least."""
        return self.weight_rows * self.k * ITEM_BYTES[self.dtype]

    @property
    def moved_bytes(self) -> int:
        """All operands, once each."""
        return sum(math.prod(shape) for _, shape in self.operands) * ITEM_BYTES[self.dtype]

    @property
    def text(self) -> str:
        """``rmsnorm, linear, residual``."""
        parts = ("rmsnorm" * self.has_norm, "linear", "bias" * self.has_bias, "silu gate" * self.is_gated)
        return ", ".join(part for part in (*parts, "residual" * self.has_residual) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """Which kernel, and its launch parameters; those of the other kernels are 0.

    ``cuda_fma``  a thread owns columns and multiplies them with every row of its block in float32; any dtype
    ``cuda_mma``  a warp multiplies 16 rows of x by 8 of the weight in tensor cores, from registers to registers
    ``cuda_wgmma``  a GEMM on Hopper's tensor cores that computes the gate from its sums; see ``codegen.gemm.hopper_gated``
    ``triton_fma``, ``triton_dot``  the first two ideas in Triton
    ``cublas``  torch's own ops
    ``cuda_cublas``, ``triton_cublas``  cuBLAS, with library kernels of that backend for the norm before it and the gate after it
    """

    form: Form
    rows: int = 0
    """Rows of the weight for a block."""
    warps: int = 0
    unroll: int = 0
    """CUDA: 16-byte loads of a thread from each row that are under way together."""
    block_k: int = 0
    """Triton: columns of a tile."""
    stages: int = 0
    """Triton and ``cuda_wgmma``: tiles under way together."""

    @property
    def text(self) -> str:
        """``cuda_mma rows=16 warps=4 unroll=4``."""
        names = ("rows", "warps", "unroll", "block_k", "stages")
        return " ".join([self.form, *(f"{name}={getattr(self, name)}" for name in names if getattr(self, name))])

    @classmethod
    def read(cls, text: str) -> GemvConfig:
        """Return the configuration that :attr:`text` begins with.

        Raises:
            ValueError: it names no form of ours, or a parameter that is no number.
        """
        form, *given = text.partition(" (")[0].split(" ")
        forms = [known for names in FORMS.values() for known in names if known == form]
        if not forms:
            raise ValueError(f"{form} is no form of a GEMV kernel")
        return cls(form=forms[0], **{name: int(value) for name, _, value in (item.partition("=") for item in given)})


CUBLAS = GemvConfig(form="cublas")

_CONFIGS: dict[Form, tuple[GemvConfig, ...]] = {
    "cuda_fma": (
        GemvConfig(form="cuda_fma", rows=4, warps=4, unroll=1),
        GemvConfig(form="cuda_fma", rows=2, warps=4, unroll=2),
    ),
    "cuda_mma": (
        GemvConfig(form="cuda_mma", rows=16, warps=8, unroll=2),
        GemvConfig(form="cuda_mma", rows=32, warps=4, unroll=2),
    ),
    "triton_fma": (
        GemvConfig(form="triton_fma", rows=2, warps=4, block_k=1024, stages=3),
        GemvConfig(form="triton_fma", rows=4, warps=4, block_k=512, stages=2),
    ),
    "triton_dot": (
        GemvConfig(form="triton_dot", rows=64, warps=4, block_k=128, stages=4),
        GemvConfig(form="triton_dot", rows=32, warps=4, block_k=128, stages=4),
    ),
}  # fmt: skip
"""The first of each is taken where nothing was measured. On an H200 the best of each was at most a tenth slower than the best of
ten others, over six layers of Qwen2.5-7B and all numbers of rows at which its form is taken."""


def refusal(problem: GemvProblem, form: Form) -> str:
    """Why a kernel does not serve a problem; empty when it does."""
    if form == "cublas":
        return ""
    if form in AROUND.values():
        return "" if around(problem, form.partition("_")[0]) else "no kernel of the library stands around this linear"
    if form == "cuda_wgmma":
        return _wgmma_refusal(problem)
    most = {"cuda_fma": _FMA_ROWS, "triton_fma": 1}.get(form, MOST_ROWS)
    if problem.m > most:
        return f"{form} takes up to {most} rows, not {problem.m}"
    if min(problem.m, problem.n, problem.k) < 1:
        return "there is nothing to read"
    if too_far := _too_far(problem, problem.m):
        return too_far
    if problem.dtype not in (*_HALF, "float32"):
        return f"{form} does not take {problem.dtype}"
    if form in ("cuda_fma", "triton_fma"):
        return ""
    if problem.dtype not in _HALF:
        return f"{form} multiplies in tensor cores, which round {problem.dtype}"
    if problem.has_norm and problem.dtype == "float16":
        return f"{form} rounds x * norm_weight before the norm's factor is known, and float16 might overflow"
    if form == "cuda_mma" and problem.k % 8:
        return f"cuda_mma reads 8 columns at once, and {problem.k} is no multiple of 8"
    return ""


def _too_far(problem: GemvProblem, rows: int) -> str:
    """Why the kernels' 32-bit indices do not serve: of some rows of x, of the results, and of the weight's rows."""
    most = max(rows * (problem.k + _LAST_STEP), rows * problem.n, problem.weight_rows)
    return f"{rows} rows of {max(problem.k, problem.n)} are counted in 32 bits" if most >= 2**31 else ""


def _wgmma_refusal(problem: GemvProblem) -> str:
    if problem.m <= MOST_ROWS:
        return f"cuda_wgmma takes more than {MOST_ROWS} rows, not {problem.m}"
    if not problem.is_gated or problem.has_norm or problem.has_bias or problem.has_residual:
        return "cuda_wgmma computes only a gate with its GEMM"
    if problem.dtype not in _HALF:
        return f"cuda_wgmma multiplies in tensor cores, which round {problem.dtype}"
    if (too_far := _too_far(problem, 1)) or problem.m >= 2**31 - 2 * TILE_TOKENS:
        return too_far or f"{problem.m} rows are counted in 32 bits"
    if min(problem.n, problem.k) < 1 or problem.n % 8 or problem.k % 8:
        return f"cuda_wgmma's rows begin at multiples of 16 bytes, and {problem.n} or {problem.k} is no multiple of 8"
    return ""


def candidates(problem: GemvProblem, backends: tuple[str, ...] = ("cuda", "triton")) -> tuple[GemvConfig, ...]:
    """Configurations of ours that serve a problem, each backend's own choice first; cuBLAS is not among them.

    A backend has one form for a problem: tensor cores above two rows and wherever the other form does not serve.
    """
    found: list[GemvConfig] = []
    for backend in backends:
        forms = [form for form in FORMS[backend] if not refusal(problem, form)]
        forms.sort(key=lambda form: (form in ("cuda_mma", "triton_dot")) != (problem.m > _FMA_BEST_ROWS))
        found += [config for form in forms[:1] for config in _configs(problem, form) if fits(problem, config)]
    return tuple(found)


def _configs(problem: GemvProblem, form: Form) -> tuple[GemvConfig, ...]:
    if form == "cuda_wgmma":
        return _even_tiles(problem)
    return (*_CONFIGS[form], *(_even_blocks(problem) if form == "cuda_mma" else ()))


def _even_blocks(problem: GemvProblem) -> tuple[GemvConfig, ...]:
    """Blocks that leave the busiest multiprocessor as little as can be, as high as that allows.

    16 rows to a block are 288 blocks for a weight of 4,608 rows: 24 multiprocessors had three, the others two, and 15.0 µs at 16
    rows of x were 0.88 of the best peer. 40 rows are 116 blocks. Higher blocks also read x less often, which at 16 rows of x
    and of the weight takes as many bytes from the L2 cache as the weight does.
    """
    most = _MOST_LINES // (2 if problem.is_gated else 1)
    by_load = sorted(range(8, most + 1, 8), key=lambda rows: (-(-problem.n // (rows * _SMS)) * rows, -rows))
    for rows in by_load:
        for warps, unroll in ((16, 1), (8, 2)):
            config = GemvConfig(form="cuda_mma", rows=rows, warps=warps, unroll=unroll)
            if fits(problem, config):
                return () if config in _CONFIGS["cuda_mma"] else (config,)
    return ()


def _even_tiles(problem: GemvProblem) -> tuple[GemvConfig, ...]:
    """The two widths of a tile that leave the busiest cluster the least to do, the better one first.

    512 rows of x by 14,336 of a weight are 3.9 rounds of tiles of 112 rows for 132 multiprocessors, 4.2 of 104 and 3.4 of 128: an
    H200 took 161, 181 and 179 µs. Over six widths from 88 to 128 and two layers the time was within 4 % of rounds times rows.
    """
    blocks = blocks_of(problem)
    down = -(-problem.m // (TILE_TOKENS * blocks))

    def cost(rows: int) -> int:
        rounds = -(-down * -(-problem.n // rows) // (_SMS // blocks))
        return rounds * (rows + _TILE_COST)

    return tuple(sorted(GATED_TILES, key=lambda config: cost(config.rows))[:2])


def _stages(rows: int) -> int:
    results = TILE_TOKENS * rows * 2
    config = GemvConfig(form="cuda_wgmma", rows=rows)
    return min(_WGMMA_STAGES, (_WGMMA_SHARED_BYTES - results) // stage_bytes(config))


def stage_bytes(config: GemvConfig) -> int:
    """Shared memory of ``cuda_wgmma`` for a tile of x and those of both halves of the weight."""
    return (TILE_TOKENS + 2 * config.rows) * TILE_COLUMNS * 2


GATED_TILES = tuple(GemvConfig(form="cuda_wgmma", rows=rows, warps=12, stages=_stages(rows)) for rows in _WGMMA_ROWS)
"""Every width of a tile of ``cuda_wgmma``; each serves every problem that the form serves."""


def blocks_of(problem: GemvProblem) -> int:
    """Blocks of a cluster of ``cuda_wgmma``: 2 share the weight's tiles where there are rows of x for both."""
    return 2 if problem.m > TILE_TOKENS else 1


def around(problem: GemvProblem, backend: str) -> GemvConfig | None:
    """Put a backend's kernels for norm and gate around cuBLAS; None where there is neither, or a norm of no library kernel.

    ``F.rms_norm`` takes 4 to 5 µs on an H200 for 32 rows of 3584, the library's kernel less than half of that.
    """
    if not (problem.has_norm or problem.is_gated) or problem.norm_offset not in (0.0, 1.0) or problem.m < 1:
        return None
    return GemvConfig(form=AROUND[backend])


def default_config(problem: GemvProblem, backends: tuple[str, ...] = ("cuda", "triton")) -> GemvConfig:
    """The choice where nothing was measured: ours up to CROSSOVER_ROWS and for a gate on many rows, cuBLAS between them."""
    ours = candidates(problem, backends) if problem.m <= CROSSOVER_ROWS or problem.m > MOST_ROWS else ()
    return ours[0] if ours else CUBLAS


def fits(problem: GemvProblem, config: GemvConfig) -> bool:
    """Whether a block's partial sums fit into static shared memory."""
    if config.form != "cuda_mma":
        return True
    lines = config.rows * (2 if problem.is_gated else 1)
    tokens = 16 * token_tiles(problem)
    return config.warps * tokens * (lines + 1) * 4 <= _SHARED_BYTES


def token_tiles(problem: GemvProblem) -> int:
    """Tiles of 16 rows of x."""
    return -(-problem.m // 16)


def entry_of(problem: GemvProblem, header: Header, config: GemvConfig) -> str:
    """Name a kernel after what it computes, with six hex digits that change with all that is constant in it."""
    digest = hashlib.sha256(repr((astuple(problem), astuple(config))).encode()).hexdigest()[:6]
    return identifier(f"fa_{header.title[:54]}_{digest}")


def heading_lines(problem: GemvProblem, header: Header, config: GemvConfig) -> list[str]:
    """What the head comment says."""
    read = f"{problem.weight_rows} x {problem.k} {problem.dtype}"
    weight = (
        f"Reads the weight ({read}, {problem.weight_bytes / 1e6:.1f} MB) once, for {problem.m} row{'s' * (problem.m != 1)} of x."
    )
    if config.form == "cuda_wgmma":
        flops = 2 * problem.m * problem.weight_rows * problem.k
        weight = (
            f"{flops / 1e9:.1f} GFLOP on {problem.moved_bytes / 1e6:.1f} MB: the weight ({read}), x and the result, once each."
        )
    lines = [f"{header.title}: {header.summary}", "", weight]
    is_rounded = config.form in ("cuda_mma", "triton_dot") and problem.has_norm
    lines.append("Sums in float32, rounded once, at the store" + ("; x * norm_weight is rounded before." if is_rounded else "."))
    if problem.has_norm:
        lines.append("The norm's factor of a row is one for all its results: the squares are summed up along the way.")
    lines.append(f"Launch: {config.text}")
    lines.append(f"Origin: {header.origin}.")
    if header.source:
        lines.append(f"Source: {header.source}")
    return lines
