"""The checks before anything is created: the archive is intact, within the target's limits, and
loads on this machine.

It also says what the archive's own benchmark promises.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tsx_archiver import Inspection, verify_archive
from tsx_cli.archive.check import CheckResult
from tsx_cli.bench.report.archive_record import ArchiveRecord, read_record
from tsx_cli.common.failure import CliError
from tsx_cli.common.inputs import SAMPLES
from tsx_cli.common.options import archive_limits
from tsx_cli.common.output import one_line
from tsx_cli.deploy.engine.facts import kept_forms
from tsx_cli.deploy.engine.kept_forms import device_of
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.preflight.limits import (
    GIB,
    LIMITS,
    MIB,
    SET,
    LimitFinding,
    ModelProfile,
    TargetLimit,
    TargetProfile,
    findings,
)
from tsx_cli.deploy.preflight.outlook import Outlook, outlook
from tsx_cli.deploy.spec import GPU, NEURON, DeploySpec
from tsx_runtime.errors import LoadFailed

ALL_THE_SAME = "--no-check deploys it anyway"
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Preflight:
    spec: DeploySpec
    place: TargetProfile
    known: ModelProfile
    outlook: Outlook | None
    found: tuple[LimitFinding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        measured = None if self.outlook is None else self.outlook.as_json()
        return {"findings": [each.as_json() for each in self.found], "measured": measured}

    def lines(self) -> list[str]:
        """What stands below a plan."""
        measured = [
            f"measured: never; `tsx bench {self.spec.model} --write` finds its best batch size and"
            " writes it into the archive"
        ]
        shown = measured if self.outlook is None else self.outlook.lines()
        return [one_line(line) for line in [*shown, *(f"note: {each.text}" for each in self.found)]]

    def noted(self, resources: Sequence[Resource]) -> Preflight:
        """With what the resources of the plan have to say."""
        more = (LimitFinding(False, note) for resource in resources for note in resource.notes)
        return replace(self, found=(*self.found, *more))

    def loaded(self, result: CheckResult) -> Preflight:
        """With what loading it has shown."""
        known = replace(self.known, load_seconds=result.load_seconds)
        more = [
            LimitFinding(False, f"answers alone and in a batch differ: {text}")
            for text in result.findings
        ]
        news = [each for each in findings(self.place, known) if each not in self.found]
        return replace(self, known=known, found=(*self.found, *news, *more))


def look_ahead(
    spec: DeploySpec, inspection: Inspection, image_bytes: int | None, *, strict: bool
) -> Preflight:
    """Raises CliError for a damaged archive, and where `strict` for what the target would
    refuse.
    """
    faults = [
        finding.text for finding in verify_archive(spec.model, archive_limits()) if finding.is_fault
    ]
    if faults:
        raise CliError(
            f"{spec.model} is damaged or incomplete: {re.sub(r'[.]$', '', '; '.join(faults))}. Pack"
            " it again with tsx archive"
        )
    kept = read_record(spec.model)
    place, known = place_of(spec), model_profile(inspection, kept, image_bytes)
    view = outlook(kept, spec)
    found = findings(place, known)
    errors = [each for each in found if each.is_error]
    if errors and strict:
        problems = "; ".join(
            f"{each.text}{f' ({each.source})' if each.source else ''}" for each in errors
        )
        raise CliError(
            f"{spec.model} does not fit {place.name}: {problems}. Nothing was changed;"
            f" {ALL_THE_SAME}"
        )
    return Preflight(spec, place, known, view, tuple(found))


def load(path: Path) -> CheckResult:
    """In a worker, as a server does, with its samples alone and in batches. Raises CliError."""
    from tsx_cli.archive.packing import (
        Packed,
        check,
    )  # here, as it imports the front end, which a plan does without

    try:
        result = check(Packed(str(path)), [], TOLERANCE, quiet=True).check
    except LoadFailed as error:
        way = "If it needs something that only the image has (a package, a GPU)"
        raise CliError(
            f"{error.message.rstrip('.')}. Nothing was changed. {way}, {ALL_THE_SAME}",
            traceback=error.traceback,
        ) from error
    assert result is not None
    return result


def place_of(spec: DeploySpec) -> TargetProfile:
    """The target with the limits that the deployment itself sets."""
    if spec.target == "lambda":
        return _function(spec)
    if spec.target == "sagemaker":
        return _endpoint(spec)
    own: Any = getattr(spec, spec.target)
    device: str | None = spec.device
    limits = _set("start", own.startup_timeout, f"{spec.target}.startup_timeout")
    if own.memory:
        limits |= _set("memory", _bytes(own.memory), f"{spec.target}.memory")
    if spec.target == "ray":
        device = None if own.num_gpus is None else GPU if own.num_gpus else "cpu"
    return TargetProfile(spec.target, limits, spec.env, device)


def _set(what: str, most: float, key: str) -> dict[str, TargetLimit]:
    return {what: TargetLimit(most, SET, key)}


def _function(spec: DeploySpec) -> TargetProfile:
    """The model is in the image, so /tmp need not hold it."""
    own = spec.lambda_
    limits = {
        **LIMITS["lambda"],
        **_set("time", own.timeout, "lambda.timeout"),
        **_set("start", own.timeout, "lambda.timeout"),
        **_set("memory", own.memory * MIB, "lambda.memory"),
    }
    return TargetProfile("lambda", limits, spec.env, spec.device)


def _endpoint(spec: DeploySpec) -> TargetProfile:
    own, component = spec.sagemaker, spec.sagemaker.component
    form = "serverless" if own.serverless else "asynchronous" if own.asynchronous else ""
    kind = f"sagemaker {form}".rstrip()
    limits = dict(LIMITS[kind])
    if own.serverless is not None:
        limits |= _set("memory", own.serverless.memory * MIB, "sagemaker.serverless.memory")
        return TargetProfile(kind, limits, spec.env, spec.device)
    limits |= _set("start", own.startup_timeout, "sagemaker.startup_timeout")
    if component is None:
        return TargetProfile(kind, limits, spec.env, spec.device, own.instance_type)
    # It has a part of the instance, and no GPU but those that it asks for.
    if component.gpus is not None:
        return TargetProfile(kind, limits, spec.env, GPU, own.instance_type)
    limits |= _set("memory", component.memory * MIB, "sagemaker.component.memory")
    return TargetProfile(kind, limits, spec.env, "cpu")


def _bytes(text: str) -> int:
    """`4g`, `512m` as docker says it, `4Gi`, `512Mi` as Kubernetes does."""
    number = re.sub("[a-z]+", "", text, flags=re.IGNORECASE)
    return int(number) * (GIB if "g" in text.lower() else MIB)


def model_profile(
    inspection: Inspection, kept: ArchiveRecord | None, image_bytes: int | None = None
) -> ModelProfile:
    unpacked = sum(member.size for member in inspection.members)
    samples = _largest(
        {
            member.name: member.size
            for member in inspection.members
            if member.name.startswith(f"{SAMPLES}/")
        }
    )
    config = inspection.config
    device = (
        config.device_type
        if config.device_type is None
        else "cpu"
        if config.device_type == "cpu"
        else "gpu"
    )
    measured: dict[str, int] = {}
    if kept is not None:
        device = device or ("cpu" if kept.best.configuration.get("device") == "cpu" else "gpu")
        kinds = kept.inputs.content_types or {"application/octet-stream": 1}
        measured = {max(kinds, key=lambda kind: kinds[kind]): kept.inputs.largest}
    p99 = None if kept is None else kept.best.p99_ms
    neuron = any(device_of(form) == NEURON for form in kept_forms(inspection))
    return ModelProfile(
        inspection.size,
        unpacked,
        samples,
        measured,
        p99,
        device,
        neuron,
        config.response_timeout,
        image_bytes=image_bytes,
    )


def _largest(sizes: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes.items():
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        found[kind] = max(size, found.get(kind, 0))
    return found
