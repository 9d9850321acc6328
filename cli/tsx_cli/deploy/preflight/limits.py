"""The limits of each target, with their sources, compared with the facts of an archive: pure
functions.

A finding is an error where the platform would refuse or fail for certain, and else something to
know before money is spent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tsx_cli.deploy.spec import GPU, NEURON, NEURON_INSTANCES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_DOCS = "https://docs.aws.amazon.com"
_HOSTING = f"{_DOCS}/sagemaker/latest/dg/your-algorithms-inference-code.html"
_OPTIONS = f"{_DOCS}/sagemaker/latest/dg/deploy-model-options.html"
_SERVERLESS = f"{_DOCS}/sagemaker/latest/dg/serverless-endpoints.html"
_ASYNC = f"{_DOCS}/sagemaker/latest/dg/async-inference.html"
_CONTAINER = f"{_DOCS}/sagemaker/latest/APIReference/API_ContainerDefinition.html"
_QUOTAS = f"{_DOCS}/lambda/latest/dg/gettingstarted-limits.html"
_IMAGES = f"{_DOCS}/lambda/latest/dg/images-create.html"
SET = "what you have set"


class TargetLimit(NamedTuple):
    """`most` is in bytes, seconds, or a number of things."""

    most: float
    source: str
    key: str = ""  # of [deploy] that raises it; empty: nothing does


_ENVIRONMENT = {  # of a SageMaker container, of whichever kind of endpoint
    "env": TargetLimit(32 * KIB, _CONTAINER),
    "env_each": TargetLimit(1024, _CONTAINER),
    "env_count": TargetLimit(100, _CONTAINER),
}

# What is limited: request, answer (bytes of one), time (seconds of one), start (seconds until it
# must be well), memory, disk (bytes), image (bytes), env (bytes of all variables together),
# env_each (bytes of one value), env_count.
LIMITS: Mapping[str, Mapping[str, TargetLimit]] = {
    "sagemaker": {
        "request": TargetLimit(6 * MIB, _OPTIONS),
        "answer": TargetLimit(6 * MIB, _OPTIONS),
        "time": TargetLimit(60, _HOSTING),
        **_ENVIRONMENT,
    },
    "sagemaker serverless": {
        "request": TargetLimit(4 * MIB, _SERVERLESS),
        "answer": TargetLimit(4 * MIB, _SERVERLESS),
        "time": TargetLimit(60, _SERVERLESS),
        "start": TargetLimit(180, _SERVERLESS),
        "disk": TargetLimit(5 * GIB, _SERVERLESS),
        "image": TargetLimit(10 * GIB, _SERVERLESS),
        **_ENVIRONMENT,
    },
    "sagemaker asynchronous": {
        "request": TargetLimit(1 * GIB, _ASYNC),
        "answer": TargetLimit(1 * GIB, _ASYNC),
        "time": TargetLimit(3600, _ASYNC),
        **_ENVIRONMENT,
    },
    "lambda": {
        "request": TargetLimit(6 * MIB, _QUOTAS),
        "answer": TargetLimit(6 * MIB, _QUOTAS),
        "image": TargetLimit(10 * GIB, _IMAGES),
        "env": TargetLimit(4 * KIB, _QUOTAS),
    },
}
IN_BASE64 = {"lambda"}  # where a body that is no text travels in base64, a third longer
TEXT = re.compile(r"text/|application/(json|xml|javascript)|[^;]*\+json")
NEARLY = 0.8  # of a limit: from here on a finding says so
NEURON_MACHINES = re.compile(r"ml\.(inf|trn)\d")
ARM = re.compile(r"ml\.[a-z]+\d+g[a-z]*\.")  # c7g, m7gd: Graviton


@dataclass(frozen=True)
class TargetProfile:
    """A target with the options of one deployment. None means unknown."""

    target: str  # of LIMITS
    limits: Mapping[str, TargetLimit]
    env: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    instance_type: str | None = None

    @property
    def name(self) -> str:
        return {"sagemaker": "SageMaker", "lambda": "Lambda", "ray": "Ray"}.get(
            self.target, self.target.replace("sagemaker", "SageMaker")
        )


@dataclass(frozen=True)
class ModelProfile:
    """The known facts of an archive before it is deployed. None means unknown."""

    packed: int  # bytes of the archive
    unpacked: int
    samples: Mapping[str, int] = field(
        default_factory=dict
    )  # content types and the bytes of their largest
    measured: Mapping[str, int] = field(
        default_factory=dict
    )  # the same of the requests of its benchmark
    p99_ms: float | None = None
    device: str | None = None  # cpu or gpu, as it is configured or was measured
    has_neuron_form: bool = False
    response_timeout: int | None = None  # seconds
    load_seconds: float | None = None  # on this machine
    image_bytes: int | None = None  # packed, as the registry has it


class LimitFinding(NamedTuple):
    is_error: bool
    text: str
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "level": "error" if self.is_error else "warning",
            "text": self.text,
            "source": self.source,
        }


def findings(place: TargetProfile, known: ModelProfile) -> list[LimitFinding]:
    """Errors first."""
    found = [
        finding
        for what, rule in RULES.items()
        if what in place.limits
        for finding in rule(place.limits[what], place, known)
    ]
    found += [*_environment(place, known), *_device(place, known)]
    return sorted(found, key=lambda finding: not finding.is_error)


def _held(
    limit: TargetLimit, value: float, near: float, error: str, warning: str
) -> Iterator[LimitFinding]:
    """`warning` from this share of the limit on."""
    if value > limit.most:
        yield LimitFinding(True, error, limit.source)
    elif value > near * limit.most:
        yield LimitFinding(False, warning, limit.source)


def _payload(
    limit: TargetLimit, place: TargetProfile, known: ModelProfile
) -> Iterator[LimitFinding]:
    for whose, sizes in (
        ("its sample", known.samples),
        ("a request of its benchmark", known.measured),
    ):
        for content_type, size in sizes.items():
            wide = place.target in IN_BASE64 and not TEXT.match(content_type)
            most = limit._replace(most=limit.most * 3 / 4) if wide else limit
            how = " (this type is sent as base64, a third larger)" if wide else ""
            has, text = (
                f"{whose} has {size_of(size)}",
                f"{place.name} takes requests of {size_of(most.most)}{how}",
            )
            yield from _held(
                most,
                size,
                NEARLY,
                f"{has}, and {text}. {_smaller(place)}",
                f"{has}, close to the limit: {text}",
            )


def _smaller(place: TargetProfile) -> str:
    if place.target == "sagemaker asynchronous":
        return "Send smaller inputs"
    if place.target == "lambda":
        return "Send smaller inputs, or deploy with --target sagemaker"
    serverless = (
        ", remove sagemaker.serverless for 6 MiB" if place.target == "sagemaker serverless" else ""
    )
    return (
        f"Send smaller inputs{serverless}, or set sagemaker.asynchronous, which takes 1 GiB"
        " through S3"
    )


def _time(limit: TargetLimit, place: TargetProfile, known: ModelProfile) -> Iterator[LimitFinding]:
    if known.p99_ms is not None:
        seconds, way = known.p99_ms / 1000, _longer(place, limit)
        text = f"in its benchmark, one request in a hundred took {seconds:.3g} s or more"
        ends = f"{place.name} ends one after {limit.most:g} s"
        yield from _held(
            limit,
            seconds,
            1 / 2,
            f"{text}, and {ends}. {way}",
            f"{text}; {ends}, which slower machines may exceed. {way}",
        )
    if known.response_timeout is not None and known.response_timeout > limit.most:
        text = (
            f"responseTimeout of the archive is {known.response_timeout} s, but {place.name} gives"
            f" a request up after {limit.most:g} s"
        )
        yield LimitFinding(False, text, limit.source)


def _longer(place: TargetProfile, limit: TargetLimit) -> str:
    if limit.key:
        return f"Raise {limit.key}, make batches smaller, or use a faster machine"
    asynchronous = (
        ", or set sagemaker.asynchronous, which allows an hour"
        if place.target.startswith("sagemaker")
        else ""
    )
    return f"Make batches smaller, use a faster machine{asynchronous}"


def _start(limit: TargetLimit, place: TargetProfile, known: ModelProfile) -> Iterator[LimitFinding]:
    if known.load_seconds is None:
        return
    text, gives = (
        f"it took {known.load_seconds:.1f} s to load on this machine",
        f"{place.name} gives it {limit.most:g} s to start",
    )
    way = f"raise {limit.key}" if limit.key else "make the model smaller"
    warning = f"{text}; {gives}, its image and model downloaded: {way} if it fails"
    yield from _held(limit, known.load_seconds, 1 / 3, f"{text}, and {gives}: {way}", warning)


def _memory(
    limit: TargetLimit, place: TargetProfile, known: ModelProfile
) -> Iterator[LimitFinding]:
    way = f"raise {limit.key}" if limit.key else "choose one with more"
    has = f"{place.instance_type or place.name} has {size_of(limit.most)} of memory"
    text = f"the content of the archive has {size_of(known.unpacked)}, and {has}"
    yield from _held(
        limit,
        known.unpacked,
        1 / 2,
        f"{text}: {way}",
        f"{text}, for torch and the requests too: {way} if it is killed",
    )


def _disk(limit: TargetLimit, place: TargetProfile, known: ModelProfile) -> Iterator[LimitFinding]:
    if known.packed + known.unpacked > limit.most:
        text = f"the archive and its content take {size_of(known.packed + known.unpacked)} of disk"
        way = (
            f"raise {limit.key}" if limit.key else "make the model smaller, or deploy to instances"
        )
        yield LimitFinding(
            True, f"{text}, and there are {size_of(limit.most)}: {way}", limit.source
        )


def _image(limit: TargetLimit, place: TargetProfile, known: ModelProfile) -> Iterator[LimitFinding]:
    if known.image_bytes is None:
        return
    text = (
        f"the image has {size_of(known.image_bytes)} compressed, and {place.name} accepts"
        f" {size_of(limit.most)} uncompressed"
    )
    way = "Build it with torch's CPU wheels (TORCH_INDEX_URL) and with fewer other packages"
    # torch unpacks to about two and a half times its packed size
    yield from _held(
        limit, known.image_bytes, 0.4, f"{text}. {way}", f"{text}: it may be too large. {way}"
    )


def _environment(place: TargetProfile, known: ModelProfile) -> Iterator[LimitFinding]:
    count, each, total = (place.limits.get(what) for what in ("env_count", "env_each", "env"))
    if count is not None and len(place.env) > count.most:
        yield LimitFinding(
            True,
            f"env has {len(place.env)} variables, and {place.name} takes {count.most:g}",
            count.source,
        )
    for name, value in place.env.items():
        if each is not None and max(len(name.encode()), len(value.encode())) > each.most:
            yield LimitFinding(
                True,
                f"env.{name} is longer than {each.most:g} bytes: put it into a file in the archive",
                each.source,
            )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in place.env.items())
    if total is not None and size > total.most:
        text = (
            f"env has {size_of(size)}, and {place.name} accepts {size_of(total.most)} in all: put"
            " part of it into a file in the archive"
        )
        yield LimitFinding(True, text, total.source)


def _device(place: TargetProfile, known: ModelProfile) -> Iterator[LimitFinding]:
    kind = place.instance_type or ""
    if NEURON_MACHINES.match(kind) and not NEURON_INSTANCES.match(kind):
        yield LimitFinding(
            True,
            f"{kind} has AWS's first accelerators, which torch-neuronx does not compile for: choose"
            " ml.inf2…",
        )
    elif place.device == NEURON and not known.has_neuron_form:
        text = (
            f"{kind or place.name} has AWS's Neuron accelerators, and the archive has no form for"
            " them: run tsx optimize on such a machine"
        )
        yield LimitFinding(True, f"{text}, or choose ml.g… for GPUs, or ml.c… for CPUs")
    if ARM.match(kind):
        yield LimitFinding(
            False, f"{kind} is an ARM machine: the image must be built for linux/arm64"
        )
    if known.device == "gpu" and place.device in (NEURON, "cpu"):
        where = f"{kind} has" if kind else f"{place.name} has here"
        yield LimitFinding(
            False,
            f"the archive is configured for a GPU, but {where} none: it will run on the CPU, slower"
            " than measured",
        )
    if known.device == "cpu" and place.device == GPU:
        text = (
            f"{kind or place.name} has a GPU, and the archive is configured for the CPU"
            " (deviceType): measure it there with tsx bench"
        )
        yield LimitFinding(False, text)


Rule = Callable[[TargetLimit, TargetProfile, ModelProfile], Iterator[LimitFinding]]
RULES: Mapping[str, Rule] = {
    "request": _payload,
    "time": _time,
    "start": _start,
    "memory": _memory,
    "disk": _disk,
    "image": _image,
}


def size_of(size: float) -> str:
    """Bytes in the units in which limits are set."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:g} bytes"
