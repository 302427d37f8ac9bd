"""The form in which each prefill step of an MLA model is computed: chosen on the host, one compiled program each.

Decode and verification are always absorbed: a few query tokens never pay for expanding the cache.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators.latent_chunks import EXPANDED, ONE_SHOT, make_chunks
from jattn.combinators.mla import FORMS, choose_method
from jattn.combinators.state import DecodeState
from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch import DispatchFacts, chunked_prefix_disabled
from jattn.models.decoder import Decoder
from jattn.models.draft_head import WithStreams
from jattn.models.latent import Form
from jattn.modes import ForwardMode
from jattn.plan import Plan
from jattn.platforms import platform_named
from jattn.spec import MLASpec

_CAPACITY, _THRESHOLD = 131072, 8192  # tokens: the defaults of `DispatchFacts`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """What a user may say of the forms of an MLA model. None: what the policy's rules and their defaults say.

    Args:
      method: the form of every prefill step. One-shot is chunked where its tokens pass the capacity, and MHA where a
        request has a prefix.
      max_chunk_capacity: cached tokens that are expanded at once. chunked_prefix_threshold: cached tokens, over the
        batch, from which a policy expands. chunked_prefix_disabled: no prefix is expanded.
    """

    method: M | None = None
    max_chunk_capacity: int | None = None
    chunked_prefix_threshold: int | None = None
    chunked_prefix_disabled: bool = False

    def __post_init__(self):
        if self.method is not None and self.method not in FORMS:
            raise ValueError(f"method {self.method} cannot run here: want one of {', '.join(FORMS)}")
        for name in ("max_chunk_capacity", "chunked_prefix_threshold"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: want at least 1 token")

    def refuse(self) -> None:
        """Raise ValueError if anything is asked for, on behalf of a model without latents."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in values.items():
            if value not in (None, False):
                raise ValueError(
                    f"{name}={value} chooses how latent attention is computed, and this model has none: leave it out, "
                    "or run the model as_mla"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillForms:
    """The forms of one engine's prefill steps: MLA, MHA (nothing cached), MHA_ONE_SHOT and MHA_CHUNKED_KV.

    Args: max_tokens: most tokens of all requests together; steps over more are absorbed. prefill_rows: most query
      tokens of a step.
    Raises: ValueError if the chunk capacity leaves no token for each slot.
    """

    policy: str
    platform: str
    spec: MLASpec
    num_slots: int
    max_tokens: int
    prefill_rows: int
    options: FormOptions

    def __post_init__(self):
        if self.capacity < self.num_slots:
            raise ValueError(
                f"max_chunk_capacity={self.capacity} leaves no token for each of {self.num_slots} requests: raise it "
                "to at least that, or lower max_batch"
            )

    @property
    def capacity(self) -> int:
        """Cached tokens that may be expanded at once."""
        return self.options.max_chunk_capacity or _CAPACITY

    @property
    def methods(self) -> tuple[M, ...]:
        """Every form that a step may need, found by asking for many lengths; the first is absorbed."""
        return _methods(self)

    def choose(self, prefixes: Sequence[int], q_lens: Sequence[int]) -> M:
        """The form of a step, of those in `methods`.

        Args: prefixes: cached tokens, a slot each, 0 for one without rows in this step. q_lens: rows, a slot each.
        """
        cached, rows = sum(prefixes), sum(q_lens)
        method = self._asked(cached, rows, sum(n > 0 for n in q_lens))
        return method if method in self.methods and (cached == 0 or cached + rows <= self.max_tokens) else M.MLA

    def form(self, method: M, state: DecodeState, q_lens: jax.Array) -> Form:
        """The form inside a step's program, with what it expands. q_lens: i32[seqs]."""
        if method in (M.MLA, M.MHA):
            return Form(method=method)
        lens = jnp.where(q_lens > 0, state.seq_lens + q_lens, 0)
        capacity = min(self.capacity, self.max_tokens) if method == M.MHA_ONE_SHOT else self.capacity
        chunks = make_chunks(method, lens, q_lens, state.page_table, page_size=state.cache.page_size, capacity=capacity)
        return Form(method=method, chunks=chunks)

    def _asked(self, cached: int, rows: int, seqs: int) -> M:
        # one program serves all names of the same computation
        method = self._rule(cached, cached + rows, seqs)
        if method not in EXPANDED:
            return M.MLA
        if cached == 0:
            return M.MHA
        return M.MHA_ONE_SHOT if method in ONE_SHOT and cached + rows <= self.capacity else M.MHA_CHUNKED_KV

    def _rule(self, cached: int, total: int, seqs: int) -> M:
        given = self.options
        if given.method is not None:
            return given.method
        disabled = chunked_prefix_disabled(self.policy, is_mla=True, requested=given.chunked_prefix_disabled)
        facts = DispatchFacts(
            mode=ForwardMode.EXTEND,
            sum_prefix_lens=cached,
            sum_seq_lens=total,
            batch_size=seqs,
            max_chunk_capacity=self.capacity,
            chunked_prefix_threshold=given.chunked_prefix_threshold or _THRESHOLD,
            chunked_prefix_disabled=disabled,
            fused_qkv_a=self.spec.q_lora_rank is not None,
            hip=platform_named(self.platform).is_hip,
        )
        return choose_method(self.policy, facts, self.spec, platform=self.platform)


@functools.cache
def _methods(forms: PrefillForms) -> tuple[M, ...]:
    most, given = forms.max_tokens, forms.options
    edges = (0, given.chunked_prefix_threshold or _THRESHOLD, forms.capacity, most)
    cached = {n + near for n in edges for near in (-1, 0, 1)} | set(range(0, most, max(1, most // 256)))
    cached |= {n * 2**e for e in range(most.bit_length()) for n in (1, 3)}
    if most <= forms.prefill_rows:  # every prompt is one step
        cached = {0}
    fresh = {1, *range(1, forms.prefill_rows, max(1, forms.prefill_rows // 8)), forms.prefill_rows}
    found = {M.MLA: None}
    for prefix, rows, seqs in itertools.product(sorted(cached), sorted(fresh), sorted({1, forms.num_slots})):
        if 0 <= prefix and seqs <= rows and prefix + rows <= most:
            found[forms._asked(prefix, rows, seqs)] = None
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class WithForm:
    """A model whose forward takes one form: what a prefill program gives to `extend` in the model's place."""

    model: Decoder | WithStreams
    form: Form

    def __call__[C: Cache](self, tokens: jax.Array, cache: C, plan: Plan, /) -> tuple[jax.Array, C]:
        """As the model."""
        return self.model(tokens, cache, plan, self.form)

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """As the model."""
        return self.model.logits(hidden)
