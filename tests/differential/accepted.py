"""The differences that are meant, each with its name, as docs/reference/torchserve.md lists
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.differential.cases import Case

# The case, what differs (see `compare.differences`), their value, ours, and both whole answers.
Covers = Callable[[Case, str, Any, Any, Any], bool]

NEW_FIELDS = {"jobQueueSize", "maxBatchBytes", "maxQueueBytes", "overloadStatus", "workerRestarts"}
NEW_WORKER_FIELDS = {"restarts"}


class Difference(NamedTuple):
    name: str
    covers: Covers


def described_more(case: Case, what: str, theirs: Any, ours: Any, pair: Any) -> bool:
    if (
        what != "body"
        or not (isinstance(theirs, list) and isinstance(ours, list))
        or len(theirs) != len(ours)
    ):
        return False
    return theirs == [without_new(each) for each in ours]


def described_all(case: Case, what: str, theirs: Any, ours: Any, pair: Any) -> bool:
    """As `described_more`, with what each version's handler says of itself."""
    if not case.target.endswith("/all?customized=true") or not isinstance(ours, list):
        return False
    reported = [
        {key: value for key, value in each.items() if key != "customizedMetadata"} for each in ours
    ]
    return reported != ours and described_more(case, what, theirs, reported, pair)


def without_new(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    kept = {key: value for key, value in described.items() if key not in NEW_FIELDS}
    kept["workers"] = [
        {key: value for key, value in worker.items() if key not in NEW_WORKER_FIELDS}
        for worker in kept.get("workers", [])
    ]
    return kept


def says_more(case: Case, what: str, theirs: Any, ours: Any, pair: Any) -> bool:
    """The same words first, then the reason."""
    return (
        what == "body.message"
        and isinstance(theirs, str)
        and isinstance(ours, str)
        and ours.startswith(theirs)
        and ours != theirs
    )


def of_answer(*targets: str, management: bool | None = None) -> Covers:
    """Whatever differs in the answers to these."""
    return lambda case, what, theirs, ours, pair: (
        any(
            case.target == target or (target.endswith("*") and case.target.startswith(target[:-1]))
            for target in targets
        )
        and management in (None, case.management)
    )


def of_body(*bodies: bytes) -> Covers:
    return lambda case, what, theirs, ours, pair: case.body in bodies


def typed(case: Case) -> str:
    return next((value for name, value in case.headers if name.lower() == "content-type"), "")


ACCEPTED: list[Difference] = [
    Difference("errors give the reason", says_more),
    Difference(
        "only models with sequences are told about sequences",
        lambda case, what, theirs, ours, pair: says_more(
            case, what, str(theirs).partition(" If this is a sequence inference")[0], ours, pair
        ),
    ),
    Difference("descriptions have more fields", described_more),
    Difference("/all?customized=true includes the descriptions of handlers", described_all),
    Difference(
        "an unsupported method is answered with 405 and the supported ones in Allow",
        lambda case, what, theirs, ours, pair: (
            what == "header allow" or (pair[1].status == 405 and pair[0].status in (404, 405))
        ),
    ),
    Difference(
        "GET / is a short index",
        lambda case, what, theirs, ours, pair: (case.method, case.target) == ("GET", "/"),
    ),
    Difference(
        "readiness and metadata of KServe's protocols are on every address",
        lambda case, what, theirs, ours, pair: (
            case.method == "GET"
            and case.target in ("/v1/models/echo", "/v1/models/nobody", "/v2")
            and not case.management
        ),
    ),
    Difference(
        "/v1/models/MODEL answers OpenAI's clients as well",
        lambda case, what, theirs, ours, pair: (
            case.target.startswith("/v1/models/")
            and what in {"body.created", "body.error", "body.id", "body.object", "body.owned_by"}
        ),
    ),
    Difference(
        "errors of the v2 protocol have the protocol's error field",
        lambda case, what, theirs, ours, pair: (
            what == "body.error" and case.target.startswith("/v2/")
        ),
    ),
    Difference(
        "a v2 body without a content type is JSON",
        lambda case, what, theirs, ours, pair: (
            case.target.startswith("/v2/models/echo") and what == "body.headers" and not typed(case)
        ),
    ),
    Difference(
        "media types are case-insensitive",
        lambda case, what, theirs, ours, pair: (
            what == "body.inputs" and typed(case) == "APPLICATION/JSON"
        ),
    ),
    Difference(
        "text is sent in the charset that its content type names",
        lambda case, what, theirs, ours, pair: (
            what == "body.inputs" and "iso-8859-1" in typed(case)
        ),
    ),
    Difference(
        "JSON answers are labelled as JSON",
        lambda case, what, theirs, ours, pair: (
            what == "header content-type" and (theirs, ours) == (None, "application/json")
        ),
    ),
    Difference("a handler's Cache-Control is kept", of_body(b"header Cache-Control=max-age=5")),
    Difference(
        "handlers find headers in any case", of_body(b"named content-type", b"named x-test")
    ),
    Difference(
        "limit=0 means the default limit, and the last page has no token",
        of_answer("/models?limit=*", management=True),
    ),
    Difference(
        "an invalid url is reported with its kind of error",
        of_answer("/models?url=", "/models?url=/etc/passwd", management=True),
    ),
    Difference(
        "a file that is not an archive is described",
        of_answer("/models?url=junk.mar", management=True),
    ),
    Difference("invalid JSON is the client's error", of_body(b"{not json")),
    Difference(
        "a parameter that is not a number is an error, and registers nothing",
        lambda case, what, theirs, ours, pair: "counted" in case.target,
    ),
    Difference(
        "registrations by JSON and by parameters have the same default delay",
        lambda case, what, theirs, ours, pair: case.target == "/models/mine" and what == "body",
    ),
    Difference(
        "a model that does not load is not registered",
        lambda case, what, theirs, ours, pair: (
            "broken" in case.target
            or (
                what == "body.models"
                and any(name in str(theirs) for name in ("broken", "full", "late"))
            )
        ),
    ),
]
