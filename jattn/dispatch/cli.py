"""The dispatch part of `jattn explain`: which form each phase takes, and the row that decided."""

import argparse
import dataclasses

from jattn.backends import policy_named
from jattn.dispatch.facts import DispatchFacts
from jattn.dispatch.names import HybridPair
from jattn.dispatch.select import explain
from jattn.modes import ForwardMode
from jattn.platforms import platform_named
from jattn.platforms.lookup import named

# Fact -> help. Each is an option under its own name; a default is the record's.
_COUNTS = {
    "max_chunk_capacity": "tokens that may be expanded at once",
    "chunked_prefix_threshold": "prefix tokens, over the batch, from which expanding pays",
    "batch_size": "requests (read by native)",
}
_FLAGS = {
    "chunked_prefix_disabled": "never expand a prefix in chunks",
    "ragged_disabled": "flashinfer and flashmla never expand",
    "piecewise_graph": "inside a program in which the lengths are not known",
    "breakable_graph": "inside a breakable graph",
    "prefill_context_parallel": "the batch is split over ranks along its tokens",
    "deterministic": "deterministic inference",
    "hip": "on ROCm",
    "rocm_fused_decode": "the fused decode kernel of ROCm is on",
    "fused_qkv_a": "the layer projects q and latent in one matrix",
    "amx": "weights are packed for AMX",
    "dsa_model": "the layer selects tokens",
    "dsa_use_mha": "planning chose dense prefill for a DSA backend",
    "no_rope": "no rotary part (newer rules)",
    "sm100_or_sm110": "on SM100 or SM110 (newer rules)",
    "decode_context_parallel": "decode is split over ranks (newer rules)",
    "fp8_gfx95_dense": "dense fp8 prefill on gfx95 (newer rules)",
}


def add_arguments(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Add the options that `run` reads. `skip`: names that the parser has already, as ("mode", "prefix")."""

    def add(name: str, **fields) -> None:
        if name not in skip:
            parser.add_argument(f"--{name.replace('_', '-')}", **fields)

    defaults = {field.name: field.default for field in dataclasses.fields(DispatchFacts)}
    add("mode", help="one forward mode, as extend (default: every mode)")
    add("prefix", type=int, default=0, metavar="N", help="cached tokens over the batch (default: 0)")
    add("seq_lens_sum", type=int, metavar="N", help="tokens over the batch, new ones included (default: not known)")
    add("prefill_policy", default="native", metavar="NAME", help="policy of prefills (default: native)")
    add("decode_policy", default="native", metavar="NAME", help="policy of decodes (default: native)")
    add("speculative_attention_mode", default="prefill", metavar="HALF", help="prefill or decode: what verifies")
    add("platform", metavar="NAME", help="a row of `jattn platforms` (default: cpu)")
    add("rules", default="seed", help="seed or newer, the generation of the original's rules (default: seed)")
    for name, text in _COUNTS.items():
        add(name, type=int, default=defaults[name], metavar="N", help=f"{text} (default: {defaults[name]})")
    for name, text in _FLAGS.items():
        add(name, action="store_true", help=text)


def run(args: argparse.Namespace) -> str:
    """What each phase takes, a line a phase: phase, policy, method, and the rows that decided.

    Raises: ValueError for an unknown mode, policy, platform or attention mode.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> print(run(parser.parse_args("--mode extend --prefix 9000 --prefill-policy triton".split())))
    extend           triton          MLA                 triton 4 (otherwise), then subtype 4 (otherwise)
    """
    pair, facts = pair_of(args), facts_of(args)
    return "\n".join(line(mode.name, pair.dispatch_name(mode), mode, facts, args.rules) for mode in _modes(args.mode))


def pair_of(args: argparse.Namespace) -> HybridPair:
    """The names of both halves. Raises: ValueError for an unknown name or attention mode."""
    return HybridPair(
        prefill=policy_named(args.prefill_policy).name,
        decode=policy_named(args.decode_policy).name,
        attention_mode=args.speculative_attention_mode,
    )


def facts_of(args: argparse.Namespace) -> DispatchFacts:
    """The facts given, with those of the platform; the mode is yet to be set."""
    platform = platform_named(args.platform or "cpu")
    prefix = args.prefix if isinstance(args.prefix, int) else sum(args.prefix)
    given = {name: getattr(args, name) for name in (*_COUNTS, *_FLAGS)}
    given["hip"] |= platform.is_hip
    given["sm100_or_sm110"] |= platform.is_sm100_or_sm110
    return DispatchFacts(mode=ForwardMode.IDLE, sum_prefix_lens=prefix, sum_seq_lens=args.seq_lens_sum, **given)


def line(phase: str, policy: str | None, mode: ForwardMode, facts: DispatchFacts, rules: str) -> str:
    """What one phase takes, in columns."""
    decision = explain(policy, dataclasses.replace(facts, mode=mode), rules=rules)
    return f"{phase.lower():<16} {policy!s:<15} {decision.method:<19} {', then '.join(map(str, decision.rows))}"


def _modes(name: str | None) -> list[ForwardMode]:
    if name is None:
        return list(ForwardMode)
    return [named({mode.name.lower(): mode for mode in ForwardMode}, name.lower(), what="mode")]
