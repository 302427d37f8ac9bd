"""The draft's part of `jattn explain`: which forms its steps and its draft-extend take, by their own stamps."""

import argparse

from jattn.backends import policy_named
from jattn.dispatch.cli import facts_of, line, pair_of
from jattn.draft.config import DraftConfig
from jattn.draft.factory import create_decode_backend, create_draft_extend_backend
from jattn.modes import ForwardMode
from jattn.platforms import platform_named


def add_arguments(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Add the options that `run` reads beside those of the dispatch. `skip`: names that the parser has already."""

    def add(name: str, **fields) -> None:
        if name not in skip:
            parser.add_argument(f"--{name.replace('_', '-')}", **fields)

    add("draft_policy", metavar="NAME", help="the draft model's own policy; adds the draft's phases")
    add("topk", type=int, default=1, help="branches of the draft tree (default: 1)")
    add("num_steps", type=int, default=3, help="drafts a round (default: 3)")


def run(args: argparse.Namespace) -> str:
    """A line for the draft's steps and one for its draft-extend; nothing without a draft policy.

    Raises: ValueError or NotImplementedError for what the draft factory refuses.

    >>> from jattn.dispatch import cli as dispatch
    >>> parser = argparse.ArgumentParser()
    >>> dispatch.add_arguments(parser)
    >>> add_arguments(parser)
    >>> print(run(parser.parse_args("--draft-policy cutedsl_mla --platform cuda-sm100".split())))
    draft decode     cutedsl_mla     MLA                 triton 4 (otherwise), then subtype 4 (otherwise)
    draft extend     trtllm_mla      MLA                 trtllm_mla 4 (otherwise), then subtype 4 (otherwise)
    """
    if args.draft_policy is None:
        return ""
    pair, facts = pair_of(args), facts_of(args)
    config = DraftConfig(
        platform=platform_named(args.platform or "cpu"),
        use_mla=True,
        topk=args.topk,
        num_steps=args.num_steps,
        draft_backend=policy_named(args.draft_policy).name,
        prefill_backend=pair.prefill,
        decode_backend=pair.decode,
        attention_mode=pair.attention_mode,
    )
    container, extend = create_decode_backend(config), create_draft_extend_backend(config)
    steps = f"draft decode     none            num_steps={args.num_steps}: draft-extend gives the only level"
    if container is not None:
        steps = line("draft decode", container.decode_stamp, ForwardMode.DECODE, facts, args.rules)
    # The half that a stamped backend's draft-extend goes by does not matter: both stamps are alike.
    return "\n".join(
        [steps, line("draft extend", extend.prefill_stamp, ForwardMode.DRAFT_EXTEND_V2, facts, args.rules)]
    )
