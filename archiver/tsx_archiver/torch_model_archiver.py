"""The `torch-model-archiver` command with TorchServe's flags, defaults and messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tsx_archiver.errors import ArchiveError
from tsx_archiver.limits import MIB
from tsx_archiver.packing import BUILTIN_HANDLERS, RUNTIMES, ArchiveSpec, plan_archive
from tsx_archiver.progress import progress_bar
from tsx_archiver.writing import FORMATS, Format, output_path, write_archive

_MIN_PROGRESS_BYTES = 256 * MIB


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="torch-model-archiver", description="Torch Model Archiver Tool"
    )
    parser.add_argument(
        "--model-name", required=True, help="name of the model; the archive is called <name>.mar"
    )
    parser.add_argument(
        "--serialized-file",
        help="weights (.pt, .pth, .safetensors), a TorchScript, .pt2 or .onnx file",
    )
    parser.add_argument(
        "--model-file",
        help="Python file with the model's class, or file.py:Class; needed for weights",
    )
    parser.add_argument(
        "--handler",
        required=True,
        help=f"Python file, file.py:function, or one of {', '.join(BUILTIN_HANDLERS)}",
    )
    parser.add_argument(
        "--extra-files",
        help="comma-separated files, patterns and directories; a directory's content is packed",
    )
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        default="python",
        help="language of the handler (default: python)",
    )
    parser.add_argument(
        "--export-path", default=".", help="directory for the archive (default: the current one)"
    )
    parser.add_argument(
        "--archive-format",
        choices=FORMATS,
        default="default",
        help=(
            "default: <name>.mar, compressed; zip-store: <name>.mar, uncompressed; tgz:"
            " <name>.tar.gz; no-archive: a directory <name>"
        ),
    )
    parser.add_argument(
        "-f", "--force", action="store_true", help="overwrite an archive of that name"
    )
    parser.add_argument("-v", "--version", required=True, help="version of the model")
    parser.add_argument(
        "-r", "--requirements-file", help="requirements.txt with what the model needs"
    )
    parser.add_argument("-c", "--config-file", help="YAML file with the model's configuration")
    return parser


def spec_of(flags: Any) -> ArchiveSpec:
    """Convert parsed flags, or any object with the same attributes; an empty file name is None."""
    return ArchiveSpec(
        model_name=flags.model_name,
        handler=flags.handler,
        version=flags.version,
        serialized_file=flags.serialized_file or None,
        model_file=flags.model_file or None,
        extra_files=flags.extra_files,
        runtime=str(flags.runtime or "python"),
        requirements_file=flags.requirements_file or None,
        config_file=flags.config_file or None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        _write_archive(
            spec_of(arguments),
            Path(arguments.export_path),
            arguments.archive_format,
            arguments.force,
        )
    except ArchiveError as error:
        print(f"ERROR - {error.message}", file=sys.stderr)
        return 1
    return 0


def _write_archive(
    spec: ArchiveSpec, export_path: Path, archive_format: Format, force: bool
) -> None:
    path = output_path(spec.model_name, export_path, archive_format)
    if force and path.exists():
        warn(f"Overwriting {path} ...")
    # This plan is only needed for its size. `write_archive` plans again, and prints the warnings.
    plan = plan_archive(spec, warn=lambda text: None)
    size = sum(member.size for member in plan.members)
    with progress_bar(
        f"Packing {path.name}", shown=size >= _MIN_PROGRESS_BYTES and sys.stderr.isatty()
    ) as progress:
        write_archive(
            spec, export_path, format=archive_format, force=force, progress=progress, warn=warn
        )


def warn(text: str) -> None:
    """Print a warning in TorchServe's form."""
    print(f"WARNING - {text}", file=sys.stderr)
