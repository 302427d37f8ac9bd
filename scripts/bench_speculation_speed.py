"""Tokens a second and the parts of a round, for `bench_speculation.py`."""

import dataclasses
import itertools
import json
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
from bench_engine import GREEDY, engine_of
from bench_speculation_arms import Arm, Keep
from flax import nnx

from jattn.combinators.model_drafts import propose
from jattn.combinators.round import model_round
from jattn.combinators.tree import link, prune_ranked
from jattn.combinators.verify import verify_tree
from jattn.models.draft_head import DraftHead, WithStreams
from jattn.serving.loaded import LoadedModel, Options
from jattn.serving.request import Request
from jattn.serving.session import Session

PARTS = (Arm(topk=1, num_steps=3, num_nodes=4), Arm(topk=4, num_steps=5, num_nodes=8))
_TURNS = 20  # timed rounds of each part, times --repeats
_ROUNDS = 5  # of an engine at a time


def speed(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]], report: dict, keep: Keep) -> None:
    """Tokens a second, and the parts of a round."""
    draw = np.random.default_rng(0)
    each = args.prompts // len(prompts)
    drawn = [[every[at] for at in draw.permutation(len(every))[:each]] for every in prompts.values()]
    some = [prompt for both in zip(*drawn, strict=True) for prompt in both]  # of each file in turn
    found: dict[str, Any] = report.setdefault("speed", {})
    found |= {"prompts": len(some), "new tokens": args.tokens, "load average before": os.getloadavg()[0]}
    for batch in args.batch:
        found[f"batch {batch}"] = _rates(args, loaded, some, batch)
        for way, row in found[f"batch {batch}"].items():
            print(json.dumps({f"batch {batch}, {way}": row}), flush=True)
        keep()
    for arm in PARTS[: args.parts]:
        parts = _parts(loaded, arm, some[-1], _TURNS * args.repeats)
        found.setdefault("round, ms at batch 1", {})[arm.name] = parts
        print(f"{arm.name}: {parts}", flush=True)
    found["load average after"] = os.getloadavg()[0]


WAYS: dict[str, dict[str, Any]] = {
    "none": dict(draft="none"),
    "n-gram": dict(draft="ngram"),
    "eagle": dict(draft="eagle"),
    "eagle, topk 4": dict(draft="eagle", topk=4),
}


def _rates(args, loaded: LoadedModel, prompts, batch: int) -> dict[str, dict[str, Any]]:
    sessions = {}
    for way in args.ways:
        options = Options(dtype=args.dtype, max_new_tokens=args.tokens, max_batch=batch, **WAYS[way])
        head = dataclasses.replace(loaded, drafter=loaded.drafter if options.draft == "eagle" else None)
        sessions[way] = Session(head, prompts, options)
        for sequence in sessions[way].sequences:
            sessions[way].engine.cancel(sequence)  # below they come in groups, each way in turn
    stop_ids = tuple(loaded.tokenizer.eos_ids)
    times: dict[str, list[float]] = {way: [] for way in sessions}
    tokens, rounds, kept = ({way: 0 for way in sessions} for _ in range(3))
    for _, group in itertools.product(range(args.repeats), itertools.batched(prompts, batch)):
        for way, session in sessions.items():
            begun = time.perf_counter()
            wanted = [Request(prompt_ids=ids, max_new_tokens=args.tokens, stop_ids=stop_ids) for ids in group]
            sequences = [session.engine.submit(request) for request in wanted]
            for _ in session.engine.run():
                pass
            times[way].append(time.perf_counter() - begun)
            tokens[way] += sum(len(sequence.new_ids) for sequence in sequences)
            rounds[way] += sum(sequence.num_rounds for sequence in sequences)
            kept[way] += sum(sequence.num_round_tokens for sequence in sequences)
    base = args.ways[0]
    return {
        way: {
            "tokens a second": round(tokens[way] / sum(times[way]), 2),
            f"over {base}": round(sum(times[base]) / sum(times[way]) * tokens[way] / tokens[base], 3),
            "of groups, median": round(statistics.median(map(float.__truediv__, times[base], times[way])), 3),
            "quartiles": [round(x, 3) for x in _quartiles(times[base], times[way])],
            "accepted": round(kept[way] / max(rounds[way], 1), 3),
            "tokens": tokens[way],
        }
        for way in sessions
    }


def _quartiles(base: list[float], own: list[float]) -> list[float]:
    ratios = [a / b for a, b in zip(base, own, strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios


def _parts(loaded: LoadedModel, arm: Arm, prompt: list[int], turns: int) -> dict[str, float]:
    # A round up to the end of each part, on states of their own in the middle of one text, in turns: what a part takes
    # is what the program that ends with it takes more than the one before.
    head = loaded.drafter
    assert isinstance(head, DraftHead)

    def in_the_middle(arm: Arm | None):
        engine = engine_of(
            loaded,
            num_steps=arm.num_steps if arm else 0,
            topk=arm.topk if arm else 1,
            num_nodes=arm.num_nodes if arm else None,
            kind=loaded.platform.kind,
            kv_dtype=loaded.model.embed.dtype,
            drafter=head if arm else None,
        )
        engine.submit(Request(prompt_ids=prompt, max_new_tokens=1024 - len(prompt), stop_ids=()))
        deltas = engine.run()
        next(deltas)
        return engine, deltas

    engines = {name: in_the_middle(own) for name, own in (("engine", arm), ("no draft", None))}
    engine = engines["engine"][0]
    shapes = engine.config.shapes(engine.config.draft_shapes[0])
    graphdef, params = nnx.split((loaded.model, head))

    def extend(_, head, state):
        made, candidates, _ = propose(head, state, topk=arm.topk, num_steps=1, sampler=GREEDY)
        return dataclasses.replace(state, draft=made), candidates

    def draft(_, head, state):
        made, candidates, _ = propose(head, state, topk=arm.topk, num_steps=arm.num_steps, sampler=GREEDY)
        tree, _ = prune_ranked(candidates, state.newest, num_nodes=arm.num_nodes)
        return dataclasses.replace(state, draft=made), (tree, link(tree).bits)

    def verify(model, head, state):
        state, (tree, bits) = draft(model, head, state)
        shape: Any = dict(rows=shapes[-1].rows, max_q_len=shapes[-1].max_q_len)
        shape |= dict(sampler=GREEDY, features_of=head.kept)
        cache, chosen, features = verify_tree(model, state, tree, bits, **shape)
        return dataclasses.replace(state, cache=cache), (chosen, features)

    def accept(model, head, state):
        sizes: Any = dict(topk=arm.topk, num_steps=arm.num_steps, num_nodes=arm.num_nodes)
        return model_round(model, head, state, **sizes, shapes=shapes, sampler=GREEDY, may_skip=False)

    def compiled(function):
        def run(params, state):
            model, head = nnx.merge(graphdef, params)
            return function(WithStreams(model, head.taps), head, state)

        state = jax.tree.map(lambda x: x.copy(), engine._settled())
        return [jax.jit(run, donate_argnums=1).lower(params, state).compile(), state]

    programs = {function.__name__: compiled(function) for function in (extend, draft, verify, accept)}
    times: dict[str, list[float]] = {name: [] for name in [*programs, *engines]}
    for turn in range(turns):
        for name, run in programs.items():
            begun = time.perf_counter()
            run[1], _ = jax.block_until_ready(run[0](params, run[1]))
            times[name].append(1e3 * (time.perf_counter() - begun))
        if turn % _ROUNDS == 0:
            for name, (serving, deltas) in engines.items():  # as many rounds, one always in flight
                begun, first = time.perf_counter(), serving.num_rounds
                for _ in itertools.islice(deltas, _ROUNDS):
                    pass
                jax.block_until_ready(serving._settled())
                if done := serving.num_rounds - first:
                    times[name].append(1e3 * (time.perf_counter() - begun) / done)
    medians = {name: statistics.median(every) for name, every in times.items()}
    ends = [0.0, *(medians[name] for name in programs), medians["engine"]]
    named = zip((*programs, "host"), itertools.pairwise(ends), strict=True)
    parts = {name: end - start for name, (start, end) in named}
    parts |= {"whole": medians["engine"], "no draft": medians["no draft"]}
    return {name: round(ms, 2) for name, ms in parts.items()}
