"""What becomes of events for a gateway that is gone, or does not read?"""

from __future__ import annotations

from engine.outbox import Outbox


def test_an_outbox_ends_after_what_it_holds_and_at_one_event_too_many() -> None:
    overflows: list[str] = []
    outbox: Outbox[str] = Outbox(2, on_overflow=lambda: overflows.append("!"))
    events = ["a", "b", "c"]
    assert outbox.take(0.0) is None
    assert outbox.put(events[0])
    assert outbox.put(events[1])
    assert outbox.take(0.0) == events[0]
    outbox.close()
    assert not outbox.put(events[2])
    assert not outbox.finished()
    assert outbox.take(0.0) == events[1]
    assert outbox.finished()
    assert not overflows
    full: Outbox[str] = Outbox(1, on_overflow=lambda: overflows.append("!"))
    assert full.put(events[0])
    assert not full.put(events[1])
    assert not full.put(events[2])
    assert overflows == ["!"]
    assert full.finished()
