"""Multi-head latent attention in every form: the same result, absorbed or expanded, over one paged latent cache.

Source: arXiv:2405.04434, section 2.1 and appendix C (absorption); chunks merged as in arXiv:2205.14135, section 3.1.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jattn.attend import attend, check_cache, merge_states, write_attend, write_kv
from jattn.cache import MLACache, RaggedKV
from jattn.combinators.latent_chunks import BLOCK, CHUNKED, ONE_SHOT, LatentChunks
from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch import DispatchFacts, form_costs, select_method
from jattn.plan import Plan
from jattn.platforms.table import platform_named
from jattn.resolve import Choice, NoBackendError
from jattn.spec import MLASpec
from pallas_kernels._common import ints, shards


def mla_attend(
    q_nope: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    cache: MLACache,
    plan: Plan,
    *,
    layer: int | jax.Array,
    spec: MLASpec,
    choice: Choice,
    w_kc: jax.Array,
    w_vc: jax.Array,
    method: M,
    chunks: LatentChunks | None = None,
) -> tuple[jax.Array, MLACache]:
    """Write a step's latents, then attend in the form that `method` names.

    Args:
      q_nope, q_rope: [tokens, num_q_heads, qk_nope_head_dim], [tokens, num_q_heads, qk_rope_head_dim]; the second
        rotated, neither scaled.
      latent, k_rope: [tokens, kv_lora_rank], normed, and [tokens, qk_rope_head_dim], rotated; written at
        `plan.write_slots`.
      cache: donated by the caller's jit; the returned cache takes its place.
      layer: 0 <= layer < cache.num_layers; may be traced.
      w_kc, w_vc: [num_q_heads, qk_nope_head_dim, kv_lora_rank], [num_q_heads, kv_lora_rank, v_head_dim]: what makes a
        head's key and value of a latent.
      method: static, from `choose_method`. MHA without chunks is right only where no request has a
        prefix. Absorbed forms read what
        the cache holds, as one-shot does; MHA and the fresh part of chunked read the latents as given, before they are
        rounded to the cache's dtype.
      chunks: `make_chunks(method, ...)`, the same for every layer.

    Returns: out [tokens, num_q_heads, v_head_dim] in q's dtype, 0 for padding rows; the cache.
    Raises: ValueError if shapes disagree, or for a method without its chunks; NoBackendError for DSA_NPU, which attends
      to selected tokens.

    >>> spec = MLASpec(num_q_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
    >>> cache = MLACache.create(spec, num_layers=1, num_pages=3, page_size=4, dtype=jnp.float32)
    >>> plan = make_plan(ForwardMode.EXTEND, [5], [5], [[2, 0]], page_size=4)
    >>> x = jnp.ones((5, 2, 8))
    >>> out, cache = mla_attend(x[..., :4], x[..., :2], x[:, 0], x[:, 0, :2], cache, plan, layer=0, spec=spec,
    ...     choice=resolve(spec, "native", "cpu"), w_kc=jnp.ones((2, 4, 8)), w_vc=jnp.ones((2, 8, 3)), method=M.MLA)
    >>> out.shape
    (5, 2, 3)
    """
    if method not in FORMS:
        raise NoBackendError(f"method {method} attends to selected tokens, for which there is no kernel yet: use MLA")
    inputs = _Inputs(q_nope, q_rope, latent, k_rope, plan, layer, spec, choice, w_kc, w_vc, chunks)
    check_cache(cache, plan, spec)
    _check(inputs, method)
    return FORMS[method](inputs, cache)


@dataclasses.dataclass(frozen=True, slots=True)
class _Inputs:
    q_nope: jax.Array
    q_rope: jax.Array
    latent: jax.Array
    k_rope: jax.Array
    plan: Plan
    layer: int | jax.Array
    spec: MLASpec
    choice: Choice
    w_kc: jax.Array
    w_vc: jax.Array
    chunks: LatentChunks | None

    @property
    def q(self) -> jax.Array:
        """Full queries [tokens, heads, qk_head_dim]."""
        return jnp.concatenate([self.q_nope, self.q_rope.astype(self.q_nope.dtype)], axis=-1)


def _written(form: Callable[[_Inputs, MLACache], jax.Array]) -> Callable[[_Inputs, MLACache], tuple]:
    # a form that finds the step's latents in the cache
    def run(x: _Inputs, cache: MLACache) -> tuple[jax.Array, MLACache]:
        cache = write_kv(x.latent, x.k_rope, cache, x.plan, layer=x.layer, choice=x.choice)
        return form(x, cache), cache

    return run


def _absorbed(x: _Inputs, cache: MLACache) -> tuple[jax.Array, MLACache]:
    q_latent = _einsum("thn,hnr->thr", x.q_nope, x.w_kc)
    q = jnp.concatenate([q_latent, x.q_rope], axis=-1)
    latent, key = x.latent, x.k_rope
    out, _, cache = write_attend(q, latent, key, cache, x.plan, layer=x.layer, spec=x.spec, choice=x.choice)
    return _einsum("thr,hrv->thv", out, x.w_vc), cache


def _one_shot(x: _Inputs, cache: MLACache) -> jax.Array:
    if x.chunks is None or not x.chunks.slots.shape[0]:
        return _attend_fresh(x)[0]
    kv = _expand_chunk(x, x.chunks, cache, 0)
    return attend(x.q, kv, x.plan, spec=x.spec.expanded, choice=x.choice)[0]


def _chunked(x: _Inputs, cache: MLACache) -> jax.Array:
    state, chunks = _attend_fresh(x), x.chunks
    if chunks is None or not chunks.slots.shape[0]:
        return state[0]
    # Partial states are kept in float32: merging many in the queries' dtype would round as many times.
    q, spec = x.q, x.spec.expanded

    def add(i, state):
        kv = _expand_chunk(x, chunks, cache, i)
        plan = dataclasses.replace(x.plan, tree=_shifted(x.plan, chunks.starts[i]))
        mask = "full" if plan.tree is None else "tree"
        out, lse = attend(q, kv, plan, spec=spec, choice=x.choice, mask=mask)
        both = (jnp.stack(pair) for pair in zip(state, (out.astype(jnp.float32), lse), strict=True))
        return merge_states(*both, choice=x.choice)

    start = (state[0].astype(jnp.float32), state[1])
    return lax.fori_loop(0, chunks.num_chunks, add, start)[0].astype(q.dtype)


def _attend_fresh(x: _Inputs) -> tuple[jax.Array, jax.Array]:
    # the step's own tokens among themselves
    kv = RaggedKV(**_expand(x, x.latent, x.k_rope), cu_kv_lens=x.plan.cu_q_lens)
    q_lens = x.plan.cu_q_lens[1:] - x.plan.cu_q_lens[:-1]
    plan = dataclasses.replace(x.plan, tree=_shifted(x.plan, x.plan.seq_lens - q_lens))
    return attend(x.q, kv, plan, spec=x.spec.expanded, choice=x.choice)


def _expand_chunk(x: _Inputs, chunks: LatentChunks, cache: MLACache, i) -> RaggedKV:
    # by blocks, as many as hold tokens: a bucket costs what is in it
    gather = functools.partial(
        x.choice.function("gather_latent"),
        cache.latent,
        latent_dim=x.spec.kv_lora_rank,
        rope_dim=x.spec.qk_rope_head_dim,
        **cache.words,
        page_offset=x.layer * cache.num_pages,
        dtype=x.q_nope.dtype,
    )
    slots, cu_kv_lens = chunks.slots[i], chunks.cu_kv_lens[i]
    if slots.shape[0] <= BLOCK:
        return RaggedKV(**_expand(x, *gather(slots)), cu_kv_lens=cu_kv_lens)

    def block(j, kv):
        at = j * BLOCK
        mine = _expand(x, *gather(lax.dynamic_slice_in_dim(slots, at, BLOCK)))
        return {name: lax.dynamic_update_slice_in_dim(kv[name], mine[name], at, 0) for name in kv}

    shape = jax.eval_shape(lambda: _expand(x, *gather(slots)))
    empty = {name: jnp.zeros(like.shape, like.dtype) for name, like in shape.items()}
    empty = shards.varying_like(empty, (x.q_nope, x.w_kc, cache.latent))
    return RaggedKV(**lax.fori_loop(0, ints.cdiv(cu_kv_lens[-1], BLOCK), block, empty), cu_kv_lens=cu_kv_lens)


def _expand(x: _Inputs, latent, k_rope) -> dict[str, jax.Array]:
    # every head's keys and values of some tokens
    k_nope, v = _einsum("tr,hnr->thn", latent, x.w_kc), _einsum("tr,hrv->thv", latent, x.w_vc)
    shared = jnp.broadcast_to(k_rope.astype(k_nope.dtype)[:, None], (*k_nope.shape[:2], k_rope.shape[1]))
    return dict(k=jnp.concatenate([k_nope, shared], axis=-1), v=v)


def _shifted(plan: Plan, first):
    # the tree among keys that begin at sequence index `first` (i32[seqs]); nodes before it keep their bits
    return None if plan.tree is None else dataclasses.replace(plan.tree, starts=plan.tree.starts - first)


def _einsum(equation: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    # float32 products as float32, never as TF32 or bfloat16; a mix of dtypes is multiplied as float32
    def wide(x, weights):
        exact = lax.Precision.HIGHEST
        return jnp.einsum(equation, x.astype(jnp.float32), weights.astype(jnp.float32), precision=exact)

    def narrow(x, weights):
        return jnp.einsum(equation, x, weights, preferred_element_type=jnp.float32)

    if x.dtype != weights.dtype or x.dtype == jnp.float32:
        return wide(x, weights).astype(x.dtype)
    # XLA:CPU (0.12) has no batched bfloat16 product with a float32 sum; one with a bfloat16 sum errs 12 times as much.
    return lax.platform_dependent(x, weights, cpu=wide, default=narrow).astype(x.dtype)


def _check(x: _Inputs, method: M) -> None:
    spec, tokens = x.spec, x.plan.num_tokens
    heads, rank = spec.num_q_heads, spec.kv_lora_rank
    for name, array, want in (
        ("q_nope", x.q_nope, (tokens, heads, spec.qk_nope_head_dim)),
        ("q_rope", x.q_rope, (tokens, heads, spec.qk_rope_head_dim)),
        ("latent", x.latent, (tokens, rank)),
        ("k_rope", x.k_rope, (tokens, spec.qk_rope_head_dim)),
        ("w_kc", x.w_kc, (heads, spec.qk_nope_head_dim, rank)),
        ("w_vc", x.w_vc, (heads, rank, spec.v_head_dim)),
    ):
        if array.shape != want:
            raise ValueError(f"{name}.shape={array.shape}: want {want} from the plan's tokens and the spec's widths")
    if x.q_nope.dtype != x.q_rope.dtype:
        raise ValueError(f"q_nope is {x.q_nope.dtype} but q_rope is {x.q_rope.dtype}: want one dtype for both")
    if method in CHUNKED | ONE_SHOT and x.chunks is None:
        raise ValueError(f"method {method} expands cached latents but chunks is None: give make_chunks({method}, ...)")
    if x.chunks is not None and x.chunks.cu_kv_lens.shape[1] != x.plan.cu_q_lens.shape[0]:
        raise ValueError(
            f"chunks are of {x.chunks.cu_kv_lens.shape[1] - 1} requests, the plan of {x.plan.cu_q_lens.shape[0] - 1}: "
            "build both from the same lengths"
        )


_CHUNKED, _ONE_SHOT = _written(_chunked), _written(_one_shot)
FORMS: dict[M, Callable[[_Inputs, MLACache], tuple[jax.Array, MLACache]]] = {
    M.MHA: _CHUNKED,
    M.MLA: _absorbed,
    M.MHA_CHUNKED_KV: _CHUNKED,
    M.MHA_ONE_SHOT: _ONE_SHOT,
    # What the original fuses by hand is one program under jit here, whatever its name.
    M.MLA_FUSED_ROPE_ROCM: _absorbed,
    M.MLA_FUSED_ROPE_CPU: _absorbed,
    M.MHA_ROCM: _CHUNKED,
    M.MHA_ONE_SHOT_ROCM: _ONE_SHOT,
    M.MHA_CHUNKED_KV_ROCM: _CHUNKED,
    M.MLA_ROCM: _absorbed,
    M.MHA_NPU: _CHUNKED,
    M.MLA_NPU: _absorbed,
}


def choose_method(policy: str | None, facts: DispatchFacts, spec: MLASpec, *, platform: str = "cpu") -> M:
    """The form of a forward, on the host: what `policy`'s rules say; `native` by what this layer costs there.

    Args: platform: the name of the row that the layer was resolved for, `choice.platform`.
    Raises: as `select_method`.

    >>> spec = MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> facts = DispatchFacts(mode=ForwardMode.EXTEND, sum_prefix_lens=9000, sum_seq_lens=9500)
    >>> choose_method("native", facts, spec, platform="cuda-sm90").name, choose_method("triton", facts, spec).name
    ('MHA_ONE_SHOT', 'MLA')
    """
    costs = form_costs(spec, kind=platform_named(platform).kind)
    no_rope = facts.no_rope or spec.qk_rope_head_dim == 0
    return select_method(policy, dataclasses.replace(facts, costs=costs, no_rope=no_rope))
