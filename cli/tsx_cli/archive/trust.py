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
    """The kinds of code that may run in the models that a command names.

    The fields are settings of optional features, which list such models.
    """

    trust_remote_code: bool = False
    trust_pickle: bool = False

    def apply(self, settings: Settings, models: Sequence[str]) -> Settings:
        """Return settings that also trust these models."""
        names = [name for name, is_given in self._asdict().items() if is_given]
        trusted = {name: [*models, *getattr(settings, name, ())] for name in names}
        return settings.model_copy(update=trusted)


NO_TRUST = TrustOptions()
