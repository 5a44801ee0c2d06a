"""Which tests must one process run, where several processes share out the tests (`pytest -n 2`)?

Those that use the same thing that is slow to start, or that count on each other: the tests of a file, but for the
exceptions below. Such a group runs in its order. What is not in it may run at the same time.
"""

from __future__ import annotations

import re

# Files whose tests have nothing in common, and take long.
ONE_BY_ONE = frozenset(
    {
        "tests/end_to_end/test_commands.py",
        "tests/end_to_end/test_pcp.py",
        "tests/kernels/test_triton.py",
        "tests/target_service/pcp/test_faults.py",
        "tests/target_service/pcp/test_launched_faults.py",
    }
)
# What is one group beyond a file.
TOGETHER = (
    # A stack serves both files' tests of its variant, and what is sampled is compared over all variants.
    re.compile(r"(tests/end_to_end/)test_(?:greedy|sampling)\.py::"),
    # A target serves all tests of its way of execution.
    re.compile(r"(tests/target_service/)test_\w+\.py::\w+\[(host|device)\b"),
)


def group_of(node_id: str) -> str:
    """The name of the tests that the test `node_id` runs with."""
    for pattern in TOGETHER:
        if match := pattern.match(node_id):
            return " ".join(match.groups())
    path = node_id.partition("::")[0]
    return node_id if path in ONE_BY_ONE else path
