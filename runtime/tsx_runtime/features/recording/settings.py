"""The settings of recordings."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from tsx_archiver.monitor.recording import RecordingConfig
from tsx_archiver.quantities import for_text
from tsx_runtime.settings.fields import FeatureModelSettings, FeatureSettings
from tsx_runtime.settings.model_limits import Accepts, Seconds

BucketUrl = Annotated[
    str,
    StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]+(/.*)?$"),
    Accepts("s3://BUCKET/PREFIX"),
]
Recording = Annotated[
    RecordingConfig,
    BeforeValidator(for_text(json.loads)),
    Accepts('a table such as {share = "1%", max_size = "100MB", max_age = "1d", answers = true}'),
]


class RecordingSettings(FeatureSettings):
    record_headers: list[str] | None = None
    """headers that recordings store in addition to those a replay needs; if not set, all that do
    not identify the client"""
    record_url: BucketUrl | None = None
    """s3://BUCKET/PREFIX to which recordings are uploaded; see recording.md"""
    record_upload_interval: Seconds = Field(60, ge=1)
    """time after which recorded requests are uploaded to record_url, in seconds"""


class RecordingModelSettings(FeatureModelSettings):
    record: Recording | None = None
    """the recording that starts with the model, in place of what its archive says; see
    recording.md"""
