"""The `torchserve` command: TorchServe's own options, as far as this version carries them, on tsx's server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tsx_cli.failure import INTERRUPTED, UsageError, report
from tsx_cli.inputs import split_list
from tsx_runtime.version import __version__

READY = "Model server started."  # what TorchServe's scripts wait for
NOT_YET = ("stop", "ts_config", "workflow_store", "log_config", "cpp_log_config", "plugins_path")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(sys.argv[1:] if argv is None else argv)
    if arguments.version:
        print(f"TorchServe Version is {__version__} (tsx)")
        return 0
    try:
        check(arguments)
        start(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the process's boundary
        return report(error, debug=False, file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="torchserve", description="TorchServe's command, on tsx. `tsx serve` does the same and more.")
    made.add_argument("-v", "--version", action="store_true", help="print the version")
    action = made.add_mutually_exclusive_group()
    action.add_argument("--start", action="store_true", help="start the server")
    action.add_argument("--stop", action="store_true", help="not in this version")
    made.add_argument("--foreground", action="store_true", help="stay in this terminal; needed in this version")
    made.add_argument("--model-store", metavar="DIRECTORY", type=Path, help="where the archives are")
    made.add_argument("--models", metavar="[NAME=]FILE", nargs="+", help="what to load: files of the model store, or all")
    made.add_argument("--ncs", "--no-config-snapshots", action="store_true", dest="ncs", help="keep no snapshots; this version keeps none")
    made.add_argument("--dt", "--disable-token-auth", action="store_true", dest="disable_token_auth", help="serve without tokens")
    made.add_argument("--enable-model-api", action="store_true", help="let requests register and remove models")
    for name in ("--ts-config", "--workflow-store", "--log-config", "--cpp-log-config"):
        made.add_argument(name, metavar="PATH", help="not in this version")
    made.add_argument("--ppath", "--plugins-path", metavar="PATH", dest="plugins_path", help="not in this version")
    return made


def check(arguments: argparse.Namespace) -> None:
    """Refuse what this version would have to ignore. Where TorchServe is the stricter one, its user has to say so."""
    for name in NOT_YET:
        if getattr(arguments, name):
            raise UsageError(f"this version of tsx does not carry --{name.replace('_', '-')} yet; `tsx serve --help` shows what it has")
    if not arguments.start:
        raise UsageError("say what to do: torchserve --start --foreground --model-store DIRECTORY --models FILE ...")
    if not arguments.foreground:
        raise UsageError("this version of tsx does not start in the background yet; add --foreground")
    if arguments.model_store is None:
        raise UsageError("Missing mandatory parameter --model-store")
    if not arguments.enable_model_api:
        raise UsageError("this version of tsx cannot switch the model API off yet; add --enable-model-api if requests may register models")


def start(arguments: argparse.Namespace) -> None:
    # Here, so that --version and a wrong option answer at once.
    from tsx_cli.options import read_settings
    from tsx_cli.serve import run_server
    from tsx_runtime.targets.server import models_from_settings

    given: dict[str, Any] = {"model_store": arguments.model_store, "load_models": split_list(arguments.models) or None}
    settings, _ = read_settings(None, None, **given, disable_token_authorization=arguments.disable_token_auth or None)
    if not settings.disable_token_authorization and not (settings.inference_token and settings.management_token):
        raise UsageError(
            "TorchServe asks for tokens, and this version of tsx does not make them up yet: "
            "set TSX_INFERENCE_TOKEN and TSX_MANAGEMENT_TOKEN, or add --disable-token-auth"
        )
    run_server(settings, models_from_settings(settings), ready_line=READY)
