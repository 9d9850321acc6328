"""Helm, as a program or through helm-python-sdk: its linter and its template renderer."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

IS_THERE = shutil.which("helm") is not None or importlib.util.find_spec("helm_python") is not None
LIBRARY = """
import helm_python, json, sys

directory, name, namespace, *values = sys.argv[1:]
found = [f"{each['path']}: {each['error']}" for each in helm_python.lint(directory, strict=True)["messages"] if each["severity"] > 1]
rendered = []
with helm_python.Chart.load(directory) as chart:
    for each in values:
        try:
            chart.validate_schema(json.loads(each))
            rendered.append("\\n---\\n".join(text for path, text in chart.render(
                json.loads(each), name=name, namespace=namespace).items() if path.endswith(".yaml")))
        except helm_python.HelmError as error:
            rendered.append(f"# {error}")
print(json.dumps([found, rendered]))
"""


def render(
    directory: Path, name: str, namespace: str, cases: Sequence[Any]
) -> tuple[list[str], list[str]]:
    """Return the linter's findings and the chart rendered with each of the values.

    For values that Helm refuses, the result is a comment with the reason.
    """
    texts = [json.dumps(values) for values in cases]
    if shutil.which("helm") is None:
        # The library runs in a subprocess, since it contains Go's runtime.
        command = [sys.executable, "-c", LIBRARY, str(directory), name, namespace, *texts]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        findings, rendered = json.loads(result.stdout)
        return findings, rendered
    linted = subprocess.run(
        ["helm", "lint", "--strict", directory],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    rendered = []
    for text in texts:
        (directory.parent / "values.json").write_text(text)
        more = ["--namespace", namespace, "--values", str(directory.parent / "values.json")]
        result = subprocess.run(
            ["helm", "template", name, str(directory), *more],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        rendered.append(
            result.stdout
            if result.returncode == 0
            else "".join(f"# {line}\n" for line in result.stderr.splitlines())
        )
    return [] if linted.returncode == 0 else [linted.stdout], rendered


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]
