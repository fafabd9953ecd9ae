"""An attribute that Python code answers is known while that code and the dicts that it looks into are as they were."""

from __future__ import annotations

import operator
from typing import ClassVar

import pytest

from fusion_advisor.fuse.direct.attribute_lookup import look_up
from fusion_advisor.fuse.direct.unchanged import Unchanged


class Checked:
    def __getattribute__(self, name):
        special = super().__getattribute__("__dict__").get("_special")
        if special is not None:
            len(special)
        return super().__getattribute__(name)


class Translated(Checked):
    attribute_map: ClassVar = {"old": "new"}
    by_default = 3

    def __getattribute__(self, name):
        if name != "attribute_map" and name in super().__getattribute__("attribute_map"):
            name = super().__getattribute__("attribute_map")[name]
        return super().__getattribute__(name)

    @property
    def shown(self):
        """What is held."""
        return self.new


class Other(Translated):
    pass


@pytest.fixture
def settings():
    kept, code = dict(vars(Translated)), {kind: kind.__getattribute__.__code__ for kind in (Translated, Checked)}
    made = Translated()
    made.new, made.more = 1, 2
    yield made
    for kind, before in code.items():
        vars(kind)["__getattribute__"].__code__ = before
    Translated.attribute_map, Translated.by_default, Translated.shown = {"old": "new"}, 3, kept["shown"]
    kept["shown"].fget.__code__ = SHOWN
    if "lacking" in vars(Translated):
        del Translated.lacking


SHOWN = vars(Translated)["shown"].fget.__code__


@pytest.mark.parametrize("name", ["new", "old", "more", "by_default", "shown", "attribute_map"])
def test_it_finds_what_reading_finds(settings, name):
    found = look_up(settings, name)
    assert found.is_found
    assert found.value is getattr(settings, name)


def test_it_finds_what_is_missing(settings):
    found = look_up(settings, "lacking")
    assert found is not None and not found.is_found
    Translated.attribute_map = {"by_default": "lacking"}
    assert not look_up(settings, "by_default").is_found
    with pytest.raises(AttributeError):
        operator.attrgetter("by_default")(settings)


def test_code_that_looks_elsewhere_is_not_followed(settings):
    settings.__dict__["_special"] = frozenset()
    assert look_up(settings, "new") is None
    del settings.__dict__["_special"]

    class Counting(Translated):
        reads = 0

        def __getattribute__(self, name):
            Counting.reads += 1
            return super().__getattribute__(name)

    class Answering(Translated):
        def __getattr__(self, name):
            return name

    class Shadowed(Translated):
        @property
        def new(self):
            return id(self)

    for kind in (Counting, Answering, Shadowed):
        made = kind()
        made.__dict__.update(more=2)
        assert look_up(made, "lacking" if kind is Answering else "old") is None


def longer(self, name):
    return object.__getattribute__(self, "more" if name == "new" else name)


CHANGES = {
    "an attribute": lambda made: setattr(made, "new", 5),
    "an attribute that asks for more": lambda made: made.__dict__.update(_special=()),
    "another name": lambda made: Translated.attribute_map.update(new="more"),
    "other names": lambda made: setattr(Translated, "attribute_map", {"new": "more"}),
    "the object's own names": lambda made: setattr(made, "attribute_map", {"new": "more"}),
    "a missing attribute": lambda made: setattr(Translated, "lacking", 5),
    "a class's attribute": lambda made: setattr(Translated, "by_default", 5),
    "the property": lambda made: setattr(Translated, "shown", 7),
    "the property's code": lambda made: setattr(vars(Translated)["shown"].fget, "__code__", (lambda self: 7).__code__),
    "the class": lambda made: setattr(made, "__class__", Other),
    "the dict": lambda made: setattr(made, "__dict__", {"new": 9, "more": 1}),
    "how names are translated": lambda made: setattr(vars(Checked)["__getattribute__"], "__code__", _with_cell(longer)),
}


def _with_cell(function):
    """The same code with the cell that a method which calls ``super()`` has."""
    return function.__code__.replace(co_freevars=("__class__",))


@pytest.mark.parametrize("in_words", [True, False], ids=["words", "python"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_seen(settings, change, in_words):
    noted = Unchanged(in_words=in_words)
    for name in ("new", "by_default", "shown", "lacking"):
        found = look_up(settings, name)
        assert noted._watch_lookup(settings, found)
    noted.finish()
    assert noted.holds()
    assert settings.new == 1 and not hasattr(settings, "lacking")
    assert noted.holds()
    change(settings)
    assert not noted.holds()


def test_a_file_that_changed_is_not_followed(tmp_path):
    source = "class One:\n    def __getattribute__(self, name):\n        return super().__getattribute__(name)\n"
    other = source.replace("name", "key")
    for code, text, is_known in ((source, source, True), (other, other.replace("(key)\n", "('held')\n"), False)):
        path = tmp_path / f"{is_known}.py"
        path.write_text(text)
        space = {}
        exec(compile(code, str(path), "exec"), space)
        made = space["One"]()
        made.held = 1
        assert (look_up(made, "held") is not None) == is_known


def test_configurations_of_transformers_are_followed():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2)
    for name in ("use_cache", "num_hidden_layers", "return_dict", "output_attentions", "_attn_implementation"):
        found = look_up(config, name)
        assert found.is_found and found.value is getattr(config, name)
    assert not look_up(config, "vision_feature_layer").is_found
    noted = Unchanged()
    assert noted._watch_lookup(config, look_up(config, "output_attentions"))
    noted.finish()
    assert noted.holds()
    config.output_attentions = True
    assert not noted.holds()
