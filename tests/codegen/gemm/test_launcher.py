"""Files of linear layers that were taken away: each ends in a launch and a check, and notices a kernel that is wrong."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from fusion_advisor.codegen.gemm.problem import GATED_TILES, GemvProblem, candidates
from fusion_advisor.codegen.gemm.registry import gemv_backend
from tests.codegen.test_standalone import run
from tests.kernel_cases.gemv_cases import HEADER, reference, tensors

NEEDS_NVCC = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
EVERYTHING = GemvProblem(
    m=3, n=22, k=264, dtype="bfloat16", has_norm=True, eps=1e-6, norm_offset=1.0, has_bias=True, is_gated=True, has_residual=True,
)  # fmt: skip
PLAIN = GemvProblem(m=1, n=70, k=264, dtype="float32")
GATED = GemvProblem(m=129, n=136, k=520, dtype="float16", is_gated=True)


def rendered(problem, backend, config=None):
    return gemv_backend(backend).render(problem, HEADER, config=config or candidates(problem, (backend,))[0])


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "right", "wrong"), [
    (EVERYTHING, "+ 1.0)", "+ 0.0)"),  # the norm's offset
    (PLAIN, "STAGES = 3", "STAGES = 3; K = 200"),
], ids=["everything", "plain"])  # fmt: skip
def test_triton_file_runs_alone_and_notices_a_wrong_kernel(tmp_path, problem, right, wrong):
    found = rendered(problem, "triton")
    assert found.file_text.startswith(found.source)
    status, said = run(tmp_path, found, found.file_text)
    assert (status, "out: relative error" in said, ": ok" in said, "GB/s" in said) == (0, True, True, True), said

    head, marker, launcher = found.file_text.partition("# ---- launch")
    broken = head.replace(right, wrong) + marker + launcher if right in head else found.file_text.replace(right, wrong)
    assert broken != found.file_text
    status, said = run(tmp_path, found, broken)
    assert (status, "WRONG" in said) == (1, True), said


def test_every_configuration_is_launched_with_what_it_was_rendered_for():
    for backend in ("triton", "cuda"):
        for problem in (EVERYTHING, PLAIN, GATED):
            for config in candidates(problem, (backend,)):
                found = rendered(problem, backend, config)
                assert found.source in found.file_text
                launcher = found.file_text.replace(found.source, "")
                assert "launch(" in launcher and "main" in launcher and f"{problem.moved_bytes}" in launcher
                if backend == "triton":
                    assert f"BLOCK_N = {config.rows}\n" in launcher and f"num_warps={config.warps}" in launcher
                else:
                    assert f"#define ROWS {config.rows} " in found.source
                    assert found.entry + ("<<<grid, block, shared_bytes, stream>>>" if problem is GATED else "<<<") in launcher


@NEEDS_NVCC
@pytest.mark.serial
def test_reference_of_a_cuda_file_is_right(tmp_path):
    """On the host, where no GPU is needed: the function that the file's check runs on the device."""
    found = rendered(EVERYTHING, "cuda")
    *inputs, _ = [name for name, _ in EVERYTHING.operands]
    read = "".join(
        f"  std::vector<element> {name}_host({t.numel()});\n  fread({name}_host.data(), 2, {t.numel()}, stdin);\n"
        for name, t in zip(inputs, tensors(EVERYTHING), strict=True)
    )
    call = f"check::result<double>({', '.join(f'{name}_host.data()' for name in inputs)}, i / N, i % N)"
    text = re.sub(r"^int main\(\) \{", "int unused() {", found.file_text, flags=re.M)
    assert text != found.file_text
    text += f'int main() {{\n{read}  for (int i = 0; i < M * N; ++i) printf("%.17g\\n", {call});\n}}\n'
    (tmp_path / "kernel.cu").write_text(text)
    command = [str(find_nvcc()), "-std=c++17", "-arch=sm_90", "kernel.cu", "-o", "check"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    given = tensors(EVERYTHING)
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in given)
    done = subprocess.run(["./check"], cwd=tmp_path, input=data, capture_output=True, check=True, timeout=100)
    ours = torch.tensor([float(line) for line in done.stdout.split()], dtype=torch.float64)
    truth = reference(EVERYTHING, [tensor.double() for tensor in given])
    torch.testing.assert_close(ours, truth.flatten(), rtol=1e-10, atol=1e-10)


@NEEDS_NVCC
@pytest.mark.serial
def test_file_with_tensor_maps_compiles_with_the_command_that_it_names(tmp_path):
    found = rendered(GATED, "cuda", GATED_TILES[-1])
    (tmp_path / f"{found.entry}.cu").write_text(found.file_text)
    command = found.file_text.splitlines()[0].removeprefix("// Build and run: ").replace("-O3", "-O1").partition(" && ")[0]
    subprocess.run([str(find_nvcc()), *command.split()[1:]], cwd=tmp_path, check=True, timeout=200)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "problem"), [("triton", EVERYTHING), ("cuda", EVERYTHING), ("cuda", PLAIN), ("cuda", GATED)])
def test_file_runs_alone_on_a_gpu(tmp_path, backend, problem):
    if backend == "cuda" and find_nvcc() is None:
        pytest.skip("nvcc compiles the file, and there is none here")
    if problem is GATED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel uses wgmma, which Hopper alone has")
    found = rendered(problem, backend)
    if found.is_for_one_arch:
        (tmp_path / f"{found.entry}.cu").write_text(found.file_text)
        command = found.file_text.splitlines()[0].removeprefix("// Build and run: nvcc ").partition(" && ")[0]
        subprocess.run([str(find_nvcc()), *command.split()], cwd=tmp_path, check=True, timeout=200)
        done = subprocess.run(["./check"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
        status, said = done.returncode, done.stdout + done.stderr
    else:
        status, said = run(tmp_path, found, found.file_text, device="cuda")
    assert (status, ": ok" in said, " GB/s" in said) == (0, True, True), said
