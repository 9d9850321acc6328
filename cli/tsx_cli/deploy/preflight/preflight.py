"""The checks before anything is created, with the prediction from the archive's benchmark.

The archive must be intact, within the limits of the target, and load on this machine.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterable, Mapping
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
from tsx_cli.deploy.preflight.limits import LimitFinding, ModelProfile, TargetProfile, find_problems
from tsx_cli.deploy.preflight.outlook import Outlook
from tsx_cli.deploy.spec import NEURON, DeploySpec
from tsx_cli.deploy.target import DeployTarget
from tsx_runtime.errors import LoadFailed

NO_CHECK_HINT = "--no-check deploys it anyway"
TOLERANCE = 1e-4  # largest accepted difference between responses alone and in a batch


@dataclass(frozen=True)
class Preflight:
    spec: DeploySpec
    profile: TargetProfile
    model: ModelProfile
    outlook: Outlook | None
    findings: tuple[LimitFinding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        measured = None if self.outlook is None else self.outlook.as_json()
        return {"findings": [finding.as_json() for finding in self.findings], "measured": measured}

    def lines(self) -> list[str]:
        """Return the lines below a plan."""
        measured = [
            f"measured: never; `tsx bench {self.spec.model} --write` finds its best batch size and"
            " writes it into the archive"
        ]
        lines = measured if self.outlook is None else self.outlook.lines()
        return [
            one_line(line)
            for line in [*lines, *(f"note: {finding.text}" for finding in self.findings)]
        ]

    def with_notes(self, notes: Iterable[str]) -> Preflight:
        more = (LimitFinding(False, note) for note in notes)
        return replace(self, findings=(*self.findings, *more))

    def with_load_result(self, result: CheckResult) -> Preflight:
        """Return the result with the findings of a load on this machine."""
        model = replace(self.model, load_seconds=result.load_seconds)
        more = [
            LimitFinding(False, f"answers alone and in a batch differ: {text}")
            for text in result.findings
        ]
        new_findings = [
            finding
            for finding in find_problems(self.profile, model)
            if finding not in self.findings
        ]
        return replace(self, model=model, findings=(*self.findings, *new_findings, *more))


def run_preflight(
    target: DeployTarget,
    spec: DeploySpec,
    inspection: Inspection,
    image_bytes: int | None,
    *,
    strict: bool,
) -> Preflight:
    """Check an archive before it is deployed.

    Raises:
        CliError: The archive is damaged; or, if `strict`, the target would refuse it.
    """
    faults = [
        finding.text for finding in verify_archive(spec.model, archive_limits()) if finding.is_fault
    ]
    if faults:
        raise CliError(
            f"{spec.model} is damaged or incomplete: {re.sub(r'[.]$', '', '; '.join(faults))}. Pack"
            " it again with tsx archive"
        )
    record = read_record(spec.model)
    profile, model = target.profile(spec), model_profile(inspection, record, image_bytes)
    scaling = target.scaling(spec)
    prediction = None if record is None else Outlook(record, spec.model.name, scaling)
    results = find_problems(profile, model)
    errors = [finding for finding in results if finding.is_error]
    if errors and strict:
        problems = "; ".join(
            f"{finding.text}{f' ({finding.source})' if finding.source else ''}"
            for finding in errors
        )
        raise CliError(
            f"{spec.model} does not fit {profile.name}: {problems}. Nothing was changed;"
            f" {NO_CHECK_HINT}"
        )
    return Preflight(spec, profile, model, prediction, tuple(results))


def load_archive(path: Path) -> CheckResult:
    """Load an archive in a worker, and send its samples alone and in batches.

    Raises:
        CliError: The archive does not load.
    """
    # This imports the front end, which a plan does not need.
    from tsx_cli.archive.packing import Packed, check

    try:
        result = check(Packed(str(path)), [], TOLERANCE, quiet=True).check
    except LoadFailed as error:
        condition = "If it needs something that only the image has (a package, a GPU)"
        raise CliError(
            f"{error.message.rstrip('.')}. Nothing was changed. {condition}, {NO_CHECK_HINT}",
            traceback=error.traceback,
        ) from error
    assert result is not None
    return result


def model_profile(
    inspection: Inspection, record: ArchiveRecord | None, image_bytes: int | None = None
) -> ModelProfile:
    unpacked = sum(member.size for member in inspection.members)
    samples = _largest_by_type(
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
    if record is not None:
        device = device or ("cpu" if record.best.configuration.get("device") == "cpu" else "gpu")
        kinds = record.inputs.content_types or {"application/octet-stream": 1}
        measured = {max(kinds, key=lambda kind: kinds[kind]): record.inputs.largest}
    p99 = None if record is None else record.best.p99_ms
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


def _largest_by_type(sizes: Mapping[str, int]) -> dict[str, int]:
    largest: dict[str, int] = {}
    for name, size in sizes.items():
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        largest[kind] = max(size, largest.get(kind, 0))
    return largest
