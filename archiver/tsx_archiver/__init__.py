"""The .mar archive: manifest, write, open, verify. Imports neither torch nor another room."""

from .cache import default_cache
from .errors import (
    ArchiveError,
    ArchiveNotFound,
    ArchiveTooLarge,
    CacheError,
    CannotOpen,
    CannotPack,
    CorruptMember,
    DuplicateInput,
    DuplicateMember,
    EmptyArchive,
    EncryptedMember,
    ForeignFile,
    InputMissing,
    InvalidConfig,
    InvalidManifest,
    InvalidModelName,
    LinkMember,
    OutputExists,
    SpecialMember,
    TooManyMembers,
    TruncatedArchive,
    UnsafeArchive,
    UnsafePath,
    UnsupportedCompression,
    WrongChecksum,
)
from .inspecting import Finding, Inspection, MemberInfo, inspect_archive, read_member, verify_archive
from .limits import Limits
from .manifest import Manifest, split_handler
from .modelconfig import ModelConfig, Problem, TorchRun, WarmUp, load_model_config, parse_model_config
from .modelfile import ModelFile, describe_model_file
from .names import ARCHIVE_SUFFIXES, DEFAULT_VERSION, default_model_name, is_model_name
from .opening import OpenArchive, open_archive
from .packing import BUILTIN_HANDLERS, ArchiveSpec, plan_archive
from .rewriting import rewrite_archive
from .safejson import load_json
from .safeyaml import load_yaml_file
from .writing import FORMATS, Format, write_archive

__all__ = [
    "ARCHIVE_SUFFIXES",
    "BUILTIN_HANDLERS",
    "DEFAULT_VERSION",
    "FORMATS",
    "ArchiveError",
    "ArchiveNotFound",
    "ArchiveSpec",
    "ArchiveTooLarge",
    "CacheError",
    "CannotOpen",
    "CannotPack",
    "CorruptMember",
    "DuplicateInput",
    "DuplicateMember",
    "EmptyArchive",
    "EncryptedMember",
    "Finding",
    "ForeignFile",
    "Format",
    "InputMissing",
    "Inspection",
    "InvalidConfig",
    "InvalidManifest",
    "InvalidModelName",
    "Limits",
    "LinkMember",
    "Manifest",
    "MemberInfo",
    "ModelConfig",
    "ModelFile",
    "OpenArchive",
    "OutputExists",
    "Problem",
    "SpecialMember",
    "TooManyMembers",
    "TorchRun",
    "TruncatedArchive",
    "UnsafeArchive",
    "UnsafePath",
    "UnsupportedCompression",
    "WarmUp",
    "WrongChecksum",
    "default_cache",
    "default_model_name",
    "describe_model_file",
    "inspect_archive",
    "is_model_name",
    "load_json",
    "load_model_config",
    "load_yaml_file",
    "open_archive",
    "parse_model_config",
    "plan_archive",
    "read_member",
    "rewrite_archive",
    "split_handler",
    "verify_archive",
    "write_archive",
]
