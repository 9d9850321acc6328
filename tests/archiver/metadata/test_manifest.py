from __future__ import annotations

import json

import pytest

from tsx_archiver import Manifest, split_handler
from tsx_archiver.errors import InvalidManifest
from tsx_archiver.metadata.manifest import parse_manifest


def parse(data: object) -> Manifest:
    return parse_manifest(json.dumps(data).encode(), default_name="fallback", source="x.mar")


def test_every_field_is_read() -> None:
    model = {
        "modelName": "m",
        "modelVersion": "3",
        "handler": "h.py:f",
        "serializedFile": "w.pt",
        "modelFile": "m.py",
        "requirementsFile": "r.txt",
        "configFile": "c.yaml",
        "extensions": "e",
    }
    manifest = parse({"runtime": "python3", "model": model})
    expected = {
        "model_name": "m",
        "version": "3",
        "handler": "h.py:f",
        "handler_file": "h.py",
        "serialized_file": "w.pt",
        "model_file": "m.py",
        "requirements_file": "r.txt",
        "config_file": "c.yaml",
        "extensions": "e",
        "runtime": "python3",
        "checksums": {},
    }
    assert {name: getattr(manifest, name) for name in expected} == expected


def test_unknown_fields_of_an_old_manifest_are_kept() -> None:
    data = {
        "modelServerVersion": "1.0",
        "implementationVersion": "1.0",
        "specificationVersion": "1.0",
        "license": "Apache 2.0",
        "model": {
            "modelName": "old",
            "modelVersion": 1.5,
            "sourceVocab": "source_vocab.pt",
            "handler": "service:handle",
        },
    }
    manifest = parse(data)
    assert manifest.data == data
    assert (manifest.version, manifest.handler_file) == ("1.5", "service")


@pytest.mark.parametrize(
    "data", [{}, {"model": {}}, {"model": None}, {"model": {"modelName": "", "modelVersion": None}}]
)
def test_missing_fields_get_torchserves_defaults(data: dict[str, object]) -> None:
    manifest = parse(data)
    assert (
        manifest.model_name,
        manifest.version,
        manifest.handler,
        manifest.serialized_file,
        manifest.runtime,
    ) == (
        "fallback",
        "1.0",
        "",
        None,
        "python",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "holds a list"),
        (b'{"model": []}', "model is a list"),
        (b'{"model": {"handler": ["x"]}}', "handler is a list"),
        (b'{"model": {"modelVersion": true}}', "modelVersion is a bool"),
        (b'{"sha256": ["x"]}', "sha256"),
        (b'{"sha256": {"a": 1}}', "sha256"),
    ],
)
def test_the_error_of_a_broken_manifest_names_its_file(content: bytes, message: str) -> None:
    with pytest.raises(InvalidManifest, match=message) as caught:
        parse_manifest(content, default_name="x", source="broken.mar")
    assert caught.value.message.startswith("broken.mar: ")


@pytest.mark.parametrize(
    "key",
    [
        "modelName",
        "modelVersion",
        "handler",
        "serializedFile",
        "modelFile",
        "requirementsFile",
        "configFile",
    ],
)
@pytest.mark.parametrize(
    "value",
    ["../../x", "/etc/passwd", "a/../../b", "..\\x", "C:\\x", "C:/x", "a\x00b", "a\nb", ".."],
)
def test_a_manifest_with_a_path_outside_the_archive_is_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidManifest, match=key):
        parse({"model": {key: value}})


@pytest.mark.parametrize("key", ["modelName", "modelVersion"])
def test_a_model_name_or_version_that_is_a_path_is_refused(key: str) -> None:
    with pytest.raises(InvalidManifest, match="is a path"):
        parse({"model": {key: "a/b"}})


def test_a_path_traversal_before_a_handlers_function_is_refused() -> None:
    with pytest.raises(InvalidManifest, match="handler"):
        parse({"model": {"handler": "../handler.py:handle"}})


@pytest.mark.parametrize(
    ("handler", "parts"),
    [
        ("h.py", ("h.py", None)),
        ("h.py:f", ("h.py", "f")),
        ("h:f", ("h", "f")),
        ("image_classifier", ("image_classifier", None)),
        (":f", (":f", None)),
        ("h.py:not a name", ("h.py:not a name", None)),
    ],
)
def test_a_handler_is_split_into_file_and_function(
    handler: str, parts: tuple[str, str | None]
) -> None:
    assert split_handler(handler) == parts
