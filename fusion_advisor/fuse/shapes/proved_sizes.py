"""Which sizes of a piece may be rounded up: those of which the graph itself proves that padding changes no element that is kept.

The proof holds for all that inputs may hold. Where none is found, it is looked for once more with zeros in the masks: a mask says
which tokens count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.dependence.prove import why_padding_counts
from fusion_advisor.fuse.shapes.padding import CannotPad, PadForm, pad_form
from fusion_advisor.fuse.shapes.pieces import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedSizes:
    """What was proved of a piece.

    Attributes:
        names: of the sizes that may be padded.
        form: where sizes stand, and along which of them masks are padded with zeros; None: nothing may be padded.
        refused: by name of another size, which op stands in the way.
    """

    names: Sequence[str] = ()
    form: PadForm | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


def prove_sizes(opened: OpenCapture, box: Box) -> ProvedSizes:
    """Prove what can be proved of a piece's graph, as it was captured: layouts that change add ops that no rule is for.

    Args:
        opened: the graph.
        box: its sizes.
    """
    wanted = [one.name for one in box if one.least < one.most]
    try:
        form = pad_form(opened)
    except CannotPad as error:
        return ProvedSizes(refused=dict.fromkeys(wanted, str(error)))
    refused, masked = {}, set()
    for name in wanted:
        reason = why_padding_counts(opened, name)
        if reason and form.has_masks(name) and not why_padding_counts(opened, name, form.masks):
            masked.add(name)
        elif reason:
            refused[name] = reason
    names = [name for name in wanted if name not in refused]
    return ProvedSizes(names=names, form=replace(form, masked=frozenset(masked)) if names else None, refused=refused)
