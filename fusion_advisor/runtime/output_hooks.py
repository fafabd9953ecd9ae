"""Recognises the forward hooks that transformers leaves in a model after the first call with ``output_hidden_states``.

Such a hook does nothing unless the call around it collects outputs: it asks one variable, the collector, and returns. So a call
that collects nothing computes the same with these hooks as without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

_MODULE = "transformers.utils.output_capturing"
_HOOK = "output_capturing_hook"
_MAKER = "install_output_capuring_hook"
_COLLECTOR = "_active_collector"


def collectors_of(hooks: Iterable[Any]) -> list[Any] | None:
    """Return what tells whether hooks collect outputs now; None where one of them is no such hook.

    Args:
        hooks: that are registered in a model.
    """
    found = {}
    for hook in hooks:
        if type(hook) is not FunctionType or hook.__name__ != _HOOK or hook.__globals__.get("__name__") != _MODULE:
            return None
        maker, collector = hook.__globals__.get(_MAKER), hook.__globals__.get(_COLLECTOR)
        if collector is None or hook.__code__ not in getattr(getattr(maker, "__code__", None), "co_consts", ()):
            return None
        found[id(collector)] = collector
    return list(found.values())


def is_collecting(collectors: Iterable[Any]) -> bool:
    """Whether one of them collects outputs now, in this thread."""
    return any(one.get() is not None for one in collectors)
