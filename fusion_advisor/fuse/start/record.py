"""Records what a saved plan needs to start without a trace: the captured graph, and everything that the trace had read.

What cannot be written down is no error. The plan then is put in place as before, by tracing the model, and says why.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion_advisor.capture.graph.fx_nodes import code_digests
from fusion_advisor.capture.graph.tracer import LiveCapture, Region
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
from fusion_advisor.fuse.start.outputs import form_of
from fusion_advisor.fuse.start.tree_text import encode_tree
from fusion_advisor.records.serialize import read_document, write_atomic
from fusion_advisor.runtime.output_hooks import collectors_of
from fusion_advisor.runtime.torch_internals import compiled_code, module_call
from fusion_advisor.workload.load import LoadedWorkload

NAME = "start.json.gz"
SCHEMA = "fusion-advisor-start/1"


def write_start(loaded: LoadedWorkload, live: LiveCapture, folder: Path) -> str:
    """Write what a start without a trace needs, beside a run's capture.

    Args:
        loaded: the model, and the call that was captured.
        live: the capture of it.
        folder: of the run; its ``capture.json.gz`` is there.

    Returns:
        Why there is no such file; empty where it was written.
    """
    path = folder / NAME
    path.unlink(missing_ok=True)
    try:
        with torch.no_grad():
            start = start_of(loaded, live)
    except (CannotDescribe, Differs) as error:
        return str(error)
    start["capture"] = digest_of(folder)
    text = json.dumps(start, separators=(",", ":"), allow_nan=False)
    write_atomic(path, gzip.compress(text.encode(), 6, mtime=0))
    return ""


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
    if dist.is_available() and dist.is_initialized():
        raise CannotDescribe("the step is one of several ranks'")
    region = _only_region(live)
    model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    if region.effects:
        raise CannotDescribe(f"the call changes {region.effects[0]} of Python's")
    if has_hooks(model):
        raise CannotDescribe("a hook is registered on a module")
    frame = frame_of(model)
    if frame is None:
        raise CannotDescribe("its forward is torch's own, or a call runs hooks")
    found = [one for one in compiled_code.compiled_codes(frame.function) if one.graph is region.route]
    if len(found) != 1:
        raise CannotDescribe("dynamo keeps no code of the capture")
    variables = frame.variables(args, kwargs)
    if not found[0].root.check(variables):
        raise CannotDescribe("the model is not as it was when it was traced")
    tree = recorded(found[0].root, variables, frame.function.__globals__)
    given = given_by(args, kwargs)
    leaves = list(given.leaves.values())
    places = places_of(region.code, model)
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "state": compiled_code.global_state(),
        "facts": model_facts.facts(model),
        "tree": encode_tree(tree),
        "pattern": _pattern(tree, variables, frame.function.__globals__),
        "code": places,
        "attributes": attributes(WatchedCode(model, find(places))),
        "graph": encode_graph(region.graph),
        "digests": list(region.digests or code_digests(region.original)),
        "names": list(region.names),
        "roles": list(region.roles),
        "sources": _sources(region, given),
        "leaves": [list(given.leaves), pattern(leaves), [one.requires_grad for one in leaves]],
        "inside": [list(given.inside), sharing([*leaves, *given.inside.values()]), list(given.objects)],
        "output": _output(live, region, given),
    }


def _only_region(live: LiveCapture) -> Region:
    if live.compiled is None or not live.is_whole():
        raise CannotDescribe("the call is not one graph")
    written = live.written
    if written.attributes or written.modules or written.contents or written.made:
        raise CannotDescribe("the call sets attributes of the model or of what it is given")
    return live.regions[0]


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether a module has a forward hook that does something.

    Args:
        model: with its parts.
    """
    return collectors_of(hook for table in module_call.hook_tables(model) for hook in table.values()) is None


def _sources(region: Region, given: Given) -> list[int | str]:
    """Return for each input of the graph which of the call's tensors it is, or the name of the model's tensor."""
    place = {id(one): number for number, one in reversed([*enumerate((*given.leaves.values(), *given.inside.values()))])}
    found: list[int | str] = []
    for name, role, value in zip(region.names, region.roles, region.example_args, strict=True):
        if role != "input":
            found.append(name)
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


def _output(live: LiveCapture, region: Region, passed: Given) -> Any:
    results = live.results if isinstance(live.results, tuple | list) else [live.results]
    made = {id(value): number for number, value in enumerate(results) if isinstance(value, torch.Tensor)}
    given = {id(value): number for number, value in enumerate(region.example_args)}

    def place(tensor: torch.Tensor) -> dict[str, int]:
        if id(tensor) in given:
            return {"input": given[id(tensor)]}
        if id(tensor) not in made:
            raise CannotDescribe("a tensor of its output is made outside of the graph")
        return {"result": made[id(tensor)]}

    return form_of(live.output, place, {id(value): name for name, value in passed.objects.items()})


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
    for folder in ("capture/graph", "capture/loops", "fuse/start", "runtime/torch_internals"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
