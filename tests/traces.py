"""Chrome traces for tests: single events, and the step of a committed capture written down as torch.profiler would."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

CAPTURES = Path(__file__).parent / "data" / "captures"


def event(cat, name, ts, dur, *, tid=1, pid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


class Recorder:
    """Puts events down as a GPU run leaves them: an op on the CPU, its launch inside, its kernel later."""

    def __init__(self):
        self.events = []
        self.now = 1000.0
        self.device_now = 1000.0
        self.id = 0

    def op(self, name, *kernels, us=2.0, stream=7, inputs=None, linked=True, gap=0.5):
        """One call of an ATen op; ``aten::a>aten::b`` nests. Kernels are names or (name, microseconds)."""
        names = name.split(">") if name else []
        for depth, one in enumerate(names):
            self.id += 1
            args = {"External id": self.id}
            if inputs is not None and depth == 0:
                dims, types = inputs
                args |= {"Input Dims": dims, "Input type": types}
            self.events.append(event("cpu_op", one, self.now + 0.1 * depth, 5.0 * len(kernels) + 1 - 0.2 * depth, **args))
        inner = self.id
        for number, kernel in enumerate(kernels):
            kernel_name, kernel_us = kernel if isinstance(kernel, tuple) else (kernel, us)
            self.id += 1
            correlation = self.id
            self.events.append(event("cuda_runtime", "cudaLaunchKernel", self.now + 1 + 5 * number, 2.0, correlation=correlation))
            self.device_now = max(self.device_now, self.now + 2) + gap
            args = {"correlation": correlation, "stream": stream, "device": 0}
            if linked and names:
                args["External id"] = inner
            self.events.append(event("kernel", kernel_name, self.device_now, kernel_us, pid=0, tid=stream, **args))
            self.device_now += kernel_us
        self.now += 5.0 * max(1, len(kernels)) + 2
        return self

    def step(self, number, start):
        self.events.append(event("user_annotation", f"ProfilerStep#{number}", start, self.now - start))

    def document(self, **facts):
        return {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": self.events, **facts}


def write(path, document):
    text = json.dumps(document, indent=1)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=1) if path.suffix == ".gz" else text.encode())
    return path


def of_capture(name, steps=2):
    """The captured step of a committed capture, as many times as asked for, with real kernel names and times."""
    capture = json.loads(gzip.decompress((CAPTURES / f"{name}.json.gz").read_bytes()))
    recorder = Recorder()
    for number in range(steps):
        start = recorder.now - 0.5
        for launch in capture["launches"]:
            target = capture["ops"][launch["op_index"]]["target"].split(".")[1]
            recorder.op(f"aten::{target}", (launch["kernel_name"], launch["duration_ns"] / 1000))
        recorder.step(number, start)
    return recorder.document(), capture
