"""Choose block sizes of the TPU attention for each generation, from what the compiler schedules.

Needs libtpu (extra `aot-tpu`), and no TPU:

    uv run --isolated --extra aot-tpu scripts/tune_tpu.py

Decode: the smallest block whose steady-state bundles take at most `_SHARE` of the time of its copy on every work here,
or the largest of those tried; a smaller one has less room past the end of a context, and its first copy is waited for
less long. Prefill: the rows of a product and the keys of a block with the least bundles in all. What was chosen, and
from what, is in `pallas_kernels/attention/tuned/tpu-*.json`; the kernel's heuristic reads it.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tpu_dump import DUMP_ARGS, steady_loop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tpu_rows

from pallas_kernels._common.tpu_rows import Row
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention.tpu_config import DATA, Facts, Sizes, heuristic

_SHARE = 0.7
_WORST = (1, 64), (3, 64), (1, 80)  # KV heads and widths that need the most bundles for their bytes
_DECODES = tpu_rows.DECODE_16, *(case for case in tpu_rows.DECODES if (case.kv_heads, case.dim) in _WORST)
_BLOCK_BYTES = tuple(1 << shift for shift in (19, 20, 21))
_PREFILLS = tuple(Sizes(rows=r, keys=k) for r, k in ((512, 512), (1024, 256), (1024, 512), (1024, 1024), (2048, 512)))


def main() -> int:
    """Try sizes for each generation, each compilation in a process of its own, and write what was chosen."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--generations", default="v5e,v6e,v7x", help="names, comma between them")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_child(args.generations, *args.one)))
        return 0
    for generation in args.generations.split(","):
        tried: list[dict] = []
        sizes = Sizes(block_bytes=_block_bytes(generation, tried), **_prefill(generation, tried))
        found = dict(
            sizes=dataclasses.asdict(sizes),
            chosen=str(__doc__).split("\n\n")[-1].strip(),
            tried=tried,
            versions={name: metadata.version(name) for name in ("jax", "libtpu")},
            date=datetime.date.today().isoformat(),
        )
        DATA.mkdir(exist_ok=True)
        (DATA / f"tpu-{generation}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{generation}: {sizes}", flush=True)
    return 0


def _block_bytes(generation: str, tried: list[dict]) -> int:
    for size in _BLOCK_BYTES:
        shares = (_try(generation, case, Sizes(block_bytes=size), tried)["bundles_over_hbm"] for case in _DECODES)
        if all(share <= _SHARE for share in shares):
            return size
    return _BLOCK_BYTES[-1]


def _prefill(generation: str, tried: list[dict]) -> dict[str, int]:
    times = {sizes: _try(generation, tpu_rows.PREFILL, sizes, tried)["bundles_us"] for sizes in _PREFILLS}
    best = min(times, key=lambda sizes: times[sizes])
    return dict(rows=best.rows, keys=best.keys)


def _try(generation: str, case: tpu_rows.Heads, sizes: Sizes, tried: list[dict]) -> dict:
    given = json.dumps(dataclasses.asdict(sizes))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--generations", generation, "--one", case.name, given, folder]
        env = os.environ | {"LIBTPU_INIT_ARGS": DUMP_ARGS.format(folder)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    tried.append(result)
    print(generation, result, flush=True)
    return result


def _child(generation: str, name: str, given: str, folder: str) -> dict:
    import tpu_ours
    from tpu_target import GENERATIONS, Compiler

    target, sizes = GENERATIONS[generation], Sizes(**json.loads(given))
    case = next(case for case in (*_DECODES, tpu_rows.PREFILL) if case.name == name)
    row = Row(kv_heads=case.kv_heads, k_dim=case.dim, v_dim=case.dim)
    group = case.q_heads // case.kv_heads
    facts = Facts(row=row, group=group, max_q_len=case.q_len, page_size=case.page, kv_bytes=2, q_bytes=2)
    device = target.device
    config = heuristic(facts, vmem=attention.vmem_of(device), cores=device.cores, sizes=sizes)[-1]
    compiler = Compiler(target)
    with compiler.described():
        call = tpu_ours.attention_call(dataclasses.replace(case, config=config), target)
    compiler.compile(call.function, call.arrays)
    loop = steady_loop(Path(folder), call.inside, call.copies)
    bundles_us = call.trips / min(call.cores, device.cores) * loop.bundles / device.ghz * 1e-3
    hbm_us = (call.hbm_bytes or case.work.hbm_bytes) / device.hbm_gbps * 1e-3
    return dict(
        work=name,
        sizes=call.sizes,
        bundles=loop.bundles,
        trips=call.trips,
        spills=loop.spills,
        bundles_us=round(bundles_us, 2),
        bundles_over_hbm=round(bundles_us / hbm_us, 3),
    )


if __name__ == "__main__":
    sys.exit(main())
