"""The options of a run that decide what is measured, and the resulting configurations."""

from __future__ import annotations

import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tsx_archiver import ModelConfig
from tsx_archiver.metadata.forms import REFERENCE, FormRecord
from tsx_archiver.metadata.slo import Slo
from tsx_archiver.quantities import parse_seconds, parse_share
from tsx_cli.bench.load.configuration import AS_IS, PRECISIONS, Configuration, parse_numbers
from tsx_cli.bench.load.results import parse_slo
from tsx_cli.bench.search.accuracy import parse_tolerance
from tsx_cli.common.failure import UsageError
from tsx_runtime.settings.traffic_policy import Compare

DEVICES = ("cpu", "cuda")
SWITCHES = {"off": False, "on": True}
MOST_CONFIGURATIONS = 20_000


@dataclass(frozen=True)
class BenchOptions:
    """As the journal keeps it; the texts are the options' own.

    Raises UsageError where they make no sense.
    """

    slo: str | None = None
    inputs: tuple[str, ...] = ()
    content_type: str | None = None
    input_kind: str | None = None  # of made-up inputs
    input_shape: str | None = None
    prompt_tokens: str | None = None
    max_tokens: str | None = None
    batch_sizes: str = "1..32"
    workers: str | None = None  # 1 to the number of cores, or to 4 where there is a GPU
    devices: str | None = None  # what the archive says, else a GPU where there is one
    precisions: str | None = None  # the archive's own
    compiled: str | None = None
    forms: str | None = None  # the reference and all that the archive keeps
    threads: str | None = None  # on a CPU the runtime's share of the cores, and fewer
    mode: Literal["closed", "open"] = "closed"
    loads: tuple[float, ...] = ()  # connections or rates; found where none are given
    arrivals: Literal["constant", "poisson", "recorded"] = "poisson"
    duration: float | None = None  # of a round; as long as the time allows
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
        self.bounds, self.compare  # noqa: B018 - they raise
        for option, text in (
            ("--batch-sizes", self.batch_sizes),
            ("--workers", self.workers),
            ("--threads", self.threads),
        ):
            if text is not None:
                parse_numbers(text, option)
        words(self.devices or "cpu", DEVICES, "--devices")
        words(self.precisions or PRECISIONS[0], PRECISIONS, "--precision")
        words(self.compiled or "off", tuple(SWITCHES), "--compile")

    @property
    def bounds(self) -> Slo | None:
        return None if self.slo is None else parse_slo(self.slo)

    @property
    def compare(self) -> Compare:
        """What counts as the same answer."""
        return parse_tolerance(self.tolerance, self.same_top)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def words(text: str, known: Sequence[str], option: str) -> list[str]:
    """`cpu,cuda`: each once, in the order given."""
    found = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for word in found:
        if word not in known:
            raise UsageError(
                f"{option}: '{word}' is not one of {', '.join(known)}; separate several with commas"
            )
    return found


def seconds(text: str, option: str) -> float:
    """Above 0. Raises UsageError."""
    with suppress(ValueError):
        if value := parse_seconds(text):
            return value
    raise UsageError(f"{option}: '{text}' is not a time; write 30s, 10m or 1h")


def finite(value: float, option: str) -> float:
    """nan is within any range. Raises UsageError."""
    if not math.isfinite(value):
        raise UsageError(f"{option}: {value} is not a number; write one such as 50")
    return value


def command_line(*secrets: str | None) -> str:
    """As it was given, for the results: without these secrets, and with the bytes of a name that
    are no text escaped.
    """
    words = sys.argv[1:]
    for secret in filter(None, secrets):
        words = [word.replace(secret, "...") for word in words]
    return plain(shlex.join(["tsx", *words]))


def plain(text: str) -> str:
    """As JSON and files can hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


def share(text: str, option: str) -> float:
    """Between 0 and 1. Raises UsageError."""
    with suppress(ValueError):
        if 0 < (value := parse_share(text)) < 1:
            return value
    raise UsageError(f"{option}: '{text}' is not a share between 0 and 1; write 5% or 0.05")


def configurations(
    options: BenchOptions,
    config: ModelConfig,
    cores: int,
    gpus: int,
    kept: Sequence[FormRecord] = (),
    *,
    batches: bool = True,
) -> list[Configuration]:
    """All that the options allow, the devices' in the order given; `kept` are the forms that the
    archive has. Raises UsageError for what this machine or model cannot have.
    """
    devices = _devices(options, config, gpus)
    compiled: Sequence[bool | None] = [None]
    if options.compiled is not None:
        compiled = [
            SWITCHES[word] for word in words(options.compiled, tuple(SWITCHES), "--compile")
        ]
    precisions = (
        [AS_IS]
        if options.precisions is None
        else words(options.precisions, PRECISIONS, "--precision")
    )
    forms = _forms(options, [form.name for form in kept])
    found = []
    for device in devices:
        workers = parse_numbers(
            options.workers or f"1..{4 if device != 'cpu' else cores}", "--workers"
        )
        sizes = parse_numbers(options.batch_sizes, "--batch-sizes") if batches else [1]
        ways: list[tuple[str, bool | None, str | None]] = []
        if forms[0] in (None, REFERENCE):
            ways += [
                (precision, compilation, forms[0])
                for compilation in compiled
                for precision in precisions
            ]
        ways += [
            (AS_IS, None, form.name)
            for form in kept
            if form.name in forms and form.bound.get("device") == device
        ]
        for (precision, compilation, name), count in itertools.product(ways, workers):
            for threads, size in itertools.product(
                _threads(options, config, device, count, cores), sizes
            ):
                found.append(
                    Configuration(device, precision, compilation, threads, count, size, name)
                )
    if not found:
        raise UsageError(
            f"--forms: {options.forms} was not built for {' or '.join(devices)}; run tsx optimize"
            " with --device, or add reference"
        )
    if len(found) > MOST_CONFIGURATIONS:
        raise UsageError(
            f"these ranges are {len(found)} configurations, more than {MOST_CONFIGURATIONS}; make"
            " some of them smaller"
        )
    return found


def _forms(options: BenchOptions, kept: Sequence[str]) -> list[str | None]:
    """The reference first; [None] where there is nothing else, and the archive decides.

    Raises UsageError.
    """
    if not kept and options.forms in (None, REFERENCE):
        return [None]
    if not kept:
        raise UsageError(
            f"--forms {options.forms}: the archive keeps no forms of its model; make some with tsx"
            " optimize, or leave it out"
        )
    given = (
        [REFERENCE, *kept]
        if options.forms is None
        else words(options.forms, (REFERENCE, *kept), "--forms")
    )
    if REFERENCE not in given and (options.precisions or options.compiled):
        raise UsageError(
            "--precision and --compile are for the reference, which --forms leaves out: add"
            " reference to it, or leave them out"
        )
    return sorted(given, key=lambda name: name != REFERENCE)


def _threads(
    options: BenchOptions, config: ModelConfig, device: str, workers: int, cores: int
) -> Sequence[int | None]:
    """Those that were asked for.

    Otherwise what the runtime gives each worker, and fewer: one, and on many cores a number
    between.
    """
    if options.threads is not None:
        return parse_numbers(options.threads, "--threads")
    given = Configuration(workers=workers).threads_per_worker(cores, config.threads)
    fewer = {1, 2 ** (cores.bit_length() // 2)} if device == "cpu" else set()
    return [None, *sorted(each for each in fewer if each < given)]


def _devices(options: BenchOptions, config: ModelConfig, gpus: int) -> list[str]:
    if options.devices is None:
        return ["cuda" if gpus and config.device_type != "cpu" else "cpu"]
    devices = words(options.devices, DEVICES, "--devices")
    if "cuda" in devices and not gpus:
        raise UsageError(
            "--devices cuda: no GPU is visible here (`nvidia-smi` shows what the driver sees);"
            " leave it out"
        )
    return devices
