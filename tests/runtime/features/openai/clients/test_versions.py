"""The table of tested clients in docs/guides/openai.md has the versions of the tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.client_environments import NODE_CLIENTS, PYTHON_CLIENTS

ROOT = Path(__file__).parents[5]


def test_the_table_has_the_versions_of_the_tests() -> None:
    page = (ROOT / "docs" / "guides" / "openai.md").read_text()
    table = page.partition("## Tested clients")[2].partition("\n- ")[0]
    rows = {
        package: version
        for packages, versions in re.findall(r"^\| (`.*?) \| (\d.*?) \|", table, re.MULTILINE)
        for package, version in zip(
            re.findall("`(.*?)`", packages), versions.split(" with "), strict=True
        )
    }
    constraints = dict(
        re.findall(
            r"^(openai|langchain-openai)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M
        )
    )
    python_clients = dict(pin.split("==") for pin in PYTHON_CLIENTS.values())
    assert rows == constraints | python_clients | NODE_CLIENTS
