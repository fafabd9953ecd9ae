"""Records of a graph's ops: which op owns the memory that a value lies in."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import Region


def test_a_view_of_an_input_belongs_to_that_input_though_another_one_lies_in_the_same_memory():
    """As in a backward pass, whose forward pass keeps parts of one product; the first part is not the whole of it."""
    with FakeTensorMode():
        whole = torch.empty(4, 6)
        values = {"first": whole[:, :2], "second": whole[:, 2:], "other": torch.empty(4, 4)}
        values |= {"deeper": values["second"].unsqueeze(1), "sum": values["second"] + values["other"]}
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in ("first", "second", "other")}
    nodes["deeper"] = graph.call_function(torch.ops.aten.unsqueeze.default, (nodes["second"], 1))
    nodes["again"] = graph.call_function(torch.ops.aten.squeeze.dim, (nodes["deeper"], 1))
    nodes["sum"] = graph.call_function(torch.ops.aten.add.Tensor, (nodes["again"], nodes["other"]))
    nodes["written"] = graph.call_function(torch.ops.aten.add_.Tensor, (nodes["again"], nodes["other"]))
    graph.output((nodes["sum"], nodes["written"]))
    values |= {"again": values["second"], "written": values["second"]}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    ops, index_of = describe(Region(index=0, graph=GraphModule({}, graph), original=GraphModule({}, graph)))
    record = {name: ops[index_of[node]] for name, node in nodes.items()}
    assert all(record[name].alias_of is None for name in ("first", "second", "other", "sum"))
    assert {record[name].alias_of for name in ("deeper", "again", "written")} == {index_of[nodes["second"]]}
    assert record["written"].mutates == (index_of[nodes["first"]], index_of[nodes["second"]])
