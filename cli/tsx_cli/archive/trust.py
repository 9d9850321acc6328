"""The options that let code in a model's files run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from tsx_runtime.settings.schema import Settings

TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let code that lies in a Hugging Face model run."),
]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle", help="Load a .joblib or .pkl, which can run any code of its author."
    ),
]


class TrustOptions(NamedTuple):
    """The kinds of code that may run in the models that a command names."""

    remote_code: bool = False
    pickle: bool = False

    def apply(self, settings: Settings, models: Sequence[str]) -> Settings:
        """Return settings that also trust these models."""
        trusted: dict[str, list[str]] = {}
        if self.remote_code:
            # An optional feature.
            from tsx_runtime.features.huggingface.settings import HuggingFaceSettings

            known = HuggingFaceSettings.of(settings).trust_remote_code
            trusted["trust_remote_code"] = [*models, *known]
        if self.pickle:
            from tsx_runtime.features.tabular.settings import TabularSettings  # an optional feature

            trusted["trust_pickle"] = [*models, *TabularSettings.of(settings).trust_pickle]
        return settings.model_copy(update=trusted)


NO_TRUST = TrustOptions()
