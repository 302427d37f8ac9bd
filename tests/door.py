"""Runs sequences given as arrays through the public door, on each path that it offers."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, RaggedKV, make_plan

PATHS = ("prefill", "decode", "split", "pallas merge", "ragged")
"""prefill: all queries in one packed forward. decode: one row a request at a time, each step written and attended.
split: keys in three parts, merged. pallas merge: the same through the Mosaic GPU kernel, interpreted, where a race
raises. ragged: packed keys without a cache."""
_CHECKED = plgpu.InterpretGPUParams(detect_races=True)


def choice_for(spec: AttnSpec, path: str = "prefill"):
    """The kernels of a path on this CPU."""
    if path == "pallas merge":
        choice = jattn.resolve(spec, "native", "cpu", prefer=("hopper",), num_splits=3)
        row = choice.row("merge_states")
        assert row.name == "hopper/merge_states" and row.function is not None
        checked = dataclasses.replace(row, interpreted=functools.partial(row.function, interpret=_CHECKED))
        return dataclasses.replace(choice, rows=tuple(checked if x is row else x for x in choice.rows))
    return jattn.resolve(spec, "native", "cpu", num_splits=3 if path == "split" else 1)


def tables(kv_lens, page_size: int, *, spare: int = 2, seed: int = 0):
    """A shuffled page table with wild tails, and the number of pages."""
    rng = np.random.default_rng(seed)
    pages = [-(-n // page_size) for n in kv_lens]
    total = sum(pages) + spare
    order = rng.permutation(total)
    table = rng.integers(-(2**31), 2**31 - 1, (len(kv_lens), max([*pages, 1]) + 1), dtype=np.int64).astype(np.int32)
    at = 0
    for b, n in enumerate(pages):
        table[b, :n] = order[at : at + n]
        at += n
    return table, total


def poisoned(spec: AttnSpec, *, num_layers: int, num_pages: int, page_size: int, dtype, **scales) -> PagedKV:
    """A cache whose every row is NaN where its dtype has one."""
    cache = PagedKV.create(spec, num_layers=num_layers, num_pages=num_pages, page_size=page_size, dtype=dtype, **scales)
    if cache.dtype == jnp.int8:
        return cache
    assert cache.v is not None
    k, v = (np.full(x.shape, np.nan, cache.dtype).view(x.dtype) for x in (cache.k, cache.v))
    return dataclasses.replace(cache, k=jnp.asarray(k), v=jnp.asarray(v))


def attend_all(sequences, *, path="prefill", page_size=4, dtype=jnp.float32, layer=1, scales=None, **spec_args):
    """Outputs and lse of each sequence: dicts with q [tq, hq, d], k [tk, hk, d], v [tk, hk, dv] (the last queries line
    up with the last keys; a sequence may have more queries than keys). Returns float64 (out, lse) lists."""
    first = sequences[0]
    sinks = spec_args.pop("sinks", None)
    spec = AttnSpec(
        num_q_heads=first["q"].shape[1],
        num_kv_heads=first["k"].shape[1],
        head_dim=first["q"].shape[2],
        v_head_dim=first["v"].shape[2],
        sinks=sinks is not None,
        **spec_args,
    )
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    choice = choice_for(spec, path)
    arrays = [{name: jnp.asarray(s[name], dtype) for name in ("q", "k", "v")} for s in sequences]
    if path == "ragged":
        return _ragged(arrays, spec, choice, sinks)
    run = _decode if path == "decode" else _prefill
    return run(arrays, spec, choice, sinks, page_size, dtype, layer, scales or {})


def _pack(arrays, name):
    return jnp.concatenate([a[name] for a in arrays])


def _unpack(out, lse, lens):
    cuts = np.cumsum(lens)[:-1]
    out, lse = np.asarray(out.astype(jnp.float32), np.float64), np.asarray(lse, np.float64)
    return np.split(out[: sum(lens)], cuts), np.split(lse[: sum(lens)], cuts)


def _ragged(arrays, spec, choice, sinks):
    q_lens, kv_lens = ([a[name].shape[0] for a in arrays] for name in ("q", "k"))
    plan = _free_plan(q_lens, kv_lens)
    kv = RaggedKV(
        k=_pack(arrays, "k"), v=_pack(arrays, "v"), cu_kv_lens=jnp.asarray(np.cumsum([0, *kv_lens]), jnp.int32)
    )
    return _unpack(*jattn.attend(_pack(arrays, "q"), kv, plan, spec=spec, choice=choice, sinks=sinks), q_lens)


def _free_plan(q_lens, kv_lens):
    # queries may outnumber keys (they see nothing then), which make_plan refuses on the host
    cu = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
    zeros = jnp.zeros(sum(q_lens), jnp.int32)
    return jattn.Plan(
        positions=zeros,
        seq_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=cu,
        page_table=jnp.zeros((len(q_lens), 1), jnp.int32),
        write_slots=zeros - 1,
        mode=ForwardMode.EXTEND,
        max_q_len=max(q_lens),
        page_size=1,
    )


def _filled(arrays, spec, choice, page_size, dtype, layer, scales, upto):
    kv_lens = [a["k"].shape[0] for a in arrays]
    table, total = tables(kv_lens, page_size)
    cache = poisoned(spec, num_layers=3, num_pages=total, page_size=page_size, dtype=dtype, **scales)
    lens = np.asarray([min(n, u) for n, u in zip(kv_lens, upto, strict=True)])
    plan = make_plan(ForwardMode.EXTEND, lens, lens, table, page_size=page_size)
    k, v = (jnp.concatenate([a[name][:n] for a, n in zip(arrays, lens, strict=True)]) for name in ("k", "v"))
    if sum(lens):
        cache = jattn.write_kv(k, v, cache, plan, layer=layer, choice=choice)
    return cache, table, kv_lens


def _prefill(arrays, spec, choice, sinks, page_size, dtype, layer, scales):
    upto = [a["k"].shape[0] for a in arrays]
    cache, table, kv_lens = _filled(arrays, spec, choice, page_size, dtype, layer, scales, upto)
    q_lens = [a["q"].shape[0] for a in arrays]
    plan = dataclasses.replace(_free_plan(q_lens, kv_lens), page_table=jnp.asarray(table), page_size=page_size)
    out, lse = jattn.attend(_pack(arrays, "q"), cache, plan, layer=layer, spec=spec, choice=choice, sinks=sinks)
    return _unpack(out, lse, q_lens)


def _decode(arrays, spec, choice, sinks, page_size, dtype, layer, scales):
    kv_lens = np.asarray([a["k"].shape[0] for a in arrays])
    q_lens = np.asarray([a["q"].shape[0] for a in arrays])
    cache, table, _ = _filled(arrays, spec, choice, page_size, dtype, layer, scales, np.maximum(kv_lens - q_lens, 0))
    num_seqs = len(arrays)
    outs: list[list] = [[] for _ in arrays]
    step = jax.jit(
        lambda q, k, v, cache, plan: jattn.write_attend(
            q, k, v, cache, plan, layer=layer, spec=spec, choice=choice, sinks=sinks
        )
    )
    for i in range(int(q_lens.max())):
        at = kv_lens - q_lens + i  # sequence index of this step's token; negative: a query before the first key
        live = (i < q_lens) & (at >= 0)
        lens = np.where(live, at + 1, 0)
        plan = make_plan(
            ForwardMode.DECODE, lens, live.astype(int), table, page_size=page_size, num_tokens=num_seqs, max_q_len=1
        )
        picks = [b for b in range(num_seqs) if live[b]]
        rows = {name: jnp.zeros((num_seqs, *arrays[0][name].shape[1:]), dtype) for name in ("q", "k", "v")}
        for row, b in enumerate(picks):
            rows["q"] = rows["q"].at[row].set(arrays[b]["q"][i])
            rows["k"] = rows["k"].at[row].set(arrays[b]["k"][at[b]])
            rows["v"] = rows["v"].at[row].set(arrays[b]["v"][at[b]])
        out, lse, cache = step(rows["q"], rows["k"], rows["v"], cache, plan)
        for row, b in enumerate(picks):
            outs[b].append((out[row], lse[row]))
        for b in range(num_seqs):
            if i < q_lens[b] and not live[b]:
                outs[b].append((jnp.zeros_like(out[0]), jnp.full_like(lse[0], -jnp.inf)))
    done = [[np.stack([np.asarray(x[n].astype(jnp.float32), np.float64) for x in out]) for n in (0, 1)] for out in outs]
    return [d[0] for d in done], [d[1] for d in done]
