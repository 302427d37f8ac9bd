"""Laws of the door: what may change without changing the answer.

Bit for bit where programs work on the same shapes: pages elsewhere, and a batch of any size while its tiles are worked
on one at a time. Decode and small verify batches share lanes, whose number follows the batch, and a shard has fewer
heads: XLA:CPU compiles `exp`, row sums and multiply-adds of other shapes with other roundings (of 12288 weights, 287
differ between one tile and eight together; scores and weighted values alone do not). One lane for every tile
would keep the bits and take 1.6x the time at eight requests, so there the law is the tolerance that plain JAX earns.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import functools

import drawn
import earned
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import LAYER, Setup
from jax.sharding import PartitionSpec as P

import jattn
from jattn import ForwardMode, make_plan

MIXED = Setup(name="mixed, group 3, sinks", group=3, head_dim=20, sinks=True)
BF16 = Setup(name="decode and verify, bf16, group 7, window", group=7, head_dim=24, dtype="bfloat16", page_size=16,
             sliding_window=9, max_q_len=6, num_tokens=26)  # fmt: skip
DECODE = Setup(name="decode, group 3", group=3, page_size=3, max_q_len=1, num_tokens=6)
INT8 = Setup(name="verify, int8, token scales", kv_dtype="int8", max_q_len=6, num_tokens=26)
SPLITS = Setup(name="splits, fp8, cap", num_splits=3, kv_dtype="fp8_e4m3", logit_soft_cap=2.0)
SHARE_LANES = (DECODE, INT8)
SETUPS = (MIXED, BF16, DECODE, INT8, SPLITS)
EVERY = pytest.mark.parametrize("setup", SETUPS, ids=str)
FEW = hypothesis.settings(max_examples=5, phases=[hypothesis.Phase.generate])


@functools.cache
def door(setup):
    @jax.jit
    def run(q, seq_lens, q_lens, page_table, bits, sinks, cache):
        plan = make_plan(setup.mode, seq_lens, q_lens, page_table, tree=bits, **sizes(setup))
        return jattn.attend(q, cache, plan, sinks=sinks, **static(setup))

    return run


def sizes(setup):
    return dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)


def static(setup):
    return dict(layer=LAYER, spec=setup.spec, choice=setup.choice)


def arrays(ins):
    return tuple(map(jnp.asarray, (ins.q, ins.seq_lens, ins.q_lens, ins.page_table)))


def sinks_of(ins):
    return None if ins.sinks is None else jnp.asarray(ins.sinks)


def ask(setup, ins, cache, bits=None):
    """out, lse of the door as NumPy arrays."""
    return tuple(map(np.asarray, door(setup)(*arrays(ins), bits, sinks_of(ins), cache)))


def draw(setup, data):
    batch = data.draw(drawn.batches(setup))
    return batch, drawn.build(setup, batch)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        differs = (a != b) & ~((a != a) & (b != b))
        assert not differs.any(), (np.argwhere(differs)[:5], a[differs][:5], b[differs][:5])


def assert_alike(setup, ins, got, want):
    """Equal bits, or both within what plain JAX earns where tiles share lanes."""
    if setup not in SHARE_LANES:
        return assert_same_bits(got, want)
    answer = earned.answer(setup, ins)
    earned.assert_within(answer, got)
    earned.assert_within(answer, want)


@EVERY
@FEW
@hypothesis.given(data=st.data())
def test_permuted_pages_give_the_same_bits(setup, data):
    batch, ins = draw(setup, data)
    moved = dataclasses.replace(ins, page_table=drawn.table(np.random.default_rng(batch.seed + 1), setup, ins.seq_lens))
    assert_same_bits(ask(setup, moved, drawn.cache(setup, moved)), ask(setup, ins, drawn.cache(setup, ins)))


@EVERY
@FEW
@hypothesis.given(data=st.data())
def test_padding_requests_columns_and_rows_change_nothing(setup, data):
    _, ins = draw(setup, data)
    cache = drawn.cache(setup, ins)
    padded = padding(ins, requests=2, columns=3, rows=9)
    wider = dataclasses.replace(setup, num_seqs=setup.num_seqs + 2, num_tokens=setup.num_tokens + 9)
    out, lse = ask(wider, padded, cache)
    assert_alike(setup, ins, (out[: setup.num_tokens], lse[: setup.num_tokens]), ask(setup, ins, cache))
    used = ins.q_lens.sum()
    assert (out[used:] == 0).all() and (lse[used:] == -np.inf).all()


def padding(ins, *, requests, columns, rows):
    """More of everything that is not there: empty requests between the others, wild table entries, NaN rows."""
    at = np.arange(requests) + 1  # the first two after the first request and the second
    table = np.pad(ins.page_table, ((0, 0), (0, columns)), constant_values=-(2**31))
    nothing = np.full((rows, *ins.q.shape[1:]), np.nan).astype(ins.q.dtype)
    return dataclasses.replace(
        ins,
        q=np.concatenate([ins.q, nothing]),
        seq_lens=np.insert(ins.seq_lens, at, 0),
        q_lens=np.insert(ins.q_lens, at, 0),
        page_table=np.insert(table, at, 2**31 - 1, axis=0),
    )


@EVERY
@FEW
@hypothesis.given(data=st.data())
def test_a_request_alone_gets_what_it_gets_in_a_batch(setup, data):
    _, ins = draw(setup, data)
    cache = drawn.cache(setup, ins)
    together = ask(setup, ins, cache)
    got = [np.zeros_like(together[0]), np.full_like(together[1], -np.inf)]
    for b, rows in enumerate(ins.rows):
        q = np.full_like(ins.q, np.nan)
        q[: ins.q_lens[b]] = ins.q[rows]
        first = np.arange(setup.num_seqs) == 0
        lens = {name: np.where(first, getattr(ins, name)[b], 0) for name in ("seq_lens", "q_lens")}
        alone = dataclasses.replace(ins, q=q, page_table=np.roll(ins.page_table, -b, axis=0), **lens)
        for x, y in zip(got, ask(setup, alone, cache), strict=True):
            x[rows] = y[: ins.q_lens[b]]
    assert_alike(setup, ins, got, together)


@FEW
@hypothesis.given(data=st.data())
def test_a_chain_given_as_a_tree_is_causal(data):
    _, ins = draw(INT8, data)
    bits = np.zeros((INT8.num_tokens, 1), np.uint32)
    for rows in ins.rows:
        bits[rows, 0] = (np.uint32(2) << np.arange(rows.stop - rows.start, dtype=np.uint32)) - np.uint32(1)
    cache = drawn.cache(INT8, ins)
    assert_same_bits(ask(INT8, ins, cache, bits=jnp.asarray(bits)), ask(INT8, ins, cache))


@FEW
@hypothesis.given(data=st.data())
def test_a_prefix_attended_apart_then_merged_then_sinks_equals_once(data):
    """A part of the pages in full, the rest causal: `merge_states`, then `apply_sinks` once."""
    batch, ins = draw(MIXED, data)
    lens = zip(batch.seq_lens, batch.q_lens, strict=True)
    pages = np.asarray([data.draw(st.integers(0, (s - n) // MIXED.page_size)) for s, n in lens], np.int32)
    apart = by_parts(dataclasses.replace(MIXED, sinks=False))
    out, lse = apart(*arrays(ins), jnp.asarray(pages), sinks_of(ins), drawn.cache(MIXED, ins))
    earned.compare(MIXED, ins, out, lse)


@functools.cache
def by_parts(setup):
    @jax.jit
    def run(q, seq_lens, q_lens, page_table, pages, sinks, cache):
        columns = jnp.arange(page_table.shape[1], dtype=jnp.int32)[None] + pages[:, None]
        rest = jnp.take_along_axis(page_table, jnp.minimum(columns, page_table.shape[1] - 1), axis=1)
        held = pages * setup.page_size
        plans = (
            make_plan(setup.mode, held, q_lens, page_table, **sizes(setup)),
            make_plan(setup.mode, seq_lens - held, q_lens, rest, **sizes(setup)),
        )
        parts = [
            jattn.attend(q, cache, plan, mask=mask, **static(setup))
            for plan, mask in zip(plans, ("full", "causal"), strict=True)
        ]
        out, lse = (jnp.stack(x) for x in zip(*parts, strict=True))
        out, lse = jattn.merge_states(out, lse, choice=setup.choice)
        return jattn.apply_sinks(out, lse, sinks), lse

    return run


@FEW
@hypothesis.given(data=st.data())
def test_decoding_token_by_token_equals_prefill_at_once(data):
    setup = MIXED
    _, ins = draw(setup, data)
    before = drawn.cache(setup, ins, held=ins.seq_lens - ins.q_lens)
    rows = np.full((setup.max_q_len, setup.num_seqs), setup.num_tokens - 1, np.int32)  # [step, request]
    for b, mine in enumerate(ins.rows):
        rows[: ins.q_lens[b], b] = np.arange(mine.start, mine.stop)
    steps = token_by_token(setup)(*arrays(ins), jnp.asarray(ins.k), jnp.asarray(ins.v), rows, sinks_of(ins), before)
    outs, lses = map(np.asarray, steps)
    out, lse = (
        np.zeros((setup.num_tokens, *outs.shape[2:]), outs.dtype),
        np.full((setup.num_tokens, *lses.shape[2:]), -np.inf, np.float32),
    )
    for b, mine in enumerate(ins.rows):
        out[mine], lse[mine] = outs[: ins.q_lens[b], b], lses[: ins.q_lens[b], b]
    earned.compare(setup, ins, out, lse)


@functools.cache
def token_by_token(setup):
    @jax.jit
    def run(q, seq_lens, q_lens, page_table, k, v, rows, sinks, cache):
        def step(cache, at):
            i, row = at
            live = i < q_lens
            lens = jnp.where(live, seq_lens - q_lens + i + 1, 0)
            size = dict(page_size=setup.page_size, num_tokens=setup.num_seqs, max_q_len=1)
            plan = make_plan(ForwardMode.DECODE, lens, live.astype(jnp.int32), page_table, **size)
            order = jnp.argsort(~live)  # live requests in front: rows are packed
            place, picked = jnp.argsort(order), row[order]
            out, lse, cache = jattn.write_attend(
                q[picked], k[picked], v[picked], cache, plan, sinks=sinks, **static(setup)
            )
            return cache, (out[place], lse[place])

        return jax.lax.scan(step, cache, (jnp.arange(setup.max_q_len), rows))[1]

    return run


SHARDED = (
    Setup(name="verify, group 3, sinks", group=3, num_kv_heads=4, head_dim=20, sinks=True, max_q_len=6, num_tokens=26),
    Setup(name="decode, bf16 queries, fp8, one scale, splits", group=2, num_kv_heads=4, dtype="bfloat16", page_size=16,
          kv_dtype="fp8_e4m3", num_splits=3, max_q_len=1, num_tokens=6),
    Setup(name="verify, int8, token scales", num_kv_heads=4, kv_dtype="int8", max_q_len=6, num_tokens=26),
)  # fmt: skip


@pytest.mark.parametrize("setup", SHARDED, ids=str)
@hypothesis.settings(FEW, max_examples=3)
@hypothesis.given(data=st.data())
def test_shards_of_kv_heads_equal_one_device(setup, data):
    _, ins = draw(setup, data)
    before = drawn.cache(setup, ins, held=ins.seq_lens - ins.q_lens)
    args = (*arrays(ins), jnp.asarray(ins.k), jnp.asarray(ins.v), sinks_of(ins))
    *got, cache = sharded(setup, before.layout, 4)(*args, before)
    *want, want_cache = sharded(setup, before.layout, 1)(*args, before)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(want_cache), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    if setup.token_scales:
        drawn.take_scales(setup, ins, cache)
    answer = earned.answer(setup, ins)
    for state in (got[:2], got[2:], want[:2], want[2:]):
        earned.assert_within(answer, state)


@functools.cache
def sharded(setup, layout, num_devices):
    """`write_attend`, then `attend` alone, each device with its KV heads and their query heads."""
    local = dataclasses.replace(setup, num_kv_heads=setup.num_kv_heads // num_devices)

    def run(q, seq_lens, q_lens, page_table, k, v, sinks, cache):
        plan = make_plan(local.mode, seq_lens, q_lens, page_table, **sizes(local))
        out, lse, cache = jattn.write_attend(q, k, v, cache, plan, sinks=sinks, **static(local))
        return out, lse, *jattn.attend(q, cache, plan, sinks=sinks, **static(local)), cache

    if num_devices == 1:
        return jax.jit(run)
    heads, rows = P(None, None, "heads"), P(None, "heads")
    scale = None if not setup.quantised else heads if setup.token_scales else P()
    kv = jattn.PagedKV(k=heads, v=heads, k_scale=scale, v_scale=scale, num_layers=drawn.NUM_LAYERS, layout=layout)
    mesh = jax.make_mesh((num_devices,), ("heads",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:num_devices])
    in_specs = (rows, P(), P(), P(), rows, rows, P("heads") if setup.sinks else None, kv)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=(rows, rows, rows, rows, kv)))
