"""The accepted differences, named as in docs/reference/torchserve.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.differential.cases import Case

# Its arguments are the case, the part (see `compare.differences`), both values and both responses.
Covers = Callable[[Case, str, Any, Any, Any], bool]

NEW_FIELDS = {"jobQueueSize", "maxBatchBytes", "maxQueueBytes", "overloadStatus", "workerRestarts"}
NEW_WORKER_FIELDS = {"restarts"}


class Difference(NamedTuple):
    name: str
    covers: Covers


def has_new_fields(case: Case, part: str, theirs: Any, ours: Any, pair: Any) -> bool:
    if (
        part != "body"
        or not (isinstance(theirs, list) and isinstance(ours, list))
        or len(theirs) != len(ours)
    ):
        return False
    return theirs == [without_new_fields(version) for version in ours]


def has_handler_metadata(case: Case, part: str, theirs: Any, ours: Any, pair: Any) -> bool:
    """Tell whether descriptions differ only by new fields and the handlers' own metadata."""
    if not case.target.endswith("/all?customized=true") or not isinstance(ours, list):
        return False
    versions = [
        {key: value for key, value in version.items() if key != "customizedMetadata"}
        for version in ours
    ]
    return versions != ours and has_new_fields(case, part, theirs, versions, pair)


def without_new_fields(description: Any) -> Any:
    if not isinstance(description, dict):
        return description
    fields = {key: value for key, value in description.items() if key not in NEW_FIELDS}
    fields["workers"] = [
        {key: value for key, value in worker.items() if key not in NEW_WORKER_FIELDS}
        for worker in fields.get("workers", [])
    ]
    return fields


def has_longer_message(case: Case, part: str, theirs: Any, ours: Any, pair: Any) -> bool:
    """Tell whether our error begins with TorchServe's text and continues with a reason."""
    return (
        part == "body.message"
        and isinstance(theirs, str)
        and isinstance(ours, str)
        and ours.startswith(theirs)
        and ours != theirs
    )


def any_difference_of(*targets: str, management: bool | None = None) -> Covers:
    """Accept all differences in responses to these targets."""
    return lambda case, part, theirs, ours, pair: (
        any(
            case.target == target or (target.endswith("*") and case.target.startswith(target[:-1]))
            for target in targets
        )
        and management in (None, case.management)
    )


def body_is(*bodies: bytes) -> Covers:
    return lambda case, part, theirs, ours, pair: case.body in bodies


def content_type_of(case: Case) -> str:
    return next((value for name, value in case.headers if name.lower() == "content-type"), "")


ACCEPTED: list[Difference] = [
    Difference("errors give the reason", has_longer_message),
    Difference(
        "only models with sequences are told about sequences",
        lambda case, part, theirs, ours, pair: has_longer_message(
            case, part, str(theirs).partition(" If this is a sequence inference")[0], ours, pair
        ),
    ),
    Difference("descriptions have more fields", has_new_fields),
    Difference("/all?customized=true includes the descriptions of handlers", has_handler_metadata),
    Difference(
        "an unsupported method is answered with 405 and the supported ones in Allow",
        lambda case, part, theirs, ours, pair: (
            part == "header allow" or (pair[1].status == 405 and pair[0].status in (404, 405))
        ),
    ),
    Difference(
        "GET / is a short index",
        lambda case, part, theirs, ours, pair: (case.method, case.target) == ("GET", "/"),
    ),
    Difference(
        "readiness and metadata of KServe's protocols are on every address",
        lambda case, part, theirs, ours, pair: (
            case.method == "GET"
            and case.target in ("/v1/models/echo", "/v1/models/nobody", "/v2")
            and not case.management
        ),
    ),
    Difference(
        "/v1/models/MODEL answers OpenAI's clients as well",
        lambda case, part, theirs, ours, pair: (
            case.target.startswith("/v1/models/")
            and part in {"body.created", "body.error", "body.id", "body.object", "body.owned_by"}
        ),
    ),
    Difference(
        "errors of the v2 protocol have the protocol's error field",
        lambda case, part, theirs, ours, pair: (
            part == "body.error" and case.target.startswith("/v2/")
        ),
    ),
    Difference(
        "a v2 body without a content type is JSON",
        lambda case, part, theirs, ours, pair: (
            case.target.startswith("/v2/models/echo")
            and part == "body.headers"
            and not content_type_of(case)
        ),
    ),
    Difference(
        "media types are case-insensitive",
        lambda case, part, theirs, ours, pair: (
            part == "body.inputs" and content_type_of(case) == "APPLICATION/JSON"
        ),
    ),
    Difference(
        "text is sent in the charset that its content type names",
        lambda case, part, theirs, ours, pair: (
            part == "body.inputs" and "iso-8859-1" in content_type_of(case)
        ),
    ),
    Difference(
        "JSON answers are labelled as JSON",
        lambda case, part, theirs, ours, pair: (
            part == "header content-type" and (theirs, ours) == (None, "application/json")
        ),
    ),
    Difference("a handler's Cache-Control is kept", body_is(b"header Cache-Control=max-age=5")),
    Difference(
        "handlers find headers in any case", body_is(b"named content-type", b"named x-test")
    ),
    Difference(
        "limit=0 means the default limit, and the last page has no token",
        any_difference_of("/models?limit=*", management=True),
    ),
    Difference(
        "an invalid url is reported with its kind of error",
        any_difference_of("/models?url=", "/models?url=/etc/passwd", management=True),
    ),
    Difference(
        "a file that is not an archive is described",
        any_difference_of("/models?url=junk.mar", management=True),
    ),
    Difference("invalid JSON is the client's error", body_is(b"{not json")),
    Difference(
        "a parameter that is not a number is an error, and registers nothing",
        lambda case, part, theirs, ours, pair: "counted" in case.target,
    ),
    Difference(
        "registrations by JSON and by parameters have the same default delay",
        lambda case, part, theirs, ours, pair: case.target == "/models/mine" and part == "body",
    ),
    Difference(
        "a model that does not load is not registered",
        lambda case, part, theirs, ours, pair: (
            "broken" in case.target
            or (
                part == "body.models"
                and any(name in str(theirs) for name in ("broken", "full", "late"))
            )
        ),
    ),
]
