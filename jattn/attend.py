"""The door: attention over a cache, by plan. Every model and every draft goes through these four functions."""

import dataclasses

import jax

import pallas_kernels.merge_states.xla as merge_xla
from jattn.cache import MLACache, PagedKV, RaggedKV
from jattn.plan import Plan
from jattn.resolve import Choice, NoBackendError
from jattn.spec import AttnSpec


def write_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: PagedKV,
    plan: Plan,
    *,
    layer: int | jax.Array,
    spec: AttnSpec,
    choice: Choice,
    mask: str | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, PagedKV]:
    """Write a step's keys and values, then attend: one primitive, so that a kernel may fuse the two.

    Args:
      q: [tokens, num_q_heads, head_dim], rotated, not scaled (`spec.sm_scale` is applied inside).
      k, v: [tokens, num_kv_heads, head_dim], [tokens, num_kv_heads, v_head_dim], written at `plan.write_slots`.
      cache: donated by the caller's jit; the returned cache takes its place.
      layer: 0 <= layer < cache.num_layers; may be traced.
      mask, sinks: as in `attend`.

    Returns: out, lse as in `attend`, and the cache.
    Raises: ValueError if shapes disagree with `plan`, `cache` or `spec`; checked while tracing, so free at run time.

    >>> spec = AttnSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
    >>> choice = resolve(spec, "native", "cpu")
    >>> cache = PagedKV.create(spec, num_layers=1, num_pages=3, page_size=4)
    >>> plan = make_plan(ForwardMode.EXTEND, np.array([5]), np.array([5]), np.array([[2, 0]]), page_size=4)
    >>> x = jnp.ones((5, 4, 8))
    >>> out, lse, cache = write_attend(x, x[:, :2], x[:, :2], cache, plan, layer=0, spec=spec, choice=choice)
    >>> out.shape, lse.shape
    ((5, 4, 8), (5, 4))
    """
    _check_cache(cache, plan, spec)
    _check_rows("k", k, (plan.num_tokens, spec.num_kv_heads, spec.head_dim))
    _check_rows("v", v, (plan.num_tokens, spec.num_kv_heads, spec.v_head_dim))
    cache = write_kv(k, v, cache, plan, layer=layer, choice=choice)
    out, lse = attend(q, cache, plan, layer=layer, spec=spec, choice=choice, mask=mask, sinks=sinks)
    return out, lse, cache


def write_kv(k: jax.Array, v: jax.Array, cache: PagedKV, plan: Plan, *, layer, choice: Choice) -> PagedKV:
    """Store keys and values at `plan.write_slots` of one layer; slot -1 writes nothing. Shapes as in `write_attend`."""
    scales = {}
    if cache.token_scales:
        scales = dict(k_scales=cache.k_scale, v_scales=cache.v_scale)
    elif cache.k_scale is not None:
        scales = dict(k_scale=_scale(cache.k_scale, layer), v_scale=_scale(cache.v_scale, layer))
    scales |= _bits(cache)
    written = choice.function("write_kv")(
        cache.k,
        cache.v,
        k,
        v,
        plan.write_slots,
        page_offset=layer * cache.num_pages,
        num_pages=cache.num_pages,
        **scales,
    )
    return dataclasses.replace(cache, **dict(zip(("k", "v", "k_scale", "v_scale"), written, strict=False)))


def attend(
    q: jax.Array,
    kv: PagedKV | RaggedKV | MLACache,
    plan: Plan,
    *,
    layer: int | jax.Array = 0,
    spec: AttnSpec,
    choice: Choice,
    mask: str | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over keys that are already stored.

    Args:
      q: [tokens, num_q_heads, head_dim], rotated, not scaled. Rows follow `plan.cu_q_lens`.
      kv: a cache, or fresh packed keys (`RaggedKV`; the queries are the last of each request's keys).
      mask: "causal" (bottom-right aligned), "full" (every key of the request, for prefix chunks) or "tree"; by default
        what the plan implies.
      sinks: f32[num_q_heads], required when `spec.sinks`. `out` then is final; to merge partial states, attend with a
        spec without sinks, `merge_states`, then `apply_sinks` once.

    Returns:
      out: [tokens, num_q_heads, v_head_dim] in q's dtype; 0 where no key is visible and for padding rows.
      lse: f32[tokens, num_q_heads], natural log, sinks left out; -inf where no key is visible.
    Raises: ValueError if shapes disagree; NoBackendError for MLA caches, or packed keys without a kernel for them.
    Source: arXiv:2205.14135, algorithm 1; paging as in arXiv:2309.06180.
    """
    _check_rows("q", q, (plan.num_tokens, spec.num_q_heads, spec.head_dim))
    mask = mask or plan.mask
    if isinstance(kv, MLACache):
        raise NoBackendError("no kernel provides mla: attention over an MLACache is not offered yet")
    if mask not in ("causal", "full", "tree"):
        raise ValueError(f"mask={mask!r}: want 'causal', 'full' or 'tree'")
    if (mask == "tree") != (plan.tree is not None):
        raise ValueError(
            f"mask={mask!r} but plan.tree is {'set' if plan.tree else 'None'}: give make_plan(tree=...) its bits"
        )
    if spec.sinks != (sinks is not None):
        raise ValueError(
            f"spec.sinks={spec.sinks} but sinks is {'given' if sinks is not None else 'None'}: they go together"
        )
    common = dict(
        cu_q_lens=plan.cu_q_lens,
        max_q_len=plan.max_q_len,
        sm_scale=spec.sm_scale,
        mask=mask,
        logit_soft_cap=spec.logit_soft_cap,
        sliding_window=spec.sliding_window,
        num_splits=choice.num_splits,
        **_tree_args(plan),
    )
    if choice.num_splits == 1:
        common["sinks"] = sinks
    if isinstance(kv, RaggedKV):
        out, lse = _attend_ragged(q, kv, choice, common)
    else:
        _check_cache(kv, plan, spec)
        out, lse = choice.function("attend")(
            q,
            kv.k,
            kv.v,
            page_table=plan.page_table,
            page_offset=layer * kv.num_pages,
            seq_lens=plan.seq_lens,
            k_scale=_scale(kv.k_scale, layer),
            v_scale=_scale(kv.v_scale, layer),
            **_bits(kv),
            **common,
        )
    if choice.num_splits == 1:
        return out, lse
    out, lse = merge_states(out, lse, choice=choice)
    out = apply_sinks(out, lse, sinks) if sinks is not None else out
    return out.astype(q.dtype), lse


def merge_states(out: jax.Array, lse: jax.Array, *, choice: Choice | None = None) -> tuple[jax.Array, jax.Array]:
    """Merge partial attention states over disjoint keys. (0, -inf) is the neutral state.

    Args: out: [parts, tokens, heads, v_dim]. lse: f32[parts, tokens, heads], natural log. choice: picks the kernel;
      None takes plain JAX.
    Returns: out [tokens, heads, v_dim], lse f32[tokens, heads].
    Source: arXiv:2205.14135, section 3.1; reduction as in https://pytorch.org/blog/flash-decoding/.

    >>> out, lse = merge_states(jnp.array([[[[1.0]]], [[[3.0]]]]), jnp.zeros((2, 1, 1)))
    >>> float(out[0, 0, 0]), round(float(lse[0, 0]), 4)
    (2.0, 0.6931)
    """
    function = merge_xla.merge_states if choice is None else choice.function("merge_states")
    return function(out, lse)


def apply_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """Turn a sink-free state into the output of a layer with sinks: out * exp(lse) / (exp(lse) + exp(sink)).

    Args: out: [tokens, heads, v_dim]. lse: f32[tokens, heads]. sinks: f32[heads], one logit a query head.
    """
    return merge_xla.apply_sinks(out, lse, sinks)


def _attend_ragged(q, kv: RaggedKV, choice: Choice, common):
    function = choice.row("attend").ragged
    if function is None:
        raise NoBackendError(f"{choice.row('attend').name} attends to paged keys only; resolve with prefer=('xla',)")
    return function(q, kv.k, kv.v, cu_kv_lens=kv.cu_kv_lens, **common)


def _tree_args(plan: Plan) -> dict:
    if plan.tree is None:
        return {}
    return dict(
        tree_bits=plan.tree.bits,
        tree_starts=plan.tree.starts,
        tree_kv_positions=plan.tree.kv_positions,
        q_positions=plan.positions,
    )


def _scale(scale: jax.Array | None, layer) -> jax.Array | None:
    return scale if scale is None or scale.ndim == 3 else scale[layer]


def _bits(cache: PagedKV) -> dict:
    return {} if cache.k.dtype == cache.dtype else dict(kv_dtype=cache.dtype)


def _check_rows(name: str, x: jax.Array, want: tuple) -> None:
    if x.shape != want:
        raise ValueError(f"{name}.shape={x.shape}: want {want} from the plan's tokens and the spec's heads and width")


def _check_cache(cache: PagedKV, plan: Plan, spec: AttnSpec) -> None:
    if cache.page_size != plan.page_size:
        raise ValueError(f"cache has pages of {cache.page_size} tokens, plan of {plan.page_size}: build both alike")
    want = (spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
    got = (cache.k.shape[2], cache.k.shape[3], cache.v.shape[3])
    if got != want:
        raise ValueError(
            f"cache holds (kv_heads, head_dim, v_head_dim)={got}, spec says {want}: create it from this spec"
        )
