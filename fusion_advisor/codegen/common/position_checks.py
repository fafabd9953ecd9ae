"""Positions that a tensor holds: what eager raises where one of them is out of range, and how a kernel says so.

Every kernel compares a position with its table's extent before it reads or writes there, and touches no memory outside:

- C++ kernels write the first wrong position into an argument of their own; the launcher raises eager's error from it.
- CUDA C++ calls ``__assertfail`` and Triton ``tl.device_assert``, as ATen's kernels and Inductor's do: the process's context is
  lost and the next synchronisation raises ``device-side assert triggered``. Kernels that assert are captured in CUDA graphs.

What it costs on a GPU: the two comparisons decide already where a load may read. The check adds one branch for each position and
a call that no thread makes: 2 % of a cross entropy in Triton, 0.2 % in CUDA C++, and less than 1 % of a step in six models
(docs/measurements/trust_cost.md).
"""

from __future__ import annotations

from fusion_advisor.ir.program import Program, Value

MESSAGE = "position out of range"
"""What the device's assertion says."""


def checks_of(program: Program) -> tuple[int, ...]:
    """Return the numbers of a loop nest's ``inside`` values, in order: the n-th reports itself as check n + 1."""
    return tuple(number for number, value in enumerate(program.values) if value.op == "inside")


def error_of(program: Program, check: int, position: int) -> Exception:
    """Return the exception that eager raises for a position out of range.

    Args:
        program: the loop nest.
        check: which of its checks failed, counted from 1.
        position: what was compared; a negative one of ``index`` was counted from the end already.
    """
    value = program.values[checks_of(program)[check - 1]]
    return _raised(value, position, int(program.values[value.args[1]].constant or 0))


def _raised(value: Value, position: int, size: int) -> Exception:
    name, _, dim = value.check.partition(" ")
    if name == "index_select" and dim != "0":
        return RuntimeError(f"INDICES element is out of DATA bounds, id={position} axis_dim={size}")
    if name == "gather":
        return RuntimeError(f"index {position} is out of bounds for dimension {dim} with size {size}")
    if name == "index":
        return IndexError(f"index {position - size * (position < 0)} is out of bounds for dimension 0 with size {size}")
    if name == "target":
        return IndexError(f"Target {position} is out of bounds.")
    if name == "index_copy_":
        return IndexError(f"index_copy_(): index {position} is out of bounds for dimension {dim} with size {size}")
    return IndexError("index out of range in self")
