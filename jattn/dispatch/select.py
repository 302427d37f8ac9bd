"""Choosing the form of an MLA layer: on the host, inside jit, and with the reason."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.dispatch.conditions import CONDITIONS
from jattn.dispatch.facts import DispatchFacts, check_static, host_facts
from jattn.dispatch.interpreter import Row, Truth, first, matches
from jattn.dispatch.methods import METHODS, AttnForwardMethod
from jattn.dispatch.rules import ROCM_NAMES, RULES
from jattn.platforms.lookup import named

_INDEX = {method: at for at, method in enumerate(METHODS)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A decision with the rows that made it, outermost table first. `str()` is one line for people."""

    policy: str | None
    method: AttnForwardMethod
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"{self.method} by {', then '.join(map(str, self.rows))}"


def select_method(policy_name: str | None, facts: DispatchFacts, *, rules: str = "seed") -> AttnForwardMethod:
    """The form that a policy's rules choose, on the host: the sums are integers or None.

    Args:
      policy_name: a backend name; one without rules, None included, takes triton's rules as the original does.
      rules: "seed" or "newer", the two generations of the original's rules.

    Raises: TypeError where triton's rules need the prefix lengths and they are None; ValueError for negative counts
      or unknown rules.

    >>> from jattn.modes import ForwardMode
    >>> facts = DispatchFacts(mode=ForwardMode.EXTEND, sum_prefix_lens=9000, sum_seq_lens=9500)
    >>> select_method("flashinfer", facts).name, select_method("triton", facts).name
    ('MHA_ONE_SHOT', 'MLA')
    """
    facts = host_facts(facts)
    decided = first(_rows(policy_name, rules), _tester(policy_name, facts))
    return _result(policy_name, facts, rules, decided)


def explain(policy_name: str | None, facts: DispatchFacts, *, rules: str = "seed") -> Explanation:
    """As `select_method`, with the rows that decided.

    >>> from jattn.modes import ForwardMode
    >>> facts = DispatchFacts(mode=ForwardMode.DECODE, sum_prefix_lens=None, sum_seq_lens=64)
    >>> print(explain("fa3", facts))
    MLA by generic 4 (not non-speculative extend), then subtype 4 (otherwise)
    """
    facts = host_facts(facts)
    decided = first(_rows(policy_name, rules), _tester(policy_name, facts))
    return Explanation(policy=policy_name, method=_result(policy_name, facts, rules, decided), rows=decided)


def select_method_traced(policy_name: str | None, facts: DispatchFacts, *, rules: str = "seed") -> jax.Array:
    """The same decision inside jit, for sums that are known only on the device.

    Args: facts: `sum_prefix_lens` and `sum_seq_lens` are i32 arrays of one shape (or None); the rest is static.
    Returns: i32 of the sums' shape, an index into `METHODS`; for `lax.switch` over the forms that were compiled.

    >>> from jattn.modes import ForwardMode
    >>> facts = DispatchFacts(mode=ForwardMode.EXTEND, sum_prefix_lens=jnp.array([0, 9]), sum_seq_lens=jnp.array(20))
    >>> [METHODS[i].name for i in select_method_traced("fa3", facts)]
    ['MHA_ONE_SHOT', 'MLA']
    """
    check_static(facts)
    sums = [x for x in (facts.sum_prefix_lens, facts.sum_seq_lens) if x is not None]
    shape = jnp.broadcast_shapes(*map(jnp.shape, sums))
    live = list(matches(_rows(policy_name, rules), _tester(policy_name, facts)))
    indices = [_INDEX[_result(policy_name, facts, rules, rows)] for _, rows in live]
    result = jnp.full(shape, indices[-1], jnp.int32)  # the last row of a table always holds
    for (holds, _), index in zip(reversed(live[:-1]), reversed(indices[:-1]), strict=True):
        result = jnp.where(holds, np.int32(index), result)
    return result


def _tester(policy_name: str | None, facts: DispatchFacts) -> Callable[[str], Truth]:
    return lambda condition: CONDITIONS[condition](policy_name, facts)


def _rows(policy_name: str | None, rules: str) -> tuple[Row, ...]:
    tables = named(RULES, rules, what="rules")
    return tables.get(policy_name or "", tables["triton"])


def _result(policy_name: str | None, facts: DispatchFacts, rules: str, decided: tuple[Row, ...]) -> AttnForwardMethod:
    method = decided[-1].then
    if rules == "newer" and facts.hip and policy_name != "native":
        return ROCM_NAMES.get(method, method)
    return method
