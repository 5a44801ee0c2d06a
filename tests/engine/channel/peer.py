"""One end of a channel as a process of its own.

`python -m tests.engine.channel.peer answer DESCRIPTION | chase DESCRIPTION | target`.
"""

from __future__ import annotations

import sys
import threading

from engine.channel import attach_drafter_channel, describe, open_target_channel
from engine.channel.control import Word
from engine.channel.shm import ShmDrafterChannel
from tests.engine.channel.entries import SPEC, decode, encode, fill, reply_probs, reply_tokens, wrong_tensors

PATIENCE_S = 20.0


def run_chaser(word: str) -> None:
    """Read the newest entry over and over while the target overruns the ring; count what could be believed."""
    channel = attach_drafter_channel(decode(word))
    assert isinstance(channel, ShmDrafterChannel)
    print("attached", flush=True)
    whole = torn = 0
    while not channel.closed:
        newest = channel._control.get(Word.TARGET_SEQ)
        # The oldest entry that may still be there: the next one to be overwritten.
        seq = max(1, newest - channel.spec.depth + 1)
        entry = channel.take_entry(seq, PATIENCE_S if newest == 0 else 0.0)
        if entry is None:
            continue
        wrong = wrong_tensors(entry)
        if not channel.entry_intact(seq):
            torn += 1
        elif wrong:
            print(f"wrong {seq} {wrong}", flush=True)
        else:
            whole += 1
    print(f"ended whole={whole} torn={torn}", flush=True)
    channel.close()


def run_drafter(word: str) -> None:
    """Check every entry and answer it, from step 1, until the channel ends."""
    channel = attach_drafter_channel(decode(word))
    spec = channel.spec
    print("attached", flush=True)
    seq = 1
    while (entry := channel.take_entry(seq, PATIENCE_S)) is not None:
        wrong = wrong_tensors(entry)
        if not channel.entry_intact(seq):
            print(f"overwritten {seq}", flush=True)
        elif wrong:
            print(f"wrong {seq} {wrong}", flush=True)
        rows, drafts = entry.num_rows, spec.max_draft_len
        probs = reply_probs(seq, rows, drafts, spec.vocab_size) if spec.draft_probs else None
        channel.publish_reply(seq, reply_tokens(seq, rows, drafts, spec.vocab_size), probs, None)
        seq += 1
    print(f"ended closed={channel.closed} peer_alive={channel.peer_alive()}", flush=True)
    channel.close()


def run_target() -> None:
    """Open a channel, publish step 1, and stand still until killed."""
    channel = open_target_channel(SPEC, "shm")
    print(f"channel {encode(describe(channel))}", flush=True)
    fill(channel.begin(1, 2, 5))
    channel.publish(1)
    threading.Event().wait(PATIENCE_S * 5)


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        run_drafter(sys.argv[2])
    elif sys.argv[1] == "chase":
        run_chaser(sys.argv[2])
    else:
        run_target()
