"""What the forms of an MLA layer cost: from how many fresh tokens on expanding the cache pays.

For q fresh and p cached tokens a request, each head computes

    expanded  2 (dn + dr) + 2 dv FLOPs a query-key pair, and 2 r (dn + dv) a token that is expanded, p + q of them
    absorbed  2 (r + dr) + 2 r   FLOPs a query-key pair, and 2 r (dn + dv) a query token

with q p + q^2 / 2 pairs. So expanding saves 4 r - 2 dn - 2 dv a pair and costs 2 r (dn + dv) more a cached token. For
DeepSeek that is 1536 and 262144: a long prefix pays from 171 tokens on. Where the three kinds of work run at different
speeds, their counts are divided by these.
"""

import dataclasses
import fractions

from jattn.spec import MLASpec

_LARGEST_PAIR = 64  # keeps products of the traced decision in 64 bits, up to 6e7 tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Relative speeds of a platform: FLOPs a unit of time."""

    absorbed: float = 1.0  # a query-key pair in the latent space
    expanded: float = 1.0  # a query-key pair of full heads
    expand: float = 1.0  # up-projecting a token


# GFLOP/s of processor time, fitted as scripts/bench_mla_forms.py does (two AVX-512 cores, jax 0.12.0.1, float32; the
# machine had other work). Platforms without a row are taken by their FLOPs alone. On XLA:CPU all heads share one latent
# tile, while expanded keys are transposed head by head.
RATES = {"cpu": Rates(absorbed=82.0, expanded=43.0, expand=58.0)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FormCosts:
    """Expanding pays if pair * q * (2 p + q) > row * p, with q fresh and p cached tokens a request."""

    pair: int = 3
    row: int = 1024  # the default is DeepSeek's, by FLOPs


def form_costs(spec: MLASpec, *, kind: str) -> FormCosts:
    """Costs of a layer on a platform of `kind`, as a ratio of small integers.

    >>> form_costs(MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ...            kind="cuda")
    FormCosts(pair=3, row=1024)
    """
    rates = RATES.get(kind, Rates())
    absorbed = 2 * (2 * spec.kv_lora_rank + spec.qk_rope_head_dim) / rates.absorbed
    expanded = 2 * (spec.qk_head_dim + spec.v_head_dim) / rates.expanded
    row = 2 * spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim) / rates.expand
    if absorbed <= expanded:  # a latent so narrow that absorbing is cheaper for any lengths
        return FormCosts(pair=0, row=1)
    ratio = fractions.Fraction(2 * row / (absorbed - expanded)).limit_denominator(_LARGEST_PAIR)
    return FormCosts(pair=ratio.denominator, row=ratio.numerator)
