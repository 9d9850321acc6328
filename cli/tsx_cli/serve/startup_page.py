"""The output of `tsx serve` after its start: models, addresses, a request to try, how to stop."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from tsx_archiver import describe_model_file
from tsx_cli.archive.model_file import kind_of_directory, kind_text
from tsx_cli.common.curl import curl
from tsx_cli.common.output import human, one_line, print_table
from tsx_runtime.api.management.samples import SampleInput, has_example, sample_of
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.feature import LoadedItem
from tsx_runtime.http.tls import is_trusted_as
from tsx_runtime.server.server import RunningServer
from tsx_runtime.server.startup import LoadStatus
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.example_requests import MAX_QUOTED_CHARS
from tsx_runtime.version import __version__

ROLE_NAMES = {
    "inference": "predictions",
    "management": "models",
    "metrics": "metrics",
    "grpc_inference": "gRPC predictions",
    "grpc_management": "gRPC models",
}


def show(started: RunningServer, settings: Settings, console: Console) -> None:
    """Print a page on a terminal, or else plain lines in which a program finds the addresses."""
    versions = started.versions
    if not console.is_terminal:
        for version in versions:
            print(
                f"serving {version.name} {version.version}: {kind(version)}, {devices(version)},"
                f" {_count(len(version.workers), 'worker')}"
            )
        for item in started.items:
            details = one_line(", ".join(item.details.values()))
            print(f"serving {item.kind} {item.name}: {details}")
        for role, address in started.addresses.items():
            print(f"{ROLE_NAMES.get(role, role)} at {address}")
        if page := web_page(started):
            print(f"page at {page}")
        print(
            "\n".join(f"try: {one_line(line)}" for line in examples(started, settings)), flush=True
        )
        return
    items_by_kind: dict[str, list[LoadedItem]] = {}
    for item in started.items:
        items_by_kind.setdefault(item.kind, []).append(item)
    count_texts = [
        _count(len(versions), "model"),
        *(_count(len(items), noun) for noun, items in items_by_kind.items()),
    ]
    console.print(
        Text.assemble(
            "\n", (f"tsx {__version__}", "bold"), f" serves {' and '.join(count_texts)}\n"
        )
    )
    if page := web_page(started):
        console.print(Text.assemble(f"  {'page':<16} ", (page, "bold")), soft_wrap=True)
    for role, address in started.addresses.items():
        console.print(Text(f"  {ROLE_NAMES.get(role, role):<16} {address}"), soft_wrap=True)
    console.print("\n  in another terminal:")
    lines = examples(started, settings)
    for line in lines[:1] if "--sample" in lines[0] else lines:
        console.print(Text.assemble("    ", (one_line(line), "bold")), soft_wrap=True)
    console.print()
    if versions:
        rows = [
            (version.name, version.version, kind(version), devices(version), len(version.workers))
            for version in versions
        ]
        print_table(["model", "version", "kind", "device", "workers"], rows)
    for noun, items in items_by_kind.items():
        print_table(
            [noun, *items[0].details], [(item.name, *item.details.values()) for item in items]
        )
    console.print("\n  Ctrl-C stops the server\n")


def overwrite(text: str, console: Console) -> None:
    """Print a line that the next output overwrites; it is printed on a terminal only."""
    if console.is_terminal:
        print(f"\x1b[K{text[: console.width - 1]}\r", end="", flush=True)


def progress_line(source_text: str, status: LoadStatus) -> str:
    """Describe the progress of loading, in bytes and seconds."""
    steps = [
        f"{one_line(name)}: {step} {human(done)} of {human(total)}"
        for name, step, done, total in status.opening
    ]
    steps += [
        f"{name}: worker {worker} {f'has {human(memory)} in memory' if memory else 'is starting'}"
        for name, worker, memory in status.loading
    ]
    return f"loading {'; '.join(steps) or source_text}, {status.seconds:.0f} s"


def web_page(started: RunningServer) -> str | None:
    """Return the URL of the web page, or None if the address is a Unix socket."""
    address = started.addresses["management"]
    return None if parse_address(address).scheme == "unix" else f"{address}/ui/"


def examples(started: RunningServer, settings: Settings) -> list[str]:
    """Return shell commands that work as printed; the last one uses curl.

    If the input is unknown, FILE is a placeholder.
    """
    inference = started.addresses["inference"]
    address, url = (
        parse_address(inference),
        (
            []
            if inference == Settings.model_fields["inference_address"].default
            else ["--url", inference]
        ),
    )
    trust = (
        f"TSX_CERTIFICATE_FILE={shlex.quote(str(settings.certificate_file))} "
        if address.scheme == "https"
        else ""
    )
    candidates = ((version, sample_of(version)) for version in started.versions)
    version_and_sample = next(
        (
            (version, sample)
            for version, sample in candidates
            if sample is not None or has_example(version)
        ),
        None,
    )
    lines = []
    if version_and_sample is not None:
        if not trust or is_trusted_as(address.host, settings):
            lines.append(
                trust + shlex.join(["tsx", "predict", version_and_sample[0].name, "--sample", *url])
            )
        if version_and_sample[1] is not None:
            return [
                *lines,
                request_line(
                    inference, version_and_sample[0].name, version_and_sample[1], settings
                ),
            ]
    elif started.versions:
        lines.append(shlex.join(["tsx", "predict", started.versions[0].name, "FILE", *url]))
    lines += [curl(inference, item.path, settings, "-T", "FILE") for item in started.items[:1]]
    return [*lines, curl(inference, "/ping", settings)]


def request_line(address: str, name: str, sample: SampleInput, settings: Settings) -> str:
    """Return a shell command that sends a sample to its model.

    A short text is part of the command; any other sample is downloaded from the server.
    """
    text = sample.body.decode(errors="surrogateescape").strip()
    # curl treats an argument that begins with @ as the name of a file.
    is_short = len(text) <= MAX_QUOTED_CHARS and text.isprintable() and text[:1] != "@"
    curl_arguments = (
        "-H",
        f"Content-Type: {sample.content_type}",
        *(("-d", text) if is_short else ("--data-binary", "@-")),
    )
    line = curl(address, f"/predictions/{name}", settings, *curl_arguments, with_token=True)
    return (
        line
        if is_short
        else (
            f"{curl(address, f'/v2/models/{name}/sample', settings, '-s', with_token=True)} |"
            f" {line}"
        )
    )


def kind(version: ModelVersion) -> str:
    weights = version.archive.manifest.serialized_file
    if weights is None:
        return kind_of_directory(version.archive.manifest)
    text = kind_text(describe_model_file(version.archive.directory / weights))
    return ", as ".join([text, *list(version.forms)[:1]])


def devices(version: ModelVersion) -> str:
    names = sorted({worker.device for worker in version.workers if worker.device})
    return ", ".join(names) or ("still loading" if version.workers else "none")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
