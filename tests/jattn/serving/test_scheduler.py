"""The scheduler, alone and under the engine's own loop over a device made of Python, for drawn loads.

The made-up device keeps every cached row with its request and index, so that a page lost, shared, or written outside of
what its request owns shows as a wrong row.
"""

import dataclasses
import types
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn.serving.engine
from jattn import AttnSpec
from jattn.combinators.state import Status
from jattn.serving.engine import Engine
from jattn.serving.programs import Programs
from jattn.serving.request import Request
from jattn.serving.scheduler import Scheduler

STOP = 22


class Leaf(np.ndarray):
    def copy_to_host_async(self):
        pass


def token_at(seed, index):
    """The token that the made-up model puts at `index` of a request; sometimes STOP."""
    return (seed * 7 + index * index * 5 + index) % 23


@dataclasses.dataclass(kw_only=True)
class Slot:
    """What the device knows of a request. `cached` rows are in the pool; `known` tokens have been fed or made."""

    seed: int = -1
    prompt_len: int = 0
    limit: int = 0
    stop_ids: tuple[int, ...] = ()
    cached: int = 0
    known: int = 0
    status: Status = Status.FREE


class Device:
    """The four programs of an engine, token by token, with checks at every dispatch."""

    def __init__(self, rng, *, tokens=token_at, accepted=None):
        self.rng, self.tokens, self.accepted = rng, tokens, accepted  # accepted: seed -> tokens of each round
        self.pool: dict[int, Any] = {}  # slot in the cache -> (seed, index) of the row that it holds
        self.num_dispatches = 0
        self.pages_held: dict[int, list[int]] = {}  # seed -> pages owned while each round runs
        self.cached_at_end: dict[int, int] = {}

    def attach(self, config, scheduler):
        self.config, self.scheduler = config, scheduler
        self.slots = [Slot() for _ in range(config.num_seqs)]

    def programs(self):
        chunks: dict[tuple[int, Any], Any] = {
            (rows, None): lambda _, state, report, q_lens, rows=rows: self.prefill(state, q_lens, rows)
            for rows in (4, 16)
        }
        return Programs(
            rounds=(lambda _, state, report: self.round(state),),
            prefill=chunks,
            admit=self.admit,
            release=self.release,
            pages=lambda _, table: table,
            report=lambda held, _: held,
        )

    def admit(self, state, slot, tokens, lens, stop_ids, sampling):
        known, seed = int(lens[0]), int(sampling.seed)
        assert self.slots[slot].status not in (Status.PREFILL, Status.DECODE)
        stops = tuple(int(stop) for stop in stop_ids if stop >= 0)
        self.slots[slot] = Slot(seed=seed, prompt_len=known, limit=int(lens[2]), stop_ids=stops, status=Status.PREFILL)
        assert tokens[:known].tolist() == [self.tokens(seed, i) for i in range(known)]  # and what it had made
        return state

    def release(self, state, slot):
        self.slots[slot].status = Status.FREE
        return state

    def prefill(self, state, q_lens, rows):
        assert 0 < sum(q_lens) <= rows
        made = {}
        for at, length in enumerate(q_lens.tolist()):
            slot = self.slots[at]
            if length == 0:
                continue
            assert slot.status is Status.PREFILL
            self.read(state, at, slot.cached)
            self.write(state, at, slot.cached, slot.cached + length)
            slot.cached += length
            if slot.cached == slot.prompt_len:
                slot.known = slot.prompt_len
                made[at] = self.extend(slot, 1)
        return self.report(state, made, {})

    def round(self, state):
        made, drafted = {}, {}
        for at, slot in enumerate(self.slots):
            if slot.status is not Status.DECODE:
                continue
            room = min(self.config.num_steps, slot.limit - slot.known - 1)
            if self.accepted is None:
                drafted[at] = int(self.rng.integers(0, room + 1))
                right = int(self.rng.integers(0, drafted[at] + 1))
            else:
                drafted[at], right = room, self.accepted[slot.seed].pop(0) - 1
            self.read(state, at, slot.cached)
            self.write(state, at, slot.cached, slot.cached + 1 + drafted[at], right=slot.cached + 1 + right)
            held = len(self.scheduler.pages.owned(self.scheduler.slots[at]))
            least = -(-(slot.cached + 1 + room) // self.scheduler.page_size)
            assert held >= least
            self.pages_held.setdefault(slot.seed, []).append(held)
            made[at] = self.extend(slot, right + 1)
            slot.cached += len(made[at])
            self.cached_at_end[slot.seed] = slot.cached
        return self.report(state, made, drafted)

    def extend(self, slot, count):
        new = [self.tokens(slot.seed, slot.known + i) for i in range(count)]
        kept, why = cases.finish(slot.known, new, slot.stop_ids, slot.limit)
        slot.known += len(kept)
        slot.status = {"stop": Status.STOPPED, "length": Status.LENGTH, None: Status.DECODE}[why]
        return kept

    def place(self, state, at, index):
        size = self.scheduler.page_size
        owned = self.scheduler.pages.owned(self.scheduler.slots[at])
        page = int(state.page_table[at, index // size])
        assert index // size < len(owned) and owned[index // size] == page, "outside of the pages that it owns"
        return page * size + index % size

    def write(self, state, at, start, end, right=None):
        for index in range(start, end):
            kept = right is None or index < right
            self.pool[self.place(state, at, index)] = (self.slots[at].seed, index) if kept else None

    def read(self, state, at, end):
        for index in range(end):
            assert self.pool[self.place(state, at, index)] == (self.slots[at].seed, index), "a cached row was lost"

    def report(self, state, made, drafted):
        self.num_dispatches += 1
        self.check_owners()
        num_seqs, width = self.config.num_seqs, self.config.num_steps + 1
        tokens = np.full((num_seqs, width), -1, np.int32)
        for at, new in made.items():
            tokens[at, : len(new)] = new
        counts = [len(made.get(at, ())) for at in range(num_seqs)]
        columns = counts, [drafted.get(at, 0) for at in range(num_seqs)], [slot.status for slot in self.slots]
        words = np.column_stack([*(np.array(column, np.int32) for column in columns), tokens])
        return state, (words.view(Leaf), None)

    def check_owners(self):
        scheduler = self.scheduler
        running = [s for s in scheduler.slots if s]
        held = [page for s in running for page in scheduler.pages.owned(s)]
        assert len(set(held)) == len(held) == scheduler.num_pages - scheduler.pages.num_free
        assert not any(scheduler.pages.owned(s) for s in scheduler.waiting)
        oldest_waiting = min((s.index for s in scheduler.waiting), default=float("inf"))
        assert all(s.index < oldest_waiting for s in running)  # first come, first served


class Stub(nnx.Module):
    def __init__(self):
        self.spec = AttnSpec(num_q_heads=1, num_kv_heads=1, head_dim=1)
        self.config = types.SimpleNamespace(vocab_size=2**31 - 1)
        self.kv_layout = None


def engine_on(device, *, num_slots, num_pages, page_size, num_steps, max_context=48):
    with mock.patch.object(jattn.serving.engine, "compile_programs", lambda *_: device.programs()):
        model: Any = Stub()
        sizes = dict(num_slots=num_slots, num_pages=num_pages, page_size=page_size, num_steps=num_steps)
        engine = Engine(model, num_layers=1, max_context=max_context, kind="cpu", prefill_rows=(4, 16), **sizes)
    device.attach(engine.config, engine.scheduler)
    return engine


def prompt_of(seed, length):
    return [token_at(seed, index) for index in range(length)]


def answer(engine, request):
    """What a loop over single tokens gives."""
    length = len(request.prompt_ids)
    capacity = engine.scheduler.num_pages * engine.scheduler.page_size + 1
    limit = min(length + request.max_new_tokens, engine.config.max_context, capacity)
    made = [token_at(request.seed, index) for index in range(length, limit)]
    kept, why = cases.finish(length, made, request.stop_ids, limit)
    return kept, why


@dataclasses.dataclass
class Load:
    sizes: dict[str, int]
    requests: list[Request]
    arrivals: list[int]  # deltas heard before each is submitted
    cancels: dict[int, int]  # deltas heard -> request cancelled then
    seed: int


@st.composite
def loads(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=7))
    least = max(-(-n // page_size) for n in lengths)
    num_pages = draw(st.integers(least, least + 40 // page_size))
    new = st.integers(1, 16)
    requests = [
        Request(
            prompt_ids=prompt_of(seed, n), max_new_tokens=draw(new), seed=seed, stop_ids=draw(st.sampled_from(STOPS))
        )
        for seed, n in enumerate(lengths)
    ]
    sizes = dict(page_size=page_size, num_pages=num_pages)
    sizes |= dict(num_slots=draw(st.integers(1, 4)), num_steps=draw(st.sampled_from([0, 1, 7])))
    arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths))))
    cancels = draw(st.dictionaries(st.integers(1, 15), st.integers(0, len(lengths) - 1), max_size=2))
    return Load(sizes, requests, [0, *arrivals[1:]], cancels, draw(st.integers(0, 2**16)))


STOPS = [(), (), (STOP,), (STOP, 3)]


def play(load):
    """Serve a load. Returns the engine, the device, sequences in order and those that were cancelled."""
    device = Device(np.random.default_rng(load.seed))
    engine = engine_on(device, **load.sizes)
    sequences, cancelled, heard = [], set(), 0

    def submit_arrived():
        while len(sequences) < len(load.requests) and load.arrivals[len(sequences)] <= heard:
            sequences.append(engine.submit(load.requests[len(sequences)]))

    while len(sequences) < len(load.requests) or engine.scheduler.busy:
        if not engine.scheduler.busy:
            heard = max(heard, load.arrivals[len(sequences)])
        submit_arrived()
        for delta in engine.run():
            assert delta.sequence not in cancelled and delta.sequence.new_ids[-len(delta.new_ids) :] == delta.new_ids
            assert delta.finish_reason == delta.sequence.finish_reason
            heard += 1
            submit_arrived()
            at = load.cancels.get(heard, len(sequences))
            if at < len(sequences) and sequences[at].finish_reason is None:
                engine.cancel(sequences[at])  # it may run, wait for its turn, or have been taken back
                assert sequences[at].finish_reason == "stop"
                cancelled.add(sequences[at])
            assert device.num_dispatches < 40 + 12 * sum(len(r.prompt_ids) + r.max_new_tokens for r in load.requests)
    return engine, device, sequences, cancelled


@settings(max_examples=100)
@given(load=loads())
def test_every_request_gets_its_tokens_and_every_page_comes_back(load):
    engine, _, sequences, cancelled = play(load)
    for sequence, request in zip(sequences, load.requests, strict=True):
        want, why = answer(engine, request)
        if sequence in cancelled:
            assert sequence.new_ids == want[: len(sequence.new_ids)]
        else:
            assert (sequence.new_ids, sequence.finish_reason) == (want, why)
    assert engine.scheduler.pages.num_free == load.sizes["num_pages"]
    assert engine.scheduler.slots == [None] * load.sizes["num_slots"] and not engine.scheduler.waiting


def test_a_pool_too_small_for_all_takes_the_newest_back_whole():
    """Eight pages of four: each of three requests needs six in the end, so that they finish one after another."""
    requests = [Request(prompt_ids=prompt_of(seed, 6), max_new_tokens=16, seed=seed) for seed in range(3)]
    sizes = dict(num_slots=3, num_pages=8, page_size=4, num_steps=1)
    load = Load(sizes, requests, [0, 0, 0], {}, 0)
    taken = []

    def preempt(scheduler, sequence):
        running = [s for s in scheduler.slots if s]
        assert sequence is max(running, key=lambda s: s.index)
        original(scheduler, sequence)
        assert (scheduler.waiting[0], sequence.slot in range(3)) == (sequence, False)
        assert scheduler.pages.owned(sequence) == []
        taken.append((sequence.index, len(sequence.new_ids)))

    original = Scheduler.preempt
    with mock.patch.object(Scheduler, "preempt", preempt):
        _, _, sequences, _ = play(load)
    assert any(made for _, made in taken)  # it had made tokens, and kept them
    assert 0 not in {index for index, _ in taken}  # the oldest never gives way
    assert [len(s.new_ids) for s in sequences] == [16, 16, 16]


@pytest.mark.parametrize(("pages", "taken_back"), [(40, False), (12, True), (8, False)])
def test_a_speculating_request_holds_the_pages_that_it_may_write(pages, taken_back):
    case = cases.build("C25")
    size, verify, rows = case.inputs["page"], case.inputs["verify_tokens"], case.inputs["requests"]
    last = [row["prompt"] + sum(row["accepted"]) for row in rows]  # index of the token that ends each request

    def tokens(seed, index):
        return STOP if index == last[seed] else 1

    device = Device(None, tokens=tokens, accepted={seed: list(row["accepted"]) for seed, row in enumerate(rows)})
    sizes = dict(num_slots=4, num_pages=pages, page_size=size, num_steps=verify - 1)
    engine = engine_on(device, **sizes, max_context=200)
    sequences = [
        engine.submit(Request(prompt_ids=[1] * row["prompt"], max_new_tokens=100, seed=seed, stop_ids=(STOP,)))
        for seed, row in enumerate(rows)
    ]
    for _ in engine.run():
        pass
    assert taken_back == any(len(device.pages_held[seed]) < len(row["accepted"]) for seed, row in enumerate(rows))
    got = [
        {
            "pages_while_verifying": np.array(device.pages_held[seed]),
            "tokens_at_end": device.cached_at_end[seed],
            "held_after_finish": len(engine.scheduler.pages.owned(sequence)),
        }
        for seed, sequence in enumerate(sequences)
    ]
    if taken_back:  # its second prefill made a token, so that it has fewer rounds; `Device.round` has checked each
        for row in got:
            del row["pages_while_verifying"]
    assert case.check({"requests": got}) == []
    assert engine.scheduler.pages.num_free == pages


def scheduler_of(**sizes):
    return Scheduler(**{**dict(num_slots=2, num_pages=8, page_size=4, max_context=24, rows_in_flight=4), **sizes})


def request_of(length, new=8):
    return Request(prompt_ids=[1] * length, max_new_tokens=new)


@pytest.mark.parametrize(
    ("sizes", "length", "message"),
    [
        (dict(), 24, "the prompt has 24 tokens and the cache holds 24 a request: one more is needed for the answer"),
        (dict(num_pages=3), 13, "the prompt has 13 tokens and needs 4 pages of 4, but the cache has 3: shorten"),
    ],
)
def test_a_prompt_that_cannot_run_even_alone_is_refused(sizes, length, message):
    scheduler = scheduler_of(**sizes)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(request_of(length))
    assert not scheduler.busy
    longest = scheduler.submit(request_of(length - 1))
    assert scheduler.admit() == [longest]


def test_limits_are_those_of_the_request_the_context_and_the_pool():
    def limit(scheduler, *request):
        return scheduler.limit_of(scheduler.submit(request_of(*request)))

    assert limit(scheduler_of(), 5, 7) == 12
    assert limit(scheduler_of(), 20, 100) == 24
    assert limit(scheduler_of(num_pages=3), 12, 100) == 13  # the last token is never cached


def test_a_small_request_does_not_overtake_a_large_one():
    scheduler = scheduler_of(num_slots=3, num_pages=6)
    first, large, small = (scheduler.submit(request_of(n)) for n in (12, 20, 1))
    assert scheduler.admit() == [first]
    scheduler.finish(first)
    assert scheduler.admit() == [large]
    scheduler.finish(large)
    assert scheduler.admit() == [small]


def test_prompts_are_prefilled_in_chunks_oldest_first():
    scheduler = scheduler_of(num_slots=3, num_pages=30)
    sequences = [scheduler.submit(request_of(n)) for n in (3, 9, 4)]
    assert scheduler.admit() == sequences
    assert scheduler.waiting_for_prefill() == 16
    assert [scheduler.next_chunk(8) for _ in range(3)] == [[3, 5, 0], [0, 4, 4], [0, 0, 0]]
    assert scheduler.waiting_for_prefill() == 0
    scheduler.finish(sequences[0])
    newer = scheduler.submit(request_of(2))
    assert scheduler.admit() == [newer] and newer.slot == 0  # a newer request in a lower slot still comes last
    sequences[1].num_prefilled = 0
    assert scheduler.next_chunk(8) == [0, 8, 0]


def test_a_request_taken_back_prefills_what_it_had_made_too():
    scheduler = scheduler_of()
    sequence = scheduler.submit(request_of(5))
    scheduler.admit()
    scheduler.next_chunk(16)
    sequence.new_ids = [7, 8, 9]
    sequence.num_known += 3
    scheduler.preempt(sequence)
    assert scheduler.pages.num_free == 8 and scheduler.busy
    assert scheduler.admit() == [sequence]
    assert (sequence.prefill_len, sequence.num_known, sequence.num_prefilled) == (8, 8, 0)
    assert sequence.known_ids == [1] * 5 + [7, 8, 9]
    assert sequence.limit == 13  # counted from the prompt


def test_mean_accept_is_tokens_a_round_and_one_before_any():
    sequence = scheduler_of().submit(request_of(3))
    assert sequence.mean_accept == 1.0
    sequence.num_rounds, sequence.num_round_tokens = 4, 10
    assert sequence.mean_accept == 2.5
