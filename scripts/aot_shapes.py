"""Shapes of arrays that calls compiled for absent devices share."""

import jax
import jax.numpy as jnp


def of_tree(mask: str, *, tokens: int, seqs: int, nodes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A tree's arrays, of `nodes` query tokens a request, where `mask` is one."""
    if mask != "tree":
        return {}
    return dict(
        tree_bits=jax.ShapeDtypeStruct((tokens, -(-nodes // 32)), jnp.uint32),
        tree_starts=jax.ShapeDtypeStruct((seqs,), jnp.int32),
        tree_kv_positions=jax.ShapeDtypeStruct((seqs, nodes), jnp.int32),
        q_positions=jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )


def of_options(*, scales: bool, sinks: int) -> dict[str, jax.ShapeDtypeStruct]:
    """One scale for keys and one for values where asked for, and a logit for each of `sinks` query heads."""
    f32 = jnp.float32
    found = {name: jax.ShapeDtypeStruct((), f32) for name in ("k_scale", "v_scale") if scales}
    return found | ({"sinks": jax.ShapeDtypeStruct((sinks,), f32)} if sinks else {})
