"""The fixture of a registry."""

from tests.runtime.core.conftest import registry as registry
