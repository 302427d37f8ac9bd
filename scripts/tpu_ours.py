"""Our TPU kernels on the works of the schedule report."""
# Settings are passed on as mappings, and peers are installed for a run only; the checker can follow neither.
# pyright: reportArgumentType=false, reportMissingImports=false

import dataclasses
import functools
import math

import jax.numpy as jnp
import tpu_rows
from tpu_rows import Call, Heads, Latents, Row, i32, shape
from tpu_target import Generation

from pallas_kernels._common import tpu_rows as pool_rows
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention.tpu_config import Facts, heuristic, tuned
from pallas_kernels.mla import tpu as mla
from pallas_kernels.mla import tpu_config as mla_config


def attention_call(case: Heads, generation: Generation) -> Call:
    """A call of the attention on a work; of `case.config`, or of the sizes that a call chooses."""
    device, page = generation.device, case.page
    row = pool_rows.Row(kv_heads=case.kv_heads, k_dim=case.dim, v_dim=case.dim)
    group = case.q_heads // case.kv_heads
    facts = Facts(row=row, group=group, max_q_len=case.q_len, page_size=page, kv_bytes=2, q_bytes=2)
    if case.tree:
        facts = dataclasses.replace(facts, tree_words=2)
    chosen = heuristic(facts, vmem=attention.vmem_of(device), cores=device.cores, sizes=tuned(device.name))
    config = case.config or chosen[-1]
    room = case.kv_len // page

    def function(q, pool, table, seq_lens, cu_q_lens, *tree):
        return attention.paged_attention(
            q,
            pool,
            page_table=table,
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            max_q_len=case.q_len,
            sm_scale=case.dim**-0.5,
            kv_heads=case.kv_heads,
            mask="tree" if tree else "causal",
            **dict(zip(("tree_bits", "tree_starts"), tree, strict=False)),
            config=config,
            device=device.name,
        )

    arrays = (
        shape(case.tokens, case.q_heads, case.dim),
        shape(case.seqs * room, page, row.lanes),
        i32(case.seqs, room),
        i32(case.seqs),
        i32(case.seqs + 1),
    )
    if case.tree:
        arrays += (shape(case.tokens, 1, dtype=jnp.uint32), i32(case.seqs))
    keys = config.block_pages * page
    first = case.kv_len - case.q_len
    blocks = sum(
        -(-min(first + at + config.block_q, case.kv_len) // keys) for at in range(0, case.q_len, config.block_q)
    )
    tiles = 1 if config.unroll_heads else case.kv_heads // config.heads
    sizes = f"{config.block_pages} pages of {page}, {config.block_q} queries, {config.heads} heads a product"
    trips = case.seqs * blocks * tiles
    copies = config.block_pages if tiles == 1 else 0  # else they are in the loop around that of the products
    more = dict(trips=trips, cores=2, sizes=sizes, copies=copies, hbm_bytes=_hbm_bytes(case, row))
    return Call(function=function, arrays=arrays, inside="jattn_attention", **more)


def _hbm_bytes(case: Heads, row: pool_rows.Row) -> int:
    # rows are padded to whole lanes
    spare = row.lanes - row.used
    return case.work.hbm_bytes + 2 * case.seqs * case.kv_len * spare


def _latent(case: Latents, page: int, generation: Generation) -> Call:
    device = generation.device
    row = mla_config.row_of(num_heads=case.heads, latent_dim=case.latent, rope_dim=case.rope)
    group = case.heads // row.kv_heads
    facts = Facts(row=row, group=group, max_q_len=case.q_len, page_size=page, kv_bytes=2, q_bytes=2)
    config = mla_config.heuristic(facts, vmem=attention.vmem_of(device), cores=device.cores)[-1]
    room = case.kv_len // page

    def function(q, pool, table, seq_lens, cu_q_lens):
        return mla.attend_latent(
            q,
            pool,
            latent_dim=case.latent,
            page_table=table,
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            max_q_len=case.q_len,
            sm_scale=(128 + case.rope) ** -0.5,
            device=device.name,
        )

    arrays = (
        shape(case.tokens, case.heads, case.latent + case.rope),
        shape(case.seqs * room, page, row.lanes),
        i32(case.seqs, room),
        i32(case.seqs),
        i32(case.seqs + 1),
    )
    tiles = row.kv_heads // config.heads
    trips = (
        case.seqs
        * math.ceil(case.q_len / config.block_q)
        * math.ceil(case.kv_len / (config.block_pages * page))
        * tiles
    )
    sizes = f"{config.block_pages} pages of {page}, {config.block_q} queries of {config.heads * group} heads"
    return Call(
        function=function,
        arrays=arrays,
        inside="jattn_attention",
        trips=trips,
        cores=2,
        sizes=sizes,
        hbm_bytes=case.hbm_bytes(row.lanes),
    )


def rows() -> list[Row]:
    """Every kernel on every work that it does."""
    found = []
    verify = tpu_rows.VERIFY, tpu_rows.TREE
    for case in (tpu_rows.DECODE, *tpu_rows.DECODES, tpu_rows.DECODE_16, *verify, tpu_rows.PREFILL):
        found.append(Row(kernel="tpu/attend", work=case.work, call=functools.partial(attention_call, case)))
    for case in (tpu_rows.MLA_DECODE, tpu_rows.MLA_DECODE_16, tpu_rows.MLA_VERIFY, tpu_rows.MLA_VERIFY_16):
        found.append(Row(kernel="tpu/attend_latent", work=case.work, call=functools.partial(_latent, case, 64)))
    return found
