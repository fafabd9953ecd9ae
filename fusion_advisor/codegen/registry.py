"""All backends, one line each; for each kind of device the preferred one first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.descriptor import RUN, Backend
from fusion_advisor.codegen.cpp.descriptor import Cpp
from fusion_advisor.codegen.cuda.descriptor import Cuda
from fusion_advisor.codegen.triton.descriptor import Triton
from fusion_advisor.errors import NoCompiler, UsageError

if TYPE_CHECKING:
    from fusion_advisor.codegen.common.interface import KernelMaker

BACKENDS: tuple[Backend, ...] = (
    Triton(),
    Cuda(),
    Cpp(),
)
NAMES = tuple(one.name for one in BACKENDS)


def descriptor(name: str) -> Backend:
    """Return the backend of a name.

    Raises:
        UsageError: there is none.
    """
    for one in BACKENDS:
        if one.name == name:
            return one
    raise UsageError(detail=f"there is no backend `{name}`", help=f"one of: {', '.join(NAMES)}")


def backend(name: str) -> KernelMaker:
    """Return what renders and builds kernels in the backend of a name.

    Raises:
        UsageError: there is none.
    """
    return descriptor(name).maker()


def backends_for(device_kind: str) -> tuple[Backend, ...]:
    """Return the backends whose kernels run on a kind of device, the preferred one first.

    Args:
        device_kind: torch's device type, ``cuda`` or ``cpu``.
    """
    return tuple(one for one in BACKENDS if device_kind in one.device_kinds)


def refuse_unready(asked: str | None, device_kind: str) -> None:
    """Refuse a device for which no kernel can be built, or none in the language that was asked for.

    Args:
        asked: for a backend by name; None and any other word leave the choice to the device.
        device_kind: torch's device type, ``cuda`` or ``cpu``.

    Raises:
        UsageError: the backend's kernels do not run there.
        NoCompiler: on a CPU, where every kernel is C++.
    """
    for one in BACKENDS:
        if one.name == asked and device_kind not in one.device_kinds and one.without_device() != RUN:
            raise UsageError(
                detail=f"--backend {asked} makes kernels for {' or '.join(one.device_kinds)}, and the model is on {device_kind}",
                help=f"leave it out, or use {' or '.join(other.name for other in backends_for(device_kind))}",
            )
    if device_kind == "cpu" and not any(one.is_available() for one in backends_for(device_kind)):
        raise NoCompiler
