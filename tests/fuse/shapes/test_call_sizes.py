"""A name stands for the dims that one expects, or for those that were said; calls are had at other sizes."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.call_sizes import dims_of, resized

IDS, MASK = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)


def test_tokens_images_features_and_hidden_states_are_known():
    call = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "pixel_values": torch.zeros(2, 3, 8, 8),
        "inputs_embeds": torch.zeros(2, 6, 4),
        "input_features": torch.zeros(2, 5, 9),
        "scale": torch.zeros(2, 4),
        "flag": torch.tensor(1),
        "table": torch.zeros(7),
    }
    found = dims_of((), call, read_shapes("batch=1..4,seq=1..8"))
    assert found == {
        "input_ids": ("batch", "seq"),
        "attention_mask": ("batch", "seq"),
        "pixel_values": ("batch", "", "", ""),
        "inputs_embeds": ("batch", "seq", ""),
        "input_features": ("batch", "", ""),
        "scale": ("batch", ""),
    }
    assert dims_of((), call, read_shapes("height=8..16,width=8..16,frames=2..9")) == {
        "pixel_values": ("", "", "height", "width"),
        "input_features": ("", "", "frames"),
    }


def test_dims_that_were_named_are_taken_as_they_are():
    request = read_shapes({"args.0": ("rows=1..9", None), "mask": ("rows", None)})
    assert dims_of((torch.zeros(3, 4),), {"mask": torch.zeros(3, 1), "ids": IDS}, request) == {
        "args.0": ("rows", ""),
        "mask": ("rows", ""),
    }


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ("height=2..4", "no tensor of the call has a dim height"),
        ("tokens=2..4", "names that are found by themselves"),
        ({"labels": ("batch=1..4", None)}, "no tensor `labels`"),
        ({"input_ids": ("batch=1..4",)}, "has 2 dims, and 1 are named"),
    ],
)
def test_a_name_that_is_no_dim_is_refused(shapes, words):
    with pytest.raises(UsageError, match=words):
        dims_of((), {"input_ids": IDS}, read_shapes(shapes))


def test_the_way_out_names_a_tensor_of_the_call():
    with pytest.raises(UsageError) as caught:
        dims_of((torch.zeros(3, 4),), {}, read_shapes("height=2..4"))
    assert "shapes={'args.0': ('height=1..16', None)}" in caught.value.hint_text


def test_a_call_is_repeated_or_cut_off():
    dims = {"input_ids": ("batch", "seq"), "attention_mask": ("batch", "seq")}
    fixed = torch.zeros(2, 6)
    call = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False, "fixed": fixed}
    args, other = resized((), call, dims, {"batch": 3, "seq": 4})
    assert args == ()
    assert other["input_ids"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9], [0, 1, 2, 3]]
    assert (other["use_cache"], other["fixed"] is fixed) == (False, True)
    _, longer = resized((), call, dims, {"batch": 1, "seq": 13})
    assert longer["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5] * 2 + [0]]
    assert longer["input_ids"].stride() == (13, 1)  # a dim of size 1 keeps no stride of what it was cut from
    _, one = resized((), call, dims, {"batch": 1, "seq": 4})
    assert one["input_ids"].stride() == (4, 1)
    assert IDS.tolist()[1] == [6, 7, 8, 9, 10, 11]
