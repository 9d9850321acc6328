"""The limits of each target, with their sources, compared with the facts of an archive.

A finding is an error if the platform is certain to refuse or fail, and otherwise a warning before
money is spent. The functions are pure.
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
SET_BY_USER = "what you have set"


class TargetLimit(NamedTuple):
    """A limit of a target."""

    most: float  # bytes, seconds or items
    source: str  # address of the documentation that states it
    key: str = ""  # the key of [deploy] that raises it, if any


def set_limit(name: str, most: float, key: str) -> dict[str, TargetLimit]:
    return {name: TargetLimit(most, SET_BY_USER, key)}


_ENVIRONMENT = {  # limits of SageMaker containers, for every kind of endpoint
    "env": TargetLimit(32 * KIB, _CONTAINER),
    "env_each": TargetLimit(1024, _CONTAINER),
    "env_count": TargetLimit(100, _CONTAINER),
}

# The keys are request and answer (bytes), time (seconds of a request), start (seconds until
# healthy), memory, disk and image (bytes), env (bytes of all variables), env_each (bytes of one
# value) and env_count.
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
BASE64_TARGETS = {"lambda"}  # targets that receive binary bodies in base64, a third larger
TEXT_TYPES = re.compile(r"text/|application/(json|xml|javascript)|[^;]*\+json")
WARNING_FRACTION = 0.8  # fraction of a limit above which a finding is a warning
NEURON_MACHINES = re.compile(r"ml\.(inf|trn)\d")
ARM = re.compile(r"ml\.[a-z]+\d+g[a-z]*\.")  # c7g, m7gd: Graviton


@dataclass(frozen=True)
class TargetProfile:
    """A target with the options of one deployment. None means unknown."""

    target: str  # a key of LIMITS
    limits: Mapping[str, TargetLimit]
    env: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    instance_type: str | None = None

    @property
    def name(self) -> str:
        return {"lambda": "Lambda", "ray": "Ray"}.get(
            self.target, self.target.replace("sagemaker", "SageMaker")
        )


@dataclass(frozen=True)
class ModelProfile:
    """The known facts of an archive before it is deployed. None means unknown."""

    packed: int  # bytes of the archive
    unpacked: int
    # Bytes of the largest sample, and of the largest benchmark request, by content type.
    samples: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    p99_ms: float | None = None
    device: str | None = None  # cpu or gpu, as configured or measured
    has_neuron_form: bool = False
    response_timeout: int | None = None  # seconds
    load_seconds: float | None = None  # time to load on this machine
    image_bytes: int | None = None  # compressed size in the registry


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


def find_problems(profile: TargetProfile, model: ModelProfile) -> list[LimitFinding]:
    """Return the findings, errors first."""
    results = [
        finding
        for key, rule in RULES.items()
        if key in profile.limits
        for finding in rule(profile.limits[key], profile, model)
    ]
    results += [*_environment(profile, model), *_device(profile, model)]
    return sorted(results, key=lambda finding: not finding.is_error)


def _compare(
    limit: TargetLimit, value: float, warning_fraction: float, error: str, warning: str
) -> Iterator[LimitFinding]:
    """Yield an error above the limit, or a warning above the fraction `warning_fraction` of it."""
    if value > limit.most:
        yield LimitFinding(True, error, limit.source)
    elif value > warning_fraction * limit.most:
        yield LimitFinding(False, warning, limit.source)


def _payload(
    limit: TargetLimit, profile: TargetProfile, model: ModelProfile
) -> Iterator[LimitFinding]:
    for subject, sizes in (
        ("its sample", model.samples),
        ("a request of its benchmark", model.measured),
    ):
        for content_type, size in sizes.items():
            is_base64 = profile.target in BASE64_TARGETS and not TEXT_TYPES.match(content_type)
            most = limit._replace(most=limit.most * 3 / 4) if is_base64 else limit
            encoding = " (this type is sent as base64, a third larger)" if is_base64 else ""
            size_text = f"{subject} has {size_of(size)}"
            text = f"{profile.name} takes requests of {size_of(most.most)}{encoding}"
            yield from _compare(
                most,
                size,
                WARNING_FRACTION,
                f"{size_text}, and {text}. {_advice_to_shrink(profile)}",
                f"{size_text}, close to the limit: {text}",
            )


def _advice_to_shrink(profile: TargetProfile) -> str:
    if profile.target == "sagemaker asynchronous":
        return "Send smaller inputs"
    if profile.target == "lambda":
        return "Send smaller inputs, or deploy with --target sagemaker"
    serverless = (
        ", remove sagemaker.serverless for 6 MiB"
        if profile.target == "sagemaker serverless"
        else ""
    )
    return (
        f"Send smaller inputs{serverless}, or set sagemaker.asynchronous, which takes 1 GiB"
        " through S3"
    )


def _time(
    limit: TargetLimit, profile: TargetProfile, model: ModelProfile
) -> Iterator[LimitFinding]:
    if model.p99_ms is not None:
        seconds, advice = model.p99_ms / 1000, _advice_to_speed_up(profile, limit)
        text = f"in its benchmark, one request in a hundred took {seconds:.3g} s or more"
        limit_text = f"{profile.name} ends one after {limit.most:g} s"
        yield from _compare(
            limit,
            seconds,
            1 / 2,
            f"{text}, and {limit_text}. {advice}",
            f"{text}; {limit_text}, which slower machines may exceed. {advice}",
        )
    if model.response_timeout is not None and model.response_timeout > limit.most:
        text = (
            f"responseTimeout of the archive is {model.response_timeout} s, but {profile.name}"
            f" gives a request up after {limit.most:g} s"
        )
        yield LimitFinding(False, text, limit.source)


def _advice_to_speed_up(profile: TargetProfile, limit: TargetLimit) -> str:
    if limit.key:
        return f"Raise {limit.key}, make batches smaller, or use a faster machine"
    asynchronous = (
        ", or set sagemaker.asynchronous, which allows an hour"
        if profile.target.startswith("sagemaker")
        else ""
    )
    return f"Make batches smaller, use a faster machine{asynchronous}"


def _start(
    limit: TargetLimit, profile: TargetProfile, model: ModelProfile
) -> Iterator[LimitFinding]:
    if model.load_seconds is None:
        return
    text = f"it took {model.load_seconds:.1f} s to load on this machine"
    limit_text = f"{profile.name} gives it {limit.most:g} s to start"
    advice = f"raise {limit.key}" if limit.key else "make the model smaller"
    warning = f"{text}; {limit_text}, its image and model downloaded: {advice} if it fails"
    yield from _compare(
        limit, model.load_seconds, 1 / 3, f"{text}, and {limit_text}: {advice}", warning
    )


def _memory(
    limit: TargetLimit, profile: TargetProfile, model: ModelProfile
) -> Iterator[LimitFinding]:
    advice = f"raise {limit.key}" if limit.key else "choose one with more"
    size_text = f"{profile.instance_type or profile.name} has {size_of(limit.most)} of memory"
    text = f"the content of the archive has {size_of(model.unpacked)}, and {size_text}"
    yield from _compare(
        limit,
        model.unpacked,
        1 / 2,
        f"{text}: {advice}",
        f"{text}, for torch and the requests too: {advice} if it is killed",
    )


def _disk(
    limit: TargetLimit, profile: TargetProfile, model: ModelProfile
) -> Iterator[LimitFinding]:
    if model.packed + model.unpacked > limit.most:
        text = f"the archive and its content take {size_of(model.packed + model.unpacked)} of disk"
        advice = (
            f"raise {limit.key}" if limit.key else "make the model smaller, or deploy to instances"
        )
        yield LimitFinding(
            True, f"{text}, and there are {size_of(limit.most)}: {advice}", limit.source
        )


def _image(
    limit: TargetLimit, profile: TargetProfile, model: ModelProfile
) -> Iterator[LimitFinding]:
    if model.image_bytes is None:
        return
    text = (
        f"the image has {size_of(model.image_bytes)} compressed, and {profile.name} accepts"
        f" {size_of(limit.most)} uncompressed"
    )
    advice = "Build it with torch's CPU wheels (TORCH_INDEX_URL) and with fewer other packages"
    # torch unpacks to about two and a half times its packed size. The compressed size therefore
    # becomes an error at the whole limit, and a warning at 0.4 of it.
    yield from _compare(
        limit, model.image_bytes, 0.4, f"{text}. {advice}", f"{text}: it may be too large. {advice}"
    )


def _environment(profile: TargetProfile, model: ModelProfile) -> Iterator[LimitFinding]:
    count, single, total = (profile.limits.get(key) for key in ("env_count", "env_each", "env"))
    if count is not None and len(profile.env) > count.most:
        yield LimitFinding(
            True,
            f"env has {len(profile.env)} variables, and {profile.name} takes {count.most:g}",
            count.source,
        )
    for name, value in profile.env.items():
        if single is not None and max(len(name.encode()), len(value.encode())) > single.most:
            yield LimitFinding(
                True,
                f"env.{name} is longer than {single.most:g} bytes: put it into a file in the"
                " archive",
                single.source,
            )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in profile.env.items())
    if total is not None and size > total.most:
        text = (
            f"env has {size_of(size)}, and {profile.name} accepts {size_of(total.most)} in all: put"
            " part of it into a file in the archive"
        )
        yield LimitFinding(True, text, total.source)


def _device(profile: TargetProfile, model: ModelProfile) -> Iterator[LimitFinding]:
    kind = profile.instance_type or ""
    if NEURON_MACHINES.match(kind) and not NEURON_INSTANCES.match(kind):
        yield LimitFinding(
            True,
            f"{kind} has AWS's first accelerators, which torch-neuronx does not compile for: choose"
            " ml.inf2…",
        )
    elif profile.device == NEURON and not model.has_neuron_form:
        text = (
            f"{kind or profile.name} has AWS's Neuron accelerators, and the archive has no form for"
            " them: run tsx optimize on such a machine"
        )
        yield LimitFinding(True, f"{text}, or choose ml.g… for GPUs, or ml.c… for CPUs")
    if ARM.match(kind):
        yield LimitFinding(
            False, f"{kind} is an ARM machine: the image must be built for linux/arm64"
        )
    if model.device == "gpu" and profile.device in (NEURON, "cpu"):
        subject = f"{kind} has" if kind else f"{profile.name} has here"
        yield LimitFinding(
            False,
            f"the archive is configured for a GPU, but {subject} none: it will run on the CPU,"
            " slower than measured",
        )
    if model.device == "cpu" and profile.device == GPU:
        text = (
            f"{kind or profile.name} has a GPU, and the archive is configured for the CPU"
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
    """Format bytes in the units of the limits."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:g} bytes"
