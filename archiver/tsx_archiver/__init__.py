"""The .mar archive: its manifest, writing, opening and verification.

This package imports neither torch nor another package of tsx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsx_archiver.errors import ArchiveError, ArchiveNotFound, CacheError, InvalidConfig
    from tsx_archiver.inspecting import (
        Finding,
        Inspection,
        inspect_archive,
        read_member,
        verify_archive,
    )
    from tsx_archiver.limits import Limits
    from tsx_archiver.metadata.manifest import Manifest, handler_fault, split_handler
    from tsx_archiver.metadata.modelconfig import (
        ModelConfig,
        TorchRun,
        WarmUp,
        load_model_config,
        parse_model_config,
    )
    from tsx_archiver.metadata.modelfile import ModelFile, describe_model_file
    from tsx_archiver.metadata.safejson import load_json
    from tsx_archiver.metadata.safeyaml import load_yaml_file
    from tsx_archiver.names import (
        ARCHIVE_SUFFIXES,
        DEFAULT_VERSION,
        default_model_name,
        is_inside,
        is_model_name,
        shown,
    )
    from tsx_archiver.opening import OpenArchive, open_archive, refuse_foreign_link
    from tsx_archiver.packing import BUILTIN_HANDLERS, ArchiveSpec, plan_archive
    from tsx_archiver.rewriting import rewrite_archive
    from tsx_archiver.storage.cache import default_cache
    from tsx_archiver.writing import Format, write_archive

__all__ = [
    "ARCHIVE_SUFFIXES",
    "BUILTIN_HANDLERS",
    "DEFAULT_VERSION",
    "ArchiveError",
    "ArchiveNotFound",
    "ArchiveSpec",
    "CacheError",
    "Finding",
    "Format",
    "Inspection",
    "InvalidConfig",
    "Limits",
    "Manifest",
    "ModelConfig",
    "ModelFile",
    "OpenArchive",
    "TorchRun",
    "WarmUp",
    "default_cache",
    "default_model_name",
    "describe_model_file",
    "handler_fault",
    "inspect_archive",
    "is_inside",
    "is_model_name",
    "load_json",
    "load_model_config",
    "load_yaml_file",
    "open_archive",
    "parse_model_config",
    "plan_archive",
    "read_member",
    "refuse_foreign_link",
    "rewrite_archive",
    "shown",
    "split_handler",
    "verify_archive",
    "write_archive",
]

# The modules of these names. A module is imported when one of its names is first used, because
# loading all of them would slow down the help of every command.
_MODULES = (
    "errors",
    "inspecting",
    "limits",
    "metadata.manifest",
    "metadata.modelfile",
    "metadata.safejson",
    "metadata.safeyaml",
    "names",
    "opening",
    "packing",
    "rewriting",
    "storage.cache",
    "writing",
    "metadata.modelconfig",  # searched last, because it imports pydantic, which is slow
)


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        names = vars(import_module(f"{__name__}.{module}"))
        if name in names:
            globals()[name] = names[name]
            return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
