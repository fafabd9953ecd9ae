"""What is known of a rendered kernel stands in its record: nothing reads it back from the text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fusion_advisor
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend
from tests.kernel_cases import programs as p

PLAIN = Header(title="k", summary="a kernel", origin="test")
MISLEADING = Header(
    title="k",
    summary="for start in range(8): tl.device_assert( for (index_t start = 0 CLUSTER index_t shift = + lane >= x",
    origin="Tuning: packs=8",
    source="Build: c++ -O0",
)


@pytest.mark.parametrize("name", ["triton", "cuda", "cpp"])
@pytest.mark.parametrize("program", [p.rmsnorm(4, 64), p.softmax(4, 40960, "bfloat16")], ids=["resident", "wide"])
def test_a_comment_changes_no_fact(name, program):
    found = [backend(name).render(program, header, tuning=Tuning(num_warps=4), fast_math=False) for header in (PLAIN, MISLEADING)]
    facts = [(one.entry, one.tuning, one.form, one.has_asserts, one.flags) for one in found]
    assert facts[0] == facts[1] and found[0].source != found[1].source
    assert found[0].form.is_looped is (name != "cpp" and program.dims[-1] > 16384)


def reads_text(tree):
    """Lines that look for something in an attribute ``source`` of a kernel, or match a pattern against it."""
    for node in ast.walk(tree):
        inside = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            inside = [node.comparators[0]]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("search", "match", "findall")
        ):
            inside = node.args
        for one in inside:
            if isinstance(one, ast.Attribute) and one.attr == "source" and ast.unparse(one) != "self.source":
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_nothing_looks_for_facts_in_a_kernels_text():
    assert list(reads_text(ast.parse("'CLUSTER' in rendered.source"))) and list(reads_text(ast.parse("re.search('x', a.source)")))
    folder = Path(fusion_advisor.__file__).parent
    found = [f"{path.name}:{line}" for path in folder.rglob("*.py") for line in reads_text(ast.parse(path.read_text()))]
    assert found == []
