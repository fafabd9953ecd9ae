"""What was found, tried and kept in each graph of a training step, for the run's report."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from fusion_advisor.fuse.decide.session import Variant
from fusion_advisor.fuse.plan.plan import Plan
from fusion_advisor.records import Capture, Fusion, GraphRewrite


@dataclass(slots=True, kw_only=True)
class Entry:
    """One graph: a pass of a step, or of a part of it where the model's call has graph breaks.

    Attributes:
        graph: as AOTAutograd made it.
        training_pass: ``forward`` or ``backward``.
        capture: its ops and its traced kernels.
        plan: its chains, and what was to be tried.
        fusions: every one that was tried.
        rewrites: every graph rewrite that has a site.
        variant: the graph with what was kept in it; None where nothing was.
    """

    graph: GraphModule
    training_pass: str
    capture: Capture
    plan: Plan
    fusions: tuple[Fusion, ...] = ()
    rewrites: tuple[GraphRewrite, ...] = ()
    variant: Variant | None = None


@dataclass(slots=True)
class Journal:
    """Collects the entries of a run, in the order in which the graphs were rewritten.

    Attributes:
        entries: one for each graph.
    """

    entries: list[Entry] = field(default_factory=list)
    _numbered: int = 0

    def begin(self, graph: GraphModule, training_pass: str, capture: Capture, plan: Plan) -> Entry:
        """Add a graph, its fusions numbered on from those before: an id is the name of a file, and belongs to one fusion.

        Args:
            graph: as it was traced.
            training_pass: ``forward`` or ``backward``; empty for a graph that asks for no gradient, which is a part of the first.
            capture: of the graph.
            plan: of the graph.
        """
        first = self._numbered + 1
        numbered = tuple(replace(fusion, id=f"F{first + at}") for at, fusion in enumerate(plan.fusions))
        plan, self._numbered = replace(plan, fusions=numbered), self._numbered + len(numbered)
        self.entries.append(Entry(graph=graph, training_pass=training_pass or "forward", capture=capture, plan=plan))
        return self.entries[-1]

    def forget(self, graphs: Collection[GraphModule]) -> None:
        """Drop the entries of passes that are none of the step's.

        Args:
            graphs: as AOTAutograd made them.
        """
        self.entries[:] = [entry for entry in self.entries if not any(entry.graph is one for one in graphs)]

    def capture_of(self, graph: GraphModule) -> Capture | None:
        """Return what was traced of a graph; None where it was not rewritten."""
        entry = self.of(graph)
        return None if entry is None else entry.capture

    def of(self, graph: GraphModule) -> Entry | None:
        """Return the entry of a graph; None where it was not rewritten."""
        return next((entry for entry in self.entries if entry.graph is graph), None)
