"""Limits for JSON and YAML documents, which are checked before parsing."""

from __future__ import annotations

import json

import pytest

from tsx_archiver.errors import InvalidConfig, InvalidManifest
from tsx_archiver.metadata.manifest import MAX_MANIFEST_VALUES, parse_manifest
from tsx_archiver.metadata.modelconfig import ModelConfig
from tsx_archiver.metadata.safejson import MAX_DEPTH, MAX_DIGITS, load_json
from tsx_archiver.metadata.safeyaml import MAX_NODES, load_yaml


def load(content: bytes, bytes_: int = 1000, values: int = 10):
    return load_json(content, most_bytes=bytes_, most_values=values)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'"' + b"a" * 999 + b'"', "it has 1001 bytes; at most 1000 are read"),
        (b"[" + b"1," * 9 + b"[]]", "it has more than 10 values"),
        (b'{"a": "' + b"[" * 10 + b'"}', "it has more than 10 values"),
        (b"[1", "Expecting"),
        (b"\xff\xfe\xfd", "codec can't decode"),
    ],
)
def test_a_document_that_exceeds_a_limit_is_refused(content, text):
    with pytest.raises(ValueError, match=text):
        load(content)


def test_documents_within_the_limits_are_read():
    assert load(b'"' + b"a" * 998 + b'"') == "a" * 998
    assert load(b"[" + b"1," * 9 + b"1]") == [1] * 10
    assert load(b"9" * MAX_DIGITS, 5000) == int("9" * MAX_DIGITS)
    assert load(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, values=100) == json.loads(
        "[" * MAX_DEPTH + "]" * MAX_DEPTH
    )


@pytest.mark.parametrize(
    "content", [b"[" * 65 + b"]" * 65, b'{"a":' * 65 + b"1" + b"}" * 65, b"[" * 100_000]
)
def test_the_nesting_depth_is_limited(content):
    with pytest.raises(ValueError, match="more than 64 deep"):
        load(content, 1 << 20, 200_000)


def test_the_digits_of_a_number_are_limited():
    with pytest.raises(ValueError, match="a number has 4301 digits"):
        load(b"9" * (MAX_DIGITS + 1), 5000)


@pytest.mark.slow
def test_a_manifest_may_have_100_000_checksums_but_not_a_million_lists():
    checksums = {f"files/{number}.bin": f"{number:064x}" for number in range(100_000)}
    read = parse_manifest(
        b"\xef\xbb\xbf" + json.dumps({"model": {}, "sha256": checksums}).encode(),
        default_name="m",
        source="m.mar",
    )
    assert len(read.checksums) == 100_000
    with pytest.raises(InvalidManifest, match=f"more than {MAX_MANIFEST_VALUES} values"):
        parse_manifest(b'{"a": [' + b"[]," * 1_000_000 + b"1]}", default_name="m", source="m.mar")


@pytest.mark.slow
def test_the_values_of_a_configuration_are_counted_before_parsing():
    labels = "\n".join(f"  {number}: label {number}" for number in range(MAX_NODES // 2 - 10))
    assert (
        len(load_yaml(f"labels:\n{labels}\n".encode(), source="x")["labels"]) == MAX_NODES // 2 - 10
    )
    for content in (b"a: [" + b"1," * 200_000 + b"1]", b"- 1\n" * 200_000):
        with pytest.raises(InvalidConfig, match="lines and commas"):
            load_yaml(content, source="x")


def test_a_configuration_is_serialized_once_for_all_workers():
    config = ModelConfig(raw={"a": [1, 2]})
    assert config.text == "a:\n- 1\n- 2\n"
    assert config.text is config.text
