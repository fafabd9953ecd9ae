"""How the ops of the kernel IR are written in Triton.

Only ``tl`` functions that the interpreter has too: no libdevice, so every kernel can be run and checked without a
GPU. Where ``tl`` lacks a function or its version is not accurate enough, the template prints a helper
(``templates/triton/helpers.py.jinja``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fusion_advisor.codegen.common.arguments import Access, Schedule
from fusion_advisor.codegen.common.column_passes import parts_of
from fusion_advisor.codegen.common.printer import ATOM, PRODUCT, ROUNDERS, SUM, UNARY, Text, Writer
from fusion_advisor.codegen.common.printer_rows import jumps_after_division, jumps_after_function
from fusion_advisor.codegen.triton.op_rows import ROWS
from fusion_advisor.ir.causal_mask import order_of
from fusion_advisor.ir.program import HALF, ITEM_BYTES, Value, dropout_constants, result_dtypes

_IDENTITY = {"reduce_sum": {"float": "0.0", "int": "0"},
             "reduce_max": {"float": 'float("-inf")', "int": str(-(2**63))},
             "reduce_min": {"float": 'float("inf")', "int": str(2**63 - 1)}}  # fmt: skip
LOWEST = {"float32": "-3.4028234663852886e38", "float64": "-1.7976931348623157e308"}
"""The lowest finite number, where a running maximum starts."""


def identity(value: Value) -> str:
    """The literal that leaves a reduction unchanged."""
    return _IDENTITY[value.op]["int" if value.dtype == "int64" else "float"]


def _writes_rows(plan: Schedule) -> bool:
    """Whether a kernel has rows, and each of its stores writes to all rows of its tile."""
    row_dims = {"flat": (), "tiled": (plan.col_dim - 1,), "rows": range(plan.col_dim)}[plan.kind]
    return bool(plan.stores) and all(any(access.strides[dim] != "0" for dim in row_dims) for access in plan.stores)


class TritonWriter(Writer):
    """Prints values as Triton.

    Args:
        plan: the schedule.
        fast_math: allow approximate division, square root and tanh.
        is_looped: whether the columns are walked in a loop: then reductions are accumulated by the skeleton.
    """

    rows = ROWS
    helper_names = frozenset(
        {"tanh", "sigmoid", "expm1", "log1p", "pow", "round", "trunc", "remainder", "sign", "exp", "sigmoid_16bit",
         "tanh_cdf_16bit", "normal_cdf_16bit", "to_float32", "maximum", "minimum", "philox", "dropout_factor", "checked", "erfc",
         "round_bf16", "round_fp16", "in_eights", "add_exp", "merge_exp_sums", "add_moments", "squares_about", "mean_of",
         "tanh_16bit", "exp_16bit", "expm1_16bit", "log1p_16bit"}
    )  # fmt: skip

    def __init__(self, plan: Schedule, *, fast_math: bool, is_looped: bool) -> None:
        self.is_looped = is_looped
        self.parts = parts_of(plan) if is_looped else frozenset[int]()
        """What is one number for all columns of a tile where no part of the row ends inside of it."""
        self.zero_past_end: set[int] = set()
        """Column-varying values that are 0 in masked lanes, because everything they are made of was loaded as 0."""
        self.policies: dict[int, str] = {}
        """What loads say to the cache, by value number."""
        self.is_float64 = any(v.dtype == "float64" for v in plan.program.values)
        self.is_half = result_dtypes(plan.program) <= HALF and not plan.program.is_exact
        self.is_rough = self.is_half and not jumps_after_division(plan.program)
        """Whether a division or a root may be approximate."""
        self.is_short = self.is_half and not jumps_after_function(plan.program)
        """Whether functions need only be good to 16 bits."""
        self._runs: dict[int, str] = {}
        self._says_bytes = False
        self.shares_rows = not is_looped and _writes_rows(plan)
        """Whether what all rows of a tile share may be read for each of them."""
        super().__init__(plan, fast_math=fast_math)

    def literal(self, value: Value) -> str:
        """A Python literal."""
        constant = value.constant
        if value.dtype == "bool":
            return "True" if constant else "False"
        if value.dtype == "int64":
            return str(int(constant or 0))
        number = float(0.0 if constant is None else constant)
        if number == 0 and math.copysign(1.0, number) < 0:  # triton 3.6 takes the literal -0.0 for +0.0
            bits = 64 if value.dtype == "float64" else 32
            return f"tl.full([], 1 << {bits - 1}, tl.uint{bits}).to(tl.float{bits}, bitcast=True)"
        if value.constant_name and value.dtype == "float64":
            return f"tl.full([], {number!r}, tl.float64)"  # a name for a plain number would hold it as float32
        return repr(number) if math.isfinite(number) else f'float("{number}")'

    def typed(self, number: int) -> str:
        """A value for where no other says its dtype: of two plain numbers Triton makes int32 or float32."""
        value, code = self.plan.program.values[number], self.text(number).code
        is_plain = value.op == "const" and not value.constant_name and value.dtype in ("int64", "float64")
        return f"tl.full([], {code}, tl.{value.dtype})" if is_plain else code

    @property
    def shared_columns(self) -> Collection[int]:
        """What is one number for a tile inside a part of the row."""
        return self.parts

    def mask(self, varies: frozenset[int]) -> str:
        """Name of the mask of a tile that varies over these dims; empty when it needs none."""
        if self.plan.kind == "flat":
            return "mask" if varies else ""
        has_col = self.plan.col_dim in varies
        return {(True, True): "mask", (False, True): "col_mask", (True, False): "row_mask", (False, False): ""}[
            self._moves_along_rows(varies), has_col
        ]

    def _moves_along_rows(self, varies: frozenset[int]) -> bool:
        row_dims = varies - {self.plan.col_dim}
        if self.plan.kind == "tiled":
            row_dims &= {self.plan.col_dim - 1}  # outer dims are one number per program, never past the end
        return bool(row_dims)

    def address(self, access: Access, varies: frozenset[int]) -> str:
        """Pointer expression shaped like the dims in ``varies``; a dim that does not move the address adds ``0 * index``."""
        if access.is_pair:  # `item` counts elements, two to a column
            code = self.operand_address(replace(access, strides=(*access.strides[:-1], "1")), col="item")
        else:
            code = self.operand_address(access)
        for d in sorted(varies):
            in_tile = d >= self.plan.col_dim - (1 if self.plan.kind == "tiled" else 0) or self.plan.kind == "rows"
            is_moved = any(d in self.plan.varies[number] for number, _ in access.gathered)
            if access.strides[d] == "0" and in_tile and not is_moved:
                code += f" + 0 * {self.plan.indices[d]}"
        return code

    def definitions(self, numbers: Iterable[int]) -> list[str]:
        """The statements of those of these values that are named, in order."""
        lines: list[str] = []
        read: set[tuple[int, int]] = set()
        for number in numbers:
            if number in self.plan.loads and self._bytes_at_once(self.plan.loads[number]) and not self._says_bytes:
                self._says_bytes = True
                lines.append("# As many bytes for a thread as it reads elements: more of them would have to change threads.")
            pair = self.plan.load_pair(number)
            if number in self.policies and pair[0] == pair[1]:
                lines.append(
                    f"{self.text(number).code} = {self.load(number, self.plan.program.values[number], self.plan.loads[number])}"
                )
            elif pair[0] == pair[1]:
                lines += [" = ".join(self.statement(number))] if self.is_named(number) else []
            elif pair not in read:
                read.add(pair)
                lines += self._pair(*pair)
        return lines

    def _pair(self, even: int, odd: int) -> list[str]:
        """Both elements of every column are read as one run of neighbours, at full width, and then split."""
        value, access = self.plan.program.values[even], self.plan.loads[even]
        if even not in self._runs:
            self._runs[even] = self.fresh(f"{access.operand.name}_run")
        run, varies = self._runs[even], self.plan.varies[even]
        paired = f"{run}.reshape({', '.join([*self._tile(varies), '2'])})"
        halves = f"{self.text(even).code}, {self.text(odd).code}"
        return [
            f"{run} = {self._read(access, varies, [self.mask(varies)])}",
            f"{halves} = tl.split({self._widened(paired, access, value)})",
        ]

    def interleaved(self, values: tuple[int, int]) -> str:
        """Two values per column as one run of neighbours, ready to be stored."""
        varies = self.plan.varies[values[0]] | self.plan.varies[values[1]]
        rows = self._tile(varies)[:-1]
        parts = []
        for number in values:
            value, text, shape = self.plan.program.values[number], self.text(number).code, ", ".join([*rows, "BLOCK_COLS"])
            if value.op == "const":
                text = f"tl.full([{shape}], {text}, tl.{value.dtype})"
            elif self.plan.col_dim not in self.plan.varies[number]:
                text = f"tl.broadcast_to({text}, [{shape}])"
            parts.append(text)
        return f"tl.join({', '.join(parts)}).reshape({', '.join([*rows, '2 * BLOCK_COLS'])})"

    def _tile(self, varies: frozenset[int]) -> list[str]:
        """Shape of a tile of columns that varies over these dims."""
        if self.plan.kind == "flat":
            return ["BLOCK_COLS"]
        return ["BLOCK_ROWS" if self._moves_along_rows(varies) else "1", "BLOCK_COLS"]

    def load(self, number: int, value: Value, access: Access) -> str:
        """A masked ``tl.load``; empty for one of a pair."""
        varies = self.plan.varies[number]
        is_part = number in self.parts
        if self.plan.col_dim in varies and not is_part:
            self.zero_past_end.add(number)
        if access.is_pair:
            return ""
        if self.shares_rows and self._is_shared_by_rows(number, value):
            zero = "0.0" if access.operand.dtype.startswith(("float", "bfloat")) else "0"
            place = self.operand_address(access, col="shared_col")
            return self._widened(f"tl.load({place}, mask=col_mask, other={zero})", access, value)
        masks = [self.mask(varies)]
        if is_part:
            alone = self.mask(varies - {self.plan.col_dim}) or "True"
            masks = [f"{alone} if WHOLE else {masks[0]}"]
        if value.guard is not None and (value.args or not (causal := self._guard(value.guard, access))):
            masks = self.with_guard(masks[0], value.guard)
        elif value.guard is not None:
            masks.append(causal)
        policy = self.policies.get(number, "")
        return self._widened(self._read(access, varies, masks, policy=policy), access, value)

    def _is_shared_by_rows(self, number: int, value: Value) -> bool:
        varies = self.plan.varies[number]
        is_plain = value.guard is None and not value.args
        return is_plain and self.plan.col_dim in varies and not self._moves_along_rows(varies)

    def is_block(self, number: int) -> bool:
        """Whether a value differs between elements of a tile."""
        varies = self.plan.varies[number]
        return self.plan.col_dim in varies or self._moves_along_rows(varies)

    def with_guard(self, mask: str, guard: int) -> list[str]:
        """What must hold, each by itself, where a mask and a guard do."""
        if mask and not self.is_block(guard):
            # Not `mask & guard`: Triton's interpreter makes a bad mask of a block and a number that was loaded.
            return [f"tl.where({self.text(guard).code}, {mask}, False)"]
        return [mask, self.text(guard).at(ATOM)]

    def _read(self, access: Access, varies: frozenset[int], masks: list[str], *, policy: str = "") -> str:
        other, wanted = "", " & ".join(filter(None, masks))
        if wanted:
            zero = "0.0" if access.operand.dtype.startswith(("float", "bfloat")) else "0"
            other = f", mask={'item_' * access.is_pair}{wanted}, other={zero}"
        kept = f', eviction_policy="{policy}"' if policy else ""
        address, most = self.address(access, varies), self._bytes_at_once(access)
        if most:
            address = f"tl.max_contiguous({address}, [{'' if self.plan.kind == 'flat' else '1, '}{most}])"
        return f"tl.load({address}{other}{kept})"

    def _bytes_at_once(self, access: Access) -> int:
        """How many neighbours a thread is to read of a tensor of bytes, such as a mask; 0 where that is left to Triton.

        It would take 16, but 8 or 4 of the other tensors, and move what it made of them through shared memory: a masked
        softmax of 1,024 columns had 5 barriers in bfloat16 and 11 in float32. It has the 3 of its reductions (sm_90).
        """
        accesses = [one for one in (*self.plan.loads.values(), *self.plan.stores) if one.is_vector and not one.is_pair]
        widths = [ITEM_BYTES[one.operand.dtype] for one in accesses if ITEM_BYTES[one.operand.dtype] > 1]
        is_narrow = ITEM_BYTES[access.operand.dtype] == 1 and access.is_vector and not (access.is_pair or access.gathered)
        return 16 // min(widths) if is_narrow and widths else 0

    def _widened(self, code: str, access: Access, value: Value) -> str:
        if value.dtype == access.operand.dtype:
            return code
        if access.operand.dtype == "bfloat16" and value.dtype == "float32":
            self.helpers.add("to_float32")
            return f"to_float32({code})"
        return f"{code} != 0" if value.dtype == "bool" else f"{code}.to(tl.{value.dtype})"

    def _guard(self, number: int, access: Access) -> str:
        """A causal guard asked of the first column of each 16 bytes: a mask that changes inside them would be read by element."""
        order, plan = order_of(self.plan.program, number), self.plan
        if order is None or order.column != plan.col_dim or access.strides[-1] != "1":
            return ""
        col, pack = plan.indices[-1], 16 // ITEM_BYTES[access.operand.dtype]
        return f"({col} // {pack} * {pack} <= {self.text(plan.program.values[number].args[1]).at(SUM)})"

    def masked(self, value: Value) -> str:
        """The argument of a reduction, with lanes past the end set to the reduction's identity."""
        arg = value.args[0]
        if value.op == "reduce_sum" and arg in self.zero_past_end:
            return self.text(arg).code
        return f"tl.where({self.mask(frozenset((self.plan.col_dim,)))}, {self.typed(arg)}, {identity(value)})"

    def dropout(self, number: int, value: Value) -> Text:
        """A call of the helper, with what columns share of the element's number and what they do not."""
        self.helpers |= {"philox", "dropout_factor"}
        numbering, (threshold, scale) = self.plan.numbers[number], dropout_constants(float(value.constant or 0))
        seed, base = self.text(value.args[0]).code, self.number_base(numbering)
        index, stride = self.plan.indices[-1], numbering.strides[-1]
        col = {"0": "0", "1": index}.get(stride, f"{index} * {stride}")
        if base == col == "0":
            base = "tl.full([], 0, INDEX)"
        code = f"dropout_factor({seed}, {base}, {col}, {threshold}, {scale!r}, BY_FOUR)"
        return Text(f"{code}.to(tl.float32)" if self.is_float64 and value.dtype == "float32" else code)

    def inside(self, number: int, value: Value, args: Sequence[Text]) -> Text:
        """A call of the helper, which asserts where a lane is neither past the end nor unwanted."""
        self.helpers.add("checked")
        varies = self.plan.varies[number]
        mask = self.mask(varies)
        if number in self.parts:
            mask = f"({self.mask(varies - {self.plan.col_dim}) or 'True'} if WHOLE else {mask})"
        masks = [mask] if value.guard is None else self.with_guard(mask, value.guard)
        wanted = " & ".join(filter(None, masks)) or "True"
        return Text(f"checked({', '.join(arg.code for arg in args)}, {wanted})")

    def reduction(self, number: int, value: Value) -> str:  # noqa: ARG002
        """A reduced tile; empty in a loop, whose skeleton accumulates it."""
        if self.is_looped:
            return ""
        return self.reduce_tile(value, self.masked(value))

    def reduce_tile(self, value: Value, tile: str) -> str:
        """Reduce a tile over its columns."""
        if value.op == "reduce_sum":
            return f"tl.sum({tile}, axis=1, keep_dims=True)"
        helper = "maximum" if value.op == "reduce_max" else "minimum"
        self.helpers.add(helper)
        return f"tl.reduce({tile}, 1, {helper}, keep_dims=True)"

    def widen(self, name: str) -> str:
        """An index as int64."""
        return f"{name}.to(tl.int64)"

    def rounded_product(self, value: Value, args: Sequence[Text]) -> Text:
        """An FMA that adds 0: it cannot be contracted once more, whatever Triton's options say.

        It makes 0 of -0, so that an exact kernel is compiled without contraction instead.
        """
        if self.plan.program.is_exact:
            return Text(f"{args[0].at(PRODUCT)} * {args[1].at(UNARY)}", PRODUCT)
        left, right = args if self.plan.program.values[value.args[0]].op != "const" else args[::-1]
        return Text(f"tl.fma({left.code}, {right.code}, 0.0)")

    def _write(self, number: int) -> None:
        super()._write(number)
        value = self.plan.program.values[number]
        keeps_zero = {"neg", "abs", "sub", "add", "mul", "cast", "sqrt", "tanh", "erf", "sin", "sign", *ROUNDERS}
        if value.op in keeps_zero and all(a in self.zero_past_end for a in value.args):
            self.zero_past_end.add(number)

    def normal_cdf(self, code: str) -> str:
        """A call of the helper, which is as good as the results' dtype asks for."""
        is_finer = "float16" in result_dtypes(self.plan.program)
        self.helpers.add("normal_cdf_half" if is_finer else "normal_cdf_bfloat16")
        return f"normal_cdf_16bit({code})"
