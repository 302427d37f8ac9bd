"""Block sizes of the TPU attention: those of a generation are read, and whatever is asked for fits its memory."""

import dataclasses
import json

import pytest

from pallas_kernels._common.tpu_devices import DEVICES
from pallas_kernels._common.tpu_rows import Row
from pallas_kernels.attention.tpu import vmem_of
from pallas_kernels.attention.tpu_config import DATA, Facts, Sizes, block_kv, fitting, heuristic, tuned, vmem_bytes
from pallas_kernels.mla import tpu_config as mla_config

FACTS = Facts(row=Row(kv_heads=8, k_dim=128, v_dim=128), group=4, max_q_len=512, page_size=16, kv_bytes=2, q_bytes=2)


def test_sizes_of_a_generation_are_those_of_its_file():
    assert {path.stem for path in DATA.glob("tpu-*.json")} <= set(DEVICES)
    assert all(tuned(path.stem) == Sizes(**json.loads(path.read_text())["sizes"]) for path in DATA.glob("tpu-*.json"))
    assert tuned("unnamed") == Sizes() == tuned(None)


def test_sizes_reach_the_blocks():
    sizes = Sizes(block_bytes=1 << 20, rows=512, keys=256)
    one, short, long = heuristic(FACTS, vmem=100 << 20, sizes=sizes)
    assert one.block_pages * 16 * 2048 * 2 == short.block_pages * 16 * 2048 * 2 == 1 << 20
    assert (long.block_q * 4, long.block_pages * 16) == (512, 256)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("page_size", [1, 3, 256])
def test_what_is_chosen_fits_the_memory(device, kv_heads, page_size):
    row = dataclasses.replace(FACTS.row, kv_heads=kv_heads)
    facts = dataclasses.replace(FACTS, row=row, page_size=page_size, held_as_words=page_size == 3)
    for config in heuristic(facts, vmem=vmem_of(device), cores=device.cores, sizes=tuned(device.name)):
        assert vmem_bytes(config, facts) <= vmem_of(device)


def test_what_fits_nowhere_is_refused():
    config = heuristic(FACTS, vmem=100 << 20)[0]
    with pytest.raises(ValueError, match="bytes of vector memory at least, not 1024"):
        fitting(config, FACTS, 1024)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_parts_of_latent_blocks_are_whole_registers_where_memory_is_short(device, page_size):
    row = mla_config.row_of(num_heads=128, latent_dim=512, rope_dim=64)
    facts = Facts(row=row, group=16, max_q_len=512, page_size=page_size, kv_bytes=2, q_bytes=2)
    for config in mla_config.heuristic(facts, vmem=vmem_of(device), cores=device.cores):
        assert vmem_bytes(config, facts) <= vmem_of(device)
        assert block_kv(config, facts) % (config.parts * 128) == 0
