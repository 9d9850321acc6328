"""The entry point of images, `python -m tsx_runtime.targets.entry`: detects the platform and serves
the model of the image.

    TSX_TARGET    sagemaker, lambda or container; if not set: lambda where Lambda names the address of its Runtime API, sagemaker
                  where one of SageMaker's variables is there, else container

Any other word than `serve` is a command, as in `docker run IMAGE bash`, and replaces this process.

Modules of a platform are imported once it is known: on Lambda every import adds to the cold start.
"""

import sys

if __name__ == "__main__":  # not even __future__ may be imported before this
    from tsx_runtime.shared.safe_path import remove_working_directory

    remove_working_directory()

import os
import traceback
from collections.abc import Mapping, Sequence

from tsx_archiver import ArchiveError
from tsx_runtime.errors import LoadFailed, TsxError
from tsx_runtime.targets.image.environment import RUNTIME_API, TARGET, one_of

TARGETS = ("container", "sagemaker", "lambda")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Returns the exit code: 0 after a requested stop, 1 where the model or a setting is wrong."""
    words = list(argv) or ["serve"]
    if words[0] != "serve":
        return _become(words)
    try:
        return _serve(
            chosen(env), {name: value for name, value in env.items() if name != TARGET}
        )  # no setting of a server
    except (TsxError, ArchiveError, OSError) as error:
        print(f"Error: {getattr(error, 'message', None) or error}", file=sys.stderr)
        if isinstance(error, LoadFailed) and error.traceback:
            print(error.traceback, file=sys.stderr)  # on these platforms the log is the only output
        return 1
    except Exception:  # the process's boundary
        traceback.print_exc()
        return 1


def _become(words: list[str]) -> int:
    """Returns only where the program cannot be started."""
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(
            f"Error: '{words[0]}' cannot be started: {error.strerror}. 'serve', or no command,"
            " starts the server.",
            file=sys.stderr,
        )
        return 127  # as a shell has it


def chosen(env: Mapping[str, str]) -> str:
    """Raises SettingError."""
    if named := one_of(env, TARGET, TARGETS):
        return named
    if env.get(RUNTIME_API):
        return "lambda"
    return "sagemaker" if any(name.startswith("SAGEMAKER_") for name in env) else "container"


def _serve(target: str, env: Mapping[str, str]) -> int:
    if target == "sagemaker":
        from tsx_runtime.targets.sagemaker.endpoint import serve_endpoint  # here, as below

        serve_endpoint(env)
        return 0
    if target == "lambda":
        from tsx_runtime.targets.aws_lambda.run import run  # here, as below

        return run(os.environ)
    # Here, because it brings a server along.
    from tsx_runtime.targets.image.serve import serve_image

    serve_image(env)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
