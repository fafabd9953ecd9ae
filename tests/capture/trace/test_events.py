"""Which events of a chrome trace are kept, and in which order."""

from __future__ import annotations

from fusion_advisor.capture.trace.events import read_events


def event(cat, name, ts, dur, *, tid=1, ph="X", **args):
    return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def test_events_are_sorted_by_kind_and_time():
    trace = read_events(
        [
            event(
                "kernel", "second", 20.0, 2.5, correlation=2, stream=7, grid=[4, 1, 1], block=[128, 1, 1], **{"External id": 11}
            ),
            event("kernel", "first", 10.0, 1.0, correlation=1),
            event("gpu_memcpy", "Memcpy HtoD", 5.0, 1.0, correlation=3),
            event("gpu_memset", "Memset", 6.0, 1.0, correlation=4),
            event("cuda_runtime", "cudaLaunchKernel", 1.0, 0.5, correlation=1),
            event("cuda_runtime", "cudaLaunchKernelExC", 1.2, 0.5, correlation=5),
            event("cuda_driver", "cuLaunchKernelEx", 1.5, 0.5, correlation=2),
            event("cuda_runtime", "cudaMemcpyAsync", 1.7, 0.5, correlation=3),
            event("cuda_runtime", "cudaDeviceSynchronize", 2.0, 50.0, correlation=9),
            event("cpu_op", "aten::mul", 0.5, 3.0, **{"External id": 11}),
            event("user_annotation", "fa:step:0", 0.0, 100.0),
            event("user_annotation", "the user's own", 0.0, 100.0),
        ]
    )
    assert [kernel.name for kernel in trace.kernels] == ["Memcpy HtoD", "Memset", "first", "second"]
    assert [call.correlation for call in trace.launches] == [1, 5, 2, 3]
    assert [span.name for span in trace.ranges] == ["fa:step:0"]
    assert [op.external for op in trace.cpu_ops] == [11]
    last = trace.kernels[-1]
    assert (last.start_ns, last.duration_ns, last.end_ns) == (20_000, 2_500, 22_500)
    assert (last.stream, last.grid, last.block, last.external) == (7, (4, 1, 1), (128, 1, 1), 11)


def test_annotations_mirrored_onto_the_device_are_left_out():
    trace = read_events(
        [event("gpu_user_annotation", "fa:op:3", 0.0, 50.0, tid=7), event("gpu_user_annotation", "fa:step:0", 0.0, 90.0, tid=7)]
    )
    assert trace.kernels == trace.ranges == ()


def test_flows_instants_and_metadata_are_left_out():
    trace = read_events(
        [
            event("ac2g", "ac2g", 0.0, 1.0, ph="s"),
            event("kernel", "k", 0.0, 1.0, ph="f"),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
            {"ph": "i", "name": "Iteration Start", "ts": 1.0},
        ]
    )
    assert trace.kernels == trace.launches == trace.cpu_ops == ()


def test_an_outer_event_comes_before_the_one_inside_it():
    trace = read_events([event("cpu_op", "inner", 1.0, 2.0), event("cpu_op", "outer", 1.0, 5.0)])
    assert [op.name for op in trace.cpu_ops] == ["outer", "inner"]


def test_a_stream_that_is_no_number_is_zero():
    assert read_events([event("kernel", "k", 0.0, 1.0, stream="default")]).kernels[0].stream == 0
