"""Call a model once before anything is measured: a model that raises is the user's to mend, not a bug of ours."""

from __future__ import annotations

import torch

from fusion_advisor.errors import AdvisorError, LaterCallFailed, ModelFailed
from fusion_advisor.workload.device import is_out_of_memory, out_of_memory
from fusion_advisor.workload.factory import is_raised_in, location_of, said_by
from fusion_advisor.workload.load import LoadedWorkload


def first_call(loaded: LoadedWorkload) -> None:
    """Run the model on its inputs.

    Raises:
        ModelFailed: it raised.
        OutOfMemory: its step does not fit.
    """
    device = torch.device(loaded.record.device)
    try:
        with torch.no_grad():
            loaded.model(*loaded.args, **loaded.kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except AdvisorError:
        raise
    except (Exception, SystemExit) as error:  # any model may raise anything; it is reported, never swallowed
        if is_out_of_memory(error):
            raise out_of_memory(stage="running the model once", device=device, request=loaded.request, error=error) from error
        raise ModelFailed(
            model_id=loaded.record.model_id,
            exception=type(error).__name__,
            first_line=said_by(error)[0],
            location=location_of(error, otherwise="the call itself"),
        ) from error


def later_failure(loaded: LoadedWorkload, error: BaseException) -> LaterCallFailed | None:
    """Say that the model raised after its first call had passed; None where what raised was not the user's code."""
    if isinstance(error, AdvisorError) or is_out_of_memory(error) or not is_raised_in(loaded.model, error):
        return None
    return LaterCallFailed(
        model_id=loaded.record.model_id,
        exception=type(error).__name__,
        first_line=said_by(error)[0],
        location=location_of(error, otherwise="the call itself"),
    )
