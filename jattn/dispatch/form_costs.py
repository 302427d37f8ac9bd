"""What the forms of an MLA layer cost, as integers: from how many fresh tokens on expanding the cache pays.

For q fresh and p cached tokens a request, a head multiplies

    expanded  2 (dn + dr) + 2 dv a query-key pair, and 2 r (dn + dv) a token that is expanded, p + q of them
    absorbed  2 (r + dr) + 2 r   a query-key pair, and 2 r (dn + dv) a query token

so expanding saves `pair` = 4 r - 2 dn - 2 dv a pair, of q p + q^2 / 2 pairs, and costs `row` = 2 r (dn + dv) more a
cached token. For DeepSeek that is 1536 and 262144: a long prefix pays from 171 tokens on.
"""

import dataclasses
import fractions

from jattn.spec import MLASpec

_LARGEST_PAIR = 64  # keeps products of the traced decision in 64 bits, up to 6e7 tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FormCosts:
    """Expanding pays if pair * q * (2 p + q) > row * p, with q fresh and p cached tokens a request."""

    pair: int = 3
    row: int = 1024  # the default is DeepSeek's


def form_costs(spec: MLASpec, *, kind: str) -> FormCosts:
    """Costs of a layer on a platform of `kind`.

    >>> form_costs(MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ...            kind="cuda")
    FormCosts(pair=3, row=1024)
    """
    saved = 4 * spec.kv_lora_rank - 2 * spec.qk_nope_head_dim - 2 * spec.v_head_dim
    row = 2 * 2 * spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)
    if saved <= 0:  # a latent so narrow that absorbing is cheaper for any lengths
        return FormCosts(pair=0, row=1)
    ratio = fractions.Fraction(row, saved).limit_denominator(_LARGEST_PAIR)
    return FormCosts(pair=ratio.denominator, row=ratio.numerator)
