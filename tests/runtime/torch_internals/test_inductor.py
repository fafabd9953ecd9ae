"""Inductor: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from fusion_advisor.runtime.torch_internals import fake_mode, fx_trace, inductor


def test_compilers_begin_with_empty_caches_and_get_theirs_back(monkeypatch, tmp_path):
    before = str(tmp_path / "before"), str(tmp_path / "before too")  # Inductor makes a path absolute when it is imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before[0])
    monkeypatch.setenv("TRITON_CACHE_DIR", before[1])
    with inductor.empty_compile_caches():
        inside = os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]
    assert "before" not in inside[0] and "before" not in inside[1]
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]) == before


def test_inductor_compiles_a_traced_graph():
    # A matrix product alone needs no code of Inductor's own, which a C++ compiler would take seconds for.
    a, b = torch.randn(4, 8), torch.randn(8, 2)
    module = fx_trace.retrace_to_aten(lambda x, y: (torch.mm(x, y),), fake_mode.fake_tensors([a, b]))
    (result,) = inductor.compile_graph(module, [a, b])(a, b)
    torch.testing.assert_close(result, a @ b)


def test_a_mode_of_torch_compile_can_be_called_by_a_backend_of_ours():
    # What torch.compile itself would call: the mode's settings are in it, and it compiles a graph of dynamo's.
    assert inductor.compiler_of("reduce-overhead").config["triton.cudagraphs"] is True
    assert "triton.cudagraphs" not in inductor.compiler_of("default").config
    seen, a, b = [], torch.randn(4, 8), torch.randn(8, 2)

    def backend(graph, inputs):
        seen.append(graph)
        return inductor.compiler_of("default")(graph, inputs)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(torch.mm, backend=backend)(a, b), a @ b)
    assert len(seen) == 1


def test_inductor_calls_an_op_that_it_was_told_of():
    # Where implicit fallbacks are off, only what it was told of compiles: nothing is written out for a log line then.
    library = torch.library.Library("fusion_advisor_test_told", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    torch.library.register_fake("fusion_advisor_test_told::twice", torch.empty_like, lib=library)
    op = torch.ops.fusion_advisor_test_told.twice.default
    x = torch.randn(4)
    graph = torch.fx.Graph()
    graph.output((graph.call_function(op, (graph.placeholder("x"),)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with torch._inductor.config.patch(implicit_fallbacks=False):
        with pytest.raises(RuntimeError, match="missing lowering"):
            inductor.compile_graph(module, [x])
        inductor.call_without_lowering(op)
        (result,) = inductor.compile_graph(module, [x])(x)
    torch.testing.assert_close(result, x + x)


def test_a_torch_that_is_too_old_for_packages_is_known(tmp_path):
    assert inductor.missing_for_packages() == ""
    assert inductor.missing_for_packages(inductor=object()) == "AOTInductor packages (torch 2.6)"
    assert inductor.missing_for_packages(include=tmp_path) == "headers of the stable ABI (torch 2.10)"
    header = tmp_path / "torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m)\n")
    assert inductor.missing_for_packages(include=tmp_path) == "headers of the stable ABI (torch 2.10)"


def test_the_options_of_packages_are_known():
    assert hasattr(torch._inductor.config.cpp, "vec_isa_ok")
    assert hasattr(torch._inductor.config.aot_inductor, "precompile_headers")


@pytest.mark.slow  # half a minute of a C++ compiler
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_program_becomes_a_package_that_loads(is_on_gpu, tmp_path):
    """For a GPU nobody asks for the CPU's vector instructions; what is compiled for the CPU later asks anew."""
    from torch._inductor import cpu_vec_isa

    x, built = torch.randn(4, 4), []
    program = torch.export.export(torch.nn.Tanh(), (x,))
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()  # an earlier test may have asked
    asked = cpu_vec_isa.VecISA.check_build.__code__
    sys.setprofile(lambda frame, event, _: built.append(event) if event == "call" and frame.f_code is asked else None)
    try:
        spent = inductor.compile_and_package(program, tmp_path / "tanh.pt2", is_on_gpu=is_on_gpu)
    finally:
        sys.setprofile(None)
    assert is_on_gpu is not bool(built)
    assert {"lowering", "C++"} <= spent.keys() and all(seconds > 0 for seconds in spent.values())
    if is_on_gpu:
        assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 0
    found = torch._inductor.aoti_load_package(str(tmp_path / "tanh.pt2"))(x)
    torch.testing.assert_close(found, x.tanh())
