"""Images and sounds in the messages of a chat."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.multimodal_models import (
    data_url,
    image_part,
    png,
    sound_part,
    text_part,
    tokenizer_with,
    wav,
)
from tests.support.processes import free_port  # noqa: F401
