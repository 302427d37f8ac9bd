"""Which request sits in which slot, what it may write next, and who gives way when pages run out. Plain Python."""

import collections
import dataclasses

from jattn.serving.pages import PageAllocator
from jattn.serving.request import Request, TokenLogprob

NOT_RUNNING = -1  # the slot of a request that has none


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request on its way: what is known of it on the host, one round late."""

    index: int  # order of submission
    request: Request
    new_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)  # of new_ids, where the engine reports them
    num_prefilled: int = 0  # tokens whose prefill has been dispatched
    num_known: int = 0  # tokens known when it was admitted, then kept up by reports
    prefill_len: int = 0  # tokens to prefill: the prompt, and after a preemption what it had generated
    slot: int = NOT_RUNNING
    finish_reason: str | None = None
    num_rounds: int = 0  # decode rounds that gave tokens to this request
    num_round_tokens: int = 0  # tokens of those rounds
    num_drafted: int = 0  # drafts verified in them

    @property
    def limit(self) -> int:
        """Most tokens that it may have, prompt included."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def mean_accept(self) -> float:
        """Tokens a target step of decoding, the bonus token included; 1 before any."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def known_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt_ids, *self.new_ids]


class Scheduler:
    """First come, first served; prefill before decode; the newest request gives way when pages run out."""

    def __init__(self, *, num_slots: int, num_pages: int, page_size: int, max_context: int, rows_in_flight: int):
        self.pages = PageAllocator(num_pages)
        self.num_pages, self.page_size, self.max_context = num_pages, page_size, max_context
        self.rows_in_flight = rows_in_flight  # tokens that two rounds may write before the host hears of the first
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.slots: list[Sequence | None] = [None] * num_slots
        self._submitted = 0

    def submit(self, request: Request) -> Sequence:
        """Queue a request. Raises ValueError if it could not run even alone."""
        length = len(request.prompt_ids)
        if length >= self.max_context:
            raise ValueError(
                f"the prompt has {length} tokens and the cache holds {self.max_context} a request: one more is "
                "needed for the answer; shorten the prompt or raise --max-context"
            )
        if self._pages_for(length) > self.num_pages:  # one that fills them gets the one token that is never cached
            raise ValueError(
                f"the prompt has {length} tokens and needs {self._pages_for(length)} pages of {self.page_size}, "
                f"but the cache has {self.num_pages}: shorten the prompt or raise --num-pages"
            )
        sequence = Sequence(index=self._submitted, request=request)
        self._submitted += 1
        self.waiting.append(sequence)
        return sequence

    def limit_of(self, sequence: Sequence) -> int:
        """Most tokens that the request can have here: its own limit, the context, the whole pool."""
        return min(sequence.limit, self.max_context, self.num_pages * self.page_size + 1)

    @property
    def busy(self) -> bool:
        """Whether any request is queued or in a slot."""
        return bool(self.waiting) or any(self.slots)

    def admit(self) -> list[Sequence]:
        """Move waiting requests into free slots while their prompt and first rounds fit. Returns those moved."""
        admitted = []
        for slot, holder in enumerate(self.slots):
            if holder is not None or not self.waiting:
                continue
            sequence = self.waiting[0]
            known = len(sequence.known_ids)
            if not self._reserve(sequence, known):
                break  # first come, first served: a smaller one behind it does not overtake
            self.waiting.popleft()
            sequence.slot, sequence.num_prefilled = slot, 0
            sequence.num_known = sequence.prefill_len = known
            self.slots[slot] = sequence
            admitted.append(sequence)
        return admitted

    def next_chunk(self, max_rows: int) -> list[int]:
        """Prompt tokens to prefill now, by slot, at most `max_rows` in all; all 0 when no slot prefills."""
        q_lens, room = [0] * len(self.slots), max_rows
        for sequence in self._running():
            take = min(room, sequence.prefill_len - sequence.num_prefilled)
            q_lens[sequence.slot] = take
            sequence.num_prefilled += take
            room -= take
        return q_lens

    def waiting_for_prefill(self) -> int:
        """Prompt tokens that running slots have not dispatched yet."""
        return sum(s.prefill_len - s.num_prefilled for s in self._running())

    def short_of_pages(self) -> Sequence | None:
        """Reserve the pages that the next round may write. Returns the request that must give way, None if all fit."""
        running = self._running()
        return running[-1] if any(not self._reserve(s, s.num_known) for s in running) else None

    def preempt(self, sequence: Sequence) -> None:
        """Take a request back whole: pages freed, at the head of the queue with what it has generated."""
        self.finish(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Free a request's slot and pages."""
        self.slots[sequence.slot] = None
        sequence.slot = NOT_RUNNING
        self.pages.release(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a waiting request out of the queue; it holds no slot and no page."""
        self.waiting.remove(sequence)

    def _running(self) -> list[Sequence]:
        """Requests that hold a slot, oldest first."""
        return sorted((s for s in self.slots if s), key=lambda s: s.index)

    def _reserve(self, sequence: Sequence, num_known: int) -> bool:
        most = min(num_known + self.rows_in_flight, self.limit_of(sequence))
        return self.pages.grow(sequence, self._pages_for(most - 1))  # the last token is never cached

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
