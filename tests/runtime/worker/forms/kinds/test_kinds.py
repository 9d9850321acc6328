"""The list of all forms: valid names, and no imports of their packages."""

from __future__ import annotations

import subprocess
import sys

from tsx_archiver.metadata.forms import NAME, REFERENCE
from tsx_runtime.worker.forms.kinds import known_forms

# Packages whose import takes a second and more.
HEAVY = (
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


def test_a_worker_that_looks_for_a_form_imports_none_of_their_packages(processes: None) -> None:
    code = f"""
import sys
import tsx_runtime.worker.handlers.base
from tsx_runtime.worker.forms.kinds import known_forms

before = set(sys.modules)
known_forms()
print([name for name in {HEAVY!r} if name in set(sys.modules) - before])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
