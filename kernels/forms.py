"""How does the host launch a kernel again that it has launched before on the same tensors?

Binding arguments and asking the driver about each pointer costs Triton's launch some two microseconds an argument, and
the kernels around a step's graph have up to fifty. A *form* is such a launch with everything settled but a few numbers.
Its first launch goes the ordinary way and returns it; whoever launches keeps it under what the addresses of the tensors
depend on (an entry of a ring, a shape). Where a launch costs nothing worth saving there are no forms: None comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

Form = Callable[..., None]
# All the kernel's arguments; has the kernel's effects.
Prepare = Callable[..., Form | None]

MAX_FORMS = 256


@dataclass(frozen=True, slots=True)
class Preparations:
    """The first launches of kernels that have forms; arguments as the kernel's. Tensors of a form's later launches
    begin where those of its first one did, and may have other sizes.

    take_drafts: later launches by (num_rows, query_stride, seq, num_reply_rows).
    write_ring_entry: by (max_tokens,).
    take_entry: by (padded_rows, padded_tokens, num_updates, seq, max_entry_tokens).
    finish_reply: by (num_rows, seq).
    """

    take_drafts: Prepare
    write_ring_entry: Prepare
    take_entry: Prepare
    finish_reply: Prepare


class Forms:
    """Forms by key, those used last. They hold their tensors: clear them when those are to go. Used by one thread."""

    def __init__(self, most: int = MAX_FORMS) -> None:
        self._most = most
        self._forms: OrderedDict[Hashable, Form] = OrderedDict()
        self._round = 0

    def __len__(self) -> int:
        return len(self._forms)

    def get(self, key: Hashable) -> Form | None:
        """The form under that key."""
        form = self._forms.get(key)
        if form is not None:
            self._forms.move_to_end(key)
        return form

    def keep(self, key: Hashable, form: Form | None) -> None:
        """Keep what preparing returned; the one used longest ago goes where there are too many."""
        if form is not None:
            self._forms[key] = form
            while len(self._forms) > self._most:
                self._forms.popitem(last=False)

    def renew(self, round_number: int) -> None:
        """Forget them all where the number is another than the last time (at first: than 0): tensors that some of them
        hold will not come again.
        """
        if round_number != self._round:
            self._round = round_number
            self._forms.clear()

    def clear(self) -> None:
        """Forget them all."""
        self._forms.clear()
