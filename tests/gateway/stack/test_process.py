"""What a service prints comes back line by line, whatever it is."""

from __future__ import annotations

import sys

from gateway.stack.process import MAX_LINE, ServiceProcess
from gateway.stack.settings import ServiceSpec


async def lines_of(code: str) -> tuple[int, list[str]]:
    lines: list[str] = []
    spec = ServiceSpec("dummy", (sys.executable, "-c", code), {"OUTRIDER_TEST": "x"}, "")
    process = await ServiceProcess.start(spec, lines.append)
    return await process.wait(), lines


async def test_lines_progress_bars_and_bytes() -> None:
    code = (
        "import sys, os\n"
        "os.write(1, b'a\\r\\nb\\rc\\n\\nlast ')\n"
        "os.write(2, b'\\xff \\xf0\\x9f\\x99\\x82')\n"
        "print(os.environ['OUTRIDER_TEST'], end='')\n"
        "sys.exit(4)\n"
    )
    status, lines = await lines_of(code)
    assert status == 4
    assert lines == ["a", "b", "c", "", "last \ufffd \U0001f642x"]


async def test_a_line_without_end_is_cut() -> None:
    _, lines = await lines_of(f"print('x' * {MAX_LINE * 3})")
    assert "".join(lines) == "x" * MAX_LINE * 3
    assert max(map(len, lines)) < 2 * MAX_LINE


async def test_an_escaped_child_that_holds_the_pipe_does_not_hold_us() -> None:
    code = (
        "import subprocess, sys\n"
        "print('done', flush=True)\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(6)'], start_new_session=True)\n"
    )
    assert await lines_of(code) == (0, ["done"])
