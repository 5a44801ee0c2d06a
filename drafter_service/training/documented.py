"""Which functions with a docstring are there to be asked for?

Signatures and docstrings, without bodies, of plain functions in Python's own library and in wheels: real material for
requests to complete a function.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_SHORTEST, _LONGEST = 60, 900


def documented_functions(wheels: Sequence[Path]) -> list[str]:
    """Each once, in the order found: ASCII, of 60 to 900 characters, public, with a body of its own, no methods."""
    found: dict[str, None] = {}
    for source in _sources(wheels):
        for code in signatures(source):
            if _SHORTEST < len(code) < _LONGEST and code.isascii():
                found[code] = None
    return list(found)


def signatures(source: str) -> Iterator[str]:
    """The heads of a module's functions, docstring included; nothing of a module that does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test")) or node.decorator_list:
            continue
        is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if ast.get_docstring(node) and len(node.body) > 1 and not is_method:
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))


def _sources(wheels: Sequence[Path]) -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library).parts
        if not any("test" in part or part.endswith("-packages") for part in inside):
            yield path.read_text(encoding="utf-8", errors="replace")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".py") and "test" not in name:
                    yield archive.read(name).decode("utf-8", errors="replace")
