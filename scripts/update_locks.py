"""Write the hashed requirements that images install (`templates/tsx_templates/locks`) from
pyproject.toml and constraints.txt.

Run it after either changed; it needs `uv`. Torch and what it
brings for GPUs are left out: their files differ from index to index.
`base.txt` is everything that tsx always needs; a file named after an extra holds what that extra
adds; `sbom.txt` is the tool that lists what is installed.
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
    "onnx",
    "openvino",
    "otel",
    "peft",
    "rules",
    "transformers",
)
SBOM_TOOL = "cyclonedx-bom==7.5.0"
OF_TORCH = re.compile(r"(torch|triton|nvidia-(?!ml-py=)[\w-]+|cuda-[\w-]+)==")
HEAD = "# Made by scripts/update_locks.py: do not edit.\n"


def compiled(*arguments: str, source: str = "pyproject.toml", text: str | None = None) -> list[str]:
    """The pinned packages, each with its hashes, as blocks of lines."""
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
    done = subprocess.run(
        command, cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    blocks = re.split(r"\n(?=[\w.-]+==)", done.stdout.strip("\n"))
    return [block for block in blocks if not OF_TORCH.match(block)]


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    base = compiled()
    locks = {"base": base, "sbom": compiled(source="-", text=SBOM_TOOL)}
    for extra in EXTRAS:
        locks[extra] = [block for block in compiled("--extra", extra) if block not in base]
    for name, blocks in locks.items():
        (LOCKS / f"{name}.txt").write_text(
            HEAD + "".join(f"{block}\n" for block in blocks), encoding="utf-8"
        )
        print(f"{name}.txt: {len(blocks)} packages")


if __name__ == "__main__":
    main()
