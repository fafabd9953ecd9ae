"""FA4xx: building, checking and launching kernels."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class CompileFailed(AdvisorError):
    """A kernel did not compile and --strict was given."""

    code = "FA401"
    message = "a kernel did not compile: {detail}"
    note = "the original ops still run"
    hint = "the compiler's message is in the run's log.txt; without --strict this is a warning"
    exit_code = 8


class NumericsFailed(AdvisorError):
    """A rewrite changed results and --strict was given."""

    code = "FA402"
    message = "numbers changed: {detail}"
    note = "every rewrite that failed its check was removed; the model computes the same as before"
    hint = "the report shows each error and eager's own error; without --strict this is a warning"
    exit_code = 7


class NothingReplaced(AdvisorError):
    """A planned fusion replaced nothing, and --strict was given."""

    code = "FA403"
    message = "a fusion replaced nothing: {detail}"
    note = "a rewrite that does nothing is a bug in the rewrite, not a slow rewrite"
    hint = "the report's receipt gives the reason for each site; without --strict this is a warning"
    exit_code = 6


class KernelCheckFailed(AdvisorError):
    """A library kernel broke its own contract in `kernels check`."""

    code = "FA404"
    message = "`{name}` failed {failed} of {total} cases"
    hint = "the rows marked `failed` say which case, backend and dtype"
    exit_code = 10


class KernelFaulted(AdvisorError):
    """A kernel that faulted on a GPU while it was tried: nothing can run on that GPU in this process any more."""

    code = "FA415"
    message = "{kernel} faulted on the GPU while it was checked: {detail}"
    note = "the report so far was written; the process's context on the GPU is lost, and the model with it"
    hint = "leave the kernel out with `--skip {kernel}`, in a new process; please report it with its source, which is in kernels/"
    exit_code = 8


class HalfWritten(AdvisorError):
    """A fused call stopped after it may have written to its cache: the cache is not what either call would have left."""

    code = "FA416"
    message = "{detail}: reset the cache and repeat"
    note = "the call had begun to write to its cache, which now holds part of a step"
    hint = "later calls run the model's original ops where the same would happen again"
    exit_code = 4
