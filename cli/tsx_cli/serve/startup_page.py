"""The start-up page of `tsx serve`: the models, the addresses, a request to try, how to stop."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tsx_archiver import describe_model_file
from tsx_cli.archive.model_file import kind_in_words
from tsx_cli.common.inputs import guess_content_type, samples_in
from tsx_cli.common.output import one_line, print_table
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.server.server import RunningServer
from tsx_runtime.targets.server.tls import is_trusted_as
from tsx_runtime.version import __version__

WHAT = {
    "inference": "predictions",
    "management": "models",
    "metrics": "metrics",
    "grpc_inference": "gRPC predictions",
    "grpc_management": "gRPC models",
}


def show(started: RunningServer, settings: Settings, console: Console) -> None:
    """A page on a terminal; plain lines elsewhere, where a program may look for the addresses."""
    versions = started.versions
    if not console.is_terminal:
        for version in versions:
            print(
                f"serving {version.name} {version.version}: {kind(version)}, {devices(version)}, {_count(len(version.workers), 'worker')}"
            )
        for workflow in started.workflows:
            print(f"serving workflow {workflow.name}: {one_line(', '.join(workflow.nodes))}")
        for role, address in started.addresses.items():
            print(f"{WHAT[role]} at {address}")
        if page := web_page(started):
            print(f"page at {page}")
        print("\n".join(f"try: {one_line(line)}" for line in examples(started, settings)), flush=True)
        return
    served = [_count(len(versions), "model"), *([_count(len(started.workflows), "workflow")] if started.workflows else [])]
    console.print(Text.assemble("\n", (f"tsx {__version__}", "bold"), f" serves {' and '.join(served)}"))
    if versions:
        rows = [(each.name, each.version, kind(each), devices(each), len(each.workers)) for each in versions]
        print_table(["model", "version", "kind", "device", "workers"], rows)
    if started.workflows:
        print_table(["workflow", "nodes"], [(each.name, ", ".join(each.nodes)) for each in started.workflows])
    for role, address in started.addresses.items():
        console.print(Text(f"  {WHAT[role]:<16} {address}"))
    if page := web_page(started):
        console.print(Text(f"  {'page':<16} {page}"))
    console.print()
    for line in examples(started, settings):
        console.print(Text.assemble("  ", ("try", "bold"), f"   {one_line(line)}"), soft_wrap=True)
    console.print(Text.assemble("  ", ("stop", "bold"), "  Ctrl-C\n"))


def web_page(started: RunningServer) -> str | None:
    """Where a browser finds it; none opens a unix socket."""
    address = started.addresses["management"]
    return None if parse_address(address).scheme == "unix" else f"{address}/ui/"


def examples(started: RunningServer, settings: Settings) -> list[str]:
    """Lines for a shell. The last works as it stands: a sample of an archive where one has any, else a question to the server."""
    for version in started.versions:
        if samples := samples_in(version.archive.directory):
            return [_prediction(_curl(started.addresses["inference"], f"/predictions/{version.name}", settings), samples[0], settings)]
    inference = started.addresses["inference"]
    lines = [f"tsx predict {version.name} FILE --url {inference}" for version in started.versions[:1]]
    lines += [shlex.join([*_curl(inference, f"/wfpredict/{workflow.name}", settings), "-T", "FILE"]) for workflow in started.workflows[:1]]
    return [*lines, shlex.join(_curl(started.addresses["inference"], "/ping", settings))]


def kind(version: ModelVersion) -> str:
    weights = version.archive.manifest.serialized_file
    return kind_in_words(describe_model_file(version.archive.directory / weights)) if weights else "code only"


def devices(version: ModelVersion) -> str:
    found = sorted({worker.device for worker in version.workers if worker.device})
    return ", ".join(found) or ("still loading" if version.workers else "none")


def _curl(address: str, path: str, settings: Settings) -> list[str]:
    """The command that asks for a path of the server, and accepts its certificate."""
    parsed = parse_address(address)
    if parsed.scheme == "unix":
        return ["curl", "--unix-socket", parsed.path, f"http://localhost{path}"]
    if parsed.scheme == "https":
        trust = ["--cacert", str(settings.certificate_file)] if is_trusted_as(parsed.host, settings) else ["-k"]
        return ["curl", *trust, f"{address}{path}"]
    return ["curl", f"{address}{path}"]


def _prediction(curl: list[str], sample: Path, settings: Settings) -> str:
    words = [*curl, "-T", str(sample), "-H", f"Content-Type: {guess_content_type(sample.name, sample.read_bytes())}"]
    token = settings.inference_token is not None and not settings.disable_token_authorization
    return shlex.join(words) + (' -H "Authorization: Bearer $TSX_INFERENCE_TOKEN"' if token else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
