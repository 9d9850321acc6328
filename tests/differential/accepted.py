"""The differences that are meant, each with its name, as docs/torchserve.md lists them."""

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
    if what != "body" or not (isinstance(theirs, list) and isinstance(ours, list)) or len(theirs) != len(ours):
        return False
    return theirs == [without_new(each) for each in ours]


def described_all(case: Case, what: str, theirs: Any, ours: Any, pair: Any) -> bool:
    """As `described_more`, with what each version's handler says of itself."""
    if not case.target.endswith("/all?customized=true") or not isinstance(ours, list):
        return False
    told = [{key: value for key, value in each.items() if key != "customizedMetadata"} for each in ours]
    return told != ours and described_more(case, what, theirs, told, pair)


def without_new(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    kept = {key: value for key, value in described.items() if key not in NEW_FIELDS}
    kept["workers"] = [{key: value for key, value in worker.items() if key not in NEW_WORKER_FIELDS} for worker in kept.get("workers", [])]
    return kept


def says_more(case: Case, what: str, theirs: Any, ours: Any, pair: Any) -> bool:
    """The same words first, then the reason."""
    return what == "body.message" and isinstance(theirs, str) and isinstance(ours, str) and ours.startswith(theirs) and ours != theirs


def of_answer(*targets: str, management: bool | None = None) -> Covers:
    """Whatever differs in the answers to these."""
    return lambda case, what, theirs, ours, pair: (
        any(case.target == target or (target.endswith("*") and case.target.startswith(target[:-1])) for target in targets)
        and management in (None, case.management)
    )


def of_body(*bodies: bytes) -> Covers:
    return lambda case, what, theirs, ours, pair: case.body in bodies


def typed(case: Case) -> str:
    return next((value for name, value in case.headers if name.lower() == "content-type"), "")


ACCEPTED: list[Difference] = [
    Difference("errors give the reason", says_more),
    Difference("descriptions tell more", described_more),
    Difference("handlers describe themselves for all versions too", described_all),
    Difference(
        "a method that a route does not take is 405, and Allow says which it takes",
        lambda case, what, theirs, ours, pair: what == "header allow" or (pair[1].status == 405 and pair[0].status in (404, 405)),
    ),
    Difference(
        "readiness and metadata of KServe's protocols on every address",
        lambda case, what, theirs, ours, pair: (
            case.method == "GET" and case.target in ("/v1/models/echo", "/v1/models/nobody", "/v2") and not case.management
        ),
    ),
    Difference(
        "errors of the v2 protocol have its own field",
        lambda case, what, theirs, ours, pair: what == "body.error" and case.target.startswith("/v2/"),
    ),
    Difference(
        "a v2 body without a type is JSON",
        lambda case, what, theirs, ours, pair: case.target.startswith("/v2/models/echo") and what == "body.headers" and not typed(case),
    ),
    Difference(
        "a media type is read whatever the case of its letters",
        lambda case, what, theirs, ours, pair: what == "body.inputs" and typed(case) == "APPLICATION/JSON",
    ),
    Difference(
        "text comes in the charset that it names",
        lambda case, what, theirs, ours, pair: what == "body.inputs" and "iso-8859-1" in typed(case),
    ),
    Difference("a handler's own Cache-Control holds", of_body(b"header Cache-Control=max-age=5")),
    Difference("handlers find headers whatever the case of their letters", of_body(b"named content-type", b"named x-test")),
    Difference("limit=0 is the default page, and the last page names no next one", of_answer("/models?limit=*", management=True)),
    Difference("a url that cannot be one is told by its kind", of_answer("/models?url=", "/models?url=/etc/passwd", management=True)),
    Difference("an archive that is none says what it is", of_answer("/models?url=junk.mar", management=True)),
    Difference("what is no JSON is the client's error", of_body(b"{not json")),
    Difference(
        "a parameter that is no number is an error, and registers nothing",
        lambda case, what, theirs, ours, pair: "counted" in case.target,
    ),
    Difference(
        "a registration by JSON has the same default delay as one by parameters",
        lambda case, what, theirs, ours, pair: case.target == "/models/mine" and what == "body",
    ),
    Difference(
        "a model that does not load is not registered",
        lambda case, what, theirs, ours, pair: "broken" in case.target or (what == "body.models" and "broken" in str(theirs)),
    ),
]
