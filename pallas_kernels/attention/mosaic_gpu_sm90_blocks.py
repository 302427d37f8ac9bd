"""The rings of key and value blocks of one program of the Hopper attention."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention.mosaic_gpu_sm90_float8 import widen
from pallas_kernels.attention.mosaic_gpu_sm90_records import Arrays, Item, Static


class Blocks:
    """The rings of key and value blocks: who fills them, waits for them and hands them back.

    With a look ahead, keys run a block before values: the products of a block's keys are under way while the weights of
    the one before are computed.
    """

    def __init__(self, static: Static, arrays: Arrays, smem: dict, item: Item, head):
        self.static, self.smem, self.item = static, smem, item
        self.pools = dict(k=arrays.k, v=arrays.v)
        self.stages = static.config.stages
        self.copies_itself = not static.config.copies_apart
        self.source = copies.Source(
            page_table=arrays.page_table,
            seq=item.seq,
            offset=arrays.page_offset[0],
            head=head,
            kv_len=item.kv_len,
            block=static.config.block_kv,
            page=static.page_size,
            in_lanes=not (self.copies_itself or static.interpret),
            sharers=static.config.sharers,
            interpret=static.interpret,
        )
        self.gathers = self.source.gathers and not static.interpret

    def stage(self, block):
        """Place of a block in its ring."""
        return lax.rem(block - self.item.begin, self.stages)

    def begin(self, all_ids: list[tuple]) -> None:
        """Start the first block's keys, of the first blocks' page ids."""
        self.start("k", self.item.begin, all_ids[0])

    def fill(self, all_ids: list[tuple]) -> None:
        """Start the rest of the first blocks, from their page ids."""
        for i, ids in enumerate(all_ids):
            block = self.item.begin + i
            if i:
                self.start("k", block, ids)
            self.start("v", block, ids)
            self._commit()

    def run(self) -> None:
        """Start the other blocks as the computing warpgroups free their places: what a copying warpgroup does.

        Keys run a block ahead of values, as their places come free: a block's values are read after the next keys.
        """

        def start(name: str, block, ids) -> None:
            plgpu.barrier_wait(self.smem[f"{name}_free"].at[self.stage(block)])
            self.start(name, block, ids)

        def step(block, ids):
            now, after = ids
            following = self.source.ids(block + 2)
            pl.when(block + 1 < self.item.end)(lambda: start("k", block + 1, after))
            start("v", block, now)
            return after, following

        first = self.item.begin + self.stages
        ids = self.source.ids(first), self.source.ids(first + 1)
        pl.when(first < self.item.end)(lambda: start("k", first, ids[0]))
        lax.fori_loop(first, self.item.end, step, ids)

    def start(self, name: str, block, ids) -> None:
        """Start the copies of one block of keys ("k") or values ("v"); past the end, of nothing."""
        ring, full, stage = self.smem[f"{name}_ring"], self._full(name), self.stage(block)
        first_warp = 0 if name == "k" else self.source.pages % 4
        self.source.copy(self.pools[name], ring, full, stage, block, ids, block < self.item.end, first_warp)

    def _full(self, name: str) -> copies.Barriers:
        return copies.Barriers(self.smem["full"], 0 if name == "k" else self.stages)

    def wait(self, name: str, block) -> None:
        """Wait until a block is there; past the end, for nothing."""
        if self.gathers:
            if name == "k":  # the group of a block's keys holds the values of the block before, or the same block's
                copies.wait_gathered(self.stages - 1)
            return
        full, stage = self._full(name), self.stage(block)

        @pl.when(block < self.item.end)
        def _():
            if self.static.interpret:
                plgpu.barrier_wait(full.at(stage))
            else:
                copies.wait_barrier(full, stage, lax.div(block - self.item.begin, self.stages) & 1)

    def read(self, name: str, block):
        """A block that is there, in the layout that products read."""
        place = self.smem[f"{name}_ring"].at[self.stage(block)]
        if self.static.narrow is None:
            return place
        wide = self.smem[f"{name}_wide"]
        if self.static.interpret:
            wide[...] = lax.bitcast_convert_type(place[...], self.static.narrow).astype(wide.dtype)
        else:
            widen(self.smem[f"{name}_ring"], wide, self.stage(block), self.static.narrow)
        return wide

    def release(self, name: str, block) -> None:
        """Hand back a block of keys ("k") or values ("v") to the copying warpgroup: all products have read it."""
        plgpu.barrier_arrive(self.smem[f"{name}_free"].at[self.stage(block)])

    def renew(self, keys, values, ids: tuple) -> None:
        """Hand back block `keys` of the keys and `values` of the values (None: none): all products have read them.

        ids: page ids of the blocks that take their places.
        """
        if not self.copies_itself:
            self.release("k", keys)
            if values is not None:
                self.release("v", values)
            return
        if not self.static.interpret:
            copies.warpgroup_barrier()  # all four warps have read what the copies overwrite

        self.start("k", keys + self.stages, ids[0])
        if values is not None:
            self.start("v", values + self.stages, ids[1])
        self._commit()

    def _commit(self) -> None:
        if self.gathers:
            copies.commit_gathered()
