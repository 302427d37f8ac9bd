"""Partial states of attention, and their merge in float64."""

import jax.numpy as jnp
import numpy as np


def parts(splits, lead, v_dim, dtype, seed=0):
    """Partial states of which some are empty, with NaN where they are, and rows with nothing but empty parts."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(splits, *lead, v_dim))
    lse = rng.normal(size=(splits, *lead)) * 5
    empty = rng.random(lse.shape) < 0.3
    empty[:, 0] = True
    out[empty] = np.nan
    lse[empty] = -np.inf
    lse[-1][empty[-1]] = np.inf
    return jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)


def in_float64(out, lse):
    """Values and log-sums of the merge; empty parts may hold anything."""
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    top = np.where(np.isneginf(lse.max(0)), 0, lse.max(0))
    weights = np.exp(lse - top)
    total = weights.sum(0)
    some = np.where(total > 0, total, 1)
    merged = (np.where(weights[..., None] > 0, out, 0) * weights[..., None]).sum(0) / some[..., None]
    return merged, np.where(total > 0, top + np.log(some), -np.inf)


def assert_merged(merge, reference, splits, lead, v_dim, dtype):
    """The merge is as close to float64 as the reference is, twice over; nothing of an empty part shows."""
    out, lse = parts(splits, lead, v_dim, dtype)
    got, got_lse = merge(out, lse)
    assert got.dtype == out.dtype and got.shape == (*lead, v_dim)
    want, want_lse = in_float64(out, lse)
    peer = np.asarray(reference(out, lse)[0], np.float64)
    tolerance = 2 * np.abs(peer - want).max() + float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-7
    assert (np.abs(np.asarray(got, np.float64) - want) <= tolerance).all()
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-6, atol=1e-6)
    return got, got_lse
