"""The requests: those of `STATELESS` change nothing, those of `STORY` build on each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BOUNDARY = "d1ff"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


class Case(NamedTuple):
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    management: bool = False

    def __str__(self) -> str:
        kind = next((value for name, value in self.headers if name.lower() == "content-type"), "")
        parts = [
            self.method,
            "management" if self.management else "",
            self.target,
            kind,
            repr((self.body or b"")[:40])[2:-1],
        ]
        return " ".join(filter(None, parts))


def part(name: str, value: bytes, *lines: str, disposition: str = "") -> bytes:
    head = "\r\n".join([f'Content-Disposition: form-data; name="{name}"{disposition}', *lines])
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


BODIES: list[tuple[str | None, bytes]] = [
    ("application/json", b'{"a": [1, 2.5, null, true], "b": "\xc3\xa9"}'),
    ("application/json", b"[1, 2]"),
    ("application/json", b'"text"'),
    ("application/json", b"17"),
    ("application/json", b"{not json"),
    ("application/json", b""),
    ("application/json; charset=utf-8", b'{"a": 1}'),
    ("APPLICATION/JSON", b'{"a": 1}'),
    ("application/vnd.api+json", b'{"a": 1}'),
    ("text/plain", "grün".encode()),
    ("text/plain; charset=utf-8", "grün".encode()),
    ("text/plain; charset=iso-8859-1", "grün".encode("latin-1")),
    ("text/csv", b"1,2\n3,4\n"),
    ("text/html", b"<p>"),
    ("text/plain", b"\xff\xfe not utf-8"),
    ("application/octet-stream", bytes(range(256))),
    ("application/octet-stream", b""),
    ("image/jpeg", b"\xff\xd8\xff\xe0"),
    ("application/x-www-form-urlencoded", b"a=1&b=two+words&c=%C3%A9"),
    ("application/x-www-form-urlencoded", b"a=1&a=2"),
    ("application/x-www-form-urlencoded", b""),
    (FORM, form(part("data", b"plain"))),
    (FORM, form(part("data", b"plain"), part("other", b"more"))),
    (
        FORM,
        form(
            part(
                "data",
                b"\x00\x01",
                "Content-Type: application/octet-stream",
                disposition='; filename="a.bin"',
            )
        ),
    ),
    (
        FORM,
        form(
            part(
                "data",
                b'{"a": 1}',
                "Content-Type: application/json",
                disposition='; filename="a.json"',
            )
        ),
    ),
    (
        FORM,
        form(part("data", b"words", "Content-Type: text/plain", disposition='; filename="a.txt"')),
    ),
    (FORM, form(part("data", b"1"), part("data", b"2"))),
    (FORM, form(part("data", b""))),
    (None, b"no type"),
    (None, b""),
]

MODEL_PATHS = [
    "/predictions/{m}",
    "/predictions/{m}/1.0",
    "/predictions/{m}/1.0/more/of/it",
    "/predictions/{m}?a=1&b=two%20words",
    "/predictions/{m}/1.0?a=1&a=2",
    "/predictions/{m}/9.9",
    "/predictions/nobody",
    "/explanations/{m}",
    "/explanations/{m}/1.0",
    "/explanations/{m}/9.9",
    "/explanations/nobody",
    "/v1/models/{m}:predict",
    "/v1/models/{m}:explain",
    "/v1/models/nobody:predict",
    "/v2/models/{m}/infer",
    "/v2/models/{m}/explain",
    "/v2/models/nobody/infer",
    "/models/{m}/invoke",
    "/models/nobody/invoke",
    "/invocations?model_name={m}",
    "/invocations?model_name=nobody",
    "/{m}/predict",
    "/{m}/1.0/predict",
    "/{m}/predict?a=1",
    "/{m}/9.9/predict",
    "/nobody/predict",
]

OTHER_PATHS = [
    "/",
    "/nothing",
    "/ping",
    "/ping/",
    "/predictions",
    "/predictions/",
    "/invocations",
    "/models",
    "/models/echo",
    "/v1/models/echo",
    "/v1/models/nobody",
    "/v2",
    "/wfpredict/nobody",
    "/token?type=inference",
    "/favicon.ico",
]

ACTS = [
    "text hello",
    "text grün",
    "raw",
    "array",
    "none",
    "number",
    "fraction",
    "truth",
    "rows",
    "table",
    "empty",
    "unsupported",
    "few",
    "many",
    "nolist",
    *[
        f"status {code}"
        for code in (
            200,
            201,
            202,
            203,
            205,
            206,
            299,
            400,
            401,
            404,
            409,
            413,
            429,
            500,
            503,
            507,
            599,
        )
    ],
    "header X-One=1",
    "header x-one=1",
    "header Content-Type=image/png",
    "header Cache-Control=max-age=5",
    "kind text/plain",
    "kind application/json; charset=utf-8",
    "fail because",
    *[f"refuse {code} no such thing" for code in (400, 404, 409, 422, 500, 503, 507)],
    "memory",
    "cuda",
    "named Content-Type",
    "named content-type",
    "named X-Test",
    "named x-test",
    "named absent",
    "facts",
]

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")


def stateless() -> Iterator[Case]:
    for kind, body in BODIES:
        headers = () if kind is None else (("Content-Type", kind),)
        yield Case("POST", "/predictions/echo", headers, body)
        yield Case("PUT", "/predictions/echo/1.0?q=1", headers, body)
        yield Case("POST", "/echo/predict?q=1", headers, body)
    for path in MODEL_PATHS:
        target = path.format(m="echo")
        for method in METHODS:
            yield Case(method, target, (("Content-Type", "text/plain"),), b"hello")
        yield Case("GET", target)
    for path in OTHER_PATHS:
        for method in METHODS:
            yield Case(method, path)
    for act in ACTS:
        yield Case(
            "POST",
            "/predictions/actor",
            (("Content-Type", "text/plain"), ("X-Test", "Yes")),
            act.encode(),
        )
    yield Case(
        "POST",
        "/invocations",
        (("Content-Type", FORM),),
        form(part("model_name", b"echo"), part("data", b"x")),
    )
    yield Case(
        "POST",
        "/predictions/echo",
        (("x-test", "lower"), ("CONTENT-TYPE", "application/json")),
        b'{"a":1}',
    )
    yield from management_reads()


def management_reads() -> Iterator[Case]:
    for target in (
        "/models",
        "/models?limit=1",
        "/models?limit=2",
        "/models?limit=3",
        "/models?limit=1&next_page_token=1",
        "/models?limit=1&next_page_token=2",
        "/models?next_page_token=99",
        "/models?limit=-1",
        "/models?limit=0",
        "/models?limit=1000",
        "/models?next_page_token=-5",
        "/models/echo",
        "/models/echo/1.0",
        "/models/echo/all",
        "/models/echo/9.9",
        "/models/nobody",
        "/models/actor",
        "/models/described",
        "/models/described?customized=true",
        "/models/described/1.0?customized=true",
        "/models/described/all?customized=true",
        "/v1/models/echo",
        "/v1/models/nobody",
        "/predictions/echo",
        "/nothing",
        "/",
        "/ping",
        "/models/echo/1.0/set-default/more",
    ):
        yield Case("GET", target, management=True)
    for method, target in (
        ("POST", "/models"),
        ("POST", "/models?url="),
        ("POST", "/models?url=absent.mar"),
        ("POST", "/models?url=junk.mar"),
        ("POST", "/models?url=../echo.mar"),
        ("POST", "/models?url=%2e%2e%2fecho.mar"),
        ("POST", "/models?url=/etc/passwd"),
        ("POST", "/models?url=echo.mar"),
        ("POST", "/models?url=other.mar&runtime=cobol"),
        ("PUT", "/models/nobody?min_worker=1"),
        ("PUT", "/models/echo/9.9?min_worker=1"),
        ("PUT", "/models/echo?min_worker=3&max_worker=1"),
        ("PUT", "/models/echo/9.9/set-default"),
        ("PUT", "/models/nobody/1.0/set-default"),
        ("DELETE", "/models/nobody"),
        ("DELETE", "/models/echo/9.9"),
        ("PATCH", "/models/echo"),
        ("DELETE", "/models"),
        ("PUT", "/models"),
        ("POST", "/models/echo"),
        ("POST", "/models/echo/1.0"),
    ):
        yield Case(method, target, management=True)


def manage(method: str, target: str, body: bytes | None = None) -> Case:
    return Case(
        method,
        target,
        (("Content-Type", "application/json"),) if body else (),
        body,
        management=True,
    )


ASK = Case("POST", "/predictions/other", (), b"x")

STORY = [
    manage("POST", "/models?url=other.mar"),
    manage("GET", "/models/other"),
    ASK,
    manage("GET", "/models/other?customized=true"),
    manage("POST", "/models?url=other.mar"),
    manage("PUT", "/models/other?min_worker=1&synchronous=true"),
    ASK,
    manage("GET", "/models/other"),
    manage("PUT", "/models/other?min_worker=2&synchronous=true"),
    manage("GET", "/models/other"),
    manage("PUT", "/models/other?min_worker=1&max_worker=1&synchronous=true"),
    manage("PUT", "/models/other/1.0?min_worker=1&synchronous=true"),
    manage("POST", "/models?url=other-2.mar&initial_workers=1&synchronous=true"),
    manage("GET", "/models"),
    manage("GET", "/models/other/all"),
    manage("GET", "/models/other"),
    Case("POST", "/predictions/other/2.0", (), b"x"),
    manage("DELETE", "/models/other/1.0"),
    manage("PUT", "/models/other/2.0/set-default"),
    manage("GET", "/models/other"),
    manage("DELETE", "/models/other/1.0"),
    Case("POST", "/predictions/other/1.0", (), b"x"),
    ASK,
    manage("DELETE", "/models/other/2.0"),
    manage("GET", "/models/other"),
    ASK,
    manage(
        "POST",
        "/models",
        b'{"url": "other.mar", "model_name": "mine", "batch_size": 4, "initial_workers": 1, "synchronous": true}',
    ),
    manage("GET", "/models/mine"),
    Case("POST", "/predictions/mine", (), b"x"),
    manage(
        "POST",
        "/models?url=other.mar&model_name=yours&response_timeout=7&startup_timeout=60&initial_workers=1&synchronous=true",
    ),
    manage("GET", "/models/yours"),
    manage("POST", "/models", b"{not json"),
    manage("POST", "/models?url=other.mar&model_name=counted&batch_size=many&max_batch_delay=soon"),
    manage("GET", "/models/counted"),
    manage("DELETE", "/models/counted"),
    manage("DELETE", "/models/mine/1.0"),
    manage("DELETE", "/models/yours"),
    manage("DELETE", "/models/yours"),
    manage("POST", "/models?url=decided.mar&initial_workers=0"),
    manage("GET", "/models/decided"),
    manage("DELETE", "/models/decided"),
    manage(
        "POST",
        "/models?url=other.mar&model_name=zero&batch_size=0&max_batch_delay=&initial_workers=&response_timeout=&startup_timeout=",
    ),
    manage("GET", "/models/zero"),
    Case("POST", "/predictions/zero", (), b"x"),
    manage("PUT", "/models/zero?min_worker=0&max_worker=0&synchronous=true&number_gpu="),
    Case("POST", "/predictions/zero", (), b"x"),
    manage("DELETE", "/models/zero"),
    manage("POST", "/models?url=other.mar&model_name=late&startup_timeout=0&initial_workers=1"),
    manage("POST", "/models?url=full.mar&initial_workers=1"),
    manage("POST", "/models?url=broken.mar&initial_workers=1&synchronous=true"),
    manage("GET", "/models/broken"),
    manage("GET", "/models"),
]
