"""Limits on trees that hold before any backend is made: the original checks them among its server's arguments."""

from jattn.backends import policy_named


def check_draft_limits(
    *,
    topk: int,
    page_size: int,
    base_backend: str | None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
    num_steps: int | None = None,
    num_draft_tokens: int | None = None,
) -> None:
    """Refuse a tree that the configured names cannot page or hold.

    Args:
      topk: branches; page_size: tokens a page.
      base_backend: the name given for both phases; prefill_backend, decode_backend: the halves, where given apart.
      num_steps, num_draft_tokens: checked against each other for chains, where both are given.

    Raises: ValueError with the value, the rule and the way out; for an unknown name, the list of names.

    >>> check_draft_limits(topk=4, page_size=16, base_backend="triton")
    >>> check_draft_limits(topk=4, page_size=16, base_backend="aiter")
    Traceback (most recent call last):
    ValueError: topk=4 with page_size=16 under 'aiter': its trees need page_size=1; ...
    """
    base = policy_named(base_backend if base_backend is not None else "native")
    halves = {policy_named(name or base.name).name for name in (prefill_backend, decode_backend)}
    if topk > 1 and "trtllm_mha" in halves:
        raise ValueError(f"topk={topk} under 'trtllm_mha': it verifies chains only; use topk=1, or 'native' for a tree")
    if topk > 1 and page_size > 1 and not base.paged_trees:
        raise ValueError(
            f"topk={topk} with page_size={page_size} under {base.name!r}: its trees need page_size=1; "
            "native, flashinfer, triton and fa3 page trees"
        )
    if topk == 1 and num_steps is not None and num_draft_tokens not in (None, num_steps + 1):
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} with topk=1 and num_steps={num_steps}: a chain verifies "
            f"num_steps + 1 = {num_steps + 1} tokens; leave num_draft_tokens out"
        )
