"""What a call writes, and whether the state is put back so that every repeat is the same work."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.side_effects import Before, live_tensors, written_by
from fusion_advisor.errors import NotRepeatable


class Slot:
    """A cache of fixed size: values written at a position that a tensor, or a Python number, counts."""

    def __init__(self, size=1024):
        self.values = torch.zeros(size)
        self.position = torch.tensor(0)
        self.steps = 0
        self.last = None


class Model(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, slot=None):
        return self.step(self, x, slot)


def watch(step, slot=None, x=None):
    model = Model(step)
    args = (torch.ones(1) if x is None else x,)
    kwargs = {} if slot is None else {"slot": slot}
    return model, written_by(lambda: model(*args, **kwargs), model, args, kwargs)


def pure(model, x, slot):
    return x + 1


def at_position(model, x, slot):
    slot.values.index_copy_(0, slot.position[None], x)
    slot.position.add_(1)
    return slot.values.sum()


def rolls(model, x, slot):
    slot.values.copy_(torch.cat((slot.values[1:], x)))
    return slot.values.sum()


def counts_in_python(model, x, slot):
    slot.steps += 1
    slot.last = x * slot.steps
    return slot.last


def grows(model, x, slot):
    slot.history = [*getattr(slot, "history", []), x]
    return x


def in_a_list(model, x, slot):
    slot.append(x.clone())
    return x


def in_a_buffer(model, x, slot):
    model.seen += 1
    return x


def in_its_input(model, x, slot):
    return x.mul_(2)


def test_a_pure_call_writes_nothing_and_is_made_once():
    calls = []
    _, written = watch(lambda model, x, slot: calls.append(1) or x + 1, Slot())
    assert not written.tensors and not written.attributes and len(calls) == 1
    written.rewind()
    written.restore()


def test_only_the_position_is_put_back_when_the_same_place_is_written_again():
    slot = Slot()
    slot.position.fill_(7)
    _, written = watch(at_position, slot)
    assert set(written.tensors) == {"slot.values", "slot.position"} and written.moving == ("slot.position",)
    assert int(slot.position) == 7 and slot.values.nonzero().tolist() == [[7]]
    written.restore()
    assert slot.values.sum() == 0 and int(slot.position) == 7 and written.moving == ("slot.position",)


@pytest.mark.parametrize("runs", [1, 5])
def test_repeats_after_rewinding_are_the_same_work(runs):
    slot = Slot()
    model, written = watch(at_position, slot)
    for _ in range(runs):
        written.rewind()
        assert model(torch.ones(1), slot) == 1
    assert int(slot.position) == 1


def test_contents_are_put_back_when_a_repeat_would_not_write_the_same():
    slot = Slot()
    slot.values += torch.arange(1024)
    before = slot.values.clone()
    model, written = watch(rolls, slot)
    assert written.moving == ("slot.values",) and torch.equal(slot.values, before)
    first = model(torch.ones(1), slot)
    written.rewind()
    assert torch.equal(model(torch.ones(1), slot), first)


def test_a_set_that_stays_is_no_change():
    """A copy of a set may have another order: CLIP's ``_no_split_modules`` was taken for one that each call changes."""
    model = Model(counts_in_python)
    model.names = set(range(40))
    for name in set(range(40)) - {2, 33}:
        model.names.discard(name)
    assert list(model.names) != list(model.names.copy())
    slot = Slot()
    written = written_by(lambda: model(torch.ones(1), slot), model, (torch.ones(1), slot), {})
    assert written.contents == [] and written.modules == []
    before = Before.of(model)
    assert not before.is_changed()
    model.names.add(3)
    assert before.is_changed()
    before.restore()
    assert model.names == {2, 33}


def test_what_is_kept_in_python_is_put_back():
    slot = Slot()
    model, written = watch(counts_in_python, slot)
    assert slot.steps == 0 and slot.last is None
    assert "slot.last" in written.made
    assert model(torch.ones(1), slot) == 1


def test_an_attribute_that_the_call_makes_is_taken_away():
    slot = Slot()
    watch(grows, slot)
    assert not hasattr(slot, "history")


@pytest.mark.parametrize(("step", "name"), [(in_a_buffer, "seen"), (in_its_input, "args.0")])
def test_buffers_and_inputs_are_watched(step, name):
    x = torch.ones(1)
    model, written = watch(step, x=x)
    assert written.moving == (name,) and model.seen.sum() == 0 and x == 1


def test_a_list_that_grows_cannot_be_put_back():
    with pytest.raises(NotRepeatable, match="differs from the first"):
        watch(in_a_list, [])


def test_a_parameter_that_the_model_writes_is_put_back_outside_no_grad():
    embedding = torch.nn.Embedding(4, 2, max_norm=0.1)
    before, ids = embedding.weight.detach().clone(), torch.tensor([0, 3])
    with torch.no_grad():
        written = written_by(lambda: embedding(ids), embedding, (ids,), {})
        embedding(ids)
    assert list(written.tensors) == ["weight"] and not torch.equal(embedding.weight, before)
    written.restore()
    assert torch.equal(embedding.weight, before)


def test_a_sparse_buffer_is_left_alone():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("links", torch.eye(2).to_sparse())
    assert list(live_tensors(model, (torch.eye(2).to_sparse_csr(),), {})) == ["weight", "bias"]
