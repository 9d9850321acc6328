"""The `torchserve` command: TorchServe's options and messages for tsx's server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tsx_cli.common.failure import FAILED, INTERRUPTED, CliError, report
from tsx_cli.common.inputs import split_list
from tsx_runtime.version import TORCHSERVE_VERSION, __version__

if TYPE_CHECKING:
    import psutil

    from tsx_runtime.server.startup import StartModel
    from tsx_runtime.settings.schema import Settings

READY = "Model server started."  # Scripts wait for this line.
RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
NOT_RUNNING = "TorchServe is not currently running."
IGNORED_OPTIONS = ("cpp_log_config", "plugins_path")


def main(argv: Sequence[str] | None = None) -> int:
    from tsx_cli.serve.background import MARK

    tokens = list(sys.argv[1:] if argv is None else argv)
    is_server = tokens[:1] == [MARK]
    arguments = argument_parser().parse_args(tokens[1:] if is_server else tokens)
    try:
        return serve(arguments) if is_server else run_action(arguments, tokens)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the process's boundary
        return report(error, debug=False, file=sys.stderr)


def argument_parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="torchserve",
        description="TorchServe's command, on tsx. `tsx serve` does the same and more.",
    )
    action = command.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument(
        "--start", action="store_true", help="start the server; this is the default"
    )
    action.add_argument(
        "--stop",
        action="store_true",
        help="stop the server after it has answered accepted requests",
    )
    command.add_argument(
        "--ts-config",
        metavar="FILE",
        type=Path,
        help="config.properties, a snapshot, or a tsx.toml",
    )
    command.add_argument(
        "--model-store", metavar="DIRECTORY", type=Path, help="directory of the archives"
    )
    command.add_argument(
        "--workflow-store",
        metavar="DIRECTORY",
        type=Path,
        help="directory of the workflow archives, if different",
    )
    command.add_argument(
        "--models",
        metavar="[NAME=]FILE",
        nargs="+",
        help="models to load: files of the model store, or all",
    )
    command.add_argument("--foreground", action="store_true", help="run in the foreground")
    command.add_argument(
        "--no-config-snapshots",
        "--ncs",
        action="store_true",
        dest="ncs",
        help="do not write snapshots or start from one",
    )
    command.add_argument(
        "--disable-token-auth", "--dt", action="store_true", help="do not require tokens"
    )
    command.add_argument(
        "--enable-model-api",
        action="store_true",
        help="allow requests to register and remove models",
    )
    command.add_argument(
        "--log-config",
        metavar="FILE",
        type=Path,
        help="a log4j2.xml, for its levels and sizes, or a file for Python's logging.config",
    )
    command.add_argument(
        "--cpp-log-config",
        metavar="FILE",
        type=Path,
        help="accepted and ignored: there is no C++ backend",
    )
    command.add_argument(
        "--plugins-path",
        "--ppath",
        metavar="PATH",
        type=Path,
        help="accepted and ignored: Java plugins cannot be loaded",
    )
    # A file descriptor by which the server notifies the process that started it.
    command.add_argument("--tell", type=int, help=argparse.SUPPRESS)
    return command


def run_action(arguments: argparse.Namespace, tokens: Sequence[str]) -> int:
    """Perform the action of the options; the server itself runs in another process.

    That process is a child, or replaces this one.
    """
    if arguments.version:
        print(f"TorchServe Version is {TORCHSERVE_VERSION} (tsx {__version__})")
        return 0
    temporary = os.environ.get("TEMP")
    # tempfile would fall back to another directory, where the pid file may be another server's.
    if temporary and not Path(temporary).is_dir():
        print(
            NOT_RUNNING
            if arguments.stop
            else f"Invalid temp directory: {temporary}, please check TEMP environment variable."
        )
        return 0 if arguments.stop else FAILED
    if arguments.stop:
        return stop()
    from tsx_cli.serve.background import become_server, start_in_background

    if find_server_or_clean() is not None:
        print(RUNNING)
        return FAILED
    if missing := missing_file(arguments, os.environ):
        print(missing)
        return FAILED
    # An invalid setting is reported by this process and its exit code.
    setup = configure(arguments, os.environ, warn=lambda notice: None)
    store = setup.settings.model_store
    if store is None or not store.is_dir():
        print(
            "Missing mandatory parameter --model-store"
            if store is None
            else f"--model-store directory not found: {store}"
        )
        return FAILED
    if missing := missing_archive(setup.settings):
        print(missing, file=sys.stderr)
        return FAILED
    return become_server(tokens) if arguments.foreground else start_in_background(tokens)


def stop() -> int:
    from tsx_cli.serve.background import end_server

    process = find_server_or_clean()
    if process is None:
        print(NOT_RUNNING)
        return 0
    if not end_server(process):
        raise CliError(
            f"TorchServe (process {process.pid}) is still answering accepted requests; `kill -9"
            f" {process.pid}` stops it at once"
        )
    print("TorchServe has stopped.")
    return 0


def find_server_or_clean() -> psutil.Process | None:
    """Return the running server, or remove the pid file of a server that has ended."""
    from tsx_cli.serve.background import find_server, pid_file, remove_orphan

    server = find_server(pid_file())
    if server is None and remove_orphan(pid_file()):
        print("Removing orphan pid file.", flush=True)
    return server


def missing_file(arguments: argparse.Namespace, env: Mapping[str, str]) -> str:
    """Return TorchServe's message about a missing file or directory of the command line."""
    config = env.get("TS_CONFIG_FILE") or arguments.ts_config
    if arguments.log_config and not arguments.log_config.exists():
        return f"--log-config file not found: {os.path.realpath(arguments.log_config)}"
    if config and not Path(config).exists():
        return f"--ts-config file not found: {config}"
    if arguments.workflow_store and not arguments.workflow_store.is_dir():
        return f"--workflow-store directory not found: {arguments.workflow_store}"
    return ""


def missing_archive(settings: Settings) -> str:
    """Return TorchServe's message about a missing archive of a snapshot."""
    for start in starts(settings) if settings.model_snapshot is not None else ():
        if start.path is not None and not start.path.exists():
            name, version = start.order.model_name, start.order.version
            problem = (
                f"InvalidSnapshotException: Model archive file for model :{name}, version"
                f" :{version} not found in model store"
            )
            return f"{problem}: {start.path}. Put it there, or start without the snapshot: --ncs"
    return ""


def serve(arguments: argparse.Namespace) -> int:
    """Run the server in this process."""
    from tsx_cli.serve.background import AlreadyRunning, claim_pid_file, pid_file, start_notifier
    from tsx_cli.serve.server import run_server
    from tsx_runtime.feature import start_items
    from tsx_runtime.features.torchserve.snapshots import Snapshots
    from tsx_runtime.server.server import ServeOptions

    warnings: list[str] = []
    setup = configure(arguments, os.environ, warn=warnings.append)
    for notice in [*warnings, *notices(arguments, setup)]:
        print(notice, file=sys.stderr)
    notify = start_notifier(arguments.tell)
    options = ServeOptions(answer_first=True, on_bound=notify, on_answering=notify)
    if not arguments.ncs:
        snapshots = Snapshots(
            snapshot_directory(os.environ), setup.base, setup.settings.model_store
        )
        options = replace(options, accepting=snapshots.written)
    try:
        with claim_pid_file(pid_file()):
            run_server(
                setup.settings,
                starts(setup.settings),
                start_items(setup.settings),
                ready_line=READY,
                options=options,
            )
    except AlreadyRunning:
        print(RUNNING)
        return FAILED
    except PermissionError as error:
        if error.filename != str(pid_file()):
            raise
        raise CliError(
            f"{error.filename} belongs to another user; set TMPDIR to your own directory, for"
            " --stop as well"
        ) from error
    return 0


class Setup(NamedTuple):
    """The settings of a server and their origin.

    Attributes:
        settings: The settings.
        base: The settings in the form of a config.properties; snapshots begin with them.
        file: The configuration file, or None.
        restored: Whether the file is the last snapshot.
    """

    settings: Settings
    base: dict[str, str]
    file: Path | None
    restored: bool


def configure(arguments: argparse.Namespace, env: Mapping[str, str], warn: Any) -> Setup:
    """Read the settings.

    Raises:
        SettingError: A setting is invalid.
        UsageError: An option is invalid.
    """
    from tsx_runtime.errors import SettingError
    from tsx_runtime.settings.schema import Settings
    from tsx_runtime.settings.sources import load_settings
    from tsx_runtime.settings.torchserve import load_properties, read_torchserve_config

    file, restored = config_file(arguments, env)
    snapshot_options = {
        "model_store": arguments.model_store,
        "workflow_store": arguments.workflow_store,
        "load_models": split_list(arguments.models),
    }
    options = {
        **snapshot_options,
        # Snapshots do not contain these options: open access must be requested at each start.
        "disable_token_authorization": arguments.disable_token_auth,
        "enable_model_api": arguments.enable_model_api,
        "log_config": arguments.log_config,
    }
    properties = file if file is not None and file.suffix != ".toml" else None
    keys = (
        []
        if properties is None
        else read_torchserve_config(properties, env, Settings.model_fields)[0]
    )
    # As in TorchServe, environment variables override the command line.
    overridden_names = {key.name for key in keys if key.origin.startswith("environment variable")}
    given_settings = {
        name: value for name, value in options.items() if value and name not in overridden_names
    }
    try:
        settings, origins = load_settings(given_settings, env, file, warn)
    except SettingError as error:
        if not restored:
            raise
        raise SettingError(
            f"{error.message}. This is the last snapshot; --ncs starts without it"
        ) from error
    settings = settings.model_copy(
        update={
            name: value for name, value in defaults(env).items() if origins.get(name) == "default"
        }
    )
    base = {} if properties is None else load_properties(properties)
    base |= {
        name: ",".join(value) if isinstance(value, list) else str(value)
        for name, value in snapshot_options.items()
        if value
    }
    # Paths become absolute, since a server may start from the snapshot in another directory.
    for name in ("model_store", "workflow_store"):
        if name in base and "$$" not in base[name]:
            base[name] = str(Path(base[name]).absolute())
    return Setup(settings, base, file, restored)


def defaults(env: Mapping[str, str]) -> dict[str, object]:
    """Return the defaults that scripts for TorchServe rely on."""
    logs = Path(env.get("LOG_LOCATION") or "logs")
    metrics = Path(env["METRICS_LOCATION"]) if env.get("METRICS_LOCATION") else logs
    security_defaults = {
        "generate_tokens": True,
        "enable_model_api": False,
        "pass_headers": ["authorization", "proxy-authorization", "cookie"],
    }
    return {
        **security_defaults,
        "handler_error_status": 503,
        "metrics_mode": "log",
        "access_log": True,
        "log_location": logs,
        "metrics_location": metrics,
    }


def config_file(arguments: argparse.Namespace, env: Mapping[str, str]) -> tuple[Path | None, bool]:
    """Return the configuration file, and whether it is the last server's snapshot."""
    from tsx_runtime.features.torchserve.snapshots import snapshot_to_start_from

    given_file = env.get("TS_CONFIG_FILE") or arguments.ts_config
    if given_file:
        return Path(given_file), False
    snapshot = None if arguments.ncs else snapshot_to_start_from(snapshot_directory(env))
    if snapshot is not None:
        return snapshot, True
    default_file = Path("config.properties")
    return (default_file if default_file.is_file() else None), False


def snapshot_directory(env: Mapping[str, str]) -> Path:
    return Path(env.get("LOG_LOCATION") or "logs", "config")


def notices(arguments: argparse.Namespace, setup: Setup) -> list[str]:
    from tsx_runtime.settings.torchserve import WITHOUT_EFFECT

    ignored_options = [name for name in IGNORED_OPTIONS if getattr(arguments, name)]
    lines = [
        f"--{name.replace('_', '-')} has no effect here: {WITHOUT_EFFECT[name]}"
        for name in ignored_options
    ]
    if setup.settings.pass_headers:
        names = ", ".join(setup.settings.pass_headers)
        lines.append(
            f"handlers see these headers of requests, as in TorchServe: {names}; an empty"
            " pass_headers keeps them from handlers"
        )
    if setup.restored:
        ignored_text = (
            "; --models is ignored (--ncs starts without the snapshot)" if arguments.models else ""
        )
        lines.append(f"starting from the last snapshot, {setup.file}{ignored_text}")
    return lines


def starts(settings: Settings) -> list[StartModel]:
    """Return the models to start.

    Without a GPU, a model without a given number of workers gets one per core, as in TorchServe.
    """
    from tsx_runtime.server.startup import models_from_settings
    from tsx_runtime.shared.cores import cpu_count

    return [
        replace(start, order=replace(start.order, default_workers=cpu_count()))
        for start in models_from_settings(settings)
    ]


if __name__ == "__main__":
    sys.exit(main())
