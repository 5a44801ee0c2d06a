"""What does rank 0 tell a rank that it starts, and which times hold between ranks?"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from target_service.config import TargetConfig

BEAT_S = 0.1
WATCH_S = 0.05  # between two looks at the ranks
HANG_S = 1.5  # a rank without a heartbeat for so long hangs: noticed within 2 s in all
STARVED_S = 0.5  # a watcher that was itself kept from looking for so long does not judge the others by that time
JOIN_TIMEOUT_S = 60.0
CLOSE_S = 5.0  # for ranks to end by themselves
REST_S = 3.0  # for a rank's device to come to rest, then


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
