"""Records what a saved plan needs to start without a trace: the captured graphs, and everything that the traces had read.

Once for a run: versions, torch's global state, facts of the model (classes, sources, configuration, layouts). Once for each call
that was captured, which is the example call, and in a plan of ranges one call of each piece: the guards as a tree; the code that
was traced, by name and digest; the graph; which tensors of the call, of the model, or which sizes its inputs are; the form of the
output, and of what it sets in the objects that it is given. A piece has three things more: its open sizes, the guards on them,
and where it begins and ends. Its layouts and guards are expressions of sizes as nested lists.

Compared when it is loaded: all of this with the model and a call of the same sizes; the pieces' ends with those that the guards
give; the results with those of the model's own ops, a piece's at two sizes. Compared at each call: code, guards, tensors, and
what dynamo had asked of sizes. Figures: ``docs/measurements/start_up.md``.

What cannot be written down is no error. The plan then is put in place as before, by tracing the model, and says why.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion_advisor.capture.graph.fx_nodes import code_digests
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import LiveCapture, Region
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.errors import UnreadableReport
from fusion_advisor.export.copied import model_facts
from fusion_advisor.fuse.direct.code_guard import WatchedCode
from fusion_advisor.fuse.direct.direct_call import frame_of
from fusion_advisor.fuse.start.call_tensors import Given, given_by, sharing
from fusion_advisor.fuse.start.code_facts import attributes, find, places_of
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.fuse.start.graph_text import encode_graph
from fusion_advisor.fuse.start.guard_record import recorded
from fusion_advisor.fuse.start.guard_tree import Differs, Seen, Tree, check, pattern, roots
from fusion_advisor.fuse.start.object_changes import ObjectState, asked_numbers, untold_change
from fusion_advisor.fuse.start.open_call import Call, CallAt, DescribedSizes, Source, described_sizes, other_sizes
from fusion_advisor.fuse.start.outputs import form_of, holds_number, marked
from fusion_advisor.fuse.start.tree_text import encode_tree
from fusion_advisor.records import SizeRange
from fusion_advisor.records.serialize import read_document, write_atomic
from fusion_advisor.runtime.output_hooks import collectors_of
from fusion_advisor.runtime.torch_internals import compiled_code, module_call
from fusion_advisor.workload.load import LoadedWorkload

NAME = "start.json.gz"
SCHEMA = "fusion-advisor-start/3"


def write_start(loaded: LoadedWorkload, live: LiveCapture, folder: Path, *, pieces: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write what a start without a trace needs, beside a run's capture.

    Args:
        loaded: the model, and the call that was captured.
        live: the capture of it.
        folder: of the run; its ``capture.json.gz`` is there.
        pieces: of ranges that the run serves, from :func:`piece_of`.

    Returns:
        Why each start traces the model, which is then all that the file says; empty where none has to.
    """
    why = ""
    try:
        with torch.no_grad():
            start = start_of(loaded, live)
        start["pieces"] = list(pieces)
        start["capture"] = digest_of(folder)
    except (CannotDescribe, Differs) as error:
        why = str(error)
        start = {"schema": SCHEMA, "why_not": why}
    text = json.dumps(start, separators=(",", ":"), allow_nan=False)
    write_atomic(folder / NAME, gzip.compress(text.encode(), 6, mtime=0))
    return why


def read_start(folder: Path) -> dict[str, Any] | str:
    """Read what :func:`write_start` wrote, or return why it cannot be used.

    Args:
        folder: of the run.
    """
    path = folder / NAME
    if not path.exists():
        return f"the run has no {NAME}"
    try:
        start = json.loads(read_document(path))
    except (UnreadableReport, ValueError, RecursionError) as error:
        return f"{NAME} cannot be read ({' '.join(str(error).split())[:120]})"
    if not isinstance(start, dict) or start.get("schema") != SCHEMA:
        return f"{NAME} is of another version"
    if "why_not" in start:
        return str(start["why_not"]) or f"{NAME} gives no reason"
    if start.get("capture") != digest_of(folder):
        return f"{NAME} is of another capture"
    return start


def digest_of(folder: Path) -> str:
    """Return a digest of a run's capture.

    Args:
        folder: of the run.
    """
    return hashlib.sha256((folder / "capture.json.gz").read_bytes()).hexdigest()


def start_of(loaded: LoadedWorkload, live: LiveCapture) -> dict[str, Any]:
    """Return what a start without a trace needs, as plain data.

    Args:
        loaded: the model, and the call that was captured.
        live: the capture of it; what dynamo compiled for it still is there.

    Raises:
        CannotDescribe: something that the trace had read, or made, means nothing in another process.
        Differs: the model is no longer as it was traced.
    """
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "state": compiled_code.global_state(),
        "facts": model_facts.facts(loaded.model),
        **_call_of(loaded.model, loaded.args, loaded.kwargs, live),
    }


def piece_of(model: torch.nn.Module, opened: OpenCapture, name: str, at: CallAt, box: Sequence[SizeRange]) -> dict[str, Any]:
    """Return what a piece of a range needs to start without a trace, as plain data, or why it is traced.

    Args:
        model: as it was traced.
        opened: the piece's capture; what dynamo compiled for it still is there.
        name: of the call that it is a piece of.
        at: makes such a call.
        box: its sizes.
    """
    ranges = {one.name: [one.least, one.most] for one in box}
    found: dict[str, Any] = {"name": name, "sizes": dict(opened.sizes), "ranges": ranges}
    args, kwargs = opened.call

    def other() -> Call | None:
        sizes = other_sizes(opened, box)
        return None if sizes is None else at(sizes)

    try:
        with torch.no_grad():
            return found | _call_of(model, args, kwargs, opened.live, opened, other)
    except (CannotDescribe, Differs) as error:
        return found | {"why": str(error)}


def _call_of(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: LiveCapture,
    opened: OpenCapture | None = None, other: Callable[[], Call | None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Describe one captured call; ``other`` makes one of other sizes, where some are open.

    Raises:
        CannotDescribe: something that the trace had read, or made, means nothing in another process.
        Differs: the model is no longer as it was traced.
    """
    if dist.is_available() and dist.is_initialized():
        raise CannotDescribe("the step is one of several ranks'")
    region, given = _only_region(live), given_by(args, kwargs)
    state = ObjectState.of(args, kwargs, given)
    own = {id(owner) for _, owner, _ in state.before}
    others = [what for what, owner in region.effects if owner not in own]
    if others:
        raise CannotDescribe(f"the call changes {others[0]} of Python's")
    if has_hooks(model):
        raise CannotDescribe("a hook is registered on a module")
    frame = frame_of(model)
    if frame is None:
        raise CannotDescribe("its forward is torch's own, or a call runs hooks")
    found = [one for one in compiled_code.compiled_codes(frame.function) if one.graph is region.route]
    if len(found) != 1:
        raise CannotDescribe("dynamo keeps no code of the capture")
    variables, space = frame.variables(args, kwargs), frame.function.__globals__
    if not found[0].root.check(variables):
        raise CannotDescribe("the model is not as it was when it was traced")
    sizes = described_sizes(opened, given)
    tree = recorded(found[0].root, variables, space, given.tensors, sizes.open_at)
    numbers = [] if opened is None else asked_numbers([(node, variables[name]) for name, node in tree.variables.items()], state)
    leaves = list(given.leaves.values())
    places = places_of(region.code, model)
    made = _made(live, given, other, (args, kwargs))
    untold = untold_change(live.written, [(path, name) for path, name, _ in made.sets])
    if untold:
        raise CannotDescribe(untold)
    return {
        "tree": encode_tree(tree),
        "pattern": _pattern(tree, variables, space),
        "code": places,
        "attributes": attributes(WatchedCode(model, find(places))),
        "graph": encode_graph(region.graph, sizes.symbols),
        "open": sizes.data,
        "digests": list(region.digests or code_digests(region.original)),
        "names": list(region.names),
        "roles": list(region.roles),
        "sources": _sources(region, given, sizes),
        "leaves": [list(given.leaves), pattern(leaves), [one.requires_grad for one in leaves]],
        "inside": [list(given.inside), sharing(given.tensors), list(given.objects)],
        "output": made.output,
        "sets": made.sets,
        "numbers": numbers,
    }


def _only_region(live: LiveCapture) -> Region:
    if live.compiled is None or not live.is_whole():
        raise CannotDescribe("the call is not one graph")
    changed = lasting_change(live.written)
    if changed:
        raise CannotDescribe(changed)
    return live.regions[0]


def lasting_change(written: Written) -> str:
    """Say what a call changes in the model that outlives it; empty where it writes to tensors alone.

    Args:
        written: by the call.
    """
    for _, name, _ in written.modules:
        return f"the call sets `{name}` of the model"
    return "the call changes a list, a dict or a set of the model" if written.contents else ""


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether a module has a forward hook that does something.

    Args:
        model: with its parts.
    """
    return collectors_of(hook for table in module_call.hook_tables(model) for hook in table.values()) is None


def _sources(region: Region, given: Given, sizes: DescribedSizes) -> list[Source]:
    """Return for each input of the graph which of the call's tensors it is, whose size, or the name of the model's tensor."""
    place = {id(one): number for number, one in reversed([*enumerate(given.tensors)])}
    inputs = [node.meta.get("val") for node in region.graph.graph.nodes if node.op == "placeholder"]
    found: list[Source] = []
    for name, role, value, known in zip(region.names, region.roles, region.example_args, inputs, strict=True):
        if role != "input":
            found.append(name)
        elif isinstance(known, torch.SymInt):
            found.append(sizes.place_of(known))
        elif id(value) in place:
            found.append(place[id(value)])
        else:
            raise CannotDescribe(f"an input of its graph, `{name}`, is neither the call's nor a parameter")
    return found


def _pattern(tree: Tree, variables: Mapping[str, Any], space: dict[str, Any]) -> list[int]:
    """Read the model by the tree that was recorded, and return which of the tensors in it are one."""
    seen = Seen()
    for node, value in roots(tree, variables, space):
        check(node, value, seen)
    return pattern(seen.tensors)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a call makes of its graph's results.

    Attributes:
        output: the form of what it returns.
        sets: path of an object that it is given, name of an attribute, and the form of what it sets.
    """

    output: Any
    sets: list[list[Any]]


def _made(live: LiveCapture, passed: Given, other: Callable[[], Call | None] | None, call: Call) -> _Made:
    """Describe what a call returns and sets; ``other`` makes a call of other sizes, where some are open.

    Raises:
        CannotDescribe: it holds what means nothing in another process, or a number that may follow from sizes in an unknown way.
    """
    kinds = {type(value) for value in _results(live) if value is not None and not isinstance(value, torch.Tensor)}
    if kinds and (other is None or kinds != {int}):
        raise CannotDescribe("its output holds a float or a truth value that the graph computes")
    if other is None and not live.written.attributes:
        return _Made(_form_of(live, live.output, passed, ()), [])
    made = _made_at(live, call, passed)
    if other is not None and holds_number([made.output, [form for *_, form in made.sets]]):
        # Dynamo writes what is the same at all sizes into its code, and reads what is a tensor's size off the tensor.
        another = other()
        if another is None or _made_at(live, another, given_by(*another)) != made:
            raise CannotDescribe("its output holds a number, which may follow from a size")
    return made


def _made_at(live: LiveCapture, call: Call, passed: Given) -> _Made:
    """Describe what dynamo's code makes of the graph's results in a call: it runs without the graph, with marks for numbers."""
    route, inputs = live.regions[0].route, list[tuple[Any, ...]]()
    assert route is not None and live.compiled is not None
    results = marked(_results(live))

    def forward(*args: Any) -> Any:
        inputs.append(args)
        return results

    before, route.forward = route.forward, forward
    state = ObjectState.of(call[0], call[1], passed)
    try:
        output = live.compiled.call(*call[0], **call[1])
        if len(inputs) != 1:
            raise CannotDescribe("a call of other sizes is another graph")
        sets = [[path, name, _form_of(live, value, passed, inputs[0])] for (path, name), value in state.changes().items()]
        return _Made(_form_of(live, output, passed, inputs[0]), sets)
    finally:
        route.forward = before
        state.restore()


def _form_of(live: LiveCapture, output: Any, passed: Given, inputs: Sequence[Any]) -> Any:
    made = {id(value): number for number, value in enumerate(_results(live)) if isinstance(value, torch.Tensor)}
    given = {id(value): number for values in (inputs, live.regions[0].example_args) for number, value in enumerate(values)}

    def place(tensor: torch.Tensor) -> dict[str, int]:
        if id(tensor) in given:
            return {"input": given[id(tensor)]}
        if id(tensor) not in made:
            raise CannotDescribe("a tensor of its output is made outside of the graph")
        return {"result": made[id(tensor)]}

    return form_of(output, place, {id(value): name for name, value in passed.objects.items()})


def _results(live: LiveCapture) -> Sequence[Any]:
    return live.results if isinstance(live.results, tuple | list) else [live.results]


def versions() -> dict[str, str]:
    """Return the versions of all that a trace depends on, besides the model's code."""
    transformers = sys.modules.get("transformers")
    return {
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": str(getattr(transformers, "__version__", "none")),
        "fusion-advisor": _own_digest(),
    }


@functools.cache
def _own_digest() -> str:
    """Return a digest of what captures a model here."""
    root = Path(__file__).resolve().parent.parent.parent
    digest = hashlib.sha256()
    for folder in ("capture/graph", "capture/loops", "capture/sizes", "fuse/start", "runtime/torch_internals"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
