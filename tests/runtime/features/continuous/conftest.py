"""The fixtures of workers."""

from tests.runtime.worker.conftest import start_worker as start_worker
