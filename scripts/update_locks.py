"""The hashed requirements that images install, written to `templates/tsx_templates/locks`.

Run it after pyproject.toml or constraints.txt changed; it needs `uv`. `base.txt` has what tsx
always needs, a file named like an extra has what that extra adds, and `sbom.txt` has the tool that
lists installed packages. Torch and its GPU packages are left out: their files differ by index.
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
