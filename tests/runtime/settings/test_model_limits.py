"""A limit of a model is one row of the table, from which all its uses are derived.

These are its key, parameters, settings, registration, plan, description, snapshot and docs.
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
    """Return four values that the limit accepts and that differ from its default."""
    limit = LIMITS[name]
    candidates = [value for value in limit.choices if value != limit.default] or [
        limit.default + offset for offset in (1, 2, 3, 4)
    ]
    return (candidates * 4)[:4]


def test_every_row_of_the_limit_table_is_a_field() -> None:
    assert [field.name for field in fields(ModelLimits)] == list(LIMITS)
    assert len({limit.key for limit in LIMITS.values()}) == len(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_source_that_sets_a_limit_wins(name: str) -> None:
    limit, (by_order, by_model, by_archive, by_server) = LIMITS[name], values(name)
    settings = Settings(**{limit.setting: by_server} if limit.setting else {})
    archive, problems = parse_model_config({limit.key: by_archive})
    registration, model_settings = (
        RegisterOrder(url="m", **{name: by_order}),
        ModelSettings(**{name: by_model}),
    )

    def planned_value(
        registration: RegisterOrder, config: ModelConfig, settings: Settings
    ) -> object:
        return getattr(plan(registration, config, settings, 0), name)

    assert problems == []
    assert (
        planned_value(with_model_settings(registration, model_settings), archive, settings)
        == by_order
    )
    assert (
        planned_value(
            with_model_settings(RegisterOrder(url="m"), model_settings), archive, settings
        )
        == by_model
    )
    assert planned_value(RegisterOrder(url="m"), archive, settings) == by_archive
    assert planned_value(RegisterOrder(url="m"), ModelConfig(), settings) == (
        by_server if limit.setting else limit.default
    )
    assert planned_value(RegisterOrder(url="m"), ModelConfig(), Settings()) == limit.default


@pytest.mark.parametrize("name", LIMITS)
def test_every_schema_defines_a_limit_equally(name: str) -> None:
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
    invalid_value = limit.minimum - 1
    assert parse_model_config({limit.key: invalid_value})[1]
    for kind in (RegisterParameters, ModelSettings):
        if name in kind.model_fields:
            reason = "503 or 429" if limit.choices else f"greater than or equal to {limit.minimum}"
            with pytest.raises(ValueError, match=reason):
                kind.model_validate({name: invalid_value})
            if not limit.choices:
                with pytest.raises(ValueError, match=f"less than {limit.below}"):
                    kind.model_validate({name: limit.below})


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_documented(name: str) -> None:
    limit = LIMITS[name]
    row = f"| `{limit.key}` | `{name}` | `{limit.setting or limit.default}` | {limit.description} |"
    assert row in DOCS.read_text(encoding="utf-8").splitlines()
