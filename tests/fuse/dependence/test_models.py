"""Real models, as transformers captures them: what is proved of their sizes, and that it is true."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.apply_shapes import check_ranges
from fusion_advisor.fuse.dependence.prove import why_padding_counts
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.proved_sizes import prove_sizes
from fusion_advisor.workload.load import describe_live
from tests import tiny
from tests.fuse.dependence.padded_runs import worst_of
from tests.fuse.test_apply_shapes import bert, vit

TOKENS = "batch=2..16,seq=2..64"


def whisper():
    """Whisper's encoder of two layers and one call."""
    from transformers import WhisperConfig, WhisperModel

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=30, vocab_size=100, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperModel(config).eval().encoder, {"input_features": torch.randn(2, 16, 60)}


def masked_qwen2():
    """A Qwen2 that is given which tokens count."""
    model, kwargs = tiny.qwen2()
    return model, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


CASES = {
    "gpt2": (tiny.gpt2, TOKENS, ["batch", "seq"], set()),
    "llama": (tiny.llama, TOKENS, ["batch", "seq"], set()),
    "qwen2": (tiny.qwen2, TOKENS, ["batch", "seq"], set()),
    "qwen2 with a mask": (masked_qwen2, TOKENS, ["batch", "seq"], set()),
    "bert": (bert, TOKENS, ["batch", "seq"], {"seq"}),
    "vit": (vit, "batch=2..16", ["batch"], set()),
    "whisper": (whisper, "batch=2..16", ["batch"], set()),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_of_models_are_proved_and_padding_them_changes_nothing(name):
    maker, shapes, names, masked = CASES[name]
    torch.compiler.reset()
    model, kwargs = maker()
    with torch.no_grad():
        (call,) = check_ranges(describe_live(model, (), kwargs), ApplyOptions(shapes=read_shapes(shapes)))
        args, kwargs = call.at({one.name: 3 if one.name == "batch" else 7 for one in call.ranges})
        opened = capture_open(model, args, kwargs, call.dims)
        proved = prove_sizes(opened, call.ranges)
        assert proved.names == names and not proved.refused
        assert proved.form.masked == masked
        for size in names:
            assert worst_of(opened, proved.form, call.at, size) < 1e-5, size


def test_bert_without_zeros_in_its_mask_names_what_reads_the_padding():
    torch.compiler.reset()
    model, kwargs = bert()
    with torch.no_grad():
        (call,) = check_ranges(describe_live(model, (), kwargs), ApplyOptions(shapes=read_shapes(TOKENS)))
        args, kwargs = call.at({"batch": 3, "seq": 7})
        opened = capture_open(model, args, kwargs, call.dims, with_lines=True)
    why = why_padding_counts(opened, "seq")
    assert "attends to all of `seq`, and its mask may let padding through, in `scaled_dot_product_attention` at " in why
    assert "sdpa_attention.py:" in why
