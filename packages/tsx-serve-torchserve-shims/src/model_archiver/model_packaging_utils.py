"""`ModelExportUtils` and constants for scripts that call `package_model`."""

from __future__ import annotations

import json
import logging
from argparse import Namespace

from model_archiver.model_archiver_config import ModelArchiverConfig
from tsx_archiver.names import MANIFEST_PATH
from tsx_archiver.packing import plan_archive
from tsx_archiver.writing import SUFFIXES

MODEL_SERVER_VERSION = MODEL_ARCHIVE_VERSION = "1.0"
MAR_INF, _, MANIFEST_FILE_NAME = MANIFEST_PATH.partition("/")
archiving_options = SUFFIXES
model_handlers = {
    "base_handler": "anything",
    "text_classifier": "text",
    "image_classifier": "vision",
    "object_detector": "vision",
    "image_segmenter": "vision",
    "dali_image_classifier": "vision",
    "vllm_handler": "text",
    "trt_llm_handler": "text",
}

_log = logging.getLogger(__name__)


class ModelExportUtils:
    """TorchServe's class, with the only function that scripts call."""

    @staticmethod
    def generate_manifest_json(args: ModelArchiverConfig | Namespace) -> str:
        """Return the manifest of a model as JSON."""
        config = (
            args if isinstance(args, ModelArchiverConfig) else ModelArchiverConfig.from_args(args)
        )
        return json.dumps(plan_archive(config.spec(), warn=_log.warning).manifest, indent=2)
