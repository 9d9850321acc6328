"""`ModelArchiverConfig`, the flags of torch-model-archiver."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import dataclass, field, fields, replace

from tsx_archiver.packing import ArchiveSpec
from tsx_archiver.torch_model_archiver import spec_of
from tsx_archiver.writing import Format


@dataclass
class ModelArchiverConfig:
    """The flags of torch-model-archiver, with the same names and defaults."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = "python"
    export_path: str = field(default_factory=os.getcwd)
    archive_format: Format = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> ModelArchiverConfig:
        """Take the fields from parsed arguments; missing fields keep their defaults."""
        values = {
            item.name: getattr(args, item.name) for item in fields(cls) if hasattr(args, item.name)
        }
        return cls(**values)

    def spec(self, manifest: str | None = None) -> ArchiveSpec:
        """Return the specification of the archive.

        Args:
            manifest: JSON whose additional keys are added to the manifest.
        """
        return replace(spec_of(self), extra_manifest=json.loads(manifest) if manifest else {})
