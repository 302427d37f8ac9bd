"""Train an EAGLE-3 head for a model on answers that the model itself writes; each stage resumes where it stopped.

    python scripts/train_eagle.py answers --dir work --prompts stubs.jsonl --without question.jsonl HumanEval.jsonl.gz
    python scripts/train_eagle.py train --dir work --minutes 8
    python scripts/train_eagle.py train --dir work --minutes 8 --finish
    python scripts/train_eagle.py measure --dir work --eval question.jsonl HumanEval.jsonl.gz
    python scripts/train_eagle.py export --dir work --to head

`answers` writes work/answers-*.npz, a part at a time: messages that the model writes itself where a user would, given
prompts (a JSON object a line with `prompt`), function heads cut from its own answers, and its answers to all of them.
What shares 13 tokens with a prompt of --without is left out. `train` keeps work/state.npz and work/log.jsonl; run it
again to go on, and with --finish to let the learning rate fall to zero over this run. `measure` lets the model answer
the prompts of --eval in float32 and says how many tokens a round would give with chains of drafts. `export` writes the
head as `--draft eagle --draft-model` reads it, in bfloat16, with its record, and a plot of its curves.
"""

import argparse
import collections
import hashlib
import json
import platform
import re
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import ml_dtypes
import numpy as np
import optax
import rich.progress
from eval_prompts import grams, read_eval
from flax import nnx

from jattn.cli import read_prompts
from jattn.loaders.chat import render_chat
from jattn.loaders.draft_heads import write_head
from jattn.models.config import ModelConfig
from jattn.models.draft_head import DraftHead, Eagle3
from jattn.resolve import resolve
from jattn.serving.loaded import LoadedModel, Options, load
from jattn.spec import AttnSpec
from jattn.training import Packed, Progress, Texts, Trainer, Writer, mean_accepted
from jattn.training.dense import check_dense, grouped, has_fused

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

# How a message begins that the model goes on with, drawn: nothing, a word or two, or what asks for a function.
PLAIN = (
    "Write a|What is|What are|How do I|How can|Explain|Why|Can you|Compose|Describe|Give me|I need|Create|Imagine|"
    "Suppose|Solve|Calculate|Given|If|Who|Pretend|Act as|Compare|List|Discuss|Help me|Design|Summarize the following|"
    "Extract|Identify|Analyze|Rewrite|Edit the following|Which|The|A|My|Please|Consider|Tell me about"
).split("|")
CODE = (
    "Write a Python function|Write a Python function that takes|Write a function with a docstring|Write a Python "
    "function that returns|Create a Python function|Implement a function|Write a Python program|Write a Python "
    "function with type hints and a docstring that|Develop a Python function|Write a Python function to check|Write "
    "a Python function named"
).split("|")
SHARES = {"nothing": 0.35, "plain": 0.2, "code": 0.45}
OWN_TOKENS = 96  # of such a message, at most
# a function's head with its docstring, as a code block of an answer begins
STUB = re.compile(r"```python\n((?:(?:from|import) [^\n]*\n|\n)*def \w+\([^\n]*:\n\s+\"\"\".*?\"\"\"\n)", re.DOTALL)
WARM_UP = 100  # steps


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("answers", "train", "measure", "export"))
    parser.add_argument("--dir", type=Path, required=True, help="what is kept between runs")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", help="of the target; default: float32 on a CPU, else bfloat16")
    parser.add_argument("--minutes", type=float, default=9.0, help="end the stage after this, what is done is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="answers: files of prompts")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="answers: what to keep out, as --eval")
    parser.add_argument("--parts", type=int, default=16, help="answers: files; each has some two batches of texts")
    parser.add_argument("--batch", type=int, default=2048, help="answers: texts that are written together")
    parser.add_argument("--prompt-tokens", type=int, default=208, help="answers: longest prompt, template included")
    parser.add_argument("--new-tokens", type=int, default=160, help="answers: tokens of most answers")
    parser.add_argument("--long-tokens", type=int, default=240, help="answers: tokens of the answers of each 4th part")
    parser.add_argument("--size", type=int, default=48, help="train: rows a step")
    parser.add_argument("--length", type=int, default=512, help="train: tokens a row")
    parser.add_argument("--unroll", type=int, default=5, help="train: draft steps that are unrolled")
    parser.add_argument("--rate", type=float, default=2e-3, help="train: highest learning rate")
    parser.add_argument("--finish", action="store_true", help="train: the learning rate falls to zero in this run")
    parser.add_argument("--drafted", type=int, default=8192, help="train: tokens of the head's vocabulary")
    parser.add_argument("--ffn-dim", type=int, help="train: width of the head's MLP; default: the model's")
    parser.add_argument("--plain-attention", action="store_true", help="train: no cuDNN in the target")
    parser.add_argument("--eval", type=Path, nargs="*", default=[], help="measure: MT-Bench's and HumanEval's files")
    parser.add_argument("--eval-tokens", type=int, default=128, help="measure: tokens an answer")
    parser.add_argument("--to", type=Path, help="export: folder of the head")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    {"answers": answers, "train": train, "measure": measure, "export": export}[args.stage](args)


def answers(args: argparse.Namespace) -> None:
    """Prompts in, texts of the target out, a part a file."""
    loaded = load(Options(model=args.model, dtype=args.dtype))
    end = time.monotonic() + 60 * args.minutes
    # prompts that wait for a full batch: those given, then function heads cut from answers
    waiting = deque(("given", row) for path in args.prompts for row in read_prompts(path))
    held_out = grams(loaded.tokenizer.encode(text) for path in args.without for text in read_eval(path))
    writer = _writer(loaded, args.batch, args.prompt_tokens, max(args.new_tokens, args.long_tokens))
    for at in rich.progress.track(range(args.parts), description="answers"):
        if (args.dir / f"answers-{at:04}.npz").exists():
            _taken(waiting, args.batch)
            continue
        if time.monotonic() > end:
            print(f"time is up: parts from {at} on are for another run")
            break
        seed = args.seed + 7919 * at
        new_tokens = args.long_tokens if at % 4 == 3 else args.new_tokens
        temperature = 0.7 if at % 5 == 4 else 0.0
        counts = collections.Counter()
        ids: list[list[int]] = []
        made: list[list[int]] = []
        own = [("own", text) for text in _own_prompts(loaded, writer, args.batch, seed=seed)]
        for prompts in (own, None):
            if prompts is None:  # function heads of the answers just written wait with the others
                texts = (loaded.tokenizer.decode(one) for one in made)
                waiting.extend(("own stubs", found[1]) for found in map(STUB.search, texts) if found)
                prompts = _taken(waiting, args.batch if len(waiting) >= args.batch or at == args.parts - 1 else 0)
            asked = [(kind, _asked(loaded, text)) for kind, text in prompts]
            asked = [(kind, one) for kind, one in asked if len(one) <= args.prompt_tokens]
            kept = [(kind, one) for kind, one in asked if not held_out & grams([one])]
            counts.update([kind for kind, _ in kept], **{"left out": len(asked) - len(kept)})
            some = [one for _, one in kept]
            ids += some
            made += writer(some, temperature=temperature, seed=seed, new_tokens=new_tokens) if some else []
        texts_of = [np.asarray(a + b, np.int32) for a, b in zip(ids, made, strict=True)]
        Texts(texts_of, [len(one) for one in ids]).save(args.dir / f"answers-{at:04}.npz")
        row = {"part": at, **counts, "answer tokens": sum(map(len, made)), "temperature": temperature}
        with (args.dir / "texts.jsonl").open("a") as file:
            file.write(json.dumps({**row, "new tokens": new_tokens}) + "\n")
    for path in args.prompts:
        note = {"prompts": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        if (record := path.with_suffix(".record.json")).exists():  # as train_prompts.py leaves it
            note |= json.loads(record.read_text())
        with (args.dir / "texts.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")


def _taken(waiting: deque, most: int) -> list:
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


def _writer(loaded: LoadedModel, size: int, prompt_len: int, new_tokens: int) -> Writer:
    return Writer(
        loaded.model, size=size, prompt_len=prompt_len, new_tokens=new_tokens, stop_ids=tuple(loaded.tokenizer.eos_ids)
    )


def _asked(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.tokenizer.encode(render_chat(loaded.metadata, [{"role": "user", "content": text}]))


def _own_prompts(loaded: LoadedModel, writer: Writer, count: int, *, seed: int) -> list[str]:
    # what the model writes where a user would: the template up to the user's words
    mark = "\u241f"
    front = render_chat(loaded.metadata, [{"role": "user", "content": mark}]).partition(mark)[0]
    draw = np.random.default_rng(seed)
    kinds = draw.choice(list(SHARES), count, p=list(SHARES.values()))
    words = {"nothing": ("",), "plain": PLAIN, "code": CODE}
    begun = [str(draw.choice(words[kind])) for kind in kinds]
    made = writer(
        [loaded.tokenizer.encode(front + words) for words in begun],
        temperature=1.0,
        min_p=0.05,
        seed=seed,
        new_tokens=OWN_TOKENS,
    )
    stops = set(loaded.tokenizer.eos_ids)
    texts = [
        (words + loaded.tokenizer.decode([token for token in one if token not in stops])).strip()
        for words, one in zip(begun, made, strict=True)
    ]
    return [text for text in dict.fromkeys(texts) if len(text) > 8]


def train(args: argparse.Namespace) -> None:
    """Learn until the time is up."""
    begun = time.monotonic()
    loaded = load(Options(model=args.model, dtype=args.dtype))
    learn_from, judge_by = Texts.load(sorted(args.dir.glob("answers-*.npz"))).split(0.01)
    settings = _settings(args, learn_from, loaded)
    check_dense(loaded.model)
    half = loaded.model.embed.dtype != jnp.float32
    fused = half and not args.plain_attention and all(has_fused(grouped(block).spec) for block in loaded.model.layers)
    print(f"attention of the target: {'cuDNN' if fused else 'plain'}", flush=True)
    trainer = _trainer(loaded, settings, fused=fused)
    size, length = settings["size"], settings["length"]
    held = judge_by.packed(size, length, seed=0)
    progress = _resumed(args.dir, trainer.begin(next(held)))
    step = first = int(progress.step)
    # the order of texts depends on the step, so that a run that stopped goes on where it was
    rows = learn_from.packed(size, length, seed=args.seed + step)
    log = args.dir / "log.jsonl"
    bar = rich.progress.Progress(*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    limit, losses, started = 60 * args.minutes, None, None
    with bar, log.open("a") as file:
        task = bar.add_task("training", total=round(limit))
        while (elapsed := time.monotonic() - begun) < limit:
            rate = settings["rate"] * min(1.0, (step + 1) / WARM_UP)
            started = elapsed if started is None and step > first + 1 else started  # behind the compilation
            if args.finish and started is not None:
                rate *= 1.0 - (elapsed - started) / (limit - started)
            before, (progress, losses) = losses, trainer.train(progress, next(rows), rate)
            step += 1
            if before is not None:
                jax.block_until_ready(before)  # one step in flight: time is what the rate goes by
            if step % 50 == 0:
                judged = trainer.judge(progress, next(held))
                row = {"step": step, "rate": rate, "train": _row(losses), "held": _row(judged)}
                row["seconds"] = round(time.monotonic() - begun, 2)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(json.dumps(row), flush=True)
                bar.update(task, completed=round(elapsed), description=f"training, chains kept {row['held']['kept']}")
    _keep(args.dir, progress)


def _row(losses) -> dict[str, list[float]]:
    return {name: [round(float(x), 4) for x in value] for name, value in losses._asdict().items()}


def _settings(args: argparse.Namespace, texts: Texts, loaded: LoadedModel) -> dict[str, Any]:
    # fixed by the first run: a head cannot change its shape half-way
    file = args.dir / "settings.json"
    if not file.exists():
        names = ("model", "seed", "size", "length", "unroll", "rate", "drafted")
        settings = {name: getattr(args, name) for name in names}
        settings["ffn_dim"] = args.ffn_dim or loaded.config.ffn_dim
        settings["texts"] = len(texts.ids)
        settings["answer_tokens"] = sum(map(len, texts.ids)) - sum(texts.prompt_lens)
        settings["device"] = jax.devices()[0].device_kind
        ids, covered = texts.common(args.drafted, loaded.config.vocab_size)
        settings |= {"covered": round(covered, 4), "token_ids": ids.tolist()}
        file.write_text(json.dumps(settings))
    return json.loads(file.read_text())


def measure(args: argparse.Namespace) -> None:
    """Tokens a round with chains of drafts, on prompts that are kept from training."""
    loaded = load(Options(model=args.model, dtype="float32"))
    settings = json.loads((args.dir / "settings.json").read_text())
    trainer = _trainer(loaded, {**settings, "unroll": 8})
    progress = _resumed(args.dir, trainer.start)
    found = {}
    for path in args.eval:
        prompts = [_asked(loaded, text) for text in read_eval(path)]
        longest = max(map(len, prompts))
        made = _writer(loaded, len(prompts), longest, args.eval_tokens)(prompts)
        right, length = [], longest + args.eval_tokens
        for start in range(0, len(prompts), args.size):
            some = [np.asarray(a + b, np.int32) for a, b in zip(prompts, made, strict=True)][start : start + args.size]
            rows = Packed(*(np.zeros((args.size, length), kind) for kind in (np.int32, np.int32, bool)))
            for row, text in enumerate(some):
                rows.tokens[row, : len(text)], rows.segments[row, : len(text)] = text, 1
                rows.learn[row, len(prompts[start + row]) : len(text)] = True
            right += [*np.asarray(trainer.right(progress, rows))[: len(some)]]
        sizes = [len(prompt) for prompt in prompts], [len(a) + len(b) for a, b in zip(prompts, made, strict=True)]
        found[path.name] = [round(mean_accepted([x[:, :steps] for x in right], *sizes), 3) for steps in range(1, 9)]
        print(f"{path.name}: tokens a round with chains of 1 to 8: {found[path.name]}", flush=True)
    (args.dir / "measure.json").write_text(json.dumps(found))


def _config(config: ModelConfig, ffn_dim: int) -> ModelConfig:
    names = "d_model num_q_heads num_kv_heads head_dim vocab_size max_context rms_eps rope_theta".split()
    return ModelConfig(num_layers=1, ffn_dim=ffn_dim, **{name: getattr(config, name) for name in names})


def _head(loaded: LoadedModel, settings: dict[str, Any]) -> DraftHead:
    target = loaded.config
    config = _config(target, settings["ffn_dim"])
    spec = config.attn_spec()
    assert isinstance(spec, AttnSpec)
    choice = resolve(spec, None, loaded.platform, page_size=loaded.page_size)
    taps = (2, target.num_layers // 2, target.num_layers - 3)
    body = Eagle3(
        config,
        spec,
        choice,
        feature_dim=len(taps) * target.d_model,
        rngs=nnx.Rngs(settings["seed"]),
        dtype=loaded.model.embed.dtype,
        weight_first=loaded.platform.is_cpu,
    )
    ids = jnp.asarray(settings["token_ids"], jnp.int32)
    return DraftHead(body, loaded.model, token_ids=ids, taps=taps)


def _trainer(loaded: LoadedModel, settings: dict[str, Any], *, fused: bool = False) -> Trainer:
    head = _head(loaded, settings)
    assert isinstance(head.body, Eagle3)
    # as large as what the rows of the vocabulary were made for; from ones it takes a thousand steps to grow
    head.body.final_norm.weight[...] = loaded.model.final_norm.weight[...].astype(head.body.final_norm.weight.dtype)
    return Trainer(loaded.model, head, num_steps=settings["unroll"], fused=fused)


def _keep(folder: Path, progress: Progress) -> None:
    new = folder / "state.new.npz"  # whole or not at all
    np.savez(new, *(np.asarray(leaf) for leaf in jax.tree.leaves(progress)))
    new.replace(folder / "state.npz")


def _resumed(folder: Path, progress: Progress) -> Progress:
    file = folder / "state.npz"
    if not file.exists():
        return progress
    leaves, kind = jax.tree.flatten(progress)
    with np.load(file) as held:
        found = [held[f"arr_{i}"] for i in range(len(leaves))]
    return jax.tree.unflatten(kind, [jnp.asarray(new, old.dtype) for new, old in zip(found, leaves, strict=True)])


def export(args: argparse.Namespace) -> None:
    """The head as a folder, with its record and its curves."""
    if args.to is None:
        raise SystemExit("export wants --to, the folder of the head")
    loaded = load(Options(model=args.model, dtype="float32"))
    settings = json.loads((args.dir / "settings.json").read_text())
    trainer = _trainer(loaded, settings)
    progress = _resumed(args.dir, trainer.start)
    head = trainer.head(progress)
    body, config = head.body, head.body.config
    assert isinstance(body, Eagle3)
    spec = body.attn.spec
    ends = np.cumsum([spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim])
    gate, up = np.split(np.asarray(body.mlp.gate_up.weight[...]), 2)
    q, k, v = np.split(np.asarray(body.attn.qkv.weight[...]), ends)
    norms = dict(token_norm=body.token_norm, hidden_norm=body.hidden_norm, ffn_norm=body.mlp_norm)
    arrays = dict(fc=body.fc.weight[...], q=q, k=k, v=v, o=body.attn.out.weight[...], gate=gate, up=up)
    arrays |= dict(down=body.mlp.down.weight[...], final_norm=body.final_norm.weight[...])
    arrays |= {name: norm.weight[...] for name, norm in norms.items()}
    rows = [json.loads(line) for line in (args.dir / "log.jsonl").read_text().splitlines()]
    token_ids = np.asarray(settings.pop("token_ids"))
    measured = args.dir / "measure.json"
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__},
        "settings": settings,
        "steps": int(progress.step),
        "held": rows[-1]["held"] if rows else None,
        "texts": _texts_of(args.dir),
        "tokens a round with chains of 1 to 8": json.loads(measured.read_text()) if measured.exists() else None,
    }
    write_head(
        args.to,
        dict(
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            hidden_size=config.d_model,
            num_hidden_layers=1,
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.ffn_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            draft_vocab_size=len(token_ids),
            eagle_config={"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps]},
        ),
        {name: np.asarray(array).astype(ml_dtypes.bfloat16) for name, array in arrays.items()},
        token_ids=token_ids,
    )
    (args.to / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.to / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _plot(rows, args.to / "curves.png")


def _texts_of(folder: Path) -> dict[str, Any]:
    # what `answers` wrote down: sums over the parts, and the files of prompts
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    parts = [row for row in rows if "part" in row]
    names = ("own", "given", "own stubs", "left out", "answer tokens")
    sums = {name: sum(row.get(name, 0) for row in parts) for name in names}
    warm = sum(row["temperature"] > 0 for row in parts)
    files = [row for row in rows if "part" not in row]
    return {**sums, "greedy parts": len(parts) - warm, "parts at temperature 0.7": warm, "files": files}


def _plot(rows: list[dict], path: Path) -> None:
    steps = [row["step"] for row in rows]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for ax, name, label in zip(axes, ("divergence", "right"), ("divergence, nats", "share right"), strict=True):
        for at in range(len(rows[0]["held"][name]) if rows else 0):
            ax.plot(steps, [row["held"][name][at] for row in rows], label=f"draft {at + 1}")
        ax.set(xlabel="step", ylabel=label)
        ax.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
