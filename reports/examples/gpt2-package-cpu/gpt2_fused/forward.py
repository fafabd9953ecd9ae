"""The forward of `GPT2LMHeadModel` with kernels in place of chains of ops. Exported from run 20261130-062803-e670a7.

Sizes are those of the call that was verified; any other call runs the model's own forward (see `_adapter.py`).
"""

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from . import ops
from ._launch import Laid

aten = torch.ops.aten

ARGUMENTS = ("input_ids",)
"""Arguments of the call that are tensors or hold some."""
TENSORS = {
    "input_ids": Laid("input_ids", (2, 16), (16, 1), torch.int64),
}
"""Tensors of the call, as they were verified; one with dots in its name is held by an object."""
WRITTEN = ()
"""Tensors of the call that it writes into."""
SAVED = ()
"""Those that say where it writes; put back, the same call writes the rest again. None: it cannot be undone so."""
SETS = False
"""Whether it gives objects of the call other tensors, as a growing cache gets them."""
VALUES = {'use_cache': False}
"""Its other arguments."""
JOINED = {
}
"""Rows and sources: parameters that lie one after the other, so that one product reads them all; zeros are in further rows."""


def gpt2_block(block, following, ln_1, hidden):
    """Compute `transformer.h.0` to `transformer.h.1`."""
    c_attn_view = ln_1.view(-1, 64)
    c_attn_view_2 = torch.addmm(block.attn.c_attn.bias, c_attn_view, block.attn.c_attn.weight).view(2, 16, 192)
    attn_split, attn_split_2, attn_split_3 = c_attn_view_2.split(64, 2)
    attn_transpose = attn_split_2.view(2, 16, -1, 32).transpose(1, 2)
    attn_transpose_2 = attn_split_3.view(2, 16, -1, 32).transpose(1, 2)
    attn_transpose_3 = attn_split.view(2, 16, -1, 32).transpose(1, 2)
    attn_attention = F.scaled_dot_product_attention(
        attn_transpose_3, attn_transpose, attn_transpose_2, None, 0.0, True, scale=0.1767766952966369
    )
    c_proj_view = attn_attention.reshape(2, -1, 16, 32).transpose(1, 2).reshape(2, 16, -1).view(-1, 64)
    c_proj = torch.addmm(block.attn.c_proj.bias, c_proj_view, block.attn.c_proj.weight)
    hidden_2, ln_2 = ops.add_layernorm(c_proj, hidden, block.ln_2.weight, block.ln_2.bias)
    c_fc_view = ln_2.view(-1, 64)
    c_fc = torch.addmm(block.mlp.c_fc.bias, c_fc_view, block.mlp.c_fc.weight)
    c_proj_view_2 = ops.gelu_tanh(c_fc).view(-1, 256)
    c_proj_2 = torch.addmm(block.mlp.c_proj.bias, c_proj_view_2, block.mlp.c_proj.weight)
    hidden_3, ln_1_2 = ops.add_layernorm_2(hidden_2, c_proj_2, following.ln_1.weight, following.ln_1.bias)
    return hidden_3, ln_1_2


def gpt2_block_2(block, ln_1, hidden):
    """Compute `transformer.h.2`."""
    c_attn_view = ln_1.view(-1, 64)
    c_attn_view_2 = torch.addmm(block.attn.c_attn.bias, c_attn_view, block.attn.c_attn.weight).view(2, 16, 192)
    attn_split, attn_split_2, attn_split_3 = c_attn_view_2.split(64, 2)
    attn_transpose = attn_split_2.view(2, 16, -1, 32).transpose(1, 2)
    attn_transpose_2 = attn_split_3.view(2, 16, -1, 32).transpose(1, 2)
    attn_transpose_3 = attn_split.view(2, 16, -1, 32).transpose(1, 2)
    attn_attention = F.scaled_dot_product_attention(
        attn_transpose_3, attn_transpose, attn_transpose_2, None, 0.0, True, scale=0.1767766952966369
    )
    c_proj_view = attn_attention.reshape(2, -1, 16, 32).transpose(1, 2).reshape(2, 16, -1).view(-1, 64)
    c_proj = torch.addmm(block.attn.c_proj.bias, c_proj_view, block.attn.c_proj.weight)
    hidden_2, ln_2 = ops.add_layernorm(c_proj, hidden, block.ln_2.weight, block.ln_2.bias)
    c_fc_view = ln_2.view(-1, 64)
    c_fc = torch.addmm(block.mlp.c_fc.bias, c_fc_view, block.mlp.c_fc.weight)
    c_proj_view_2 = ops.gelu_tanh(c_fc).view(-1, 256)
    c_proj_2 = torch.addmm(block.mlp.c_proj.bias, c_proj_view_2, block.mlp.c_proj.weight)
    return hidden_2, c_proj_2


def forward(model, constants, input_ids):
    """Run the model on a call that fits TENSORS and VALUES."""
    transformer_add, ln_1 = ops.transformer(
        input_ids, model.transformer.wte.weight, constants.folded_0, model.transformer.wpe.weight,
        model.transformer.h[0].ln_1.weight, model.transformer.h[0].ln_1.bias
    )
    ln_1_2, hidden = ln_1, transformer_add
    for index in range(0, 2):
        hidden, ln_1_2 = gpt2_block(model.transformer.h[index], model.transformer.h[index + 1], ln_1_2, hidden)
    hidden_2, c_proj = gpt2_block_2(model.transformer.h[2], ln_1_2, hidden)
    ln_f = ops.add_layernorm_3(hidden_2, c_proj, model.transformer.ln_f.weight, model.transformer.ln_f.bias)
    transformer_view = ln_f.view(-1, 16, 64)
    alias = aten.alias.default(transformer_view)
    lm_head = F.linear(alias, model.transformer.wte.weight)
    return CausalLMOutputWithCrossAttentions(logits=lm_head)
