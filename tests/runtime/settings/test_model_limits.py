"""A limit of a model is one row of the table, from which all its uses come.

They are its key, parameters, settings, order, plan, description, snapshot and documentation.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tsx_archiver import ModelConfig, parse_model_config
from tsx_archiver.metadata.model_limits import CHANGEABLE, LIMITS, SAVED, ModelLimits
from tsx_runtime.api.management.schemas import DescribedModel, RegisterParameters, ScaleParameters
from tsx_runtime.core.models.plan import RegisterOrder, plan, with_model_settings
from tsx_runtime.settings.schema import ModelSettings, Settings
from tsx_runtime.settings.torchserve import VersionSettings

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def values(name: str) -> list[int]:
    """Return four values that the limit takes, none of them its default."""
    limit = LIMITS[name]
    candidates = [value for value in limit.choices if value != limit.default] or [
        limit.default + more for more in (1, 2, 3, 4)
    ]
    return (candidates * 4)[:4]


def test_the_rows_are_the_fields() -> None:
    assert [field.name for field in fields(ModelLimits)] == list(LIMITS)
    assert len({limit.key for limit in LIMITS.values()}) == len(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_source_that_names_a_limit_holds(name: str) -> None:
    limit, (by_order, by_model, by_archive, by_server) = LIMITS[name], values(name)
    settings = Settings(**{limit.setting: by_server} if limit.setting else {})
    archive, problems = parse_model_config({limit.key: by_archive})
    order, of_model = RegisterOrder(url="m", **{name: by_order}), ModelSettings(**{name: by_model})

    def planned(order: RegisterOrder, config: ModelConfig, settings: Settings) -> object:
        return getattr(plan(order, config, settings, 0), name)

    assert problems == []
    assert planned(with_model_settings(order, of_model), archive, settings) == by_order
    assert (
        planned(with_model_settings(RegisterOrder(url="m"), of_model), archive, settings)
        == by_model
    )
    assert planned(RegisterOrder(url="m"), archive, settings) == by_archive
    assert planned(RegisterOrder(url="m"), ModelConfig(), settings) == (
        by_server if limit.setting else limit.default
    )
    assert planned(RegisterOrder(url="m"), ModelConfig(), Settings()) == limit.default


@pytest.mark.parametrize("name", LIMITS)
def test_every_schema_has_the_same_of_a_limit(name: str) -> None:
    limit = LIMITS[name]
    for kind in (RegisterParameters, ScaleParameters):
        assert (name in kind.model_fields) == (name in CHANGEABLE)
    assert (name in VersionSettings.model_fields) == (name in SAVED)
    assert DescribedModel.model_fields[name].alias == limit.key
    for kind in (
        RegisterParameters,
        ScaleParameters,
        VersionSettings,
        ModelSettings,
        DescribedModel,
    ):
        if name in kind.model_fields:
            assert kind.model_fields[name].description == limit.description
    bad = limit.minimum - 1
    assert parse_model_config({limit.key: bad})[1]
    for kind in (RegisterParameters, ModelSettings):
        if name in kind.model_fields:
            reason = "503 or 429" if limit.choices else f"greater than or equal to {limit.minimum}"
            with pytest.raises(ValueError, match=reason):
                kind.model_validate({name: bad})
            if not limit.choices:
                with pytest.raises(ValueError, match=f"less than {limit.below}"):
                    kind.model_validate({name: limit.below})


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_documented(name: str) -> None:
    limit = LIMITS[name]
    row = f"| `{limit.key}` | `{name}` | `{limit.setting or limit.default}` | {limit.description} |"
    assert row in DOCS.read_text(encoding="utf-8").splitlines()
