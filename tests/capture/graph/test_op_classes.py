"""What an op is, by name, in a graph and in a trace alike."""

from __future__ import annotations

import pytest

from fusion_advisor.capture.graph.op_classes import attention_backend, base_name, class_of
from fusion_advisor.records import OpClass


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("aten.mul.Tensor", "mul"), ("aten::mul_", "mul"), ("mul", "mul"), ("aten.__and__.Tensor", "__and__"),
        ("aten::copy_", "copy_"), ("aten::index_copy_", "index_copy_"), ("aten._softmax.default", "_softmax"),
        ("aten.relu_.default", "relu"), ("_c10d_functional.all_reduce.default", "_c10d_functional.all_reduce"),
        ("_c10d_functional::all_reduce_", "_c10d_functional.all_reduce_"), ("c10d::barrier", "c10d.barrier"),
    ],
)  # fmt: skip
def test_base_name(target, name):
    assert base_name(target) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mul", "pointwise"), ("tanh", "pointwise"), ("gelu", "pointwise"), ("where", "pointwise"), ("to", "pointwise"),
        ("layer_norm", "reduction"), ("softmax", "reduction"), ("mean", "reduction"), ("native_layer_norm", "reduction"),
        ("linear", "gemm"), ("addmm", "gemm"), ("bmm", "gemm"), ("conv2d", "convolution"),
        ("scaled_dot_product_attention", "attention"), ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_efficient_attention_forward", "attention"), ("view", "view"), ("getitem", "view"), ("slice", "view"),
        ("cat", "memory"), ("embedding", "memory"), ("copy_", "memory"), ("index_copy_", "memory"),
        ("_c10d_functional.all_reduce", "collective"), ("_c10d_functional.wait_tensor", "collective"),
        ("c10d.allgather_", "collective"), ("gloo:all_reduce", "collective"), ("all_reduce", "other"),
        ("fft_fft", "other"), ("no_such_op", "other"),
    ],
)  # fmt: skip
def test_class_of(name, expected):
    assert class_of(name) is OpClass(expected)


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "cudnn"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "flash"),
        ("void pytorch_flash::flash_fwd_splitkv_combine_kernel<...>", "flash"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)", "efficient"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("aten::_scaled_dot_product_attention_math", "math"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_gemm>", "math"),
        ("void (anonymous namespace)::softmax_warp_forward<float>", "math"),
    ],
)
def test_attention_backends(kernel, backend):
    assert attention_backend(kernel) == backend
