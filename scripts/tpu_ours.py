"""Our TPU kernels on the works of the schedule report."""
# Settings are passed on as mappings, and peers are installed for a run only; the checker can follow neither.
# pyright: reportArgumentType=false, reportMissingImports=false

import functools

import tpu_rows
from tpu_rows import Call, Heads, Row, i32, shape
from tpu_target import Generation

from pallas_kernels._common import tpu_rows as pool_rows
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention.tpu_config import Facts, heuristic


def _attention(case: Heads, page: int, generation: Generation) -> Call:
    vmem = int(0.9 * generation.vmem_bytes)
    row = pool_rows.Row(kv_heads=case.kv_heads, k_dim=case.dim, v_dim=case.dim)
    group = case.q_heads // case.kv_heads
    facts = Facts(row=row, group=group, max_q_len=case.q_len, page_size=page, kv_bytes=2, q_bytes=2)
    config = heuristic(facts, vmem=vmem)[-1]
    room = case.kv_len // page

    def function(q, pool, table, seq_lens, cu_q_lens):
        return attention.paged_attention(
            q,
            pool,
            page_table=table,
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            max_q_len=case.q_len,
            sm_scale=case.dim**-0.5,
            kv_heads=case.kv_heads,
            config=config,
            vmem=vmem,
        )

    arrays = (
        shape(case.tokens, case.q_heads, case.dim),
        shape(case.seqs * room, page, row.lanes),
        i32(case.seqs, room),
        i32(case.seqs),
        i32(case.seqs + 1),
    )
    keys = config.block_pages * page
    first = case.kv_len - case.q_len
    blocks = sum(
        -(-min(first + at + config.block_q, case.kv_len) // keys) for at in range(0, case.q_len, config.block_q)
    )
    tiles = 1 if config.unroll_heads else case.kv_heads // config.heads
    sizes = f"{config.block_pages} pages of {page}, {config.block_q} queries, {config.heads} heads a product"
    trips = case.seqs * blocks * tiles
    return Call(function=function, arrays=arrays, inside="jattn_attention", trips=trips, cores=2, sizes=sizes)


def rows() -> list[Row]:
    """Every kernel on every work that it does."""
    found = []
    for case in (tpu_rows.DECODE, tpu_rows.PREFILL):
        found.append(Row(kernel="tpu/attend", work=case.work, call=functools.partial(_attention, case, 128)))
    return found
