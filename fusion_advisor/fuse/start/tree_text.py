"""A tree of what was read, as plain data and back."""

from __future__ import annotations

from typing import Any

from fusion_advisor.fuse.start.guard_tree import Node, Tree

_LONGEST = 300
"""Of a title, which goes into sentences."""
_PARTS = ("variables", "globals", "modules", "builtins")


def encode_tree(tree: Tree) -> dict[str, Any]:
    """Describe a tree.

    Args:
        tree: as recorded.
    """
    parts = {part: {name: _row(node) for name, node in getattr(tree, part).items()} for part in _PARTS}
    return {**parts, "conditions": tree.conditions}


def _row(node: Node) -> list[Any]:
    items = [[place, *(None if one is None else _row(one) for one in pair)] for place, pair in node.items.items()]
    below = [[kind, text, _row(one)] for kind, text, one in node.below]
    return [node.title, list(node.guards), node.facts, below, items, node.group]


def decode_tree(data: dict[str, Any]) -> Tree:
    """Make a tree from its description.

    Args:
        data: from :func:`encode_tree`, or from whoever wrote the file.

    Raises:
        LookupError, TypeError, ValueError: it is no such description.
    """
    variables, space, modules, builtins = ({str(name): _node(row) for name, row in data[part].items()} for part in _PARTS)
    return Tree(variables=variables, globals=space, modules=modules, builtins=builtins, conditions=list(data["conditions"]))


def _node(row: list[Any]) -> Node:
    title, guards, facts, below, items, group = row
    return Node(
        title="".join(filter(str.isprintable, str(title)))[:_LONGEST],
        group=int(group),
        guards=tuple(map(str, guards)),
        facts=[[str(kind), argument, answer] for kind, argument, answer in facts],
        below=[(str(kind), str(text), _node(one)) for kind, text, one in below],
        items={
            int(place): (None if key is None else _node(key), None if one is None else _node(one)) for place, key, one in items
        },
    )
