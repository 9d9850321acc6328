"""The settings of recordings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.settings.fields import FeatureModelSettings, FeatureSettings, table_or_flag
from tsx_runtime.settings.model_limits import Accepts, Seconds

BucketUrl = Annotated[
    str,
    StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]+(/.*)?$"),
    Accepts("s3://BUCKET/PREFIX"),
]
Recording = Annotated[
    RecordingConfig | Literal[False],
    BeforeValidator(table_or_flag),
    Accepts('true, false, or a table such as {share = "1%", max_size = "1GB", answers = true}'),
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
    """whether and how it is recorded, in place of what its archive says; see recording.md"""
