"""What is known of a rendered kernel stands in its record: nothing reads it back from the text."""

from __future__ import annotations

import ast
import pickle
import shutil
from pathlib import Path

import jinja2.bccache
import pytest

import fusion_advisor
from fusion_advisor.codegen.common.interface import Header, Tuning, environment
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


CUT = jinja2.bccache.bc_magic + b"\x80\x02"
NO_CODE = jinja2.bccache.bc_magic + pickle.dumps("another digest", 2) + b"no code"


@pytest.mark.parametrize("content", [b"", b"no code", CUT, NO_CODE, None], ids=["empty", "foreign", "cut", "older", "no folder"])
def test_a_kept_template_that_is_damaged_is_made_again(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "cpp/rowwise.cpp.jinja"
    environment.__wrapped__().get_template(name)
    folder = tmp_path / "fusion-advisor" / "jinja"
    kept = next(path for path in folder.iterdir() if b"rowwise" in path.read_bytes())
    whole, found = kept.read_bytes(), environment.__wrapped__()
    if content is None:
        shutil.rmtree(folder)
    else:
        kept.write_bytes(content)
    assert found.get_template(name).blocks  # where there is no folder any more, nothing can be written either
    assert content is None or kept.read_bytes() == whole
