"""What an image starts, `python -m tsx_runtime.targets.entry`: it finds out where it runs, and serves the model that is there.

    TSX_TARGET    sagemaker or container; if not set: sagemaker where one of SageMaker's variables is there, else container

Any other word than `serve` is a command of the user's, as `docker run IMAGE bash` has it, and takes this process's place.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_archiver import ARCHIVE_SUFFIXES, ArchiveError
from tsx_runtime.errors import LoadFailed, SettingError, TsxError
from tsx_runtime.nearest import suggestion
from tsx_runtime.output import keep_going
from tsx_runtime.setting_sources import find_config, load_settings
from tsx_runtime.targets.logs import set_up_logging
from tsx_runtime.targets.sagemaker_env import read_environment
from tsx_runtime.targets.server import Started, serve
from tsx_runtime.targets.start import StartModel, models_from_settings, start_model

TARGET = "TSX_TARGET"
TARGETS = ("container", "sagemaker")
BASE = "SAGEMAKER_BASE_DIR"
MANIFEST = Path("MAR-INF", "MANIFEST.json")

logger = logging.getLogger("tsx.server")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Returns the exit code: 0 after a stop that was asked for, 1 where the model or a setting is wrong."""
    words = list(argv) or ["serve"]
    if words[0] != "serve":
        os.execvp(words[0], words)
    try:
        _serve(env)
    except (TsxError, ArchiveError, OSError) as error:
        print(f"Error: {getattr(error, 'message', None) or error}", file=sys.stderr)
        if isinstance(error, LoadFailed) and error.traceback:
            print(error.traceback, file=sys.stderr)  # on these platforms the log is all that anybody sees
        return 1
    except Exception:  # the process's boundary
        traceback.print_exc()
        return 1
    return 0


def chosen(env: Mapping[str, str]) -> str:
    """Raises SettingError."""
    named = env.get(TARGET, "").strip().lower()
    if named and named not in TARGETS:
        raise SettingError(f"{TARGET} is '{named}'{suggestion(named, TARGETS)} There are {', '.join(TARGETS)}")
    if named:
        return named
    return "sagemaker" if any(name.startswith("SAGEMAKER_") for name in env) else "container"


def _serve(env: Mapping[str, str]) -> None:
    order: dict[str, Any] = {}
    notices: list[str] = []
    given = dict(env)
    given.pop(TARGET, None)  # no setting of a server
    if chosen(env) == "sagemaker":
        said = read_environment(env)
        given, order, notices = {**said.variables, **given}, said.order, said.notices
    settings, _ = load_settings({}, given, find_config(None, env, Path.cwd()), notices.append)
    keep_going()
    set_up_logging(settings)
    for notice in notices:
        logger.warning("%s", notice)
    models = models_from_settings(settings) or [found_model(Path(env.get(BASE) or "/opt/ml") / "model")]
    serve(settings, [replace(model, order=replace(model.order, **order)) for model in models], _tell)


def found_model(directory: Path) -> StartModel:
    """The one model of a directory: an archive, or what was in one. Raises SettingError, which says what is there instead."""
    if (directory / MANIFEST).is_file():
        return start_model(directory)
    there = sorted(path for path in directory.iterdir() if not path.name.startswith(".")) if directory.is_dir() else []
    archives = [path for path in there if path.name.endswith(ARCHIVE_SUFFIXES)]
    if len(archives) == 1:
        return start_model(archives[0])
    what = f"{len(archives)} archives: {_listed(archives)}" if archives else f"no archive, but {_listed(there)}" if there else "nothing"
    raise SettingError(f"{directory} holds {what}; it must hold one .mar, or what is in one (tsx archive unpack)")


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:5])
    return f"{names} and {len(paths) - 5} more" if len(paths) > 5 else names


def _tell(started: Started) -> None:
    served = ", ".join(f"{version.name}/{version.version}" for version in started.versions)
    logger.info("serving %s at %s", served, started.addresses["inference"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
