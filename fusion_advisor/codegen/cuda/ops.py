"""How the ops of the kernel IR are written in CUDA C++.

Columns are handled in packs of ``VEC`` neighbours. A value that varies over columns is computed per lane of a pack,
inside the lane loop; a load along contiguous columns is one access for the pack, any other load is read per lane.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fusion_advisor.codegen.common.arguments import Access, Schedule
from fusion_advisor.codegen.common.printer import ATOM, COMPARE, LOOSE, SUM, Text, Writer, terms_of
from fusion_advisor.codegen.common.printer_rows import jumps_after_division, jumps_after_function
from fusion_advisor.codegen.cuda.op_rows import COMPUTE, FAST, HELPERS, MATH, ROWS, WRAPPING_HELPERS, may_wrap
from fusion_advisor.ir.causal_mask import order_of
from fusion_advisor.ir.program import ADDRESSED, HALF, REDUCTIONS, Value, dropout_constants, result_dtypes

SCALARS = {
    "float64": "double", "float32": "float", "float16": "half_bits", "bfloat16": "bfloat16_bits", "int64": "long long",
    "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip
_ORDERS = ("lt", "le", "gt", "ge")


def vector_width(plan: Schedule) -> int:
    """Columns of the widest pack: 16 bytes of the narrowest operand that runs along the columns, 8 columns at most.

    Pairs have two columns at least: the pack of one column is read element by element.
    """
    widths = [a.col_bytes for a in (*plan.loads.values(), *plan.stores) if a.is_vector]
    return min(8, max(16 // min(widths), 2 if plan.has_pairs else 1)) if widths else 1


def moves_with_p(plan: Schedule, number: int) -> bool:
    """Whether a value of a tiled kernel differs between the rows of a thread, which are neighbours in the last row dim."""
    return plan.kind == "tiled" and plan.col_dim - 1 in plan.varies[number]


def shared_by_rows(plan: Schedule, number: int) -> bool:
    """Whether one pack of a load serves all rows of a thread."""
    return plan.kind == "tiled" and not moves_with_p(plan, number)


def shared_loads(plan: Schedule, writer: CudaWriter) -> tuple[int, ...]:
    """Loads that the columns of a pack share and that need no reduction: a group norm's weight and bias.

    Where packs lie across borders between channels, loads for the channel of a column: a pack has two of them then.
    """
    values = plan.program.values
    reduced: set[int] = set()
    for number, value in enumerate(values):
        needs = (*value.args, *(() if value.guard is None else (value.guard,)))
        if value.op in REDUCTIONS or reduced & set(needs):
            reduced.add(number)
    shared = {n for n in range(len(values)) if writer.is_named(n) and split_quotient(writer, n) >= 0} | writer.per_pack
    early: list[int] = []
    dependent: set[int] = set()  # what is read at a place that is read early itself has no such place to be read at
    for n in sorted(shared - reduced):
        read_at = {*values[n].args, *(() if values[n].guard is None else (values[n].guard,))}
        if not read_at.isdisjoint(dependent):
            dependent.add(n)
        elif values[n].op == "load" and writer.is_named(n):
            early.append(n)
            dependent.add(n)
    return tuple(early)


def split_quotient(writer: CudaWriter, number: int) -> int:
    """The number of the channel that a load is for, where packs lie across borders; -1 where it is not such a load."""
    plan, value = writer.plan, writer.plan.program.values[number]
    if not writer.is_split or value.op != "load" or value.guard is not None or value.strides[-1] != 0:
        return -1
    along = [n for n in value.args if plan.has_col(n)]
    if len(along) != 1 or plan.program.values[along[0]].op != "quotient" or not writer.is_named(along[0]):
        return -1
    index = plan.program.values[plan.program.values[along[0]].args[0]]
    return along[0] if index.op == "index" and index.dim == plan.col_dim else -1


def _per_pack(plan: Schedule) -> frozenset[int]:
    """The values that differ between columns, but not inside a pack: quotients of the column, and what is made of them alone.

    A launch whose packs would lie across a border takes narrower ones (``pack_width``).
    """
    values, found = plan.program.values, set()
    for number, value in enumerate(values):
        needs = (*value.args, *(() if value.guard is None else (value.guard,)))
        is_made_of_them = bool(needs) and all(n in found or not plan.has_col(n) for n in needs)
        is_read_at_them = value.op not in ADDRESSED or value.strides[-1] == 0
        if plan.has_col(number) and (value.op == "quotient" or (is_made_of_them and is_read_at_them)):
            found.add(number)
    return frozenset(found)


class CudaWriter(Writer):
    """Prints values as CUDA C++.

    Attributes:
        packs: the loads that are read as packs, with the name of the pack, or of the array that has one for each ``p``; of a pair
            the one that comes first; and the dropouts that are decided for a pack at once, with the name of its bits.
        per_pack: the values that all columns of a pack share, though others have their own.
        is_split: whether a pack may lie across a border between channels: nothing is shared then.
        is_shifted: whether a row's packs start where addresses allow it, up to a pack before its first column.
        is_clustered: whether several blocks share a row.
        may_wrap: the integer values that may not fit 64 bits.
    """

    rows = ROWS
    helper_names = frozenset(
        {"exp", *MATH, *HELPERS.values(), *FAST.values(), "Pack", "Word", "word_t", "to_float32", "from_float32", "load_pack",
         "store_pack",
         "checked", "normal_cdf_16bit", "tanh_cdf_16bit", "exp_16bit", "exp2_16bit", "sigmoid_16bit", "tanh_16bit",
         "expm1_16bit", "log1p_16bit", "quotient_16bit", "erfc", "row_reduce",
         "LATE", "lane", "first", "start", "top", "is_inside", "p", "index_t", "fabs", "rint", "fmod", "signbit", "VEC", "PACKS",
         "THREADS", "ROWS", "FULL", "half_bits", "bfloat16_bits", "Words", "philox", "word_of", "kept_bits", "is_kept", "Moments",
         "merged", "staged", "STAGED", "shift", "inside", "columns_inside", "load_part", "store_part", "mean_of",
         "round_bf16", "round_fp16", *WRAPPING_HELPERS}
    )  # fmt: skip

    def __init__(
        self, plan: Schedule, *, fast_math: bool, is_split: bool = False, is_shifted: bool = False, is_clustered: bool = False
    ) -> None:
        self.packs: dict[int, str] = {}
        self._starts: dict[tuple[str, str], str] = {}
        self.is_shifted = is_shifted
        self.is_clustered = is_clustered
        self.is_split = is_split
        self.per_pack = frozenset() if is_split else _per_pack(plan)
        self.is_half = result_dtypes(plan.program) <= HALF and not plan.program.is_exact
        self.is_rough = self.is_half and not jumps_after_division(plan.program)
        """Whether a division or a root may be approximate."""
        self.is_short = self.is_half and not jumps_after_function(plan.program)
        """Whether functions need only be good to 16 bits."""
        self.may_wrap = may_wrap(plan.program)
        super().__init__(plan, fast_math=fast_math)

    @property
    def shared_columns(self) -> Collection[int]:
        """Values of a pack, where a cluster shares a row: kernels that walk rows in parts have no register left for them."""
        return self.per_pack if self.is_clustered else ()

    def literal(self, value: Value) -> str:
        """A C++ literal."""
        constant = value.constant
        if value.dtype == "bool":
            return "true" if constant else "false"
        if value.dtype == "int64":
            whole = int(constant or 0)
            if whole == -(2**63):  # C++ reads 2**63 as unsigned, and compares unsigned then
                return "(long long)(1ULL << 63)"
            return str(whole) if abs(whole) < 2**31 else f"{whole}LL"
        number, suffix = float(0.0 if constant is None else constant), "f" if value.dtype == "float32" else ""
        if value.dtype == "float32" and math.isfinite(number) and abs(number) > 3.4028235677973366e38:
            number = math.copysign(math.inf, number)  # what rounding it to float32 gives
        if math.isfinite(number):
            return f"{number!r}{suffix}"
        name = ("NAN_VALUE" if math.isnan(number) else "INF_VALUE") + suffix.upper()
        self.helpers.add(name)
        return f"-{name}" if number < 0 else name

    def load(self, number: int, value: Value, access: Access) -> str:
        """A lane of a pack, or an element read by itself."""
        is_run = access.is_vector and not any(self.plan.has_col(n) for n in value.args)
        if is_run and (value.guard is None or self.pack_guard(value.guard)):
            is_shared = shared_by_rows(self.plan, number)
            pair = self.plan.load_pair(number)
            if min(pair) not in self.packs:
                noun = access.operand.name if access.is_pair else self._nouns[number]
                self.packs[min(pair)] = self.fresh(f"{noun}_pack" + ("" if is_shared else "s"))
            lane = f"2 * lane{' + 1' * (number == pair[1])}" if access.is_pair else "lane"
            pack = self.packs[min(pair)] + ("" if is_shared else "[p]")
            if access.operand.dtype == "bfloat16":
                self.helpers.add("wide_pack")
                return (
                    f"to_float32({pack}, {lane})"
                    if value.dtype == "float32"
                    else f"({COMPUTE[value.dtype]})to_float32({pack}, {lane})"
                )
            return self.widened(f"{pack}[{lane}]", access.operand.dtype, value.dtype)
        code = self.widened(f"{self.base(access)}[{self.element(access)}]", access.operand.dtype, value.dtype)
        if value.guard is None:
            return code
        other = {"float32": "0.0f", "float64": "0.0", "int64": "0LL", "bool": "false"}[value.dtype]
        return f"{self.text(value.guard).at(ATOM)} ? {code} : {other}"

    def operand_address(self, access: Access, *, col: str = "") -> str:
        """As everywhere; a tiled kernel adds up all that moves the pointer before it does so.

        Such a sum takes half the instructions and registers of pointers: rope's first load comes 15 instructions earlier, and
        with 32 registers instead of 40 a multiprocessor has all of its 2048 threads.
        """
        rest = self.element(access, col=col)
        is_sum = self.plan.kind == "tiled" and not access.gathered and " + " in rest
        return f"{access.pointer} + ({rest})" if is_sum else super().operand_address(access, col=col)

    def base(self, access: Access) -> str:
        """The pointer; of rows that are walked, the name of the row's own."""
        return access.pointer if self.plan.kind == "tiled" else super().base(access)

    def element(self, access: Access, *, col: str = "") -> str:
        """What is added to the pointer; where several dims move it, a tiled kernel names their part, which ``bases`` defines."""
        terms = terms_of(self.plan.indices[:-1], access.strides[:-1])
        if self.plan.kind != "tiled" or len(terms) < 2 or access.gathered:
            return super().element(access, col=col)
        code = " + ".join(terms)
        if (access.pointer, code) not in self._starts:
            self._starts[access.pointer, code] = self.fresh(f"{access.operand.name}_start")
            self.bases.append((self._starts[access.pointer, code], code, access))
        along = terms_of((col or self.plan.indices[-1],), access.strides[-1:])
        return " + ".join(filter(None, [self._starts[access.pointer, code], *along, access.offset]))

    def is_packed(self, position: int) -> bool:
        """Whether a store writes a pack at once: where it goes, and whether, is then the same for all columns."""
        decides = self.plan.program.stores[position].needs[1:]
        return self.plan.stores[position].is_vector and not any(self.plan.has_col(number) for number in decides)

    def pack_guard(self, number: int) -> str:
        """A guard that is the same for all columns of a pack, asked of the first; empty where it may change inside a pack.

        Columns are compared with multiples of the pack's width only, and the narrower packs of other launches divide it. A causal
        guard lets a whole pack through: what it hides may be read, it is only not worth reading.
        """
        order = order_of(self.plan.program, number)
        if order is not None and order.column == self.plan.col_dim:
            return f"first <= {self.text(self.plan.program.values[number].args[1]).at(SUM)}"
        value, width = self.plan.program.values[number], vector_width(self.plan)
        is_of_index = any(self.plan.program.values[n].op == "index" for n in value.args)
        if not self.plan.has_col(number) and (self.is_named(number) or not is_of_index):
            return self.text(number).at(ATOM)
        if value.op in ("and", "or"):
            parts = [self.pack_guard(n) for n in value.args]
            return f"({parts[0]} {value.op.replace('and', '&&').replace('or', '||')} {parts[1]})" if all(parts) else ""
        if value.op == "not":
            inner = self.pack_guard(value.args[0])
            return f"!({inner})" if inner else ""
        if value.op not in COMPARE:
            return ""
        left, right = (self.plan.program.values[n] for n in value.args)
        if left.op != "index" or right.op != "const":
            return ""
        if left.dim != self.plan.col_dim:
            return f"{self.plan.indices[left.dim]} {COMPARE[value.op]} {self.literal(right)}"
        edge = int(right.constant or 0) + (value.op in ("le", "gt"))
        return f"first {COMPARE[value.op]} {self.literal(right)}" if value.op in _ORDERS and edge % width == 0 else ""

    def dropout(self, number: int, value: Value) -> Text:
        """A bit of a pack's decisions, made before anything waits for memory; or a decision of its own."""
        numbering, (threshold, scale) = self.plan.numbers[number], dropout_constants(float(value.constant or 0))
        self.helpers |= {"philox", "kept_bits" if numbering.strides[-1] == "1" else "is_kept"}
        kept, zero = f"{scale!r}f" if value.dtype == "float32" else repr(scale), "0.0f" if value.dtype == "float32" else "0.0"
        if numbering.strides[-1] == "1":
            is_shared = shared_by_rows(self.plan, number)
            self.packs[number] = self.fresh("kept")
            return Text(f"{self.packs[number]}{'' if is_shared else '[p]'} >> lane & 1 ? {kept} : {zero}", LOOSE)
        col = "" if numbering.strides[-1] == "0" else f" + {self.plan.indices[-1]} * {numbering.strides[-1]}"
        element = f"{self.number_base(numbering)}{col}".removeprefix("0 + ")
        return Text(f"is_kept({self.text(value.args[0]).code}, {element}, {threshold}u) ? {kept} : {zero}", LOOSE)

    def kept_bits(self, number: int) -> str:
        """The decisions of the pack that starts at ``first``."""
        value, base = self.plan.program.values[number], self.number_base(self.plan.numbers[number])
        element = "first" if base == "0" else f"{base} + first"
        return f"kept_bits({self.text(value.args[0]).code}, {element}, {dropout_constants(float(value.constant or 0))[0]}u)"

    @staticmethod
    def widened(code: str, dtype: str, compute: str) -> str:
        """An element as a number to compute with."""
        if dtype in ("float16", "bfloat16"):
            wide = f"to_float32({code})"
            return wide if compute == "float32" else f"({COMPUTE[compute]}){wide}"
        if dtype == compute:
            return code
        return f"{code} != 0" if compute == "bool" else f"({COMPUTE[compute]}){code}"

    @staticmethod
    def narrowed(code: str, compute: str, dtype: str) -> str:
        """A number as an element: rounded to nearest even."""
        if dtype in ("float16", "bfloat16"):
            return f"from_float32<{SCALARS[dtype]}>({code})"
        if dtype == compute:
            return code
        return f"{Text(code, LOOSE).at(ATOM)} != 0" if dtype == "bool" else f"({SCALARS[dtype]})({code})"

    def inside(self, number: int, value: Value, args: Sequence[Text]) -> Text:  # noqa: ARG002
        """A call of the helper; only where the position counts."""
        self.helpers.add("checked")
        call = f"checked({', '.join(arg.code for arg in args)})"
        return Text(call) if value.guard is None else Text(f"{self.text(value.guard).at(ATOM)} && {call}", LOOSE)

    def reduction(self, number: int, value: Value) -> str:  # noqa: ARG002
        """Empty: the skeleton accumulates reductions."""
        return ""

    def widen(self, name: str) -> str:
        """An index as int64."""
        return f"(long long){name}"

    def rounded_product(self, value: Value, args: Sequence[Text]) -> Text:
        """The intrinsic that nvcc never contracts."""
        return Text(f"__{'f' if value.dtype == 'float32' else 'd'}mul_rn({args[0].code}, {args[1].code})")

    def normal_cdf(self, code: str) -> str:
        """A call of the helper, which is as good as the results' dtype asks for."""
        is_finer = "float16" in result_dtypes(self.plan.program)
        self.helpers.add("normal_cdf_half" if is_finer else "normal_cdf_bfloat16")
        return f"normal_cdf_16bit({code})"

    def _is_folded(self, number: int, value: Value, text: Text) -> bool:
        """What a causal mask chooses keeps its name: a pack that it hides takes another value for it."""
        is_chosen = value.op == "where" and order_of(self.plan.program, value.args[0]) is not None
        return not is_chosen and super()._is_folded(number, value, text)
