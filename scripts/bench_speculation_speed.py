"""Tokens a second and the parts of a round, for `bench_speculation.py`."""

import dataclasses
import json
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
from bench_speculation_arms import ARMS, GREEDY, Arm, Keep, accepted_into
from flax import nnx

from jattn.combinators.costs import Variant
from jattn.combinators.model_drafts import propose
from jattn.combinators.tree import link, prune_ranked
from jattn.combinators.verify import verify_tree
from jattn.models.draft_head import DraftHead, WithStreams
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel, Options
from jattn.serving.request import Request
from jattn.serving.session import Session


def speed(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]], report: dict, keep: Keep) -> None:
    """Tokens a second, and the parts of a round."""
    draw = np.random.default_rng(0)
    each = args.prompts // len(prompts)
    some = [every[at] for every in prompts.values() for at in draw.permutation(len(every))[:each]]
    ways: dict[str, dict[str, Any]] = {
        "none": dict(draft="none"),
        "n-gram": dict(draft="ngram"),
        "eagle, chain": dict(draft="eagle"),
        "eagle, topk 4": dict(draft="eagle", topk=4),
    }
    report["speed"] = {"prompts": len(some), "load average before": os.getloadavg()[0]}
    for batch in args.batch:
        found: dict[str, list[float]] = {way: [] for way in ways}
        means: dict[str, float] = {}
        for _ in range(args.repeats):
            for way, chosen in ways.items():  # in turns, so that a busy minute hits them all
                options = Options(dtype="float32", max_new_tokens=args.tokens, max_batch=batch, **chosen)
                with_head = dataclasses.replace(loaded, drafter=loaded.drafter if options.draft == "eagle" else None)
                session = Session(with_head, some, options)
                begun = time.perf_counter()
                done = [piece.completion for piece in session.stream() if piece.completion is not None]
                found[way].append(sum(one.new_tokens for one in done) / (time.perf_counter() - begun))
                rounds = sum(sequence.num_rounds for sequence in session.sequences)
                means[way] = sum(sequence.num_round_tokens for sequence in session.sequences) / max(rounds, 1)
        report["speed"][f"batch {batch}"] = {
            way: {
                "tokens a second": round(statistics.median(rates), 2),
                "all": [round(rate, 2) for rate in rates],
                "over none": round(statistics.median(rates) / statistics.median(found["none"]), 3),
                "accepted": round(means[way], 3),
            }
            for way, rates in found.items()
        }
        print(json.dumps({f"batch {batch}": report["speed"][f"batch {batch}"]}), flush=True)
        keep()
    report["speed"]["round, ms at batch 1"] = {
        arm.name: _parts(loaded, arm, some[0], args.repeats) for arm in (ARMS[0], ARMS[1])
    }
    report["speed"]["load average after"] = os.getloadavg()[0]
    for name, parts in report["speed"]["round, ms at batch 1"].items():
        print(f"{name}: {parts}", flush=True)


def _parts(loaded: LoadedModel, arm: Arm, prompt: list[int], repeats: int) -> dict[str, float]:
    # each part as a program of its own on one state in the middle of a text, every node verified
    head = loaded.drafter
    assert isinstance(head, DraftHead)
    engine = Engine(
        loaded.model,
        num_layers=loaded.config.num_layers,
        num_slots=1,
        num_pages=1024 // loaded.page_size,
        page_size=loaded.page_size,
        max_context=1024,
        num_steps=arm.num_steps,
        topk=arm.topk,
        num_nodes=arm.num_nodes,
        kind="cuda",
        sampler=GREEDY,
        drafter=head,
    )
    engine.submit(Request(prompt_ids=prompt, max_new_tokens=512, stop_ids=()))
    deltas = engine.run()
    for _ in range(12):
        next(deltas)
    begun, first = time.perf_counter(), engine.num_rounds
    for _ in range(12):
        next(deltas)
    whole = 1e3 * (time.perf_counter() - begun) / max(engine.num_rounds - first, 1)
    state = engine._state
    graphdef, params = nnx.split((loaded.model, head))
    shape = Variant(rows=arm.num_nodes, max_q_len=arm.num_nodes, cost=1.0)

    def with_models(function):
        def run(params, *args):
            model, head = nnx.merge(graphdef, params)
            return function(WithStreams(model, head.taps), head, *args)

        return jax.jit(run)

    def drafted(steps: int):
        def run(_, head, state):
            made, candidates, _ = propose(head, state, topk=arm.topk, num_steps=steps, sampler=GREEDY)
            return made, candidates

        return run

    def prune(_, head, state, candidates):
        tree, _ = prune_ranked(candidates, state.newest, num_nodes=arm.num_nodes)
        return tree, link(tree).bits

    def verify(model, head, state, tree, bits):
        return verify_tree(
            model,
            state,
            tree,
            bits,
            rows=shape.rows,
            max_q_len=shape.max_q_len,
            sampler=GREEDY,
            features_of=head.features,
        )

    def accept(_, head, state, tree, targets, features):
        return accepted_into(state, tree, targets, features, arm)

    def timed(function, *args):
        program, times = with_models(function), []
        out: Any = None
        for _ in range(5 * repeats + 1):
            begun = time.perf_counter()
            out = jax.block_until_ready(program(params, *args))
            times.append(1e3 * (time.perf_counter() - begun))
        return out, statistics.median(times[1:])  # the first compiles

    _, extended = timed(drafted(1), state)
    (made, candidates), proposed = timed(drafted(arm.num_steps), state)
    (tree, bits), pruned = timed(prune, state, candidates)
    (cache, chosen, features), verified = timed(verify, state, tree, bits)
    _, walked = timed(accept, dataclasses.replace(state, cache=cache, draft=made), tree, chosen.tokens, features)
    parts = {"extend": extended, "draft": proposed - extended + pruned, "verify": verified, "accept": walked}
    parts |= {"whole": whole, "host and the rest": whole - sum(parts.values())}
    return {name: round(ms, 2) for name, ms in parts.items()}
