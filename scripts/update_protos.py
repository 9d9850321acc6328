"""Makes the modules of runtime/tsx_runtime/grpc/protos from .proto files with grpcio-tools.

Run it after a .proto file changed, with the release that constraints.txt pins. With --check it
writes nothing, and exits with 1 if a module is outdated.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[1] / "runtime/tsx_runtime/grpc/protos"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def generated_files() -> dict[Path, str]:
    """Return the content of each file by path."""
    contents: dict[Path, str] = {}
    for proto in sorted(PROTOS.glob("*.proto")):
        with tempfile.TemporaryDirectory() as directory:
            descriptors = Path(directory) / "set"
            arguments = [
                "protoc",
                f"-I{PROTOS}",
                f"-I{WELL_KNOWN}",
                "--include_imports",
                f"--descriptor_set_out={descriptors}",
            ]
            if protoc.main([*arguments, f"--pyi_out={directory}", proto.name]):
                raise SystemExit(f"protoc refuses {proto}")
            files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
            module = PROTOS / f"{proto.stem}_pb2.py"
            contents[module] = "".join(
                lines(
                    proto.name,
                    [(file.name, file.SerializeToString(deterministic=True)) for file in files],
                )
            )
            contents[module.with_suffix(".pyi")] = (
                Path(directory) / f"{proto.stem}_pb2.pyi"
            ).read_text()
    return contents


def lines(name: str, files: list[tuple[str, bytes]]) -> Iterator[str]:
    yield f'"""The messages of {name}. Made by scripts/update_protos.py; do not edit."""\n\n'
    yield "from tsx_runtime.grpc.pool import load_messages\n\nFILES = [\n"
    for file, serialized in files:
        yield f"    ({file!r}, {serialized!r}),\n"
    yield "]\nload_messages(globals(), FILES)\n"


def main(check: bool) -> int:
    generated = generated_files()
    outdated_paths = [
        path for path, text in generated.items() if not path.is_file() or path.read_text() != text
    ]
    for path in outdated_paths:
        print(f"{path.name} is not what its .proto file makes" if check else f"wrote {path.name}")
        if not check:
            path.write_text(generated[path])
    return 1 if check and outdated_paths else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
