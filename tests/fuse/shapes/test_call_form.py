"""Strides of dims of size 1: nobody steps by them, and what a call passes is given those of a new tensor."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.shapes.call_form import laid_out


def test_a_stride_that_nobody_steps_by_is_that_of_a_new_tensor():
    ids = torch.arange(12).view(1, 12)
    given = {"ids": ids[:, -1:], "others": [ids[:, :5], {"all": ids}], "flag": True}
    found = laid_out(given)
    assert (found["ids"].stride(), found["others"][0].stride()) == ((1, 1), (5, 1))
    assert torch.equal(found["ids"], ids[:, -1:]) and found["others"][1] is given["others"][1]
    found["ids"].zero_()
    assert ids[0, -1] == 0  # it is the caller's memory


def test_what_is_laid_out_so_already_and_what_is_not_contiguous_stay():
    given = (torch.ones(3, 1), [torch.ones(0, 4), torch.ones(4, 6)[:, :1]], torch.ones(()))
    assert laid_out(given) is given


def test_tensors_in_objects_and_of_other_classes_stay():
    class Cache:
        def __init__(self):
            self.keys = torch.ones(1, 5)[:, :1]

    other = torch.nn.Parameter(torch.ones(1, 5)[:, :1])
    given = {"cache": Cache(), "other": other, "sparse": torch.ones(2, 2).to_sparse()}
    assert laid_out(given) is given
