"""The door: attention over a cache, by plan. Every model and every draft goes through these functions."""

import dataclasses

import jax

import pallas_kernels.merge_states.xla as merge_xla
from jattn.cache import MLACache, PagedKV, RaggedKV, latent_row, rows_of
from jattn.plan import Plan
from jattn.resolve import Choice
from jattn.spec import AttnSpec, MLASpec
from pallas_kernels._common import latent_rows, tpu_rows

type Spec = AttnSpec | MLASpec
type Cache = PagedKV | MLACache


def write_attend[C: (PagedKV, MLACache)](
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: C,
    plan: Plan,
    *,
    layer: int | jax.Array,
    spec: Spec,
    choice: Choice,
    mask: str | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, C]:
    """Write a step's keys and values, then attend: one primitive, so that a kernel may fuse the two.

    Args:
      q: [tokens, num_q_heads, head_dim], rotated, not scaled (`spec.sm_scale` is applied inside).
      k, v: [tokens, num_kv_heads, head_dim], [tokens, num_kv_heads, v_head_dim], written at `plan.write_slots`, which
        are -1 or where the page table has the row's place in its sequence, as `make_plan` sets them. For an `MLACache`
        the normed latent [tokens, kv_lora_rank] and the rotated shared key [tokens, qk_rope_head_dim], and q as in
        `attend`; `combinators.mla` has the layer around it.
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
    check_cache(cache, plan, spec, choice)
    if isinstance(spec, MLASpec):
        _check_rows("latent", k, (plan.num_tokens, spec.kv_lora_rank))
        _check_rows("k_rope", v, (plan.num_tokens, spec.qk_rope_head_dim))
    else:
        _check_rows("k", k, (plan.num_tokens, spec.num_kv_heads, spec.head_dim))
        _check_rows("v", v, (plan.num_tokens, spec.num_kv_heads, spec.v_head_dim))
    writes = choice.writes("attend_latent" if isinstance(spec, MLASpec) else "attend")
    if writes is None:
        cache = write_kv(k, v, cache, plan, layer=layer, choice=choice)
        out, lse = attend(q, cache, plan, layer=layer, spec=spec, choice=choice, mask=mask, sinks=sinks)
        return out, lse, cache
    given = _asked_of(q, cache, plan, layer, spec, choice, mask or plan.mask, sinks)
    given |= dict(slots=plan.write_slots, num_pages=cache.num_pages)
    if isinstance(cache, MLACache):
        out, lse, written = writes(q, k, v, cache.latent, **given)
        cache = dataclasses.replace(cache, latent=written)
    else:
        out, lse, written = writes(q, k, v, cache.k, **given)
        cache = dataclasses.replace(cache, k=written)
    out, lse = _merged(out, lse, q.dtype, choice, sinks)
    return out, lse, cache


def write_kv[C: (PagedKV, MLACache)](k: jax.Array, v: jax.Array, cache: C, plan: Plan, *, layer, choice: Choice) -> C:
    """Store keys and values at `plan.write_slots` of one layer; slot -1 writes nothing. Shapes as in `write_attend`."""
    if isinstance(cache, MLACache):
        pages = dict(page_offset=layer * cache.num_pages, num_pages=cache.num_pages)
        written = choice.function("write_latent")(cache.latent, k, v, plan.write_slots, **pages, **cache.words)
        return dataclasses.replace(cache, latent=written)
    given = _asked_of_writes(cache, layer)
    written = choice.function("write_kv")(cache.k, cache.v, k, v, plan.write_slots, **given)
    return dataclasses.replace(cache, **dict(zip(("k", "v", "k_scale", "v_scale"), written, strict=False)))


def rotate_write(
    rows: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: PagedKV,
    plan: Plan,
    *,
    layer: int | jax.Array,
    spec: AttnSpec,
    choice: Choice,
) -> tuple[jax.Array, PagedKV] | None:
    """Rotate a step's queries and keys, and write keys and values, in one kernel; `attend` comes next.

    Args:
      rows: [tokens, num_q_heads * head_dim + num_kv_heads * (head_dim + v_head_dim)], what a fused projection gives:
        queries, keys and values of each head in turn, not rotated.
      cos, sin: f32[tokens, head_dim / 2], of the pairs of features (i, i + head_dim / 2).
      The rest as in `write_attend`.
    Returns: q [tokens, num_q_heads, head_dim] and the cache; None where no such kernel was chosen for these rows:
      rotate, then `write_attend`.
    Raises: ValueError as `write_attend`.
    """
    v_dim = spec.v_head_dim or spec.head_dim
    function = choice.rotates(head_dim=spec.head_dim, v_dim=v_dim, dtype=rows.dtype)
    if function is None or choice.writes("attend") is not None or cache.token_scales:
        return None
    check_cache(cache, plan, spec, choice)
    widths = (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * v_dim
    _check_rows("rows", rows, (plan.num_tokens, widths))
    for name, phase in (("cos", cos), ("sin", sin)):
        _check_rows(name, phase, (plan.num_tokens, spec.head_dim // 2))
    given = _asked_of_writes(cache, layer)
    q, k, v = function(cache.k, cache.v, rows, cos, sin, plan.write_slots, **given)
    return q, dataclasses.replace(cache, k=k, v=v)


def attend(
    q: jax.Array,
    kv: PagedKV | RaggedKV | MLACache,
    plan: Plan,
    *,
    layer: int | jax.Array = 0,
    spec: Spec,
    choice: Choice,
    mask: str | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over keys that are already stored.

    Args:
      q: [tokens, num_q_heads, head_dim], rotated, not scaled. Rows follow `plan.cu_q_lens`. For an `MLACache`
        [tokens, num_q_heads, kv_lora_rank + qk_rope_head_dim]: absorbed (q_nope times the key's up-projection), then
        the rotated part.
      kv: a cache, or fresh packed keys (`RaggedKV`; the queries are the last of each request's keys).
      mask: "causal" (bottom-right aligned), "full" (every key of the request, for prefix chunks) or "tree"; by default
        what the plan implies.
      sinks: f32[num_q_heads], required when `spec.sinks`. `out` then is final; to merge partial states, attend with a
        spec without sinks, `merge_states`, then `apply_sinks` once.

    Returns:
      out: [tokens, num_q_heads, v_head_dim] in q's dtype; 0 where no key is visible and for padding rows. For an
        `MLACache` [tokens, num_q_heads, kv_lora_rank], to be up-projected.
      lse: f32[tokens, num_q_heads], natural log, sinks left out; -inf where no key is visible.
    Raises: ValueError if shapes disagree, or spec and kv are of two kinds; NoBackendError for a choice of another kind
      of layer, or packed keys without a kernel for them.
    Source: arXiv:2205.14135, algorithm 1; paging as in arXiv:2309.06180.
    """
    mask = mask or plan.mask
    given = _asked_of(q, kv, plan, layer, spec, choice, mask, sinks)
    if isinstance(kv, MLACache):
        out, lse = choice.function("attend_latent")(q, kv.latent, **given)
    elif isinstance(kv, RaggedKV):
        out, lse = choice.ragged()(q, kv.k, kv.v, cu_kv_lens=kv.cu_kv_lens, **given)
    else:
        out, lse = choice.function("attend")(q, kv.k, kv.v, **given)
    return _merged(out, lse, q.dtype, choice, sinks)


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


def _asked_of(q, kv, plan: Plan, layer, spec: Spec, choice: Choice, mask: str, sinks) -> dict:
    # what an attention kernel takes beside queries and keys, all of it checked
    _check_mask(mask, plan)
    if isinstance(spec, MLASpec) != isinstance(kv, MLACache):
        raise _mixed(kv, spec)
    if isinstance(spec, MLASpec):
        return _asked_of_latents(q, kv, plan, layer, spec, choice, mask, sinks)
    _check_rows("q", q, (plan.num_tokens, spec.num_q_heads, spec.head_dim))
    if spec.sinks != (sinks is not None):
        raise ValueError(
            f"spec.sinks={spec.sinks} but sinks is {'given' if sinks is not None else 'None'}: they go together"
        )
    given = _common(plan, spec, choice, mask)
    given |= dict(logit_soft_cap=spec.logit_soft_cap, sliding_window=spec.sliding_window)
    if choice.num_splits == 1:
        given["sinks"] = sinks
    if isinstance(kv, RaggedKV):
        return given
    check_cache(kv, plan, spec, choice)
    if kv.v is None:
        given |= dict(kv_heads=spec.num_kv_heads, v_dim=spec.v_head_dim)
    scales = dict(k_scale=_scale(kv.k_scale, layer), v_scale=_scale(kv.v_scale, layer))
    return given | scales | _form(kv) | _of_pages(kv, plan, layer)


def _asked_of_writes(cache: PagedKV, layer) -> dict:
    scales = {}
    if cache.token_scales:
        scales = dict(k_scales=cache.k_scale, v_scales=cache.v_scale)
    elif cache.k_scale is not None:
        scales = dict(k_scale=_scale(cache.k_scale, layer), v_scale=_scale(cache.v_scale, layer))
    return scales | _form(cache) | dict(page_offset=layer * cache.num_pages, num_pages=cache.num_pages)


def _asked_of_latents(q, kv, plan: Plan, layer, spec: MLASpec, choice: Choice, mask: str, sinks) -> dict:
    if sinks is not None:
        raise ValueError("sinks are given but spec is an MLASpec: latent attention has none; leave them out")
    _check_rows("q", q, (plan.num_tokens, spec.num_q_heads, spec.latent_dims))
    check_cache(kv, plan, spec, choice)
    given = dict(latent_dim=spec.kv_lora_rank, **kv.words)
    return given | _common(plan, spec, choice, mask) | _of_pages(kv, plan, layer)


def _of_pages(kv: Cache, plan: Plan, layer) -> dict:
    return dict(page_table=plan.page_table, page_offset=layer * kv.num_pages, seq_lens=plan.seq_lens)


def _common(plan: Plan, spec: Spec, choice: Choice, mask: str) -> dict:
    # what attention takes whatever it attends to
    return dict(
        cu_q_lens=plan.cu_q_lens,
        max_q_len=plan.max_q_len,
        sm_scale=spec.sm_scale,
        mask=mask,
        num_splits=choice.num_splits,
        **_tree_args(plan),
    )


def _merged(out, lse, dtype, choice: Choice, sinks):
    if choice.num_splits == 1:
        return out, lse
    out, lse = merge_states(out, lse, choice=choice)
    out = apply_sinks(out, lse, sinks) if sinks is not None else out
    return out.astype(dtype), lse


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


def _form(cache: PagedKV) -> dict:
    # what the arrays of a cache do not say of their entries
    form = {} if cache.k.dtype == cache.dtype else dict(kv_dtype=cache.dtype)
    return form | (dict(token_scales=True) if cache.scaled_rows else {})


def _check_rows(name: str, x: jax.Array, want: tuple) -> None:
    if x.shape != want:
        raise ValueError(f"{name}.shape={x.shape}: want {want} from the plan's tokens and the spec's heads and width")


def _check_mask(mask: str, plan: Plan) -> None:
    if mask not in ("causal", "full", "tree"):
        raise ValueError(f"mask={mask!r}: want 'causal', 'full' or 'tree'")
    if (mask == "tree") != (plan.tree is not None):
        raise ValueError(
            f"mask={mask!r} but plan.tree is {'set' if plan.tree else 'None'}: give make_plan(tree=...) its bits"
        )


def _mixed(kv, spec: Spec) -> ValueError:
    return ValueError(
        f"keys are a {type(kv).__name__} but spec is of {type(spec).__name__}: want MLACache with MLASpec, or "
        "PagedKV or RaggedKV with AttnSpec (MLASpec.expanded for keys made from latents)"
    )


_OF_KERNELS = {
    "rows": ("rows", "row_words_", "row_scales_"),
    "latent_rope_lanes": ("latent_rope_lanes", "latent_words_", "latent_e4m3_lanes"),
}
"""Layouts that only some kernels read, and those no other; how they lie depends on the page size."""


def _check_layout(cache: Cache, choice: Choice | None) -> None:
    if choice is None:
        return
    wanted = choice.kv_layout
    got = next((asked for asked, held in _OF_KERNELS.items() if cache.layout.startswith(held)), None)
    if got != wanted:
        row = choice.row("attend_latent" if isinstance(cache, MLACache) else "attend")
        raise ValueError(
            f"cache has layout={cache.layout!r}, but {row.name} reads {wanted or 'token-major'} pages: create it with "
            "layout=choice.kv_layout"
        )


def check_cache(cache: Cache, plan: Plan, spec: Spec, choice: Choice | None = None) -> None:
    """Raise ValueError if a cache is not of this plan and this spec, or lies as the chosen kernels cannot read it."""
    if isinstance(cache, MLACache) and isinstance(spec, MLASpec):
        _check_layout(cache, choice)
        if cache.layout.startswith(_OF_KERNELS["latent_rope_lanes"]):
            row = latent_row(spec)
            names, got = "lanes of a token", cache.latent.shape[2:]
            want = tpu_rows.word_shape(row, cache.dtype) if len(got) > 1 else (row.held_lanes,)
        else:
            names, want = "(kv_lora_rank, qk_rope_head_dim)", (spec.kv_lora_rank, spec.qk_rope_head_dim)
            got = (want[0], latent_rows.width(cache.latent, want[0]) - want[0])
    elif isinstance(cache, PagedKV) and isinstance(spec, AttnSpec):
        names, want = "(kv_heads, head_dim, v_head_dim)", (spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
        _check_layout(cache, choice)
        if cache.v is None:
            row, names, got = rows_of(spec), "lanes of a token", cache.k.shape[2:]
            want = tpu_rows.word_shape(row, cache.dtype) if len(got) > 1 else (row.held_lanes,)
        else:
            got = (cache.k.shape[2], cache.k.shape[3], cache.v.shape[3])
    else:
        raise _mixed(cache, spec)
    if cache.page_size != plan.page_size:
        raise ValueError(f"cache has pages of {cache.page_size} tokens, plan of {plan.page_size}: build both alike")
    if got != want:
        raise ValueError(f"cache holds {names}={got}, spec says {want}: create it from this spec")
