"""The settings of the store of requests and answers, and of callbacks."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from tsx_runtime.settings.fields import FeatureSettings, Secret, check_store
from tsx_runtime.settings.model_limits import Accepts, Bytes, Seconds
from tsx_runtime.wire import MAX_FIELD

OFF = "off"  # the value of `jobs_store` without a store


JobsStore = Annotated[
    str,
    AfterValidator(check_store),
    Accepts("a file, sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE, or off"),
]


class JobsSettings(FeatureSettings):
    jobs_store: Annotated[JobsStore | None, Secret()] = None
    """asynchronous answers: a SQLite file, or a postgresql:// URL that servers share; off for none;
    jobs.sqlite in state_dir if not set"""
    job_retention: Seconds = Field(86_400, ge=1)
    """time for which an asynchronous answer is stored, in seconds"""
    idempotency_retention: Seconds = Field(86_400, ge=1)
    """time for which the answer to an Idempotency-Key is stored, in seconds"""
    max_kept_answer: Bytes = Field(8 << 20, ge=0, le=MAX_FIELD)
    """maximum size of an answer that is stored for an Idempotency-Key, in bytes"""
    max_job_size: Bytes | None = Field(None, ge=1, le=1_000_000_000)
    """maximum size of the body of an asynchronous request, in bytes; max_request_size if not set"""
    max_queued_jobs: int = Field(10_000, ge=1)
    """maximum number of asynchronous requests that are not answered yet"""
    max_jobs_per_client: int | None = Field(None, ge=0)
    """of these, maximum number of one client; 0 = unlimited; not set: 1000 where other machines can
    connect"""
    max_jobs_size: Bytes = Field(16 << 30, ge=0)
    """maximum size of the SQLite file of jobs_store, in bytes; 0 = no limit"""
    job_callback_hosts: list[str] = []
    """where asynchronous answers may be sent: hosts, or regular expressions that match whole URLs;
    none if empty"""
    job_callback_secret: Annotated[str | None, Secret()] = Field(None, min_length=16)
    """secret with which callbacks are signed (HMAC-SHA256)"""
    job_callback_old_secret: Annotated[str | None, Secret()] = Field(None, min_length=16)
    """previous secret, with which callbacks are signed as well"""
