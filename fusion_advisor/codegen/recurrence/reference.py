"""A recurrence as plain PyTorch, and the Triton kernel's file that launches itself and checks itself against it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.common.value_names import ValueNames
from fusion_advisor.codegen.recurrence.triton import launch_of
from fusion_advisor.codegen.triton.direct_launch import compile_options
from fusion_advisor.codegen.triton.launcher import FLOORS, own_dtype
from fusion_advisor.codegen.triton.reference import RESERVED, ReferenceWriter, TorchReference
from fusion_advisor.ir.program import Store, Value
from fusion_advisor.ir.recurrence import Recurrence

_STEP = "step"


class _StepWriter(ReferenceWriter):
    """Prints one step; ``step`` is its number."""

    def __init__(self, recurrence: Recurrence, operands: Sequence[str], names: ValueNames) -> None:
        program = recurrence.program
        super().__init__(replace(program, dims=(1, *program.dims[1:])), operands, names)
        self._state, self._steps = recurrence.state, recurrence.steps

    def printed(self, value: Value) -> str:
        """The state is copied as it is read, because the step writes it before it has computed its row."""
        if value.op == "index" and value.dim == 0:
            return f"torch.tensor({_STEP}, device=device)"
        if value.op == "size" and value.dim == 0:
            return repr(float(self._steps) if value.dtype.startswith("float") else self._steps)
        text = super().printed(value)
        return f"{text}.clone()" if value.op == "load" and value.operand == self._state else text

    def start(self, access: Value | Store) -> str:
        """An access moves on by its distance in time."""
        moved = access.strides[0]
        terms = [str(access.offset)] if access.offset else []
        terms += [_STEP if moved == 1 else f"{_STEP} * {moved}"] if moved else []
        return " + ".join(terms)


def recurrence_reference(recurrence: Recurrence, names: Sequence[str]) -> TorchReference:
    """Print the statements that walk all steps: they read and write the state's tensor, and write the rows.

    Args:
        recurrence: what the kernel walks.
        names: of its operands, the state's among them.
    """
    writer = _StepWriter(recurrence, names, ValueNames({*RESERVED, _STEP, *names}))
    lines = [f"for {_STEP} in range({recurrence.steps}):", *(f"    {line}" for line in writer.written())]
    return TorchReference(lines=tuple(lines), helpers=frozenset(writer.helpers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An operand of a launch.

    Attributes:
        name: of the tensor.
        made: the expression that makes it.
        is_output: whether the kernel writes it.
    """

    name: str
    made: str
    is_output: bool


def triton_file(rendered: Rendered, recurrence: Recurrence, operands: Sequence[Made]) -> Rendered:
    """Return a Triton kernel whose file launches itself at its site's sizes and checks its numbers.

    Args:
        rendered: the kernel.
        recurrence: at its sizes.
        operands: of a launch, in order.
    """
    launch = launch_of(recurrence)
    names, program = [one.name for one in operands], recurrence.program
    reference, own = recurrence_reference(recurrence, names), own_dtype(program)
    constants = {name: f"tl.{value}" if name == "INDEX" else value for name, value in launch.constants.items()}
    options = compile_options(launch.num_warps, asserts=False, is_exact=False)
    passed = textwrap.wrap(", ".join([*names, *map(str, launch.scalars)]), 110)
    text = environment().get_template("triton/launcher.py.jinja").render(
        file=f"{rendered.entry}.py", entry=rendered.entry, blocks=[], grid=str(launch.programs),
        constants=_keywords(constants), options=_keywords(options),
        tensors=operands, given=", ".join(names), scalars=[], arguments=[line.removesuffix(",") for line in passed],
        helpers=reference.helpers, reference=reference.lines, own=own, moved_bytes=recurrence.moved_bytes,
        input_count=sum(not one.is_output for one in operands),
        output_names=repr(tuple(one.name for one in operands if one.is_output)), floor=FLOORS[own],
    )  # fmt: skip
    return replace(rendered, text=rendered.source + text)


def _keywords(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
