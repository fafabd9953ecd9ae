"""The kernels of this package as torch ops, for the layouts in which they were checked."""

import torch

from ._cpp import cpp_launcher
from ._launch import LAYOUTS, Laid, kernel_op

# F2: embedding -> embedding -> add -> layer_norm in one kernel
transformer = kernel_op(
    "transformer",
    cpp_launcher(
        "fa_transformer_cb45c7.cpp",
        integers=(2, 16, 64, 16, 64, 64, 1024, 64, 1024, 64, 97, 32),
        checks=1,
    ),
    inputs=(
        Laid("x", (2, 16), (16, 1), torch.int64),
        Laid("weight", (97, 64), (64, 1), torch.float32),
        Laid("x2", (16,), (1,), torch.int64),
        Laid("weight2", (32, 64), (64, 1), torch.float32),
        Laid("weight3", (64,), (1,), torch.float32),
        Laid("bias", (64,), (1,), torch.float32),
    ),
    outputs=(
        Laid("out1", (2, 16, 64), (1024, 64, 1), torch.float32),
        Laid("out2", (2, 16, 64), (1024, 64, 1), torch.float32),
    ),
    device="cpu",
)

# F3: add -> layer_norm in one kernel
add_layernorm = kernel_op(
    "add_layernorm",
    cpp_launcher(
        "fa_add_layernorm_4c0549.cpp",
        integers=(32, 64, 64, 64, 64, 64),
        checks=0,
    ),
    inputs=(
        Laid("x", (32, 64), (64, 1), torch.float32),
        Laid("residual", (2, 16, 64), (1024, 64, 1), torch.float32),
        Laid("weight", (64,), (1,), torch.float32),
        Laid("bias", (64,), (1,), torch.float32),
    ),
    outputs=(
        Laid("total", (2, 16, 64), (1024, 64, 1), torch.float32),
        Laid("out", (2, 16, 64), (1024, 64, 1), torch.float32),
    ),
    device="cpu",
)

# F3: add -> layer_norm in one kernel
add_layernorm_2 = kernel_op(
    "add_layernorm_2",
    cpp_launcher(
        "fa_add_layernorm_4c0549.cpp",
        integers=(32, 64, 64, 64, 64, 64),
        checks=0,
    ),
    inputs=(
        Laid("x", (2, 16, 64), (1024, 64, 1), torch.float32),
        Laid("residual", (32, 64), (64, 1), torch.float32),
        Laid("weight", (64,), (1,), torch.float32),
        Laid("bias", (64,), (1,), torch.float32),
    ),
    outputs=(
        Laid("total", (2, 16, 64), (1024, 64, 1), torch.float32),
        Laid("out", (2, 16, 64), (1024, 64, 1), torch.float32),
    ),
    device="cpu",
)

# F1: mul -> pow -> mul -> add -> mul -> tanh -> add -> mul in one kernel
gelu_tanh = kernel_op(
    "gelu_tanh",
    cpp_launcher(
        "fa_gelu_tanh_c3eea0.cpp",
        integers=(8192,),
        checks=0,
    ),
    inputs=(
        Laid("x", (32, 256), (256, 1), torch.float32),
    ),
    outputs=(
        Laid("out", (2, 16, 256), (4096, 256, 1), torch.float32),
    ),
    device="cpu",
)

# F4: add -> layer_norm in one kernel
add_layernorm_3 = kernel_op(
    "add_layernorm_3",
    cpp_launcher(
        "fa_add_layernorm_f75e15.cpp",
        integers=(32, 64, 64, 64, 64),
        checks=0,
    ),
    inputs=(
        Laid("x", (2, 16, 64), (1024, 64, 1), torch.float32),
        Laid("residual", (32, 64), (64, 1), torch.float32),
        Laid("weight", (64,), (1,), torch.float32),
        Laid("bias", (64,), (1,), torch.float32),
    ),
    outputs=(
        Laid("out", (2, 16, 64), (1024, 64, 1), torch.float32),
    ),
    device="cpu",
)

ALL = ("transformer", "add_layernorm", "add_layernorm_2", "gelu_tanh", "add_layernorm_3",)
"""Names of the ops."""
assert list(LAYOUTS) == list(ALL)


def prepare() -> None:
    """Compile what can be compiled before the first call."""
    from ._cpp import prepare as compile_all

    compile_all()
