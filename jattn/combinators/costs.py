"""What a row costs: relative time of a target step by number of rows, measured, and the programs worth compiling."""

import bisect
import dataclasses

# Time of a step of n rows over a step of one row, SmolLM2-135M in float32. scripts/bench_round_costs.py measures it.
# cpu: two AVX-512 cores, jax 0.11.2, once, before the numbers had a script; a later run of it on a busy machine agreed
# within 10 % at 8 rows and more.
# Accelerators: a small model's step is bound by launches and weight reads, so rows are nearly free (not measured yet).
_MEASURED: dict[str, tuple[tuple[int, float], ...]] = {
    "cpu": ((1, 1.0), (2, 1.2), (4, 1.25), (8, 1.65), (16, 1.95), (32, 3.5), (64, 5.8), (128, 11.0)),
    "accelerator": ((1, 1.0), (8, 1.05), (64, 1.2), (256, 2.0)),
}


def step_cost(rows: int, *, kind: str) -> float:
    """Relative time of a step of `rows` rows on a platform of `kind`, interpolated; 0 rows cost nothing.

    >>> step_cost(1, kind="cpu"), step_cost(6, kind="cpu")
    (1.0, 1.45)
    """
    if rows == 0:
        return 0.0
    table = _MEASURED.get(kind, _MEASURED["accelerator"])
    known = [n for n, _ in table]
    at = bisect.bisect_left(known, rows)
    if at == 0:
        return table[0][1]
    if at == len(table):  # past the table, compute-bound: proportional
        return table[-1][1] * rows / known[-1]
    (n0, c0), (n1, c1) = table[at - 1], table[at]
    return c0 + (c1 - c0) * (rows - n0) / (n1 - n0)


def branches_wait(kind: str) -> bool:
    """Whether the host waits for a branch's index before it launches the branch, as XLA does on GPUs.

    All that was enqueued must end first: between rounds the device idles for some 0.1 ms.
    """
    return kind in ("cuda", "rocm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compiled shape of the target step inside a round."""

    rows: int  # packed rows
    max_q_len: int  # rows of one request, at most
    cost: float


def variants(*, num_seqs: int, num_steps: int, kind: str, standalone: bool = False) -> tuple[Variant, ...]:
    """Shapes worth compiling, smallest first: plain decode, verification of all drafts, and a quarter of either.

    Each shape costs seconds and some 200 MB while XLA:CPU compiles it, so there are three at most. Where a branch makes
    the host wait (`branches_wait`), a shape must save a fifth of the next larger one's cost.

    Args: standalone: drafts come from a draft model. What they cost is paid when verification begins, and most of them
      are right: one shape, which verifies them all.

    >>> [(v.rows, v.max_q_len) for v in variants(num_seqs=1, num_steps=15, kind="cpu")]
    [(1, 1), (4, 16), (16, 16)]
    >>> [(v.rows, v.max_q_len) for v in variants(num_seqs=8, num_steps=0, kind="cpu")]
    [(2, 1), (8, 1)]
    >>> [(v.rows, v.max_q_len) for v in variants(num_seqs=8, num_steps=7, kind="cuda")]
    [(64, 8)]
    >>> [(v.rows, v.max_q_len) for v in variants(num_seqs=8, num_steps=3, kind="cpu", standalone=True)]
    [(32, 4)]
    """
    if standalone:
        shapes = [(num_seqs * (num_steps + 1), num_steps + 1)]
    elif num_steps == 0:
        shapes = [(num_seqs // 4, 1), (num_seqs, 1)]
    else:
        most = num_seqs * (num_steps + 1)
        shapes = [(num_seqs, 1), (most // 4, num_steps + 1), (most, num_steps + 1)]
        if most // 4 <= num_seqs:
            del shapes[1]
    kept: list[Variant] = []
    for rows, width in reversed(shapes):
        shape = Variant(rows=rows, max_q_len=width, cost=step_cost(rows, kind=kind))
        if rows and not (kept and branches_wait(kind) and shape.cost > 0.8 * kept[-1].cost):
            kept.append(shape)
    return tuple(reversed(kept))
