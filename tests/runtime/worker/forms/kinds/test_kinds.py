"""The list of all forms, with valid names and without imports of their packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tsx_archiver.metadata.forms import NAME, REFERENCE
from tsx_runtime.worker.forms.kinds import known_forms

# packages whose import takes a second or more
SLOW_PACKAGES = (
    "sympy",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "onnx",
    "onnxruntime",
    "openvino",
    "nncf",
    "torchao",
)


def test_names_are_those_that_an_archive_may_have() -> None:
    assert all(
        name == form.name and NAME.fullmatch(name) and name != REFERENCE
        for name, form in known_forms().items()
    )


@pytest.mark.nightly
def test_finding_a_form_does_not_import_the_packages_of_forms(processes: None) -> None:
    code = f"""
import sys
import tsx_runtime.worker.handlers.base
from tsx_runtime.worker.forms.kinds import known_forms

before = set(sys.modules)
known_forms()
print([name for name in {SLOW_PACKAGES!r} if name in set(sys.modules) - before])
"""
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert process.stdout == "[]\n"
