"""kernel.toml: what it says is read whole, and what is wrong in it is refused with file and key."""

from __future__ import annotations

import pytest

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.library.manifest import BadManifest, read_spec
from fusion_advisor.library.spec import Case, Gemv, Input

GOOD = """
name = "thing"
summary = "does a thing"
source = "https://example.org"
backends = ["triton", "cuda"]
dtypes = ["float32", "bfloat16"]
outputs = ["total", "out"]
has_backward = false
constraints = ["even"]
[inputs]
x = { shape = ["B", "H", "S"], order = ["B", "S", "H"] }
ids = { shape = ["S"], dtype = "int64", below = "H", planted = [-1] }
cos = ["B", 1, "S"]
[constants]
eps = 1e-5
[[tunables]]
num_warps = 4
[[check]]
sizes = { B = 1, H = 2, S = 3 }
dtypes = ["float32"]
[[bench]]
sizes = { B = 8, H = 16, S = 1024 }
"""


def read(tmp_path, text):
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "kernel.toml").write_text(text)
    return read_spec(folder)


def test_reads_every_key(tmp_path):
    spec = read(tmp_path, GOOD)
    assert spec.inputs[0] == Input(name="x", shape=("B", "H", "S"), order=("B", "S", "H"))
    assert (spec.inputs[1].dtype, spec.inputs[1].below, spec.inputs[1].planted) == ("int64", "H", (-1,))
    assert spec.constants == (("eps", 1e-5),)
    assert spec.tunables == (Tuning(num_warps=4),)
    assert spec.check == (Case(sizes=(("B", 1), ("H", 2), ("S", 3)), dtypes=("float32",)),)
    assert spec.bench[0].dtypes == ("float32", "bfloat16")
    assert spec.shape_of(spec.inputs[2], spec.bench[0]) == (8, 1, 1024)
    assert (spec.name, spec.outputs, spec.has_backward, spec.constraints) == ("thing", ("total", "out"), False, ("even",))


def test_a_check_case_may_lay_its_inputs_out_in_another_order(tmp_path):
    spec = read(tmp_path, GOOD.replace('dtypes = ["float32"]\n[[bench]]', 'order = { x = ["S", "B", "H"] }\n[[bench]]'))
    (case,) = spec.check
    assert case.orders == (("x", ("S", "B", "H")),)
    assert str(case) == "B=1 H=2 S=3 x[S B H]"
    assert [tensor.order for tensor in spec.laid_out(case).inputs] == [("S", "B", "H"), ("S",), ("B", 1, "S")]
    assert spec.laid_out(spec.bench[0]) == spec


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ('name = "thing"', "", "name", "needs a text"),
        ('name = "thing"', 'name = "other"', "name", "folder"),
        ('name = "thing"', 'name = "rm -rf"', "name", "identifier"),
        ("summary", "sumary", "sumary", "did you mean `summary`"),
        ('"cuda"]', '"hip"]', "backends", "`hip`"),
        ('"bfloat16"]', '"fp8"]', "dtypes", "`fp8`"),
        ("has_backward = false", 'has_backward = "no"', "has_backward", "true or false"),
        ('["total", "out"]', "[]", "outputs", "needs a name"),
        ('["total", "out"]', '["total", "SIZE1"]', "outputs", "small letters"),
        ("eps = 1e-5", "EPS = 1e-5", "constants.EPS", "small letters"),
        ('["total", "out"]', '["out", "out"]', "outputs", "two tensors"),
        ('["total", "out"]', '["x", "out"]', "outputs", "two tensors"),
        ('order = ["B", "S", "H"]', 'order = ["B", "S"]', "inputs.x", "order"),
        ('["B", 1, "S"]', '"B"', "inputs.cos", "shape"),
        ("eps = 1e-5", 'eps = "small"', "constants.eps", "number"),
        ("num_warps = 4", "num_warps = 5", "tunables[0].num_warps", "power of two"),
        ("num_warps = 4", "warps = 4", "tunables[0].warps", "did you mean `num_warps`"),
        ('dtypes = ["float32"]', 'order = { x = ["B", "H"] }', "check[0].order.x", "dims of shape"),
        ('dtypes = ["float32"]', 'order = { z = ["S"] }', "check[0].order.z", "known are x, ids, cos"),
        ('dtypes = ["float32"]', 'order = ["S"]', "check[0].order", "table of inputs"),
        ("H = 16, S = 1024 }", 'H = 16, S = 1024 }\norder = { x = ["S", "H", "B"] }', "bench[0].order", "unknown key"),
        ("H = 2, S = 3", "H = 2", "check[0].sizes", "B, H, S"),
        ("H = 2, S = 3", "H = 2, S = -3", "check[0].sizes.S", "whole number"),
        ('dtypes = ["float32"]', 'dtypes = ["float16"]', "check[0].dtypes", "float32, bfloat16"),
        ("[[bench]]", "[[check]]", "bench", "at least one case"),
        ("[inputs]", "[inputs", "file", "is not TOML"),
        (', below = "H"', "", "inputs.ids", "needs `below`"),
        ('below = "H"', 'below = "Z"', "inputs.ids", "no input has a dim `Z`"),
        ('below = "H"', "below = 0", "inputs.ids", "at least 1"),
        ("planted = [-1]", 'planted = ["x"]', "inputs.ids", "whole numbers"),
        ('cos = ["B", 1, "S"]', 'cos = { shape = ["B", 1, "S"], below = "H" }', "inputs.cos", "below is for integers"),
    ],
)
def test_refuses_with_file_and_key(tmp_path, old, new, key, words):
    assert old in GOOD
    with pytest.raises(BadManifest) as caught:
        read(tmp_path, GOOD.replace(old, new))
    message = str(caught.value)
    assert "kernel.toml" in message and f": {key}: " in message and words in message


def test_a_missing_manifest_is_refused(tmp_path):
    with pytest.raises(BadManifest, match="No such file"):
        read_spec(tmp_path)


GEMV = """
name = "layer"
summary = "s"
source = "u"
dtypes = ["bfloat16"]
backends = ["cuda"]
outputs = ["out"]

[gemv]
{gemv}

[inputs]
{inputs}

[[check]]
sizes = {{ M = 1, N = 2, K = 3 }}

[[bench]]
sizes = {{ M = 1, N = 2, K = 3 }}
"""
X, WEIGHT = 'x = ["M", "K"]', 'weight = ["N", "K"]'


def gemv_manifest(tmp_path, gemv="", inputs=(X, WEIGHT)):
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer/kernel.toml").write_text(GEMV.format(gemv=gemv, inputs="\n".join(inputs)))
    return read_spec(tmp_path / "layer")


def test_a_kernel_written_by_hand(tmp_path):
    spec = gemv_manifest(tmp_path, "is_gated = true\nnorm_offsets = { gemma = 1.0 }", (X, 'weight = [2, "N", "K"]'))
    assert spec.gemv == Gemv(is_gated=True, norm_offsets=(("gemma", 1.0),))


@pytest.mark.parametrize(
    ("gemv", "inputs", "complaint"),
    [
        ("is_gated = 1", (X, WEIGHT), "gemv.is_gated: must be true or false"),
        ("gated = true", (X, WEIGHT), "gemv.gated: unknown key; did you mean `is_gated`?"),
        ('norm_offsets = { gemma = "1" }', (X, WEIGHT), "gemv.norm_offsets: needs a number"),
        ("is_gated = true", (X, WEIGHT), "inputs.weight: a .gemv. kernel's tensors are"),
        ("", (WEIGHT, X), "inputs: must come in the order x, norm_weight, weight"),
        ("", (X, WEIGHT, 'scale = ["N"]'), "inputs.scale: a .gemv. kernel's tensors are"),
        ("", (X, 'residual = ["M", "N"]'), "inputs: a .gemv. kernel needs x and weight"),
    ],
)
def test_a_kernel_written_by_hand_that_is_wrong(tmp_path, gemv, inputs, complaint):
    with pytest.raises(BadManifest, match=complaint):
        gemv_manifest(tmp_path, gemv, inputs)
