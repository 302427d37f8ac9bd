"""The serving loop: admits, prefills, dispatches rounds, and reads each report behind the next round's dispatch."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.combinators.costs import branches_wait
from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape, round_costs
from jattn.combinators.layer_drafts import check_layers
from jattn.combinators.model_drafts import Lineage
from jattn.combinators.ngram import NUM_CLASSES
from jattn.combinators.state import DecodeState, Status
from jattn.models.decoder import Decoder, new_cache
from jattn.models.draft_head import DraftHead
from jattn.sampling import TEMPERATURES, Logprobs, SamplerConfig
from jattn.serving.adaptive import AdaptiveShape
from jattn.serving.forms import FormOptions, PrefillForms
from jattn.serving.programs import (
    ProgramConfig,
    Programs,
    Report,
    check_width,
    compile_programs,
    empty_report,
    report_of,
    weights_of,
)
from jattn.serving.request import Request, TokenLogprob, check_offered, params_of
from jattn.serving.scheduler import NOT_RUNNING, Scheduler, Sequence
from jattn.spec import MLASpec

_REASONS = {int(Status.STOPPED): "stop", int(Status.LENGTH): "length"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one request, in order. `finish_reason` is None until its last delta."""

    sequence: Sequence
    new_ids: list[int]
    finish_reason: str | None  # "stop" | "length" | None


@dataclasses.dataclass(slots=True, kw_only=True)
class _InFlight:
    report: Report | None  # None while the program is being launched
    holders: tuple[Sequence | None, ...]  # who held each slot when the round was dispatched
    is_prefill: bool
    shape: int = 0  # of the round, an index into the programs' rounds


class Engine:
    """Serves requests with one model. Not thread-safe.

    Args:
      model: its parameters are read, never changed.
      num_layers, num_pages, page_size: of the cache. num_slots: requests that run together. max_context: tokens a
        request may have. num_steps: drafts a request and round, 0 for none. kv_dtype: storage when the spec names none.
      sampler: what requests may ask for; what they may not is left out of the programs. topk, num_nodes: continuations
        of a draft tree, and its nodes with the newest token; topk 1 drafts chains. drafter: a draft model with the
        target's vocabulary, or a head on the target's hidden states; without one, drafts come from the request's own
        text. draft_shapes: what the draft model may draft, a program each, chosen round by round; by default the one of
        num_steps, topk and num_nodes. lineage: which nodes a node of its tree sees, as in
        `combinators.model_drafts.propose`.
      forms: of the prefill of an MLA model; by default what the policy says. num_prompt_tokens: of all requests that
        will come, where that is known: forms of more are not compiled, and what passes it is prefilled absorbed.
      on_program: hears (done, total) as each program is compiled.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_layers: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_context: int,
        num_steps: int,
        kind: str,
        kv_dtype=None,
        sampler: SamplerConfig = TEMPERATURES,
        topk: int = 1,
        num_nodes: int | None = None,
        drafter: Decoder | DraftHead | None = None,
        draft_shapes: tuple[DraftShape, ...] = (),
        lineage: Lineage = "parent",
        prefill_rows: tuple[int, ...] = (128,),
        max_stops: int = 8,
        forms: FormOptions | None = None,
        num_prompt_tokens: int | None = None,
        on_program: Callable[[int, int], None] = lambda done, total: None,
    ):
        if drafter is None:
            draft_shapes = ()
        elif not draft_shapes:
            check_width(topk=topk, num_steps=num_steps, num_nodes=num_nodes, standalone=True)
            draft_shapes = (DraftShape(num_steps=num_steps, topk=topk, num_nodes=num_nodes or num_steps + 1),)
        if isinstance(drafter, DraftHead) and drafter.ahead > 1:
            for shape in draft_shapes:  # without drafts, too: rows that a layer read beside drafts must be read again
                check_layers(drafter.ahead, topk=shape.topk, num_steps=shape.num_steps)
        num_steps = max((shape.num_steps for shape in draft_shapes), default=num_steps)
        self.config = ProgramConfig(
            num_seqs=num_slots,
            max_context=max_context,
            num_steps=num_steps,
            max_stops=max_stops,
            prefill_rows=tuple(sorted(prefill_rows)),
            kind=kind,
            sampler=sampler,
            topk=topk,
            num_nodes=num_nodes,
            draft_shapes=draft_shapes,
            lineage=lineage,
            forms=_forms_of(
                model, num_slots, max_context, max(prefill_rows), forms or FormOptions(), num_prompt_tokens
            ),
        )
        self.vocab_size = model.config.vocab_size
        graphdef, params = nnx.split((model,) if drafter is None else (model, drafter))
        self._weights = weights_of(params)

        pool: dict[str, Any] = dict(num_pages=num_pages, page_size=page_size, dtype=kv_dtype)
        cache, draft_cache = new_cache(model.spec, num_layers=num_layers, layout=model.kv_layout, **pool), None
        if drafter is not None:
            _check_vocabulary(model, drafter, max(shape.topk for shape in draft_shapes))
            draft_cache = drafter.new_cache(**pool)
        features = None
        if isinstance(drafter, DraftHead):  # of the newest rows, which it has not read yet
            rows = num_steps + drafter.ahead
            features = jnp.zeros((num_slots, rows, drafter.feature_dim), model.embed.dtype)
        self.cache_bytes = cache.nbytes + (draft_cache.nbytes if draft_cache else 0)
        self._state = DecodeState.create(
            cache,
            num_seqs=num_slots,
            max_context=max_context,
            max_stops=max_stops,
            num_classes=NUM_CLASSES,
            num_biases=sampler.num_biases,
            draft_cache=draft_cache,
            draft_features=features,
        )
        self.programs: Programs = compile_programs(graphdef, params, self._state, self.config, on_program)
        self.scheduler = Scheduler(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            max_context=max_context,
            rows_in_flight=self.config.rows_in_flight,
        )
        self.adaptive = AdaptiveShape(
            draft_shapes or (NO_DRAFTS,), round_costs(kind), num_slots=num_slots, plain_costs=_plain_costs(self.config)
        )
        self._table = np.zeros(self._state.page_table.shape, np.int32)
        self._uploaded = 0  # changes of the pages' owners that the table holds
        self._pending: _InFlight | None = None
        self._ready: list[Delta] = []  # read, and not handed out yet
        # Launching some hundred kernels takes the host as long as a small model's round takes the GPU: it goes on in a
        # thread (without the interpreter's lock) while the tokens of the round before are handed out.
        self._launcher = ThreadPoolExecutor(1, "jattn-launch") if branches_wait(kind) else None
        self._launching: Future[tuple[DecodeState, Report, Report]] | None = None
        self._held, self._spares = empty_report(self.config), [empty_report(self.config) for _ in range(3)]
        self.num_rounds = 0

    def submit(self, request: Request) -> Sequence:
        """Queue a request; ValueError if it cannot fit even alone, or asks for what this engine was not built for."""
        if len(request.stop_ids) > self.config.max_stops:
            raise ValueError(f"{len(request.stop_ids)} stop tokens: this engine was built for {self.config.max_stops}")
        check_offered(request, self.config.sampler, self.vocab_size)
        return self.scheduler.submit(request)

    def cancel(self, sequence: Sequence, reason: str = "stop") -> None:
        """End a request now, keeping what it has, also one that waits; its tokens still in flight are dropped."""
        if sequence.finish_reason is not None:
            return
        for delta in [delta for delta in self._ready if delta.sequence is sequence]:  # read, not handed out
            self._ready.remove(delta)
            kept = len(sequence.new_ids) - len(delta.new_ids)
            del sequence.new_ids[kept:], sequence.logprobs[kept:]
        if sequence.slot == NOT_RUNNING:
            self.scheduler.withdraw(sequence)
        else:
            self._release(sequence)
        sequence.finish_reason = reason

    def run(self) -> Iterator[Delta]:
        """Serve until every submitted request has ended. More may be submitted, or cancelled, between deltas.

        A report is read behind the dispatch of the next program, and its deltas are handed out behind the dispatch of
        the one after: what the caller does with them takes no time of the device.
        """
        while self.scheduler.busy or self._pending is not None or self._ready:
            for sequence in self.scheduler.admit():
                self._admit(sequence)
            yield from self._make_room()
            previous = self._dispatch_next() if any(self.scheduler.slots) else self._landed_flight()
            yield from self._hand_out()
            if previous is not None:
                self._ready = self._read(previous)

    def _dispatch_next(self) -> _InFlight | None:
        """Dispatch one program; returns the one before it, if its report is not read yet."""
        self._upload_pages()
        holders = tuple(self.scheduler.slots)
        waiting, shape = self.scheduler.waiting_for_prefill(), 0
        if waiting:
            rows = next((n for n in self.config.prefill_rows if n >= waiting), self.config.prefill_rows[-1])
            program, *args = self._prefill(rows)
        else:
            shape = self.adaptive.choose(sum(holder is not None for holder in holders))
            program, args = self.programs.rounds[shape], []
            self.num_rounds += 1
        self._settled()
        flight = _InFlight(report=None, holders=holders, is_prefill=waiting > 0, shape=shape)
        previous, self._pending = self._pending, flight
        self._start(program, *args)
        return previous

    def _landed_flight(self) -> _InFlight | None:
        """The newest program, once it is launched, with none behind it."""
        self._settled()
        previous, self._pending = self._pending, None
        return previous

    def _hand_out(self) -> Iterator[Delta]:
        while self._ready:
            yield self._ready.pop(0)

    def _start(self, program: Callable, *args) -> None:
        """Launch a program on the state that it takes, and the copy of its report to the host."""
        state, held = self._state, self._held
        spare = self._spares.pop() if self._spares else empty_report(self.config)

        begun = threading.Event()

        def launch() -> tuple[DecodeState, Report, Report]:
            begun.set()
            after, held_after = program(self._weights, state, held, *args)
            report = self.programs.report(held_after, spare)
            for leaf in jax.tree.leaves(report):
                leaf.copy_to_host_async()
            return after, held_after, report

        if self._launcher is not None:
            self._launching = self._launcher.submit(launch)
            begun.wait()  # or it waits for the interpreter's lock until this thread has handed out all tokens
        else:
            self._landed(launch())

    def _settled(self) -> DecodeState:
        """The state behind the newest program, once that is launched."""
        launching, self._launching = self._launching, None
        if launching is not None:
            self._landed(launching.result())
        return self._state

    def _landed(self, launched: tuple[DecodeState, Report, Report]) -> None:
        assert self._pending is not None  # whose program this is
        self._state, self._held, self._pending.report = launched

    def _prefill(self, rows: int) -> tuple:
        # the program of a prefill step, and its argument
        q_lens, method = self.scheduler.next_chunk(rows), None
        if self.config.forms is not None:
            done = [0 if s is None else s.num_prefilled for s in self.scheduler.slots]
            prefixes = [end - new if new else 0 for end, new in zip(done, q_lens, strict=True)]
            method = self.config.forms.choose(prefixes, q_lens)
        return self.programs.prefill[rows, method], np.asarray(q_lens, np.int32)

    def _make_room(self) -> Iterator[Delta]:
        """Reserve what the next round may write; where pages run out, take back the newest request, whole."""
        while (victim := self.scheduler.short_of_pages()) is not None:
            if self._ready:
                yield from self._hand_out()  # the caller may cancel some
                continue
            if (flight := self._landed_flight()) is not None:
                self._ready = self._read(flight)  # what it has generated must be known first, and may end it
                continue
            self._dispatch(self.programs.release, np.int32(victim.slot))
            self.scheduler.preempt(victim)

    def _read(self, flight: _InFlight) -> list[Delta]:
        """Wait for a report; what it says of each request that still runs."""
        assert flight.report is not None  # launched, or the one behind it would not be
        report, deltas = report_of(flight.report), []
        if not flight.is_prefill:
            self.adaptive.record(flight.shape, [count for count in report.counts if count])
        for slot, sequence in enumerate(flight.holders):
            if sequence is None or sequence.finish_reason is not None:
                continue
            count, status = report.counts[slot], report.status[slot]
            if count == 0 and status not in _REASONS:
                continue
            new_ids = report.tokens[slot][:count]
            sequence.new_ids.extend(new_ids)
            if report.logprobs is not None:
                sequence.logprobs.extend(_logprobs_of(report.logprobs, slot, count))
            sequence.num_known += count
            if not flight.is_prefill:
                sequence.num_rounds += 1
                sequence.num_round_tokens += count
                sequence.num_drafted += report.drafted[slot]
            sequence.finish_reason = _REASONS.get(status)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)  # the device has stopped it already
                self.adaptive.finished()
            deltas.append(Delta(sequence=sequence, new_ids=new_ids, finish_reason=sequence.finish_reason))
        self._spares.append(flight.report)
        return deltas

    def _admit(self, sequence: Sequence) -> None:
        self.adaptive.admitted(sum(holder is not None for holder in self.scheduler.slots))
        request, known = sequence.request, sequence.known_ids
        tokens = np.zeros(self.config.max_context, np.int32)
        tokens[: len(known)] = known
        stop_ids = np.full(self.config.max_stops, -1, np.int32)
        stop_ids[: len(request.stop_ids)] = request.stop_ids
        self._dispatch(
            self.programs.admit,
            np.int32(sequence.slot),
            tokens,
            np.asarray([len(known), len(request.prompt_ids), self.scheduler.limit_of(sequence)], np.int32),
            stop_ids,
            params_of(request, num_biases=self.config.sampler.num_biases),
        )

    def _release(self, sequence: Sequence) -> None:
        self._dispatch(self.programs.release, np.int32(sequence.slot))
        self.scheduler.finish(sequence)

    def _dispatch(self, program: Callable, *args) -> None:
        self._state = program(self._settled(), *args)

    def _upload_pages(self) -> None:
        pages = self.scheduler.pages
        if pages.num_changes == self._uploaded:
            return
        self._uploaded, table = pages.num_changes, self._table.copy()
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is not None:
                owned = pages.owned(sequence)
                table[slot, : len(owned)] = owned
        if not np.array_equal(table, self._table):
            self._table = table
            state = self._settled()
            self._state = dataclasses.replace(state, page_table=self.programs.pages(state.page_table, table))


def _logprobs_of(logprobs: Logprobs, slot: int, count: int) -> list[TokenLogprob]:
    own, ids, top = (x[slot, :count].tolist() for x in (logprobs.own, logprobs.top_ids, logprobs.top))
    return [
        TokenLogprob(logprob=mine, top=list(zip(*likeliest, strict=True)))
        for mine, *likeliest in zip(own, ids, top, strict=True)
    ]


def _forms_of(
    model: Decoder, num_slots: int, max_context: int, rows: int, options: FormOptions, tokens: int | None
) -> PrefillForms | None:
    spec = model.spec
    if not isinstance(spec, MLASpec):
        options.refuse()
        return None
    choice = model.layers[0].attn.choice
    return PrefillForms(
        policy=choice.policy,
        platform=choice.platform,
        spec=spec,
        num_slots=num_slots,
        max_tokens=num_slots * max_context if tokens is None else min(tokens, num_slots * max_context),
        prefill_rows=rows,
        options=options,
    )


def _plain_costs(config: ProgramConfig) -> tuple[tuple[int, float], ...]:
    # of rounds without drafts: requests that each of their shapes holds
    return tuple((shape.rows, shape.cost) for shape in config.shapes(NO_DRAFTS))


def _check_vocabulary(model: Decoder, drafter: Decoder | DraftHead, topk: int) -> None:
    head = isinstance(drafter, DraftHead)
    ours, theirs = model.config.vocab_size, drafter.vocab_size if head else drafter.config.vocab_size
    if ours != theirs:
        raise ValueError(
            f"the draft model has {theirs} tokens and the target {ours}: want a draft of the same vocabulary"
        )
    drafted = drafter.rows.shape[0] if head else theirs
    if topk > drafted:
        raise ValueError(f"topk={topk} is more than the vocabulary of {drafted} tokens")
