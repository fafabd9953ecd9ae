"""FA1xx: finding and loading a model."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class UnknownModel(AdvisorError):
    """No model with this id was found."""

    code = "FA101"
    message = "no model `{model_id}`{where}"
    note = "{reason}"
    hint = "{advice}"
    exit_code = 4

    def __init__(
        self, *, model_id: str, near: str = "", near_source: str = "", has_token: bool = False, unreachable: str = ""
    ) -> None:
        """Phrase what is known.

        Args:
            model_id: What the user typed.
            near: The nearest id that would work, if any.
            near_source: Where that id comes from (``from your local cache``).
            has_token: Whether a Hub token is set, so that a private model would have been visible.
            unreachable: Why the Hub was not asked; empty when it answered.
        """
        if unreachable:
            where, reason = (
                " in the local cache or among the shipped configurations, and no such local directory",
                f"the Hub was not asked: {unreachable}",
            )
        else:
            where = " on the Hugging Face Hub, and no such local directory"
            token = "this token may not read it" if has_token else "without a token (HF_TOKEN is not set)"
            reason = f"a private model looks the same {'when ' if has_token else ''}{token}"
        other = "check the id at https://huggingface.co/models, or pass a local directory or FILE.py:factory"
        if model_id.startswith((".", "/", "~")):  # no id of the Hub begins so
            where, reason = ": there is no such directory", ""
            other = "a local model is a directory written by save_pretrained, or your own code: FILE.py:factory"
        advice = f"did you mean `{near}`?   ({near_source})" if near else other
        super().__init__(model_id=model_id, where=where, reason=reason, advice=advice, near=near)


class GatedModel(AdvisorError):
    """The model's terms were not accepted by this token's owner."""

    code = "FA102"
    message = "`{model_id}` is gated and this token may not read it"
    hint = (
        "1. accept the terms at https://huggingface.co/{model_id}\n"
        "2. run `hf auth login`, or set HF_TOKEN\n"
        "or pass --weights random if its configuration is shipped: speed does not depend on weights"
    )
    exit_code = 4


class RemoteCodeRefused(AdvisorError):
    """The model needs Python code from its own repository."""

    code = "FA103"
    message = "`{model_id}` ships its own Python code; it was not run"
    note = "{classes}"
    hint = "read it, then pass --trust-remote-code"
    exit_code = 4


class BrokenModelDirectory(AdvisorError):
    """A directory or repository that is not a transformers model."""

    code = "FA104"
    message = "`{model_id}` is not a transformers model: {detail}"
    hint = "pass a directory written by `save_pretrained`, a Hub id, or FILE.py:factory"
    exit_code = 4


class MissingWeights(AdvisorError):
    """The requested weights do not exist."""

    code = "FA105"
    message = "the weights of `{model_id}` could not be loaded: {detail}"
    hint = "--weights random runs the same shapes with seeded random weights; --weights auto takes what there is"
    exit_code = 4


class UnknownArchitecture(AdvisorError):
    """The installed transformers has no class for the model."""

    code = "FA106"
    message = "transformers {version} has no model class for `{model_id}` (model type `{model_type}`)"
    hint = 'pip install --upgrade transformers, or pass FILE.py:factory returning "(model, example_inputs)"'
    exit_code = 4


class NoExampleInputs(AdvisorError):
    """The model needs inputs that its configuration does not describe."""

    code = "FA107"
    message = "no example inputs are known for `{model_id}` ({class_name} wants `{wanted}`)"
    hint = "pass --input FILE.py:fn returning them, or FILE.py:factory returning (model, example_inputs)"
    exit_code = 4
