"""Every setting, typed, with one precedence: command line > environment (`TSX_*`) > `tsx.toml` > default.

What belongs to one model (batch size, workers, device) is not here but in the archive's `model-config.yaml`
(`tsx_archiver.ModelConfig`); the defaults that such a file may override are.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field


class Settings(BaseModel):
    """Names and defaults are TorchServe's where it has the setting."""

    inference_address: str = Field("http://127.0.0.1:8080", description="where predictions are answered")
    management_address: str = Field("http://127.0.0.1:8081", description="where models are registered, scaled and described")
    metrics_address: str = Field("http://127.0.0.1:8082", description="where Prometheus reads the metrics")
    model_store: Path | None = Field(None, description="the directory that models are registered from")
    load_models: list[str] = Field([], description="what to load at start: archives, [name=]file, or 'all' in the model store")
    default_workers_per_model: int = Field(0, ge=0, description="workers of a model that asks for none; 0 = one a GPU, or one")
    default_response_timeout: int = Field(120, ge=1, description="seconds a worker may take for a batch")
    default_startup_timeout: int = Field(120, ge=1, description="seconds a worker may take to load a model")
    unregister_model_timeout: int = Field(120, ge=1, description="seconds a model may take to finish its work when it is removed")
    job_queue_size: int = Field(100, ge=1, description="requests of one model that may wait")
    max_request_size: int = Field(6_553_500, ge=1, description="bytes of one request's body")
    max_response_size: int = Field(6_553_500, ge=1, description="bytes of one answer's body")
    number_of_gpu: int | None = Field(None, ge=0, description="GPUs to use; all that are visible if not set")
    limit_max_image_pixels: bool = Field(True, description="refuse images that would unpack to a gigantic size")
    decode_input_request: bool = Field(True, description="hand JSON and text bodies to the handler decoded")
    default_service_handler: str | None = Field(None, description="the handler of archives that name none")
    inference_token: str | None = Field(None, description="bearer token that predictions must carry")
    management_token: str | None = Field(None, description="bearer token that management and metrics calls must carry")
    disable_token_authorization: bool = Field(False, description="serve without tokens on an address that is not loopback")
    drain_timeout: int = Field(30, ge=0, description="seconds that accepted requests may take after a stop was asked for")
    cache_dir: Path | None = Field(None, description="where archives are unpacked; the user's cache directory if not set")
    max_archive_size: int = Field(64 << 30, ge=1, description="bytes that an archive may unpack to")
    max_archive_files: int = Field(10_000, ge=1, description="files that an archive may hold")
    worker_preload: bool = Field(True, description="start workers from a process that has torch imported already")
