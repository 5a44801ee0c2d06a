"""How are the committed stubs made from the .proto files?

`python protos/generate.py` writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` beside the .proto files. The generator's
version is fixed: protobuf and grpcio refuse a runtime older than the generator, so stubs of 1.76.0 load on grpcio >=
1.76 and on protobuf 6.31.1 to 7.x. The proto root is the repository root: stubs say `from protos import ...` as they
are.
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata, resources
from pathlib import Path

GENERATOR_VERSION = "1.76.0"
NAMES = ("common", "target", "drafter", "gateway")
ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> list[Path]:
    """Write the stubs under `out` (as `out/protos/...`) and return their paths.

    Raises RuntimeError when grpcio-tools has another version than GENERATOR_VERSION or when protoc fails.
    """
    # Imported here: the tools are needed by whoever changes a .proto, never by a service.
    from grpc_tools import protoc

    found = metadata.version("grpcio-tools")
    if found != GENERATOR_VERSION:
        raise RuntimeError(f"grpcio-tools {GENERATOR_VERSION} makes the committed stubs; {found} is installed")
    sources = [f"protos/{name}.proto" for name in NAMES]
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its message is on stderr")
    return [out / "protos" / f"{name}{suffix}" for name in NAMES for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]


def main() -> int:
    """Generate into the tree, or into `--out DIR`; prints one line per file."""
    parser = argparse.ArgumentParser(description="Generate the gRPC stubs from protos/*.proto.")
    parser.add_argument("--out", type=Path, default=ROOT, help="write protos/*_pb2* under it (default: the repository)")
    out: Path = parser.parse_args().out
    for path in generate(out):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
