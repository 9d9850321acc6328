"""Diagnoses a failed start: rules over the platform's message and the container's log, with what to
do.

A pure function. The first rule that knows a line of the log goes before those that only know the
platform's sentence, which often says no more than that nothing answered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class DiagnosisRule(NamedTuple):
    pattern: re.Pattern[str]
    cause: str  # `{0}` is what the pattern's group found
    way: str


def _rule(pattern: str, cause: str, way: str) -> DiagnosisRule:
    return DiagnosisRule(re.compile(pattern, re.IGNORECASE), cause, way)


NO_ENTRY = _rule(
    r"^(?!.*(?:docker-init|nvidia-)).*(?:executable file (?:\S+ )?not found|open executable"
    r"|\bexec\b.*: (?:no such file or directory|permission denied))|No module named '?tsx_runtime",
    "the image does not start tsx",
    'It must end with ENTRYPOINT ["python", "-P", "-m", "tsx_runtime.targets.entry"] (without -P'
    ' for Python 3.10) and CMD ["serve"]; tsx deploy builds such an image',
)
OTHER_MACHINE = _rule(
    r"exec format error",
    "the image was built for a different CPU architecture",
    "Build it with --platform linux/amd64, or linux/arm64 for Graviton (c7g, m7g) and Lambda's"
    " arm64",
)
LINES: tuple[DiagnosisRule, ...] = (
    NO_ENTRY,
    _rule(
        r"ModuleNotFoundError: No module named '([\w.]+)'|ImportError: cannot import name '(\w+)'",
        "the image has no module '{0}'",
        "Add its package to the requirements of the archive (`tsx archive -r requirements.txt`) or"
        " to the image; under network isolation nothing is installed at the start, so there only"
        " the image helps",
    ),
    OTHER_MACHINE,
    _rule(
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory",
        "the GPU's memory is too small for the model and its batches",
        "Lower batchSize or the number of workers, load it in bf16 (precision), or choose a"
        " larger GPU",
    ),
    _rule(
        r"MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate|\bOOM|out of"
        r" memory|oom-kill|Runtime\.OutOfMemory"
        r"|(?:signal|exit code:?|ended with|exited with) -?(?:9|137)\b|\bKilled\b",
        "the container ran out of memory",
        "Choose a machine with more memory (sagemaker.instance_type, lambda.memory,"
        " kubernetes.memory), or fewer workers (minWorkers)",
    ),
    _rule(
        r"No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is"
        r" insufficient|Torch not compiled with CUDA|libcuda\.so",
        "the model needs a GPU, but torch finds none that it can use",
        "Choose an instance with a GPU (ml.g5.xlarge) and an image with CUDA, or set deviceType:"
        " cpu in model-config.yaml",
    ),
    _rule(
        r"AccessDenied(?:Exception)?.*?((?:s3|ecr|kms|logs):\w+)|not authorized to perform:"
        r" ?([\w:]+)|\b(AccessDenied)\b",
        "the role may not do {0}",
        "Give the execution role that permission: infra/iam has the minimum policy",
    ),
    _rule(
        r"Could not resolve|Temporary failure in name resolution|Could not find a version that"
        r" satisfies|No matching distribution found",
        "a package could not be installed at the start",
        "Put it into the image, or give the container access to a package index (subnets with"
        " internet access, no network isolation)",
    ),
    _rule(
        r"holds (nothing|no archive|\d+ archives)",
        "the model is not in the expected place: the directory holds {0}",
        "It must contain one .mar, or the unpacked content of one. Deploy with `tsx deploy`, which"
        " uploads the model in this form",
    ),
    _rule(
        r"No space left on device",
        "the disk of the container is full",
        "Make the archive smaller; on Lambda raise lambda.storage, on SageMaker choose an instance"
        " with its own disk (ml.c6id…)",
    ),
    _rule(
        r"Address already in use",
        "another process in the container uses the port",
        "Start one server only: leave the image's ENTRYPOINT as it is, and no second command",
    ),
    _rule(
        r"Error: (.*(?:TSX_|SAGEMAKER_)\w+.*)",
        "a variable of the environment is wrong: {0}",
        "Correct it under [deploy] env and deploy again",
    ),
)
SAID: tuple[DiagnosisRule, ...] = (
    _rule(
        r"CannotPullContainer|ImagePullBackOff|ErrImagePull|manifest unknown|image .*(?:does not"
        r" exist|not found)|InvalidImage"
        r"|ImageAccessDenied",
        "the image cannot be pulled",
        "Check that it is in ECR in this region under that tag or digest, and that the role allows"
        " ecr:BatchGetImage",
    ),
    _rule(
        r"image manifest.*not supported|media ?type",
        "the image has a format that the platform does not accept",
        "Build it with `docker buildx build --provenance=false`: Lambda and SageMaker accept a"
        " single manifest, not a list",
    ),
    _rule(
        r"Unable to (?:write|download)|failed to download model data|ModelData|could not access"
        r" model data|S3.*(?:denied|403|404)",
        "the model cannot be read from S3",
        "The role needs s3:GetObject on the bucket (sagemaker.bucket), in the same region;"
        " infra/iam has the policy",
    ),
    _rule(
        r"InsufficientInstanceCapacity|Insufficient capacity|Unable to provision",
        "AWS has no free capacity for that instance type now",
        "Try again later, choose another sagemaker.instance_type, or another region",
    ),
    _rule(
        r"not enough hardware resources",
        "no instance of the endpoint has room for a copy of the component",
        "Lower sagemaker.component.memory, cpus or gpus (an instance keeps a part of its memory for"
        " itself), raise max_instances, or choose a larger sagemaker.instance_type",
    ),
    _rule(
        r"ResourceLimitExceeded|account-level service limit|quota",
        "the account's quota for that instance type is too small",
        "Request an increase in Service Quotas (SageMaker, 'for endpoint usage'), or choose another"
        " sagemaker.instance_type",
    ),
    _rule(
        r"\b(?:alarm|ALARM)\b",
        "an alarm went off while the new version had its share of the traffic, and the previous"
        " version is restored",
        "`tsx deploy logs` shows the log of the new version; `tsx deploy status` shows the alarms",
    ),
    _rule(
        r"(?:assume|not able to assume|cannot be assumed).*role|role.*(?:cannot be assumed|trust)",
        "the platform may not assume the role",
        "Its trust policy must name the service (sagemaker.amazonaws.com or lambda.amazonaws.com):"
        " infra/iam has it",
    ),
    _rule(
        r"CrashLoopBackOff",
        "the container starts and ends again and again",
        "The log has the reason; `tsx check --target container MODEL.mar` starts it on this"
        " machine",
    ),
    _rule(
        r"Init(?:ialization)? ?(?:timed out|timeout)|Task timed out|timed out after",
        "it did not answer within its timeout",
        "Raise lambda.timeout, or lambda.memory, which adds CPU so that the model loads faster",
    ),
)
ENGINE = _rule(
    r"\b(docker|podman) (?:run|start) ended with 12[567]\b",
    "{0} itself failed, before anything of the image was started",
    "Its message says what this machine lacks, such as a program, a right or a free port",
)
NOT_LOADED = _rule(
    r"Error: (.* does not load.*)",
    "{0}",
    "The traceback above says where. `tsx archive --check MODEL.mar` loads it on this machine in"
    " the same way",
)
NO_PING = _rule(
    r"ping health check|health check|readiness probe failed|unhealthy",
    "nothing answered /ping with 200 within the startup timeout",
    "If the log shows that the model was still loading, raise sagemaker.startup_timeout (up to 1h)."
    " `tsx check --target sagemaker MODEL.mar` runs the same start on this machine and measures its"
    " time",
)
SILENT = (
    "The container wrote no log line: the image was not started, or the role does not allow logs."
    " The role needs logs:CreateLogStream and logs:PutLogEvents; check the image's ENTRYPOINT and"
    " platform as well."
)
MOST_CAUSES = 3  # more are likely to follow from the first ones


class Diagnosis(NamedTuple):
    cause: str
    way: str
    line: str  # that gave it away

    def __str__(self) -> str:
        return f"{self.cause[:1].upper()}{self.cause[1:]}. {self.way}."


def diagnose(reason: str, lines: Sequence[str]) -> list[Diagnosis]:
    """The likely causes, what the log shows first; none where no rule knows anything of it."""
    found: dict[str, Diagnosis] = {}
    _look(found, [ENGINE], lines)
    if found:  # an engine's message is about this machine, unless it names the image's own program
        of_image: dict[str, Diagnosis] = {}
        _look(of_image, [NO_ENTRY, OTHER_MACHINE], lines)
        return list((of_image or found).values())
    for rules, texts in ((LINES, lines), (LINES + SAID, [reason]), (SAID, lines)):
        _look(found, rules, texts)
    for last, texts in ((NOT_LOADED, lines), (NO_PING, [reason])):
        if not found:
            _look(found, [last], texts)
    return list(found.values())[:MOST_CAUSES]


def _look(
    found: dict[str, Diagnosis], rules: Sequence[DiagnosisRule], texts: Sequence[str]
) -> None:
    for rule in rules:
        for text in texts:
            match = rule.pattern.search(text)
            if match is not None and rule.way not in found:
                what = next((group for group in match.groups() if group), "")
                found[rule.way] = Diagnosis(
                    rule.cause.format(what.rstrip(". ")), rule.way, text.strip()
                )
