"""Is every section run once, within its time, the timed ones alone, and does one that fails spoil no other?"""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.sections import Section, run_all, sanitizer

# Writes down when it began and ended, and with which environment.
BODY = """
import json, os, sys, time
began = time.monotonic()
time.sleep(0.3)  # so that sections side by side overlap
print(json.dumps({"began": began, "ended": time.monotonic(), "place": os.environ.get("PLACE")}))
"""


def headline(result: dict[str, object]) -> str:
    return str(result["place"])


def made(code: str = BODY, limit_s: float = 30.0, timed: bool = True, env: dict[str, str] | None = None) -> Section:
    return Section(("-c", code), limit_s, headline, timed=timed, env=env or {})


def run(sections: dict[str, Section], out: Path, beside: dict[str, str] | None = None) -> dict[str, dict[str, object]]:
    return run_all(sections, 60.0, out, Console(file=io.StringIO()), beside)


def spans(results: dict[str, dict[str, object]]) -> dict[str, tuple[float, float]]:
    found = {}
    for name, entry in results.items():
        assert entry["status"] == "ok", entry
        result = entry["result"]
        assert isinstance(result, dict)
        found[name] = (result["began"], result["ended"])
    return found


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def test_timed_sections_run_alone(tmp_path: Path) -> None:
    sections = {"rest": made(timed=False), "one": made(), "two": made()}
    found = spans(run(sections, tmp_path))
    assert list(found) == ["rest", "one", "two"]
    assert not any(overlap(found[a], found[b]) for a, b in (("one", "two"), ("one", "rest"), ("two", "rest")))
    assert json.loads((tmp_path / "one.json").read_text())["place"] is None


MEETS = """
import json, os, sys, time
from pathlib import Path
place, mine, others = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
(place / mine).touch()
end = time.monotonic() + 20
while not all((place / other).exists() for other in others):
    if time.monotonic() > end:
        sys.exit(3)
    time.sleep(0.01)
print(json.dumps({"place": os.environ.get("PLACE")}))
"""


def test_others_run_meanwhile_where_they_disturb_nobody(tmp_path: Path) -> None:
    """Each waits for both others."""
    names = ("one", "rest", "more")
    sections = {
        name: Section(
            ("-c", MEETS, str(tmp_path), f"{name}.here", *(f"{other}.here" for other in names if other != name)),
            *(30.0, headline),
            timed=name == "one",
            env={"PLACE": "first"} if name == "one" else {},
        )
        for name in names
    }
    results = run(sections, tmp_path, {"PLACE": "second"})
    assert {name: entry["headline"] for name, entry in results.items()} == {
        "one": "first",
        "rest": "second",
        "more": "second",
    }


@pytest.mark.parametrize(
    ("code", "limit_s", "status"),
    [
        ("raise SystemExit(3)", 30.0, "exit status 3"),
        ("import time; time.sleep(60)", 1.0, "not done within 1 s"),
    ],
)
def test_a_section_that_fails_spoils_no_other(tmp_path: Path, code: str, limit_s: float, status: str) -> None:
    results = run({"bad": made(code, limit_s), "good": made()}, tmp_path)
    assert results["bad"]["status"] == status
    assert results["good"]["status"] == "ok"


def test_sanitizers_side_by_side_have_ports_of_their_own() -> None:
    """compute-sanitizer takes one of a few ports after the first one."""
    from benchmarks.gpu import sections
    from benchmarks.sanitized_step import PORTS

    commands = [section.wrapper for section in sections().values() if section.wrapper]
    commands += [sanitizer("memcheck", port) for port in PORTS.values()]
    ports = sorted(int(command[command.index("--port") + 1]) for command in commands)
    assert len(ports) == 4
    assert all(after - before > 64 for before, after in pairwise(ports))
    assert all(int(re.findall(r"--launch-timeout (\d+)", " ".join(command))[0]) >= 60 for command in commands)
