"""A C++ kernel file that runs by itself: the kernel, then its launch, a reference, and a main program under a guard."""

from __future__ import annotations

from fusion_advisor.codegen.common.cpp_reference import check_context
from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.common.position_checks import checks_of
from fusion_advisor.codegen.common.site import is_empty
from fusion_advisor.codegen.common.value_names import ValueNames
from fusion_advisor.codegen.cpp.arguments import Layout
from fusion_advisor.codegen.cpp.ops import C_TYPES
from fusion_advisor.ir.program import Program, nests

GUARD = "FUSION_ADVISOR_MAIN"
_TIMED = """\
launch({given});
std::vector<double> microseconds;
for (int run = 0; run < 30; ++run) {{
  const auto start = std::chrono::steady_clock::now();
  launch({given});
  microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
}}"""


def with_launcher(rendered: Rendered, program: Program, *, fast_math: bool = False) -> str:
    """Return the whole file of a C++ kernel.

    Args:
        rendered: the kernel.
        program: of its site.
        fast_math: whether the kernel approximates.
    """
    parts = [part.program for part in nests(program)]
    if all(map(is_empty, parts)):
        return rendered.source
    integers = [
        (f"{parameter.name}_of_{number}" if len(parts) > 1 else parameter.name, parameter.value)
        for number, part in enumerate(parts, start=1)
        for parameter in Layout(part).parameters
    ]
    check = check_context(program, fast_math=fast_math)
    names = ValueNames({"threads", "wrong", *(name for name, _ in integers)})
    tensors = [names.fresh(tensor["name"]) for tensor in check["tensors"]]
    pointers = [
        f"{'' if operand.is_output else 'const '}{C_TYPES[operand.dtype]} *{name}"
        for operand, name in zip(program.operands, tensors, strict=True)
    ]
    check_count = sum(bool(checks_of(part)) for part in parts)
    given = ", ".join(
        f"reinterpret_cast<{'' if operand.is_output else 'const '}bool *>({tensor['host']}.data())" if operand.dtype == "bool"
        else f"{tensor['host']}.data()"
        for operand, tensor in zip(program.operands, check["tensors"], strict=True)
    )  # fmt: skip
    build = " ".join(flag for flag in rendered.flags if flag not in ("-fPIC", "-shared"))
    launcher = environment().get_template("cpp/launcher.cpp.jinja").render(
        **check, entry=rendered.entry, note="", check_count=check_count, run=_TIMED.format(given=given).splitlines(),
        command=[f"c++ {build} \\", f"    -D{GUARD} {rendered.entry}.cpp -o check && ./check"],
        parameters=[*pointers, *(f"int64_t {name} = {value}" for name, value in integers),
                    "int threads = omp_get_max_threads()"],
        arguments=[*tensors, *(name for name, _ in integers), *(["wrong"] if check_count else []), "threads"],
    )  # fmt: skip
    return rendered.source + launcher
