"""The load order of a worker: the data that it needs to load its model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tsx_archiver import OpenArchive
from tsx_runtime import wire
from tsx_runtime.core.hidden_credentials import passed_variables
from tsx_runtime.core.models.plan import VersionPlan
from tsx_runtime.core.placement.placement import WorkerPlacement
from tsx_runtime.core.telemetry.metricsconfig import read_metrics_config
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.log_format import writes_json
from tsx_runtime.version import __version__


def load_order(
    archive: OpenArchive,
    plan: VersionPlan,
    placement: WorkerPlacement,
    settings: Settings,
    *,
    name: str,
    version: str,
    handler: str,
    envelope: str,
    worker: str,
    gpus: int,
    properties: dict[str, Any] | None = None,
    output: str = "",
) -> wire.LoadOrder:
    """Return the load order of a worker.

    `gpus` is the worker's number of GPUs. For the other arguments see `LoadOrder`.
    """
    logs_to_files = settings.log_location is not None
    is_json = writes_json(settings.log_format, in_files=logs_to_files)
    return wire.LoadOrder(
        model_name=name,
        model_version=version,
        model_dir=str(archive.directory),
        manifest=(
            archive.manifest.data if archive.digest else _without_checksums(archive.manifest.data)
        ),
        model_config=archive.config.text,
        handler=handler,
        worker=worker,
        gpu_id=placement.gpu_id,
        batch_size=plan.batch_size or 1,
        max_batch_cost=plan.batch_cost,
        response_timeout=plan.response_timeout,
        threads=placement.threads,
        shares_cores=placement.shares_cores,
        cores=list(placement.cores) or None,
        variables=placement.variables | passed_variables(settings, name, os.environ),
        ranks=plan.parallel.ranks,
        gpus=gpus,
        limit_max_image_pixels=settings.limit_max_image_pixels,
        properties=properties or {},
        decode_input_request=settings.decode_input_request,
        max_response_size=settings.max_response_size,
        server_version=__version__,
        envelope=envelope,
        output=output,
        at_terminal=bool(output) and not logs_to_files and not is_json,
        log_json=is_json,
        model_metrics=list(read_metrics_config(settings.metrics_config).model or ()),
        mode=plan.strategy.mode,
        stateful=plan.strategy.sequences is not None,
        json_nan=settings.json_nan,
        guess_content_type=settings.guess_content_type,
        handler_error_status=settings.handler_error_status,
    )


def envelope_of(archive: OpenArchive, settings: Settings) -> str:
    """Return the envelope of requests from the manifest, or else from the settings."""
    return str(
        (archive.manifest.data.get("model") or {}).get("envelope")
        or settings.service_envelope
        or ""
    )


def _without_checksums(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a directory without checksums: its files may have been edited."""
    return {key: value for key, value in manifest.items() if key != "sha256"}
