"""What does the service know of one Serve stream?"""

from __future__ import annotations

from engine.outbox import Outbox
from target_service.messages import Event


class GatewayStream:
    """What the service knows of one Serve stream. Apart from outbox and withdrawn, changed by the device thread only.

    greeted: hello came. last_seq: the last plan's, 0 before the first. last_channel: (channel_id, epoch) of that plan.
    withdrawn: placements (request_id, epoch) whose release has come and waits behind other commands: plans among those
    need not run them any more. Added to by the thread that reads the stream, taken from by the device thread.
    """

    def __init__(self, stream_id: int, outbox: Outbox[Event]) -> None:
        self.stream_id = stream_id
        self.outbox = outbox
        self.greeted = False
        self.last_seq = 0
        self.last_channel: tuple[str, int] = ("", 0)
        self.withdrawn: set[tuple[str, int]] = set()
