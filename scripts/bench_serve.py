"""Decode rounds of `jattn generate` on a GPU: tokens a second, the share of the bandwidth roof, kernels, idle time.

    python3 scripts/bench_serve.py --shape smollm2 --batch 1 64 --context 512 --out rows.jsonl
    python3 scripts/bench_serve.py --shape llama3-8b --batch 1 64 --context 4096 --out rows.jsonl

Prompts of random tokens are served from end to end, in bfloat16, greedily, the prompts so long that the contexts are
--context tokens in the middle of the answer; without drafts, or with --drafts TOPK,STEPS,NODES by the head that comes
with SmolLM2 (then with its weights; what is accepted changes tokens_per_s, not ms_round). A JSON line each batch:
  tokens_per_s, ms_round: of the rounds in which every request decodes; median of --runs.
  ms_roof, pct_of_roof: the bytes of a round (weights without the embedding where that is no head, too, and the keys and
    values of the contexts) over the read bandwidth, measured in the same process.
  ms_kernels, kernels: time and number of a round's kernels (CUPTI). idle_pct: share of a round without one, which is
    the host's and the launches' part.
  ms_launch: the host's time to launch a round, beside its other work. ms_prefill: all prompts.
  top: the kernels that take longest, with their number and milliseconds a round.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from bench_attention_timer import Timer, roofs
from bench_engine import tokens_a_round

from jattn.serving.loaded import LoadedModel, Options, load
from jattn.serving.session import Session

_LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5)
SHAPES = {
    "smollm2": dict(
        _LLAMA,
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "llama3-8b": dict(
        _LLAMA,
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    ),
}
_PROFILED = 16  # rounds


def round_bytes(loaded: LoadedModel, batch: int, context: int) -> int:
    """Fewest bytes that a decode round reads: every weight once, and the keys and values of every request."""
    config = loaded.config
    embedding = 0 if config.tied_embeddings else loaded.model.embed.nbytes
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * loaded.model.embed.dtype.itemsize
    return loaded.weight_bytes - embedding + batch * context * row


class Serving:
    """One engine, and the same requests through it again and again."""

    def __init__(self, loaded: LoadedModel, options: Options, prompts: list[list[int]]):
        start = time.perf_counter()
        self.session = Session(loaded, prompts, options)
        self.seconds_to_compile = time.perf_counter() - start
        self.engine = self.session.engine
        self.launches: list[float] = []
        self.engine.programs = dataclasses.replace(
            self.engine.programs, rounds=tuple(map(self._timed, self.engine.programs.rounds))
        )
        self.requests = [sequence.request for sequence in self.session.sequences]
        for _ in self.session.stream():  # warm: the caller's view of the run, text and all
            pass

    def _timed(self, program):
        def call(*args):
            start = time.perf_counter()
            result = program(*args)
            self.launches.append(time.perf_counter() - start)
            return result

        return call

    def run(self, between=lambda number: None) -> tuple[float, list[float]]:
        """Seconds until the first round, and when each round's tokens were there; `between` hears of each round."""
        session = self.session
        session.sequences[:] = [self.engine.submit(request) for request in self.requests]
        for index, sequence in enumerate(session.sequences):
            sequence.index = index  # as the session's first requests, so that it decodes their texts
        first, stamps = self.engine.num_rounds, []
        start = time.perf_counter()
        seen = first
        for _ in session.stream():
            if self.engine.num_rounds != seen:
                seen = self.engine.num_rounds
                stamps.append(time.perf_counter())
                between(seen - first)
        return stamps[0] - start, stamps


def measure(loaded: LoadedModel, args, batch: int, timer: Timer, read_gbps: float) -> dict:
    """A row."""
    options = _options(args, max_batch=batch)
    draw = np.random.default_rng(0)
    length = args.context - args.tokens // 2
    prompts = draw.integers(100, loaded.config.vocab_size - 300, (batch, length)).tolist()
    serving = Serving(loaded, options, prompts)
    rounds, prefills = [], []
    for _ in range(args.runs):
        prefill, stamps = serving.run()
        steady = np.diff(stamps)[4:-4]
        rounds.append(float(np.mean(steady)) * 1e3)
        prefills.append(prefill * 1e3)
    profiled: list[tuple[str, float]] = []  # (kernel, ms)

    def between(number: int) -> None:
        if number == 8:
            timer.cupti._cupti_init()
        elif number == 8 + _PROFILED:
            jax.effects_barrier()
            profiled.extend(timer.cupti._cupti_get_timings(True))

    serving.run(between)
    accepted = tokens_a_round(serving.session.sequences)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for name, ms in profiled:
        by_name[name.split("(")[0][:80]].append(ms)
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]
    ms, kernels = statistics.median(rounds), sum(ms for _, ms in profiled) / _PROFILED
    roof = round_bytes(loaded, batch, args.context) / read_gbps / 1e6
    return dict(
        family="serve",
        shape=f"{args.shape} B{batch} ctx{args.context} p{args.page_size}",
        drafts=args.drafts,
        tokens_per_s=accepted * batch / ms * 1e3,
        accepted=accepted,
        ms_round=ms,
        runs=rounds,
        ms_roof=roof,
        pct_of_roof=100 * roof / ms,
        ms_kernels=kernels,
        kernels=len(profiled) / _PROFILED,
        idle_pct=100 * (1 - kernels / ms),
        ms_launch=statistics.median(serving.launches) * 1e3,
        ms_prefill=statistics.median(prefills),
        seconds_to_compile=serving.seconds_to_compile,
        top=[[name, len(times) / _PROFILED, sum(times) / _PROFILED] for name, times in top],
    )


def _options(args, **more) -> Options:
    drafts: dict[str, Any] = dict(draft="none", random_weights=args.config)
    if args.drafts:
        topk, steps, nodes = map(int, args.drafts.split(","))
        drafts = dict(draft="eagle", topk=topk, num_steps=steps, num_draft_tokens=nodes)
    return Options(
        max_new_tokens=args.tokens,
        page_size=args.page_size,
        ignore_eos=True,
        dtype="bfloat16",
        max_context=args.context + args.tokens,
        **drafts,
        **more,
    )


def main() -> None:
    """Measure, and print rows as they come."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--drafts", help="TOPK,STEPS,NODES of a tree of SmolLM2's head; 1,N,N+1 is a chain")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", help="JSON lines")
    args = parser.parse_args()
    timer = Timer(args.runs)
    roof = roofs(timer)
    rows = [dict(family="roof", **roof, jax=jax.__version__, device=jax.devices()[0].device_kind)]
    print(json.dumps(rows[0]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        args.config = str(Path(folder) / "config.json")
        Path(args.config).write_text(json.dumps(SHAPES[args.shape]))
        loaded = load(_options(args))
    for batch in args.batch:
        rows.append(measure(loaded, args, batch, timer, roof["read_gbps"]) | dict(date=time.strftime("%Y-%m-%d")))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
