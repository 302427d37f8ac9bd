"""What the platform table calls lowered does lower, without the device."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import jattn
from jattn import AttnSpec, ForwardMode, MLACache, MLASpec, PagedKV, make_plan
from jattn.kernel_sets import KERNELS, MLA_OPS, OPS
from jattn.platforms import PLATFORMS, Evidence

SPEC = AttnSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, sliding_window=100, sinks=True)
LATENT = MLASpec(
    num_q_heads=8, kv_lora_rank=160, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kv_dtype="fp8_e4m3"
)
LATENT_OPS = set(MLA_OPS) - set(OPS)
TOKENS, SEQS, PAGES, PAGE = 24, 4, 8, 16
LOWERED = [
    (platform, name)
    for platform, row in PLATFORMS.items()
    for name, level in row.evidence.items()
    if level is Evidence.LOWERED
]
KINDS = sorted({(PLATFORMS[platform].kind, name) for platform, name in LOWERED})


def test_every_lowered_kernel_is_written_and_offered():
    written = {row.name for row in KERNELS if row.function is not None}
    for platform, name in LOWERED:
        assert name in written, (platform, name)
        assert name.split("/")[0] in PLATFORMS[platform].kernel_sets, (platform, name)
    assert {("cuda", "xla/attend"), ("rocm", "xla/attend"), ("tpu", "xla/attend")} <= set(KINDS)


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_kernel_lowers_for_the_platforms_that_say_so(kind, name):
    assert ("mosaic_gpu" in lowered(kind, name)) == (name == "hopper/merge_states")  # the kernel, not its interpreter


@pytest.mark.parametrize("kind", sorted({kind for kind, name in KINDS if name == "xla/attend"}))
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_quantised_caches_lower_too(kind, kv_dtype):
    spec = AttnSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=kv_dtype, kv_scales="token")
    choice = jattn.resolve(spec, "native", "cpu", prefer=("xla",))
    assert lower(functools.partial(write_attend, spec, choice, None), arguments(spec), kind)


@functools.cache
def lowered(kind: str, name: str) -> str:
    """The module of one kernel for one kind of platform, called through the door."""
    kernel_set, op = name.split("/")
    platform = next(p for p, row in LOWERED if row == name and PLATFORMS[p].kind == kind)
    if op in LATENT_OPS:
        return lower(*latent_call(op, jattn.resolve(LATENT, "native", platform, prefer=(kernel_set,))), kind)
    choice = jattn.resolve(SPEC, "native", platform, prefer=(kernel_set,))
    assert choice.row(op).name == name
    q, k, v, cache, plan, sinks = arguments(SPEC)
    if op == "merge_states":
        states = (jax.ShapeDtypeStruct((3, *q.shape), q.dtype), jax.ShapeDtypeStruct((3, *q.shape[:2]), jnp.float32))
        return lower(lambda out, lse: jattn.merge_states(out, lse, choice=choice), states, kind)
    if op == "write_kv":
        write = functools.partial(jattn.write_kv, layer=1, choice=choice)
        return lower(write, (k, v, cache, plan), kind)
    attend = functools.partial(jattn.attend, layer=1, spec=SPEC, choice=choice)
    return lower(lambda q, cache, plan, sinks: attend(q, cache, plan, sinks=sinks), (q, cache, plan, sinks), kind)


def latent_call(op: str, choice):
    """A function of the latent kernel of `op`, with packed fp8 rows, and the shapes that it takes."""

    def make():
        ints = jnp.zeros(SEQS, jnp.int32)
        sizes = dict(page_size=PAGE, num_tokens=TOKENS, max_q_len=TOKENS)
        plan = make_plan(ForwardMode.MIXED, ints, ints, jnp.zeros((SEQS, PAGES), jnp.int32), **sizes)
        cache = MLACache.create(LATENT, num_layers=2, num_pages=PAGES, page_size=PAGE)
        q = jnp.zeros((TOKENS, LATENT.num_q_heads, LATENT.latent_dims), jnp.bfloat16)
        return q, cache, plan

    def run(q, cache, plan):
        if op == "attend_latent":
            return jattn.attend(q, cache, plan, layer=1, spec=LATENT, choice=choice)
        if op == "write_latent":
            rows = q[:, 0, : LATENT.kv_lora_rank], q[:, 0, LATENT.kv_lora_rank :]
            return jattn.write_kv(*rows, cache, plan, layer=1, choice=choice)
        return choice.function(op)(cache.latent, plan.positions, latent_dim=LATENT.kv_lora_rank, dtype=q.dtype)

    assert choice.row(op).op == op
    return run, jax.eval_shape(make)


def lower(function, args, kind: str) -> str:
    if kind != "rocm":
        return jax.jit(function).trace(*args).lower(lowering_platforms=(kind,)).as_text()
    # Pallas asks a device for its kind before it lowers for Triton.
    device = AbstractDevice(device_kind="gfx942", num_cores=304, platform=kind)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(kind,)).as_text()


def write_attend(spec, choice, mask, q, k, v, cache, plan, sinks):
    sinks = sinks if spec.sinks else None
    return jattn.write_attend(q, k, v, cache, plan, layer=1, spec=spec, choice=choice, mask=mask, sinks=sinks)


def arguments(spec: AttnSpec):
    """Shapes of a step: q, k, v, cache, plan, sinks."""

    def make():
        ints = jnp.zeros(SEQS, jnp.int32)
        sizes = dict(page_size=PAGE, num_tokens=TOKENS, max_q_len=TOKENS)
        plan = make_plan(ForwardMode.MIXED, ints, ints, jnp.zeros((SEQS, PAGES), jnp.int32), **sizes)
        cache = PagedKV.create(spec, num_layers=2, num_pages=PAGES, page_size=PAGE, dtype=jnp.bfloat16)
        q = jnp.zeros((TOKENS, spec.num_q_heads, spec.head_dim), jnp.bfloat16)
        k = q[:, : spec.num_kv_heads]
        return q, k, k, cache, plan, jnp.zeros(spec.num_q_heads)

    return jax.eval_shape(make)
