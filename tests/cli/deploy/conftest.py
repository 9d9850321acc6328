"""One AWS of moto's for all tests of tsx deploy, emptied before each that uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.aws import Account, aws


@pytest.fixture(scope="package")
def account() -> Iterator[Account]:
    with aws() as account:
        yield account
