"""What does rank 0 tell a rank that it starts, and which times hold between ranks?"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from target_service.config import TargetConfig

BEAT_S = 0.1
WATCH_S = 0.05  # between two looks at the ranks
HANG_S = 1.5  # a rank without a heartbeat for so long hangs: noticed within 2 s in all
NOTICE_S = 0.5  # the others' collectives fail when a rank ends, and rank 0's watcher sees it a look or two later
STARVED_S = 0.5  # a watcher that was itself kept from looking for so long does not judge the others by that time
JOIN_TIMEOUT_S = 60.0
CLOSE_S = 5.0  # for ranks to end by themselves
REST_S = 3.0  # for a rank's device to come to rest, then


def awaited_s(config: TargetConfig) -> float:
    """The most that a step may wait for drafters, its own and those of the steps before it."""
    return (config.channel_depth + 1) * config.max_wait_ms / 1e3


def collective_timeout_s(config: TargetConfig, on_device: bool) -> float:
    """After which a collective fails, as the group counts it: from when it is enqueued. With device execution rank 0's
    stands behind its drafters' replies by then, and the others enter theirs at once.
    """
    return config.pcp_timeout_s + (awaited_s(config) if on_device else 0.0)


class RankArguments(BaseModel):
    """Everything that a rank needs to know. order_bytes: of the largest order. board_depth: how many the board
    holds. port: where the ranks meet.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int
    config: TargetConfig
    model_directory: str
    board_name: str
    order_bytes: int
    board_depth: int
    port: int
    parent_pid: int
