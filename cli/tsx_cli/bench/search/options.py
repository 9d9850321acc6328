"""The options of a run that decide what is measured, and the resulting configurations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tsx_archiver import ModelConfig, OpenArchive
from tsx_archiver.metadata.forms import REFERENCE, FormRecord
from tsx_archiver.metadata.slo import Slo
from tsx_archiver.quantities import parse_seconds, parse_share
from tsx_cli.bench.load.configuration import AS_IS, PRECISIONS, Configuration, parse_numbers
from tsx_cli.bench.load.inputs import choose_payloads, parse_shape
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import parse_slo
from tsx_cli.bench.search.accuracy import parse_tolerance
from tsx_cli.common.failure import UsageError
from tsx_runtime.settings.traffic_policy import Compare

DEVICES = ("cpu", "cuda")
SWITCHES = {"off": False, "on": True}
MAX_CONFIGURATIONS = 20_000


@dataclass(frozen=True)
class BenchOptions:
    """The options of a run as the journal stores them; texts are unparsed command-line values.

    Raises:
        UsageError: A value is invalid.
    """

    slo: str | None = None
    inputs: tuple[str, ...] = ()
    content_type: str | None = None
    input_kind: str | None = None  # kind of generated inputs
    input_shape: str | None = None
    prompt_tokens: str | None = None
    max_tokens: str | None = None
    batch_sizes: str = "1..32"
    workers: str | None = None  # default: up to the number of cores, or up to 4 on a GPU
    devices: str | None = None  # default: the archive's setting, or else a GPU if there is one
    precisions: str | None = None  # default: the archive's own
    compiled: str | None = None
    forms: str | None = None  # default: the reference and all forms of the archive
    threads: str | None = None  # default on a CPU: the runtime's choice, and smaller numbers
    mode: Literal["closed", "open"] = "closed"
    loads: tuple[float, ...] = ()  # connections or rates; empty: the search chooses them
    arrivals: Literal["constant", "poisson", "recorded"] = "poisson"
    duration: float | None = None  # seconds of a round; None: the remaining time decides
    rounds: int = 3
    width: float = 0.05
    exhaustive: bool = False
    tolerance: str | None = None
    same_top: int | None = None
    allow_different: bool = False
    seed: int = 0
    server_cores: str | None = None
    generator_cores: str | None = None
    ramp: bool = False

    def __post_init__(self) -> None:
        self.bounds, self.compare  # noqa: B018 - The properties raise for invalid values.
        for option, text in (
            ("--batch-sizes", self.batch_sizes),
            ("--workers", self.workers),
            ("--threads", self.threads),
        ):
            if text is not None:
                parse_numbers(text, option)
        parse_words(self.devices or "cpu", DEVICES, "--devices")
        parse_words(self.precisions or PRECISIONS[0], PRECISIONS, "--precision")
        parse_words(self.compiled or "off", tuple(SWITCHES), "--compile")

    @property
    def bounds(self) -> Slo | None:
        return None if self.slo is None else parse_slo(self.slo)

    @property
    def compare(self) -> Compare:
        """The method by which answers are compared."""
        return parse_tolerance(self.tolerance, self.same_top)


def parse_words(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the words of a list such as `cpu,cuda` in order, without duplicates.

    Raises:
        UsageError: A word is not known.
    """
    choices = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for choice in choices:
        if choice not in known:
            raise UsageError(
                f"{option}: '{choice}' is not one of {', '.join(known)}; separate several with"
                " commas"
            )
    return choices


def seconds(text: str, option: str) -> float:
    """Parse a time above 0.

    Raises:
        UsageError: The text is not a time above 0.
    """
    with suppress(ValueError):
        if value := parse_seconds(text):
            return value
    raise UsageError(f"{option}: '{text}' is not a time; write 30s, 10m or 1h")


def share(text: str, option: str) -> float:
    """Parse a fraction between 0 and 1.

    Raises:
        UsageError: The text is not such a fraction.
    """
    with suppress(ValueError):
        if 0 < (value := parse_share(text)) < 1:
            return value
    raise UsageError(f"{option}: '{text}' is not a share between 0 and 1; write 5% or 0.05")


def payloads_of(options: BenchOptions, archive: OpenArchive) -> tuple[list[Payload], str]:
    """Return the requests and a description of their source.

    Raises:
        UsageError: There are no inputs.
    """
    return choose_payloads(
        archive.source,
        [Path(path) for path in options.inputs],
        kind=options.input_kind,
        shape=None if options.input_shape is None else parse_shape(options.input_shape),
        seed=options.seed,
        content_type=options.content_type,
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
    )


def configurations(
    options: BenchOptions,
    config: ModelConfig,
    cores: int,
    gpus: int,
    stored: Sequence[FormRecord] = (),
    *,
    batches: bool = True,
) -> list[Configuration]:
    """Return all configurations that the options allow, in the given order of the devices.

    `stored` are the forms in the archive.

    Raises:
        UsageError: This machine or model cannot run them.
    """
    devices = _devices(options, config, gpus)
    compiled: Sequence[bool | None] = [None]
    if options.compiled is not None:
        compiled = [
            SWITCHES[choice]
            for choice in parse_words(options.compiled, tuple(SWITCHES), "--compile")
        ]
    precisions = (
        [AS_IS]
        if options.precisions is None
        else parse_words(options.precisions, PRECISIONS, "--precision")
    )
    forms = _forms(options, [form.name for form in stored])
    all_configurations = []
    for device in devices:
        workers = parse_numbers(
            options.workers or f"1..{4 if device != 'cpu' else cores}", "--workers"
        )
        sizes = parse_numbers(options.batch_sizes, "--batch-sizes") if batches else [1]
        worker_kinds: list[tuple[str, bool | None, str | None]] = []
        if forms[0] in (None, REFERENCE):
            worker_kinds += [
                (precision, compilation, forms[0])
                for compilation in compiled
                for precision in precisions
            ]
        worker_kinds += [
            (AS_IS, None, form.name)
            for form in stored
            if form.name in forms and form.bound.get("device") == device
        ]
        for (precision, compilation, form_name), count in itertools.product(worker_kinds, workers):
            for threads, size in itertools.product(
                _threads(options, config, device, count, cores), sizes
            ):
                all_configurations.append(
                    Configuration(device, precision, compilation, threads, count, size, form_name)
                )
    if not all_configurations:
        raise UsageError(
            f"--forms: {options.forms} was not built for {' or '.join(devices)}; run tsx optimize"
            " with --device, or add reference"
        )
    if len(all_configurations) > MAX_CONFIGURATIONS:
        raise UsageError(
            f"these ranges are {len(all_configurations)} configurations, more than"
            f" {MAX_CONFIGURATIONS}; make some of them smaller"
        )
    return all_configurations


def _forms(options: BenchOptions, names: Sequence[str]) -> list[str | None]:
    """Return the forms to measure, the reference first.

    The list [None] leaves the choice to the archive.

    Raises:
        UsageError: The options do not fit the archive's forms.
    """
    if not names and options.forms in (None, REFERENCE):
        return [None]
    if not names:
        raise UsageError(
            f"--forms {options.forms}: the archive keeps no forms of its model; make some with tsx"
            " optimize, or leave it out"
        )
    chosen_names = (
        [REFERENCE, *names]
        if options.forms is None
        else parse_words(options.forms, (REFERENCE, *names), "--forms")
    )
    if REFERENCE not in chosen_names and (options.precisions or options.compiled):
        raise UsageError(
            "--precision and --compile are for the reference, which --forms leaves out: add"
            " reference to it, or leave them out"
        )
    return sorted(chosen_names, key=lambda name: name != REFERENCE)


def _threads(
    options: BenchOptions, config: ModelConfig, device: str, workers: int, cores: int
) -> Sequence[int | None]:
    """Return the numbers of threads: the given ones, or the runtime's choice and smaller numbers.

    The smaller numbers are 1 and, on many cores, a number in between.
    """
    if options.threads is not None:
        return parse_numbers(options.threads, "--threads")
    default = Configuration(workers=workers).threads_per_worker(cores, config.threads)
    smaller_numbers = {1, 2 ** (cores.bit_length() // 2)} if device == "cpu" else set()
    return [None, *sorted(count for count in smaller_numbers if count < default)]


def _devices(options: BenchOptions, config: ModelConfig, gpus: int) -> list[str]:
    if options.devices is None:
        return ["cuda" if gpus and config.device_type != "cpu" else "cpu"]
    devices = parse_words(options.devices, DEVICES, "--devices")
    if "cuda" in devices and not gpus:
        raise UsageError(
            "--devices cuda: no GPU is visible here (`nvidia-smi` shows what the driver sees);"
            " leave it out"
        )
    return devices
