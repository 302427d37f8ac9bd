"""Public TPU kernels on the works of the schedule report: JAX's, and tokamax's where it is installed."""
# Settings are passed on as mappings, and peers are installed for a run only; the checker can follow neither.
# pyright: reportArgumentType=false, reportMissingImports=false

import functools
import math

import tpu_rows
from tpu_rows import Call, Heads, Latents, Row, i32, shape
from tpu_target import Generation

_PAGE = 128


def _jax_rpa(case: Heads, pages_per_block: int, block_q: int, generation: Generation) -> Call:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    room = case.kv_len // _PAGE
    block_q = min(block_q, case.tokens)
    function = functools.partial(
        ragged_paged_attention,
        sm_scale=case.dim**-0.5,
        num_kv_pages_per_block=pages_per_block,
        num_queries_per_block=block_q,
        vmem_limit_bytes=_vmem(generation),
    )
    arrays = (
        shape(case.tokens, case.q_heads, case.dim),
        shape(case.seqs * room, _PAGE, 2 * case.kv_heads, case.dim),
        i32(case.seqs),
        i32(case.seqs, room),
        i32(case.seqs + 1),
        i32(1),
    )
    # It walks every request that a block of queries touches, and skips no key block above the diagonal.
    blocks = math.ceil(case.kv_len / (pages_per_block * _PAGE))
    per_request = max(1, case.q_len // block_q)
    trips = case.seqs * per_request * blocks
    sizes = f"{pages_per_block} pages of {_PAGE}, {block_q} queries"
    return Call(function=function, arrays=arrays, inside="ragged_paged", trips=trips, sizes=sizes)


def _tokamax_rpa(case: Heads, generation: Generation) -> Call:
    from tokamax._src.ops.batched_rpa.kernel import configs, wrapper

    if generation.name == "v4":
        raise NotImplementedError("batched RPA wants v5 or newer")
    decode = configs.BlockSizes(bq_sz=1, bq_c_sz=1, bkv_sz=512, batch_size=8, n_buffer=3)
    prefill = configs.BlockSizes(bq_sz=128, bq_c_sz=64, bkv_sz=512, batch_size=2, n_buffer=3)
    is_decode = case.q_len == 1
    room = case.kv_len // _PAGE

    def function(q, k, v, cache, kv_lens, pages, cu_q_lens, distribution):
        return wrapper.ragged_paged_attention(
            queries=q,
            keys=k,
            values=v,
            kv_cache=cache,
            kv_lens=kv_lens,
            page_indices=pages,
            cu_q_lens=cu_q_lens,
            distribution=distribution,
            sm_scale=case.dim**-0.5,
            decode_block_sizes=decode,
            prefill_block_sizes=prefill,
            vmem_limit_bytes=_vmem(generation),
        )

    new = shape(case.tokens, case.kv_heads, case.dim)
    arrays = (
        shape(case.tokens, case.q_heads, case.dim),
        new,
        new,
        shape(case.seqs * room, _PAGE, case.kv_heads, 2, case.dim),
        i32(case.seqs),
        i32(case.seqs * room),
        i32(case.seqs + 1),
        i32(3),
    )
    blocks = math.ceil(case.kv_len / 512)
    if is_decode:
        trips = math.ceil(case.seqs / 8) * blocks
        return Call(function=function, arrays=arrays, inside="RPAd", trips=trips, donate=(3,), sizes="8 x 512 keys")
    # blocks of 128 queries up to the diagonal, two at a time
    trips = case.seqs * sum(math.ceil(128 * (i + 1) / 512) for i in range(case.q_len // 128)) / 2
    return Call(function=function, arrays=arrays, inside="RPAp", trips=trips, donate=(3,), sizes="2 x 128 x 512 keys")


def _tokamax_mla(case: Latents, generation: Generation) -> Call:
    from tokamax._src.ops.experimental.mla.v2 import kernel

    if generation.name != "v7x":
        raise NotImplementedError("MLA v2 is for 7x")
    page, pages, batch = 256, 4, 4
    room = case.kv_len // page
    function = functools.partial(
        kernel.mla_ragged_paged_attention,
        sm_scale=(128 + case.rope) ** -0.5,
        num_kv_pages_per_block=pages,
        num_queries_per_block=(1, 1, max(1, min(8, case.q_len))),
        decode_batch_size=batch,
        vmem_limit_bytes=_vmem(generation),
    )
    arrays = (
        shape(case.heads, case.tokens, case.latent),
        shape(case.tokens, case.heads, case.rope),
        shape(case.tokens, case.latent),
        shape(case.tokens, case.rope),
        shape(case.seqs * room, page // 2, 2, case.latent + 128),
        i32(case.seqs),
        i32(case.seqs * room),
        i32(case.seqs + 1),
        i32(3),
    )
    blocks = case.kv_len // (page * pages)
    requests = math.ceil(case.seqs / batch) if case.q_len == 1 else case.seqs
    sizes = f"{batch if case.q_len == 1 else 1} x {pages} pages of {page}"
    return Call(
        function=function,
        arrays=arrays,
        inside="",
        trips=requests * blocks,
        donate=(4,),
        sizes=sizes,
        hbm_bytes=case.hbm_bytes(case.latent + 128),
    )


def _vmem(generation: Generation) -> int:
    return int(0.9 * generation.device.vmem_bytes)


def rows() -> list[Row]:
    """Every peer on every work that it does."""
    found = []
    for case, pages, block_q in ((tpu_rows.DECODE, 8, 32), (tpu_rows.PREFILL, 4, 128)):
        jax_rpa = functools.partial(_jax_rpa, case, pages, block_q)
        found.append(Row(kernel="jax/ragged_paged_attention", work=case.work, call=jax_rpa))
        batched = functools.partial(_tokamax_rpa, case)
        found.append(Row(kernel="tokamax/batched_rpa", work=case.work, call=batched, needs="tokamax"))
    for case in (tpu_rows.MLA_DECODE, tpu_rows.MLA_DECODE_16, tpu_rows.MLA_VERIFY, tpu_rows.MLA_VERIFY_16):
        latent = functools.partial(_tokamax_mla, case)
        found.append(Row(kernel="tokamax/mla_v2", work=case.work, call=latent, needs="tokamax"))
    return found
