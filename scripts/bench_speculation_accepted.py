"""Tokens a target step, for `bench_speculation.py`: rounds over texts whose model outputs are known, or served."""

import collections
import dataclasses
import json
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_engine import GREEDY, engine_of, tokens_a_round
from bench_speculation_arms import ARMS, Arm, Keep, whole_round

from jattn.cache import Cache
from jattn.combinators.costs import Variant
from jattn.combinators.extend import extend
from jattn.combinators.ngram import NUM_CLASSES
from jattn.combinators.round import decode_round
from jattn.combinators.state import DecodeState, Status
from jattn.models.decoder import new_cache
from jattn.models.draft_head import DraftHead
from jattn.plan import Plan, rows_of
from jattn.resolve import resolve
from jattn.serving.loaded import LoadedModel
from jattn.serving.request import Request
from jattn.serving.scheduler import Sequence
from jattn.spec import AttnSpec
from jattn.training import Writer
from jattn.training.dense import read

PAGE = 16
CHUNK = 512  # rows of a prefill step
GROUP = 61  # prompts that are replayed together
NEAR = 1e-3  # a gap between two logits that float32 may turn round


def accepted(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]], report: dict, keep: Keep) -> None:
    """Tokens a target step, of every arm and file."""
    rows: dict[str, Any] = report.setdefault("accepted", {})
    groups: list[Group] = []
    if args.arms:
        args.dir.mkdir(parents=True, exist_ok=True)
        groups = _groups(args, loaded, prompts)
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
        keep()
        for arm in ARMS[:3]:
            gaps = report["engine"][arm.name]["gaps where they do"].values()
            if any(gap > NEAR for gap in gaps):
                raise SystemExit(f"{arm.name}: texts differ where the model's two best logits are {max(gaps)} apart")
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
        width = head.feature_dim
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


def _served(args, loaded: LoadedModel, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    # some prompts through engines: ids without and with drafts, and what a real round accepts
    draw = np.random.default_rng(0)
    some = [(file, every[at]) for file, every in prompts.items() for at in draw.permutation(len(every))[: args.engine]]
    files = [file for file, _ in some]

    def of(sequences: Iterable[Sequence]) -> float:
        return round(tokens_a_round(sequences), 4)

    found: dict[str, Any] = {"prompts": dict(collections.Counter(files)), "slots": args.slots}
    plain = _engine_run(loaded, [ids for _, ids in some], args, None)
    found["new tokens"] = sum(len(sequence.new_ids) for sequence in plain)
    for arm in ARMS[:3]:
        start, gaps = time.perf_counter(), {}
        sequences = _engine_run(loaded, [ids for _, ids in some], args, arm)
        for number, ((_, prompt), mine, theirs) in enumerate(zip(some, sequences, plain, strict=True)):
            if mine.new_ids != theirs.new_ids:
                pairs = zip(mine.new_ids, theirs.new_ids, strict=False)
                at = next(i for i, (a, b) in enumerate(pairs) if a != b)
                gaps[f"{files[number]}, {number}, at token {at}"] = _gap(loaded, prompt + theirs.new_ids[:at])
        found[arm.name] = {
            **{file: of(s for own, s in zip(files, sequences, strict=True) if own == file) for file in prompts},
            "accepted": of(sequences),
            "texts that differ": len(gaps),
            "gaps where they do": gaps,
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps({f"served, {arm.name}": found[arm.name]}), flush=True)
    return found


def _engine_run(loaded: LoadedModel, prompts: list[list[int]], args, arm: Arm | None) -> list[Sequence]:
    context = -(-(max(map(len, prompts)) + args.tokens + 64) // 256) * 256
    head = arm if arm and arm.topk else None
    engine = engine_of(
        loaded,
        num_slots=args.slots,
        max_context=context,
        num_steps=arm.num_steps if arm else 0,
        topk=max(arm.topk, 1) if arm else 1,
        num_nodes=head.num_nodes if head else None,
        kind="cuda",  # rows count as nearly free there, so nearly every draft is verified
        drafter=loaded.drafter if head else None,
        kv_dtype=loaded.model.embed.dtype,
    )
    stop_ids = tuple(loaded.tokenizer.eos_ids)
    wanted = [Request(prompt_ids=ids, max_new_tokens=args.tokens, stop_ids=stop_ids) for ids in prompts]
    sequences = [engine.submit(request) for request in wanted]
    for _ in engine.run():
        pass
    return sequences


def _gap(loaded: LoadedModel, ids: list[int]) -> float:
    tokens = jnp.asarray(ids, jnp.int32)[None]
    hidden, _ = read(loaded.model, tokens, jnp.ones_like(tokens))
    best = jax.lax.top_k(loaded.model.logits(hidden[0, -1:]), 2)[0][0]
    return float(best[0] - best[1])
