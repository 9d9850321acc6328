"""`ModelExportUtils.generate_manifest_json`, the one helper that scripts use beside `package_model`."""

from __future__ import annotations

import json
import logging
from argparse import Namespace

from model_archiver.model_archiver_config import ModelArchiverConfig
from tsx_archiver.packing import plan_archive

_log = logging.getLogger(__name__)


class ModelExportUtils:
    @staticmethod
    def generate_manifest_json(args: ModelArchiverConfig | Namespace) -> str:
        config = args if isinstance(args, ModelArchiverConfig) else ModelArchiverConfig.from_args(args)
        return json.dumps(plan_archive(config.spec(), warn=_log.warning).manifest, indent=2)
