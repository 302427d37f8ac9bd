"""The command: `jattn generate`, `jattn platforms`, `jattn explain`. Thin: parses, calls, prints."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jattn.backends import POLICIES
from jattn.dispatch import cli as dispatch
from jattn.draft import cli as draft
from jattn.platforms import PLATFORMS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Bad input is one sentence on standard error and status 2."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"jattn: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jattn", description="Attention and drafting for JAX")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_generate(commands.add_parser("generate", help="continue prompts with a real model"))
    platforms = commands.add_parser("platforms", help="print the platform table and what is known of each kernel")
    platforms.set_defaults(run=_platforms)
    _add_explain(
        commands.add_parser("explain", help="print which policy, kernels and plan a model and batch would get")
    )
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="the text to continue; several are a batch")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='a prompt a line: {"prompt": text or ids}')
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt, and nothing else")
    _add_option_fields(parser)
    parser.set_defaults(run=_generate)


# Option -> (type, help). Names are the fields of Options; a default of None there is said to be chosen.
_FIELDS: dict[str, tuple[type, str]] = {
    "model": (str, "GGUF file, Hugging Face folder, or a name of the model table"),
    "draft": (
        str,
        "none, ngram (the text so far), standalone (a draft model), eagle (a draft head) or nextn (the model's MTP) "
        "(default: eagle where a head for the model comes with the package, else ngram)",
    ),
    "num_steps": (int, "drafts a round, at most; the depth of a tree (default: ngram 15, eagle by cost, else 3)"),
    "topk": (int, "continuations of a draft tree, 1 to 8; 1 drafts a chain (default: eagle by cost, else 1)"),
    "num_draft_tokens": (int, "nodes of a draft tree, the newest token included"),
    "draft_model": (
        str,
        "draft model, as --model (default: the model itself); with --draft eagle the folder of a head (default: the "
        "one that comes with the package)",
    ),
    "draft_layers": (int, "first layers of the draft model that draft (default: all)"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "smallest leading set of tokens reaching this probability"),
    "top_k": (int, "most likely tokens kept; 0 is off"),
    "min_p": (float, "least probability kept, relative to the largest"),
    "repetition_penalty": (float, "of tokens in prompt and answer; 1 is off"),
    "presence_penalty": (float, "of tokens in the answer; 0 is off"),
    "frequency_penalty": (float, "of each time that a token is in the answer; 0 is off"),
    "accept_threshold_single": (float, "probability from which a draft is taken; 1 keeps the distribution"),
    "accept_threshold_acc": (float, "share of the drafts' probability that takes one; 1 keeps the distribution"),
    "logprobs": (int, "with --json: log-probability of each token, and of the N likeliest"),
    "seed": (int, "prompt i uses seed + i"),
    "max_new_tokens": (int, "tokens a prompt, at most"),
    "policy": (str, f"one of {', '.join(POLICIES)}"),
    "platform": (str, "a row of `jattn platforms`; default: the device at hand"),
    "page_size": (int, "tokens a page, 1 to 256"),
    "max_context": (int, "tokens a request, prompt included"),
    "num_pages": (int, "pages of the cache, a layer"),
    "max_batch": (int, "prompts that run together"),
    "dtype": (str, "float32, bfloat16 or float16"),
    "random_weights": (str, "config.json, or a folder with one: random weights of that shape instead of --model"),
    "mla_method": (str, "form of the prefill of an MLA model, as MHA_ONE_SHOT (default: the policy's rules)"),
    "max_chunk_capacity": (int, "MLA: cached tokens that are expanded at once"),
    "chunked_prefix_threshold": (int, "MLA: cached tokens, over the batch, from which a policy expands"),
    "kv_dtype": (str, "dtype of the cache: a dtype, fp8_e4m3, fp8_e5m2 or int8"),
}


def _add_option_fields(parser: argparse.ArgumentParser) -> None:
    from jattn.serving.loaded import Options

    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    for name, (kind, text) in _FIELDS.items():
        shown = "" if defaults[name] is None else f" (default: {defaults[name]})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=defaults[name], help=text + shown)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT")
    parser.add_argument(
        "--prefer", action="append", default=[], metavar="SET", help="a kernel set to try first, as xla or gpu"
    )
    parser.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID=VALUE", help="add VALUE to the logit of token ID"
    )
    parser.add_argument(
        "--enable-multi-layer-eagle",
        action="store_true",
        help="with --draft nextn: a layer of the model's MTP a step, not the first for every step",
    )
    parser.add_argument(
        "--rejection-sampling", action="store_true", help="draw a draft model's chains, accept by rejection sampling"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end token")
    parser.add_argument("--as-mla", action="store_true", help="run a grouped-query model as its equal with latents")
    parser.add_argument("--disable-chunked-prefix", action="store_true", help="MLA: expand no cached prefix")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")


def _generate(args: argparse.Namespace) -> int:
    from jattn.console import Console
    from jattn.serving.loaded import Options, load
    from jattn.serving.session import Session

    prompts = _prompts(args)
    chosen = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    lists: dict[str, Any] = dict(
        stop=tuple(args.stop), prefer=tuple(args.prefer), logit_bias=dict(map(_bias, args.logit_bias))
    )
    options = Options(**(chosen | lists))
    with Console(quiet=args.json) as console:
        loaded = load(options, console.progress)
        session = Session(loaded, prompts, options, console.progress)
    start = time.perf_counter()
    done = []
    for piece in session.stream():
        if not args.json and len(prompts) == 1:
            print(piece.text, end="", flush=True)
        if piece.completion is not None:
            done.append(piece.completion)
    elapsed = time.perf_counter() - start
    done.sort(key=lambda completion: completion.index)
    for completion in done:
        if args.json:
            print(json.dumps(dataclasses.asdict(completion), ensure_ascii=False))
        elif len(prompts) > 1:
            print(f"[{completion.index}] {completion.text}")
    if not args.json:
        print(("\n" if len(prompts) == 1 else "") + _summary(done, session, elapsed))
    return 0


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"--logit-bias {text!r}: want a token id and a number, as 198=-5") from None


def _summary(done, session, elapsed: float) -> str:
    tokens = sum(completion.new_tokens for completion in done)
    rounds = sum(sequence.num_rounds for sequence in session.sequences)
    kept = sum(sequence.num_round_tokens for sequence in session.sequences)
    return (
        f"{tokens} new tokens, {tokens / elapsed:.1f} tokens/s, draft {done[0].draft}, "
        f"{kept / rounds if rounds else 1.0:.2f} accepted tokens a target step, "
        f"{done[0].compilations} compilations, peak memory {done[-1].peak_rss_bytes / 1e6:.0f} MB"
    )


def _prompts(args: argparse.Namespace) -> list:
    if args.prompts is None:
        if not args.prompt:
            raise ValueError("no prompt: give one in quotes, or --prompts FILE.jsonl")
        return args.prompt
    if args.prompt:
        raise ValueError("both a prompt and --prompts are given: want one of them")
    return read_prompts(args.prompts)


def read_prompts(path: Path) -> list:
    """Prompts of a JSON-lines file: an object a line with `prompt` (text) or `prompt_ids` (token ids).

    Raises: ValueError naming the file, and the line where one is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from None
    prompts = [_prompt_of(path, at, line) for at, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: want a JSON object a line with `prompt` or `prompt_ids`")
    return prompts


def _prompt_of(path: Path, at: int, line: str):
    want = 'want an object with `prompt` (text) or `prompt_ids` (a list of ids), as {"prompt": "Hello"}'
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {at} is not JSON ({error.msg} at column {error.colno}): {want}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("prompt_ids" in row):
        raise ValueError(f"{path}, line {at}: {want}, one of the two")
    prompt = row.get("prompt", row.get("prompt_ids"))
    if "prompt" in row and isinstance(prompt, str) and prompt:
        return prompt
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if is_ids and prompt:
        return prompt
    raise ValueError(f"{path}, line {at}: the prompt is {json.dumps(prompt)[:40]}; {want}, not empty")


def _platforms(args: argparse.Namespace) -> int:
    from jattn.console import platform_table, print_table

    print_table(platform_table(PLATFORMS))
    return 0


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="GGUF file, Hugging Face folder or name; without it, give the heads")
    parser.add_argument("--q-heads", type=int, default=9, help="query heads (default: 9)")
    parser.add_argument("--kv-heads", type=int, default=3, help="KV heads (default: 3)")
    parser.add_argument("--head-dim", type=int, default=64, help="width of a head (default: 64)")
    parser.add_argument("--policy", help=f"one of {', '.join(POLICIES)}")
    parser.add_argument("--platform", help="a row of `jattn platforms`; default: the device at hand")
    parser.add_argument("--mode", help="one forward mode, as extend; without it the plan is of a decode")
    parser.add_argument("--prefix", type=_lengths, default=[0], metavar="N,N", help="cached tokens, a request each")
    parser.add_argument(
        "--q-lens", type=_lengths, default=None, metavar="N,N", help="rows, a request each (default: 1)"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: 16)")
    parser.add_argument("--num-steps", type=int, default=7, help="drafts a round (default: 7)")
    parser.add_argument("--sliding-window", type=int, help="keys seen, the query's own included")
    parser.add_argument("--soft-cap", type=float, help="cap on the logits")
    parser.add_argument("--sinks", action="store_true", help="attention sinks")
    parser.add_argument("--alibi", action="store_true", help="ALiBi (not offered: prints who lacks it)")
    parser.add_argument("--kv-dtype", help="dtype of the cache")
    dispatch.add_arguments(parser, skip=("mode", "prefix", "platform"))
    draft.add_arguments(parser, skip=("num_steps",))
    parser.set_defaults(run=_explain)


def _lengths(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: want lengths as 9000,12") from None
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: want lengths of at least 0")
    return values


def _explain(args: argparse.Namespace) -> int:
    from jattn.explain import Batch, explain
    from jattn.modes import ForwardMode
    from jattn.platforms import detect, platform_named

    forms = [dispatch.run(args), draft.run(args)]  # checks the mode's name, too
    spec = _spec_of(args)
    batch = Batch(
        mode=ForwardMode[(args.mode or "decode").upper()],
        prefix_lens=args.prefix,
        q_lens=args.q_lens or [1] * len(args.prefix),
        page_size=args.page_size,
        num_steps=args.num_steps,
    )
    print(explain(spec, args.policy, platform_named(args.platform) if args.platform else detect(), batch))
    print("\nforms that an MLA model would take, and the rows that decided:")
    print("\n".join(filter(None, forms)))
    return 0


def _spec_of(args: argparse.Namespace):
    from jattn.spec import AttnSpec, MLASpec

    heads = args.q_heads, args.kv_heads, args.head_dim
    asked = dict(sliding_window=args.sliding_window, logit_soft_cap=args.soft_cap, sinks=args.sinks, alibi=args.alibi)
    if args.model:
        from jattn.loaders.models import locate
        from jattn.loaders.open import open_model
        from jattn.serving.build import config_of

        spec = config_of(open_model(locate(args.model)).hparams).attn_spec(args.kv_dtype)
        if isinstance(spec, MLASpec):
            for name, value in asked.items():
                if value not in (None, False):
                    raise ValueError(
                        f"{name}={value} is of grouped-query attention, and this model has latents: omit it"
                    )
            return spec
        heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
    return AttnSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], kv_dtype=args.kv_dtype, **asked)


if __name__ == "__main__":
    sys.exit(main())
