"""Serving behaviour on a tiny random model: the same tokens whatever happens around a request."""

import itertools

import numpy as np
import pytest
from engines import serve
from tiny_model import CONFIG, tiny

from jattn.cache import PagedKV
from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine
from jattn.serving.request import Request


@pytest.fixture(scope="module")
def model():
    return tiny()


def engine_of(model, *, num_slots=3, num_pages=96, page_size=4, num_steps=5, kind="cpu", **kwargs):
    return Engine(
        model,
        num_layers=CONFIG.num_layers,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        max_context=128,
        num_steps=num_steps,
        kind=kind,
        prefill_rows=(16,),
        **kwargs,
    )


@pytest.fixture(scope="module")
def engines(model):
    return {
        "plain": engine_of(model, num_steps=0),
        "drafting": engine_of(model),
        # 20 pages of 4: three requests of up to 60 tokens cannot all stay, so some are taken back; and as on a GPU a
        # thread launches, and a round has no branch
        "short of pages": engine_of(model, num_pages=20, kind="cuda"),
    }


PROMPTS = [[(7 * i + 3 * j) % 100 for j in range(length)] for i, length in enumerate((1, 5, 17, 33, 40, 2))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_gets_the_same_tokens_alone_in_a_batch_with_drafts_and_after_preemption(engines, temperature):
    options = dict(max_new_tokens=24, temperature=temperature, seed=11, top_p=0.95)
    want = [serve(engines["plain"], [prompt], **options)[0].new_ids for prompt in PROMPTS]
    for name, engine in engines.items():
        got = [sequence.new_ids for sequence in serve(engine, PROMPTS, **options)]
        assert got == want, name
        assert engine.scheduler.pages.num_free == engine.scheduler.num_pages
        assert all(slot is None for slot in engine.scheduler.slots)


def test_a_short_pool_really_takes_requests_back(model, engines, monkeypatch):
    engine, taken = engines["short of pages"], []
    original = engine.scheduler.preempt
    monkeypatch.setattr(
        engine.scheduler, "preempt", lambda sequence: (taken.append(sequence.index), original(sequence))
    )
    serve(engine, PROMPTS, max_new_tokens=24)
    assert taken


@pytest.mark.parametrize("name", ["plain", "drafting"])
def test_stop_tokens_and_limits_inside_accepted_tokens_are_exact(engines, name):
    (free,) = serve(engines["plain"], [PROMPTS[2]], max_new_tokens=40)
    for at in (0, 1, 7, 20, 39):
        stop = free.new_ids[at]
        first = free.new_ids.index(stop)
        (got,) = serve(engines[name], [PROMPTS[2]], max_new_tokens=40, stop_ids=(stop, 99))
        assert got.new_ids == free.new_ids[: first + 1]
        assert got.finish_reason == "stop"
        (got,) = serve(engines[name], [PROMPTS[2]], max_new_tokens=at + 1)
        assert got.new_ids == free.new_ids[: at + 1]
        assert got.finish_reason == "length"


def test_a_cancelled_request_keeps_what_it_had_and_leaves_the_others_alone(engines):
    engine = engines["drafting"]
    want = serve(engine, [PROMPTS[1]], max_new_tokens=30)[0].new_ids
    first, second = (engine.submit(Request(prompt_ids=p, max_new_tokens=30)) for p in (PROMPTS[0], PROMPTS[1]))
    for delta in engine.run():
        if delta.sequence is first and len(first.new_ids) >= 4:
            engine.cancel(first)
    assert first.finish_reason == "stop"
    assert 4 <= len(first.new_ids) <= 4 + 6
    assert second.new_ids == want
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


def test_a_cancelled_request_that_waits_never_runs(engines):
    engine = engines["drafting"]
    want = serve(engine, [PROMPTS[1]], max_new_tokens=6)[0].new_ids
    requests = [Request(prompt_ids=PROMPTS[1], max_new_tokens=6) for _ in range(5)]  # three slots: two wait
    sequences = [engine.submit(request) for request in requests]
    engine.cancel(sequences[1])
    engine.cancel(sequences[1])  # again: nothing happens
    heard = []
    for delta in engine.run():
        engine.cancel(sequences[4], reason="gone")
        heard.append(delta.sequence)
    assert sequences[1] not in heard and sequences[4] not in heard
    assert [s.finish_reason for s in sequences] == ["length", "stop", "length", "length", "gone"]
    assert [s.new_ids for s in sequences] == [want, [], want, want, []]
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


def test_a_prompt_that_fills_the_pool_gets_one_token(engines):
    prompt = [(3 * i) % 100 for i in range(80)]
    want = serve(engines["plain"], [prompt], max_new_tokens=1)[0].new_ids
    engine = engines["short of pages"]  # 20 pages of 4
    for new in (1, 9):
        (got,) = serve(engine, [prompt], max_new_tokens=new)
        assert (got.new_ids, got.finish_reason) == (want, "length")
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


def test_requests_submitted_while_others_run_are_served(engines):
    engine = engines["drafting"]
    want = [serve(engine, [p], max_new_tokens=10)[0].new_ids for p in PROMPTS]
    late = itertools.chain(PROMPTS[1:])
    sequences = [engine.submit(Request(prompt_ids=PROMPTS[0], max_new_tokens=10))]
    for _ in engine.run():
        if (prompt := next(late, None)) is not None:
            sequences.append(engine.submit(Request(prompt_ids=prompt, max_new_tokens=10)))
    assert [s.new_ids for s in sequences] == want[: len(sequences)]
    assert len(sequences) == len(PROMPTS)


def test_results_are_read_one_round_late(engines, monkeypatch):
    engine, events = engines["plain"], []
    (dispatch,), read = engine.programs.rounds, engine._read
    object.__setattr__(engine.programs, "rounds", (lambda *a: (events.append("dispatch"), dispatch(*a))[1],))
    monkeypatch.setattr(engine, "_read", lambda flight: (events.append("read"), read(flight))[1])
    serve(engine, [PROMPTS[1]], max_new_tokens=6)
    object.__setattr__(engine.programs, "rounds", (dispatch,))
    # prefill, then every read stands behind the dispatch of the round after it
    assert events[:4] == ["dispatch", "read", "dispatch", "read"]
    assert events.index("dispatch") < events.index("read")


def test_a_prompt_that_cannot_fit_is_refused_with_the_sizes(engines):
    with pytest.raises(ValueError, match=r"128 tokens and the cache holds 128 a request.*--max-context"):
        engines["plain"].submit(Request(prompt_ids=[1] * 128))
    with pytest.raises(ValueError, match=r"needs 25 pages of 4, but the cache has 20.*--num-pages"):
        engines["short of pages"].submit(Request(prompt_ids=[1] * 100))


def test_a_greedy_engine_refuses_a_random_request(model):
    engine = engine_of(model, num_slots=1, num_steps=0, sampler=SamplerConfig(random=False))
    with pytest.raises(ValueError, match="temperature=0.5"):
        engine.submit(Request(prompt_ids=[1], temperature=0.5))


@pytest.mark.parametrize(
    "kv_dtype",
    [
        pytest.param("bfloat16", marks=pytest.mark.long),
        "fp8_e4m3",
        pytest.param("fp8_e5m2", marks=pytest.mark.long),
        "int8",
    ],
)
def test_narrow_caches_stay_near_the_full_one(kv_dtype):
    full, narrow = (engine_of(tiny(dtype), num_slots=1, num_steps=0) for dtype in (None, kv_dtype))
    a, b = (serve(engine, [PROMPTS[3]], max_new_tokens=8)[0].new_ids for engine in (full, narrow))
    assert len(a) == len(b) == 8
    assert narrow.cache_bytes < full.cache_bytes
    cache = narrow._state.cache
    assert isinstance(cache, PagedKV)
    assert np.isfinite(np.asarray(cache.k).view(cache.dtype).astype(np.float32)).all()
