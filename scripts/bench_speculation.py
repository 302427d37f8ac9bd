"""What the draft head of SmolLM2-135M gives: tokens a target step on MT-Bench and HumanEval, and tokens a second.

    python scripts/bench_speculation.py accepted --mt-bench question.jsonl --human-eval HumanEval.jsonl.gz --dir work
    python scripts/bench_speculation.py speed --mt-bench question.jsonl --human-eval HumanEval.jsonl.gz

`accepted`: the model answers every prompt greedily (chat template, first 128 tokens; MT-Bench's first turns) and reads
its answers once; both are kept in work/. Rounds of chains and trees then run as they do in serving, with what the model
computed looked up instead of computed again: greedy decoding takes a draft where it is the model's own next token, so
only those rows of a tree matter that are on the known text. Every node is verified, none left out for its cost. With
--engine N the first N prompts of each file, in a drawn order, are served for real, without and with drafts: the ids are
compared, and where they differ the gap between the model's two best logits is printed.

`speed`: tokens a second at each batch of --batch, without drafts, with n-grams and with the head as `generate` runs it,
in turns, and the parts of a round: catching up on the newest tokens (extend), drafting, verifying, accepting, the host.

Writes scripts/results/speculation_cpu.json (another name with --to) and a plot beside it; an arm that is there is kept.
"""

import argparse
import collections
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from eval_prompts import read_eval
from flax import nnx

from jattn.cache import Cache
from jattn.combinators.costs import Variant
from jattn.combinators.extend import extend
from jattn.combinators.model_drafts import propose
from jattn.combinators.ngram import NUM_CLASSES
from jattn.combinators.round import advance, decode_round, to_the_front
from jattn.combinators.state import DecodeState, Status
from jattn.combinators.tree import link, prune_ranked, walk
from jattn.combinators.verify import verify_tree
from jattn.loaders.chat import render_chat
from jattn.models.decoder import new_cache
from jattn.models.draft_head import DraftHead, WithStreams
from jattn.plan import Plan, rows_of
from jattn.resolve import resolve
from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel, Options, load
from jattn.serving.request import Request
from jattn.serving.session import Session
from jattn.spec import AttnSpec
from jattn.training import Writer
from jattn.training.dense import read

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

RESULTS = Path(__file__).parent / "results"
GREEDY = SamplerConfig(random=False)
PAGE = 16
CHUNK = 512  # rows of a prefill step
GROUP = 61  # prompts that are replayed together
NEAR = 1e-3  # a gap between two logits that float32 may turn round


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to draft. topk 0: chains from the request's own text, num_steps at most."""

    topk: int
    num_steps: int
    num_nodes: int

    @property
    def name(self) -> str:
        """As it is printed."""
        if self.topk == 0:
            return f"n-gram, up to {self.num_steps}"
        return (
            f"chain of {self.num_steps}"
            if self.topk == 1
            else f"topk {self.topk}, {self.num_steps} steps, {self.num_nodes} nodes"
        )


def _tree(topk: int, num_steps: int) -> Arm:
    most = topk + (num_steps - 1) * topk * topk + 1
    return Arm(topk=topk, num_steps=num_steps, num_nodes=num_steps + 1 if topk == 1 else min(16, most))


ARMS = (
    _tree(1, 5),
    _tree(4, 5),
    Arm(topk=0, num_steps=15, num_nodes=16),
    *(
        _tree(topk, steps)
        for topk in (1, 2, 4, 8)
        for steps in (1, 2, 3, 5, 7)
        if (topk, steps) not in ((1, 5), (4, 5))
    ),
)


def main() -> None:
    """Run a stage, print its table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("accepted", "speed"))
    parser.add_argument("--mt-bench", type=Path, required=True, help="MT-Bench's question.jsonl")
    parser.add_argument("--human-eval", type=Path, required=True, help="HumanEval.jsonl, or .jsonl.gz")
    parser.add_argument("--dir", type=Path, help="accepted: where answers and features are kept")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--arms", type=int, default=len(ARMS), help="accepted: how many of the arms, the first ones")
    parser.add_argument("--every", type=int, default=1, help="accepted: every n-th prompt by length only")
    parser.add_argument(
        "--engine", type=int, default=0, metavar="N", help="accepted: prompts of each file that are served"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], help="speed: requests that run together")
    parser.add_argument("--prompts", type=int, default=8, help="speed: prompts, half of each file, drawn")
    parser.add_argument("--repeats", type=int, default=3, help="speed: runs of each arm")
    parser.add_argument("--to", type=Path, default=RESULTS / "speculation_cpu.json")
    args = parser.parse_args()
    loaded = load(Options(dtype="float32", draft="eagle"))
    files = {"MT-Bench": read_eval(args.mt_bench), "HumanEval": read_eval(args.human_eval)}
    prompts = {name: [_asked(loaded, text) for text in texts] for name, texts in files.items()}
    report = json.loads(args.to.read_text()) if args.to.exists() else {}
    report |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "settings": {
            "dtype": "float32",
            "greedy": True,
            "new_tokens": args.tokens,
            "prompts": {n: len(p) for n, p in prompts.items()},
        },
    }
    keep = lambda: args.to.write_text(json.dumps(report, indent=1) + "\n")  # noqa: E731
    {"accepted": accepted, "speed": speed}[args.stage](args, loaded, prompts, report, keep)
    keep()
    _plot(report, args.to.with_suffix(".png"))


def _asked(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.tokenizer.encode(render_chat(loaded.metadata, [{"role": "user", "content": text}]))


Keep = Callable[[], object]


def accepted(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]], report: dict, keep: Keep) -> None:
    """Tokens a target step, of every arm and file."""
    args.dir.mkdir(parents=True, exist_ok=True)
    groups = _groups(args, loaded, prompts)
    rows: dict[str, Any] = report.setdefault("accepted", {})
    held = collections.Counter(file for group in groups for file in group.files)
    report["settings"] |= {"prompts replayed": dict(held), "every": args.every}
    for arm in ARMS[: args.arms]:
        if arm.name in rows:
            continue
        start, tokens, rounds = time.perf_counter(), dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
        run = _replayed(loaded, arm, max(group.tokens.shape[1] for group in groups))
        for group in groups:
            for file, new, steps in zip(group.files, *run(group), strict=True):
                tokens[file] += int(new)
                rounds[file] += int(steps)
        means = {file: round(tokens[file] / rounds[file], 4) for file in prompts}
        rows[arm.name] = {
            **dataclasses.asdict(arm),
            **means,
            "all": round(sum(tokens.values()) / sum(rounds.values()), 4),
            "rounds": rounds,
            "tokens": tokens,
        }
        print(json.dumps({arm.name: rows[arm.name], "seconds": round(time.perf_counter() - start)}), flush=True)
        keep()
    if args.engine:
        report["engine"] = _served(args, loaded, prompts)
    print("| drafts | MT-Bench | HumanEval | all |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['MT-Bench']:.2f} | {row['HumanEval']:.2f} | {row['all']:.2f} |")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Greedy texts with what the model computed on them."""

    files: list[str]  # of each prompt
    tokens: np.ndarray  # i32[seqs, n], 0 behind the end
    prompt_lens: np.ndarray  # i32[seqs]
    lens: np.ndarray  # i32[seqs], prompt and answer
    streams: np.ndarray  # f32[seqs, n, width], as the head reads them


def _groups(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]]) -> list[Group]:
    head = loaded.drafter
    assert isinstance(head, DraftHead)
    listed = [(file, ids) for file, every in prompts.items() for ids in every]
    order = sorted(range(len(listed)), key=lambda at: len(listed[at][1]))[:: args.every]
    streams_of = jax.jit(lambda model, ids, own: jnp.concatenate(read(model, ids, own, taps=head.taps)[1], axis=-1))
    groups = []
    for start in range(0, len(order), GROUP):
        own = [listed[at] for at in order[start : start + GROUP]]
        file = args.dir / f"texts-{args.every}-{start:03}.npz"
        ids = [ids for _, ids in own]
        longest = max(map(len, ids))
        if not file.exists():
            writer = Writer(
                loaded.model,
                size=len(own),
                prompt_len=longest,
                new_tokens=args.tokens,
                stop_ids=tuple(loaded.tokenizer.eos_ids),
            )
            texts = [a + b for a, b in zip(ids, writer(ids), strict=True)]
            tokens = np.zeros((len(own), longest + args.tokens), np.int32)
            for row, text in enumerate(texts):
                tokens[row, : len(text)] = text
            streams = [  # a few rows at a time: the scores of long texts are large
                np.asarray(streams_of(loaded.model, some, np.ones_like(some)))
                for some in np.array_split(tokens, -(-len(own) // 8))
            ]
            np.savez(file, tokens=tokens, lens=list(map(len, texts)), streams=np.concatenate(streams))
            print(f"{file}: {len(own)} texts", flush=True)
        with np.load(file) as held:
            arrays = held["tokens"], np.asarray(list(map(len, ids)), np.int32), held["lens"].astype(np.int32)
            groups.append(Group([file for file, _ in own], *arrays, held["streams"]))
    return groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A model on texts that it has written: streams and next tokens are looked up by request and position."""

    tokens: jax.Array  # i32[seqs, n]
    streams: jax.Array  # f32[seqs, n, width]
    vocab_size: int = dataclasses.field(metadata=dict(static=True))

    def __call__[C: Cache](self, tokens: jax.Array, cache: C, plan: Plan, /) -> tuple[jax.Array, C]:
        """As a decoder; the next token comes in the first column, exact in float32."""
        seq, _, _ = rows_of(plan.cu_q_lens, plan.num_tokens)
        at = jnp.clip(plan.positions, 0, self.tokens.shape[1] - 1)
        behind = self.tokens[seq, jnp.minimum(at + 1, self.tokens.shape[1] - 1)]
        return jnp.concatenate([behind[:, None].astype(jnp.float32), self.streams[seq, at]], axis=1), cache

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """One where the next token is."""
        return jax.nn.one_hot(hidden[:, 0].astype(jnp.int32), self.vocab_size, dtype=jnp.float32)


def _replayed(loaded: LoadedModel, arm: Arm, context: int):
    # -> what runs a group: new tokens of rounds i32[seqs], rounds i32[seqs]
    head = loaded.drafter
    assert isinstance(head, DraftHead)
    pages = -(-(context + 80) // PAGE)
    spec = AttnSpec(num_q_heads=1, num_kv_heads=1, head_dim=8)  # of a cache that nobody reads
    choice = resolve(spec, "native", loaded.platform, page_size=PAGE)
    tree = arm.topk > 0

    def start(head, recorded: Recorded, prompt_lens, lens):
        seqs = prompt_lens.shape[0]
        pool: dict[str, Any] = dict(num_pages=seqs * pages, page_size=PAGE, dtype=jnp.float32)
        width = head.body.config.d_model
        state = DecodeState.create(
            new_cache(spec, num_layers=1, layout=choice.kv_layout, **pool),
            num_seqs=seqs,
            max_context=pages * PAGE,
            max_stops=1,
            num_classes=NUM_CLASSES,
            draft_cache=head.new_cache(**pool) if tree else None,
            draft_features=jnp.zeros((seqs, arm.num_steps + 1, width)) if tree else None,
        )
        return dataclasses.replace(
            state,
            tokens=jax.lax.dynamic_update_slice(state.tokens, recorded.tokens, (0, 0)),
            prompt_lens=prompt_lens,
            generated_from=prompt_lens,
            limits=lens,
            page_table=jnp.arange(seqs * pages, dtype=jnp.int32).reshape(seqs, pages),
            status=jnp.full(seqs, Status.PREFILL, jnp.int32),
        )

    def chunk(head, recorded: Recorded, state: DecodeState, q_lens):
        drafter = head if tree else None
        width = arm.num_steps + 1
        return extend(recorded, state, q_lens, rows=CHUNK, report_width=width, sampler=GREEDY, drafter=drafter)[0]

    def one(head, recorded: Recorded, state: DecodeState):
        seqs = state.seq_lens.shape[0]
        shape = Variant(rows=seqs * arm.num_nodes, max_q_len=arm.num_nodes, cost=1.0)
        before = state.decoding
        if tree:
            state, counts = whole_round(recorded, head, state, arm, shape)
        else:
            state, report = decode_round(recorded, state, num_steps=arm.num_steps, shapes=(shape,), sampler=GREEDY)
            counts = report.counts
        return state, counts, before

    start, chunk, one = jax.jit(start), jax.jit(chunk, donate_argnums=2), jax.jit(one, donate_argnums=2)

    def run(group: Group) -> tuple[np.ndarray, np.ndarray]:
        width = context - group.tokens.shape[1]
        padded = [np.pad(x, [(0, 0), (0, width)] + [(0, 0)] * (x.ndim - 2)) for x in (group.tokens, group.streams)]
        recorded = Recorded(*map(jnp.asarray, padded), vocab_size=loaded.config.vocab_size)
        state, left = start(head, recorded, group.prompt_lens, group.lens), group.prompt_lens.copy()
        while left.any():
            before = np.cumsum(left) - left
            q_lens = np.clip(CHUNK - before, 0, left).astype(np.int32)
            state, left = chunk(head, recorded, state, q_lens), left - q_lens
        new, rounds = np.zeros(len(group.files), int), np.zeros(len(group.files), int)
        while True:
            state, counts, took = one(head, recorded, state)
            if not np.asarray(took).any():
                break
            new, rounds = new + np.asarray(counts), rounds + np.asarray(took)
        known = np.asarray(state.tokens)
        for row, (length, text) in enumerate(zip(group.lens, group.tokens, strict=True)):
            np.testing.assert_array_equal(known[row, :length], text[:length])
        return new, rounds

    return run


def whole_round(model, head: DraftHead, state: DecodeState, arm: Arm, shape: Variant):
    """`model_round` with every node verified -> state, new tokens i32[seqs]."""
    made, candidates, _ = propose(head, state, topk=arm.topk, num_steps=arm.num_steps, sampler=GREEDY)
    state = dataclasses.replace(state, draft=made)
    tree, _ = prune_ranked(candidates, state.newest, num_nodes=arm.num_nodes)
    most = jnp.clip(state.limits - state.seq_lens - 1, 1, tree.num_nodes)  # rows have pages up to the limit
    tree = dataclasses.replace(tree, num_nodes=most)
    cache, chosen, features = verify_tree(
        model,
        state,
        tree,
        link(tree).bits,
        rows=shape.rows,
        max_q_len=shape.max_q_len,
        sampler=GREEDY,
        features_of=head.features,
    )
    return accepted_into(dataclasses.replace(state, cache=cache), tree, chosen.tokens, features, arm)


def accepted_into(state: DecodeState, tree, targets, features, arm: Arm):
    """What follows verification -> state, new tokens i32[seqs]."""
    path, new, kept = walk(tree, targets, max_depth=arm.num_steps)
    cache = to_the_front(state.cache, state, path, kept)
    seq = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    draft = state.draft
    if features is not None and draft.features is not None:
        read = jnp.where(state.decoding[:, None, None], features[seq, path], draft.features)
        draft = dataclasses.replace(draft, features=read)
    return advance(dataclasses.replace(state, cache=cache, draft=draft), new, kept)


def _served(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    # some prompts through engines: ids without and with drafts, and what a real round accepts
    draw = np.random.default_rng(0)
    some = [every[at] for every in prompts.values() for at in draw.permutation(len(every))[: args.engine]]
    plain, _ = _engine_run(loaded, some, args.tokens, None)
    found: dict[str, Any] = {"prompts": len(some)}
    for arm in ARMS[:2]:
        ids, mean = _engine_run(loaded, some, args.tokens, arm)
        gaps = []
        for prompt, mine, theirs in zip(some, ids, plain, strict=True):
            if mine != theirs:
                at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
                gaps.append(_gap(loaded, prompt + theirs[:at]))
        found[arm.name] = {"accepted": round(mean, 4), "texts that differ": len(gaps), "gaps where they do": gaps}
        print(json.dumps({f"served, {arm.name}": found[arm.name]}), flush=True)
        if any(gap > NEAR for gap in gaps):
            raise SystemExit(f"{arm.name}: texts differ where the model's two best logits are {max(gaps)} apart")
    return found


def _engine_run(loaded: LoadedModel, prompts, tokens: int, arm: Arm | None) -> tuple[list[list[int]], float]:
    context = -(-(max(map(len, prompts)) + tokens + 64) // 256) * 256
    engine = Engine(
        loaded.model,
        num_layers=loaded.config.num_layers,
        num_slots=8,
        num_pages=8 * context // loaded.page_size,
        page_size=loaded.page_size,
        max_context=context,
        num_steps=arm.num_steps if arm else 0,
        topk=arm.topk if arm else 1,
        num_nodes=arm.num_nodes if arm else None,
        kind="cuda",  # rows count as nearly free there, so nearly every draft is verified
        sampler=GREEDY,
        drafter=loaded.drafter if arm else None,
    )
    stop_ids = tuple(loaded.tokenizer.eos_ids)
    sequences = [engine.submit(Request(prompt_ids=ids, max_new_tokens=tokens, stop_ids=stop_ids)) for ids in prompts]
    for _ in engine.run():
        pass
    rounds = sum(sequence.num_rounds for sequence in sequences)
    return [s.new_ids for s in sequences], sum(s.num_round_tokens for s in sequences) / max(rounds, 1)


def _gap(loaded: LoadedModel, ids: list[int]) -> float:
    tokens = jnp.asarray(ids, jnp.int32)[None]
    hidden, _ = read(loaded.model, tokens, jnp.ones_like(tokens))
    best = jax.lax.top_k(loaded.model.logits(hidden[0, -1:]), 2)[0][0]
    return float(best[0] - best[1])


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


def _plot(report: dict, path: Path) -> None:
    rows = list(report.get("accepted", {}).values())
    speeds = {name: row for name, row in report.get("speed", {}).items() if name.startswith("batch")}
    panels = [panel for panel, has in ((_plot_accepted, rows), (_plot_speeds, speeds)) if has]
    figure, axes = plt.subplots(ncols=len(panels), figsize=(5.5 * len(panels), 4), layout="constrained", squeeze=False)
    for panel, ax in zip(panels, axes[0], strict=True):
        panel(ax, rows if panel is _plot_accepted else speeds)
    figure.suptitle(f"SmolLM2-135M, float32, greedy, {report['device']}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_accepted(ax, rows) -> None:
    for topk in sorted({row["topk"] for row in rows} - {0}):
        points = sorted((row["num_steps"], row["all"]) for row in rows if row["topk"] == topk)
        ax.plot(*zip(*points, strict=True), marker="o", label="chain" if topk == 1 else f"topk {topk}, up to 16 nodes")
    for row in rows:
        if row["topk"] == 0:
            ax.axhline(row["all"], color="grey", linestyle=":", label=f"n-gram, up to {row['num_steps']}")
    ax.set(xlabel="draft steps", ylabel="tokens a target step, bonus included", title="MT-Bench and HumanEval")
    ax.legend(fontsize=8)


def _plot_speeds(ax, speeds) -> None:
    for at, (name, ways) in enumerate(speeds.items()):
        places = np.arange(len(ways)) + at * 0.8 / len(speeds)
        bars = ax.bar(places, [way["tokens a second"] for way in ways.values()], 0.8 / len(speeds), label=name)
        ax.bar_label(bars, [f"{way['over none']:.2f}x" for way in ways.values()], fontsize=8)
        ax.set_xticks(np.arange(len(ways)) + 0.2, list(ways), fontsize=8)
    ax.set(ylabel="tokens a second", title="end to end")
    ax.legend(fontsize=8)


if __name__ == "__main__":
    main()
