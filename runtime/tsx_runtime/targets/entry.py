"""The entry point of images, `python -m tsx_runtime.targets.entry`.

It detects the platform and serves the model of the image. `TSX_TARGET` names the platform:
sagemaker, lambda or container. If it is not set, the platform is

- lambda, if the address of Lambda's Runtime API is set;
- sagemaker, if a variable of SageMaker is set;
- container otherwise.

Any argument but `serve` is a command, as in `docker run IMAGE bash`, and replaces this process.

A platform's modules are imported only if it is selected, because on Lambda every import makes the
cold start longer.
"""

import sys

if __name__ == "__main__":  # This comes before every other import, even that of __future__.
    from tsx_runtime.shared.safe_path import remove_working_directory

    remove_working_directory()

import os
import traceback
from collections.abc import Mapping, Sequence

from tsx_archiver import ArchiveError
from tsx_runtime.errors import LoadFailed, TsxError
from tsx_runtime.targets.image.environment import RUNTIME_API, TARGET, read_choice

TARGETS = ("container", "sagemaker", "lambda")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Serve, or run a command.

    Returns:
        The exit code: 0 after a requested stop, 1 after an error, 127 if a command cannot start.
    """
    command = list(argv) or ["serve"]
    if command[0] != "serve":
        return _replace_process(command)
    try:
        # TSX_TARGET is removed, because it is not a setting of the server.
        return _serve(
            choose_target(env), {name: value for name, value in env.items() if name != TARGET}
        )
    except (TsxError, ArchiveError, OSError) as error:
        # The text is one write, so that no line of the log can come between its lines.
        sys.stderr.write(f"Error: {getattr(error, 'message', None) or error}\n")
        if isinstance(error, LoadFailed) and error.traceback:
            # The traceback is written here, because on these platforms users see only the log.
            sys.stderr.write(f"{error.traceback}\n")
        return 1
    except Exception:  # the boundary of the process
        traceback.print_exc()
        return 1


def _replace_process(command: list[str]) -> int:
    """Replace this process by a command; return only if the command cannot be started."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"Error: '{command[0]}' cannot be started: {error.strerror}. 'serve', or no command,"
            " starts the server.",
            file=sys.stderr,
        )
        return 127  # the exit code of shells for this error


def choose_target(env: Mapping[str, str]) -> str:
    """Return the platform: TSX_TARGET, or the one that the other variables show.

    Raises:
        SettingError: TSX_TARGET is not a platform.
    """
    if target := read_choice(env, TARGET, TARGETS):
        return target
    if env.get(RUNTIME_API):
        return "lambda"
    return "sagemaker" if any(name.startswith("SAGEMAKER_") for name in env) else "container"


def _serve(target: str, env: Mapping[str, str]) -> int:
    if target == "sagemaker":
        # The imports are deferred, as the module's docstring explains.
        from tsx_runtime.targets.sagemaker.endpoint import serve_endpoint

        serve_endpoint(env)
        return 0
    if target == "lambda":
        from tsx_runtime.targets.aws_lambda.run import run

        return run(os.environ)
    from tsx_runtime.targets.image.serve import serve_image

    serve_image(env)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
