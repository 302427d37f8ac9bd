"""Train an EAGLE-3 head for a model on answers that the model itself writes; each stage resumes where it stopped.

    python scripts/train_eagle.py answers --prompts prompts.jsonl --own 2000 --dir work
    python scripts/train_eagle.py train --dir work --minutes 8
    python scripts/train_eagle.py export --dir work --to head

`answers` writes work/answers-*.npz, a part at a time: greedy answers to the prompts (a JSON object a line with
`prompt`), and with --own to as many that the model writes itself behind its chat template's opening. `train` keeps
work/state.npz and work/log.jsonl; run it again to go on. `export` writes the head as `--draft eagle --draft-model`
reads it, in bfloat16, with its record, and a plot of the loss and of the drafts that are right.
"""

import argparse
import json
import platform
import time
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
from flax import nnx

from jattn.cli import read_prompts
from jattn.loaders.chat import render_chat
from jattn.loaders.draft_heads import write_head
from jattn.models.config import ModelConfig
from jattn.models.draft_head import DraftHead, Eagle3
from jattn.resolve import resolve
from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel, Options, load
from jattn.serving.request import Request
from jattn.spec import AttnSpec
from jattn.training import Progress, Texts, Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

PART = 256  # prompts a file of answers


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("answers", "train", "export"))
    parser.add_argument("--dir", type=Path, required=True, help="what is kept between runs")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", help="of the target; default: float32 on a CPU, else bfloat16")
    parser.add_argument("--minutes", type=float, default=9.0, help="end the stage after this, what is done is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="answers: files of prompts")
    parser.add_argument("--own", type=int, default=0, help="answers: prompts that the model writes itself")
    parser.add_argument("--new-tokens", type=int, default=256, help="answers: tokens an answer, at most")
    parser.add_argument("--batch", type=int, default=64, help="answers: requests that run together")
    parser.add_argument("--size", type=int, default=32, help="train: texts a step")
    parser.add_argument("--length", type=int, default=384, help="train: tokens a text")
    parser.add_argument("--steps", type=int, default=6000, help="train: steps in all, for the schedule")
    parser.add_argument("--unroll", type=int, default=5, help="train: draft steps that are unrolled")
    parser.add_argument("--rate", type=float, default=1e-3, help="train: highest learning rate")
    parser.add_argument("--drafted", type=int, default=8192, help="train: tokens of the head's vocabulary")
    parser.add_argument("--ffn-dim", type=int, help="train: width of the head's MLP; default: the model's")
    parser.add_argument("--to", type=Path, help="export: folder of the head")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    {"answers": answers, "train": train, "export": export}[args.stage](args)


def answers(args: argparse.Namespace) -> None:
    """Prompts in, texts of the target out, a part a file."""
    loaded = load(Options(model=args.model, dtype=args.dtype))
    end = time.monotonic() + 60 * args.minutes
    given = [row for path in args.prompts for row in read_prompts(path)]
    parts: list[tuple[str, list[Any] | int]] = [
        (f"answers-given-{at:04}.npz", given[start : start + PART])
        for at, start in enumerate(range(0, len(given), PART))
    ]
    parts += [(f"answers-own-{at:04}.npz", min(PART, args.own - at * PART)) for at in range(-(-args.own // PART))]
    parts = [part for part in parts if not (args.dir / part[0]).exists()]
    engine = _engine(loaded, args)
    for name, prompts in rich.progress.track(parts, description="answers"):
        if time.monotonic() > end:
            print(f"time is up: {name} and later are for another run")
            return
        if isinstance(prompts, int):
            prompts = _own_prompts(loaded, engine, prompts, seed=args.seed + 7919 * int(name[12:16]))
        ids = [prompt if isinstance(prompt, list) else _asked(loaded, prompt) for prompt in prompts]
        ids = [one for one in ids if len(one) + args.new_tokens <= engine.config.max_context]
        done = _serve(engine, [_request(loaded, one, args.new_tokens) for one in ids])
        Texts([np.asarray(a + b, np.int32) for a, b in zip(ids, done, strict=True)], [len(a) for a in ids]).save(
            args.dir / name
        )


def _asked(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.tokenizer.encode(render_chat(loaded.metadata, [{"role": "user", "content": text}]))


def _own_prompts(loaded: LoadedModel, engine: Engine, count: int, *, seed: int) -> list[str]:
    # what the model writes where a user would: the template up to the user's words
    mark = "\u241f"
    front = render_chat(loaded.metadata, [{"role": "user", "content": mark}]).partition(mark)[0]
    ids = loaded.tokenizer.encode(front)
    made = _serve(
        engine,
        [_request(loaded, ids, 64, temperature=1.0, top_p=0.95, seed=seed + i) for i in range(count)],
    )
    texts = [loaded.tokenizer.decode(one).strip() for one in made]
    return [text for text in texts if len(text) > 8]


def _request(loaded: LoadedModel, ids: list[int], new_tokens: int, **sampled) -> Request:
    stop_ids = tuple(loaded.tokenizer.eos_ids)
    return Request(prompt_ids=ids, max_new_tokens=new_tokens, stop_ids=stop_ids, **sampled)


def _engine(loaded: LoadedModel, args: argparse.Namespace) -> Engine:
    context = -(-(args.new_tokens + 256) // loaded.page_size) * loaded.page_size
    return Engine(
        loaded.model,
        num_layers=loaded.config.num_layers,
        num_slots=args.batch,
        num_pages=args.batch * context // loaded.page_size,
        page_size=loaded.page_size,
        max_context=context,
        num_steps=0,
        kind=loaded.platform.kind,
        kv_dtype=loaded.model.embed.dtype,
        sampler=SamplerConfig(random=args.own > 0),
        prefill_rows=(2048,),
    )


def _serve(engine: Engine, requests: list[Request]) -> list[list[int]]:
    sequences = [engine.submit(request) for request in requests]
    for _ in engine.run():
        pass
    return [sequence.new_ids for sequence in sequences]


def train(args: argparse.Namespace) -> None:
    """Learn until the time or the steps are up."""
    loaded = load(Options(model=args.model, dtype=args.dtype))
    learn_from, judge_by = Texts.load(sorted(args.dir.glob("answers-*.npz"))).split(0.02)
    settings = _settings(args, learn_from, loaded)
    trainer = _trainer(loaded, settings)
    progress = _resumed(args.dir, trainer.start)
    start = int(progress.step)
    size, length = settings["size"], settings["length"]
    # the order of texts depends on the step, so that a run that stopped goes on where it was
    batches, held = learn_from.batches(size, length, seed=args.seed + start), judge_by.batches(size, length, seed=0)
    end, log = time.monotonic() + 60 * args.minutes, args.dir / "log.jsonl"
    bar = rich.progress.Progress(*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with bar, log.open("a") as file:
        task = bar.add_task("training", total=settings["steps"], completed=start)
        for step in range(start + 1, settings["steps"] + 1):
            progress, losses = trainer.train(progress, *next(batches))
            if step % 50 == 0 or step == settings["steps"]:
                judged = trainer.judge(progress, *next(held))
                row = {"step": step, "train": _row(losses), "held": _row(judged), "seconds": round(time.time())}
                file.write(json.dumps(row) + "\n")
                file.flush()
                bar.update(task, completed=step, description=f"training, first draft right {row['held']['right'][0]}")
            if time.monotonic() > end:
                break
    _keep(args.dir, progress)


def _row(losses) -> dict[str, list[float]]:
    return {name: [round(float(x), 4) for x in value] for name, value in losses._asdict().items()}


def _settings(args: argparse.Namespace, texts: Texts, loaded: LoadedModel) -> dict[str, Any]:
    # fixed by the first run: a head cannot change its shape half-way
    file = args.dir / "settings.json"
    if not file.exists():
        names = ("model", "seed", "size", "length", "steps", "unroll", "rate", "drafted")
        settings = {name: getattr(args, name) for name in names}
        settings["ffn_dim"] = args.ffn_dim or loaded.config.ffn_dim
        settings["texts"] = len(texts.ids)
        settings["answer_tokens"] = sum(map(len, texts.ids)) - sum(texts.prompt_lens)
        settings["token_ids"] = texts.common(args.drafted, loaded.config.vocab_size).tolist()
        file.write_text(json.dumps(settings))
    return json.loads(file.read_text())


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


def _trainer(loaded: LoadedModel, settings: dict[str, Any]) -> Trainer:
    steps = settings["steps"]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings["rate"], max(steps // 20, 1), steps, 0.02 * settings["rate"]
    )
    sizes = {name: settings[name] for name in ("size", "length")}
    return Trainer(loaded.model, _head(loaded, settings), schedule, num_steps=settings["unroll"], **sizes)


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
    head = trainer.head(progress.params)
    body, config = head.body, head.body.config
    assert isinstance(body, Eagle3)
    spec = body.spec
    ends = np.cumsum([spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim])
    gate, up = np.split(np.asarray(body.mlp.gate_up.weight[...]), 2)
    q, k, v = np.split(np.asarray(body.attn.qkv.weight[...]), ends)
    norms = dict(token_norm=body.token_norm, hidden_norm=body.hidden_norm, ffn_norm=body.mlp_norm)
    arrays = dict(fc=body.fc.weight[...], q=q, k=k, v=v, o=body.attn.out.weight[...], gate=gate, up=up)
    arrays |= dict(down=body.mlp.down.weight[...], final_norm=body.final_norm.weight[...])
    arrays |= {name: norm.weight[...] for name, norm in norms.items()}
    rows = [json.loads(line) for line in (args.dir / "log.jsonl").read_text().splitlines()]
    token_ids = np.asarray(settings.pop("token_ids"))
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__},
        "settings": settings,
        "steps": int(progress.step),
        "held": rows[-1]["held"] if rows else None,
        "curve": rows[:: max(len(rows) // 100, 1)],
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
    _plot(rows, args.to / "curves.png")


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
