"""Is everything given back by services that are asked to stop, with a channel between them?

They end without the interpreter's end, so nothing is freed that nobody frees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.channel.host import SHM_DIR
from tests.end_to_end.stack import running_stack
from tests.end_to_end.variants import ON_DEVICE, Models, prompts


@pytest.mark.parametrize("target", [{}, ON_DEVICE, {"pcp_size": 2}], ids=["host", "device", "ranks"])
@pytest.mark.parametrize("first", ["target", "drafter"])
def test_no_shared_memory_outlives_a_stop(models: Models, tmp_path: Path, target: dict[str, Any], first: str) -> None:
    drafter = {"method": "eagle3", "checkpoint": str(models.root / "eagle3")}
    with running_stack(tmp_path, models.target, target, drafter) as stack:
        stack.complete(list(prompts()[5]), 8, ignore_eos=True, draft_len=3)
        pids = [process.pid for process in stack.processes.values()]

        def held() -> list[str]:
            return [path.name for pid in pids for path in SHM_DIR.glob(f"outrider-{pid}-*")]

        assert held()
        second = "drafter" if first == "target" else "target"
        assert [stack.stop(name) for name in (first, second, "gateway")] == [0, 0, 0]
        assert held() == []
