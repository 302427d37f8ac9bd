"""Time of the merge of partial states on a GPU, beside plain JAX's and the bytes it must move.

    python3 scripts/bench_merge_states.py --out rows.jsonl

Rows are JSON lines {family, peer, shape, dtype, ms, gbps, pct_of_roof, spread}: kernel times as in
`bench_attention.py`, input sets in turns past the L2, medians of --runs in turns. S: states, R: (token, head) rows, D:
values a row.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from bench_attention_timer import Timer, roofs

from pallas_kernels.merge_states import mosaic_gpu_sm90, reference

_SHAPES = [  # states, tokens, heads, values, dtype
    (2, 64, 32, 128, "bfloat16"),
    (2, 1024, 32, 128, "bfloat16"),
    (2, 8192, 16, 128, "bfloat16"),  # a prefix and fresh tokens of MLA's expanded form
    (2, 8192, 128, 128, "bfloat16"),
    (16, 64, 32, 128, "float32"),
]
_ROTATION_BYTES = 200e6  # over three times the L2


def measure(states: int, tokens: int, heads: int, values: int, dtype: str, timer: Timer, roof: dict) -> list[dict]:
    """A row for each of the two."""
    rows, size = tokens * heads, jnp.dtype(dtype).itemsize
    nbytes = (states + 1.0) * rows * (values * size + 4)

    @jax.jit
    def one(key):
        shape = (states, tokens, heads)
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], (*shape, values), dtype), jax.random.normal(keys[1], shape, jnp.float32)

    sets = [one(jax.random.key(i)) for i in range(max(2, min(48, math.ceil(_ROTATION_BYTES / nbytes))))]
    peers = dict(jattn=mosaic_gpu_sm90.merge_states, xla=jax.jit(reference.merge_states))
    found = timer.compare({name: (call, sets, jax.block_until_ready) for name, call in peers.items()})
    label = dict(family="merge", shape=f"S{states} R{rows} D{values}", dtype=dtype)
    return [
        dict(peer=name, **label, gbps=nbytes / at["ms"] / 1e6)
        | dict(pct_of_roof=100 * nbytes / roof["copy_gbps"] / 1e6 / at["ms"])
        | {key: at[key] for key in ("ms", "ms_wall", "spread")}
        for name, at in found.items()
    ]


def main() -> None:
    """Measure, and print rows as they come."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", help="JSON lines")
    args = parser.parse_args()
    timer = Timer(args.runs)
    roof = roofs(timer)
    device = jax.devices()[0].device_kind
    rows: list[dict] = [dict(family="roof", **roof, jax=jax.__version__, device=device, date=time.strftime("%Y-%m-%d"))]
    print(json.dumps(rows[0]), flush=True)
    for shape in _SHAPES:
        for row in measure(*shape, timer, roof):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
