"""Call a model once before anything is measured: a model that raises is the user's to mend, not a bug of ours."""

from __future__ import annotations

import torch

from fusion_advisor.errors import AdvisorError, ModelFailed
from fusion_advisor.workload.device import is_out_of_memory, out_of_memory
from fusion_advisor.workload.factory import location_of
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
    except Exception as error:  # any model may raise anything; it is reported, never swallowed
        if is_out_of_memory(error):
            raise out_of_memory(stage="running the model once", device=device, request=loaded.request, error=error) from error
        lines = str(error).strip().splitlines()
        raise ModelFailed(
            model_id=loaded.record.model_id,
            exception=type(error).__name__,
            first_line=lines[0] if lines else "(no message)",
            location=location_of(error),
        ) from error
