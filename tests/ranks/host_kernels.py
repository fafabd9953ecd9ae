"""A kernel of gloo's ranks on a CPU, which tests the way of the rewrite: on a CPU there is no symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusion_advisor.codegen.common.interface import Rendered


class HostKernels:
    """Sums over the default group in fp32, adds the residual and normalises, as the kernel of GPUs does.

    Attributes:
        acquired: how often buffers were made.
        is_there: whether they are there now.
        asked: calls for which there was to be a launch.

    Args:
        spoils: ranks whose results are wrong.
    """

    def __init__(self, spoils=()):
        self.rank, self.world_size, self.held_bytes = dist.get_rank(), dist.get_world_size(), 1 << 20
        self.acquired, self.is_there, self.launches, self.asked = 0, False, 0, []
        self._spoils = spoils
        self.acquire()

    def why_not(self, call):
        """Everything is served."""
        return "" if call.cols % 8 == 0 else "rows that are no multiple of 8"

    def ways(self, call):
        """Two-shot is tried from 32 rows on."""
        return ("one-shot", "two-shot") if call.rows >= 32 else ("one-shot",)

    def rendered(self, call):
        """What the report shows."""
        norm = "layernorm" if call.norm == "layer" else "rmsnorm"
        return Rendered(backend="cpp", entry=f"fa_all_reduce_add_{norm}_host", source="// gloo", suffix=".cpp")

    def words(self, call):
        """How it is launched."""
        return f"{call.rows} rows by gloo"

    def launcher(self, call, way):
        """What launches it."""
        self.asked.append(call)

        def launch(x, residual, weight, *others):
            *vectors, total, out = others
            assert len(vectors) == call.vectors - 1
            if not self.is_there:
                raise RuntimeError("the buffers between the ranks were freed")
            self.launches += 1
            wide = x.float()
            dist.all_reduce(wide)
            if call.has_offset:
                wide = wide + vectors[-1].float()
            own = wide.reshape(total.shape) + residual.reshape(total.shape).float()
            if way == "two-shot":  # rank 0 owns all rows
                dist.broadcast(own, 0)
            total.copy_(own)
            if call.norm == "layer":
                normed = torch.nn.functional.layer_norm(own, own.shape[-1:], weight.float(), vectors[0].float(), call.eps)
            else:
                scale = torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + call.eps)
                normed = (own * scale).to(out.dtype if call.norm == "rms" else torch.float32) * weight
            out.copy_(normed.reshape(out.shape))
            if self.rank in self._spoils:
                out.mul_(1.01)

        return launch

    def acquire(self):
        """Make what stands for buffers."""
        self.acquired += not self.is_there
        self.is_there = True

    def release(self):
        """Give it back."""
        self.is_there = False
