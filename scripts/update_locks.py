"""The hashed requirements that images install, written to `templates/tsx_templates/locks`.

Run it after pyproject.toml or constraints.txt changed; it needs `uv`. `base.txt` has the packages
that tsx always needs, a file named like an extra has those that the extra adds, and `sbom.txt` has
the tool that lists installed packages. Torch and its GPU packages are left out, since their files
depend on the index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "templates" / "tsx_templates" / "locks"
EXTRAS = (
    "audio",
    "bench",
    "explain",
    "gpu",
    "grpc",
    "keystore",
    "lambda",
    "mcp",
    "monitor",
    "onnx",
    "openvino",
    "otel",
    "peft",
    "rules",
    "tabular",
    "transformers",
)
SBOM_TOOL = "cyclonedx-bom==7.5.0"
TORCH_PACKAGE = re.compile(r"(torch|triton|nvidia-(?!ml-py=)[\w-]+|cuda-[\w-]+)==")
HEAD = "# Made by scripts/update_locks.py: do not edit.\n"


def compile_requirements(
    *arguments: str, source: str = "pyproject.toml", text: str | None = None
) -> list[str]:
    """Return the pinned packages with their hashes, as blocks of lines."""
    command = [
        "uv",
        "pip",
        "compile",
        source,
        "--universal",
        "--python-version",
        "3.10",
        "--generate-hashes",
        "--quiet",
    ]
    command += ["--no-header", "--no-annotate", "--constraint", "constraints.txt", *arguments]
    process = subprocess.run(
        command, cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        sys.exit(process.stderr)
    blocks = re.split(r"\n(?=[\w.-]+==)", process.stdout.strip("\n"))
    return [block for block in blocks if not TORCH_PACKAGE.match(block)]


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    base = compile_requirements()
    locks = {"base": base, "sbom": compile_requirements(source="-", text=SBOM_TOOL)}
    for extra in EXTRAS:
        locks[extra] = [
            block for block in compile_requirements("--extra", extra) if block not in base
        ]
    for name, blocks in locks.items():
        (LOCKS / f"{name}.txt").write_text(
            HEAD + "".join(f"{block}\n" for block in blocks), encoding="utf-8"
        )
        print(f"{name}.txt: {len(blocks)} packages")


if __name__ == "__main__":
    main()
