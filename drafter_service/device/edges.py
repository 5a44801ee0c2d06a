"""How does a step begin and end at the channel? With `take_entry`, which takes the target's entry over, and
`finish_reply`, which puts the drafts where the target finds them.
"""

from __future__ import annotations

import torch

from drafter_service.device.program import DrafterProgram
from engine.channel.device import ReplyViews
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.local import LocalChannel
from kernels.forms import Forms
from kernels.kernel_set import KernelSet
from kernels.reference import take_entry as take
from kernels.reference.take_entry import EntryTensors


class StepEdges:
    """Enqueues both, over the program's buffers and the seats' state. Used by one thread. forms: the channel's."""

    def __init__(self, program: DrafterProgram, kernels: KernelSet) -> None:
        self._program = program
        self._kernels = kernels
        self._seat_state = torch.zeros((2, program.max_rows), dtype=torch.int32, device=program.device)

    def take_entry(
        self,
        forms: Forms,
        spec: ChannelSpec,
        seq: int,
        plan: torch.Tensor,
        num_words: int,
        num_rows: int,
        padded: tuple[int, int],
        max_tokens: int,
        entry: tuple[torch.Tensor, RingEntry],
        reply: ReplyViews,
    ) -> None:
        """plan: on the device, the fields of num_rows rows, then the changes of the block tables: num_words in all.
        padded: rows and tokens to fill. max_tokens: the most that the entry can have.
        """
        fields = take.PLAN_FIELDS * num_rows
        key = ("take", seq % spec.depth, num_rows, plan.data_ptr())
        form = forms.get(key)
        if form is not None:
            form(*padded, (num_words - fields) // 2, seq, max_tokens)
            return
        program = self._program
        arguments = (
            _entry_tensors(*entry),
            plan[:fields].view(take.PLAN_FIELDS, num_rows),
            plan[fields:num_words].view(2, -1),
            seq,
            spec.epoch,
            max_tokens,
            spec.vocab_size,
            program.max_len,
            self._seat_state,
            program.tables.device,
            reply.header,
            program.taken.sized(*padded),
            None if program.layout is None else program.layout.sized(*padded),
        )
        forms.keep(key, self._kernels.prepare.take_entry(*arguments))

    def finish_reply(
        self, forms: Forms, spec: ChannelSpec, seq: int, num_rows: int, header: torch.Tensor, reply: ReplyViews
    ) -> None:
        """header: of the entry, which is looked at once more."""
        key = ("finish", seq % spec.depth)
        form = forms.get(key)
        if form is not None:
            form(num_rows, seq)
            return
        program = self._program
        arguments = (
            header,
            seq,
            spec.epoch,
            num_rows,
            program.drafts,
            program.taken,
            self._seat_state,
            reply.header,
            reply.tokens,
            reply.has_probs,
        )
        forms.keep(key, self._kernels.prepare.finish_reply(*arguments))

    def warm_up(self, num_target_tokens: int, draft_probs: bool) -> None:
        """Compile both, on a channel of one row that nobody uses."""
        program, forms = self._program, Forms()
        spec = ChannelSpec(
            *("warm-up", 1, 1, 1, 1, program.max_draft_len, 0, torch.float32, num_target_tokens, 1, 1, 1, draft_probs)
        )
        end = LocalChannel(spec, program.device).drafter
        entry, reply = end.ring(1), end.reply(1)
        plan = torch.full((take.PLAN_FIELDS,), -1, dtype=torch.int32, device=program.device)
        self.take_entry(forms, spec, 1, plan, plan.shape[0], 1, (1, 1), 1, entry, reply)
        self.finish_reply(forms, spec, 1, 1, entry[0], reply)


def _entry_tensors(header: torch.Tensor, entry: RingEntry) -> EntryTensors:
    return EntryTensors(
        header=header,
        positions=entry.positions,
        input_ids=entry.input_ids,
        query_start_loc=entry.query_start_loc,
        seq_lens=entry.seq_lens,
        num_rejected=entry.num_rejected,
        anchors=entry.anchors,
        next_prompt_tokens=entry.next_prompt_tokens,
        temperatures=entry.temperatures,
        seeds=entry.seeds,
        slot_mapping=entry.slot_mapping,
        block_tables=entry.block_tables,
    )
