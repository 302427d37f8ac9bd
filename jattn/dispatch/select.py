"""Choosing the form of an MLA layer: on the host, inside jit, and with the reason."""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.dispatch.conditions import CONDITIONS, QUESTIONS, Sums
from jattn.dispatch.facts import DispatchFacts, StaticFacts, check_static, host_facts, static_facts
from jattn.dispatch.interpreter import Row, matches
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
    return _decide(policy_name, facts, rules).method


def explain(policy_name: str | None, facts: DispatchFacts, *, rules: str = "seed") -> Explanation:
    """As `select_method`, with the rows that decided.

    >>> from jattn.modes import ForwardMode
    >>> facts = DispatchFacts(mode=ForwardMode.DECODE, sum_prefix_lens=None, sum_seq_lens=64)
    >>> print(explain("fa3", facts))
    MLA by generic 4 (not non-speculative extend), then subtype 4 (otherwise)
    """
    decided = _decide(policy_name, facts, rules)
    return Explanation(policy=policy_name, method=decided.method, rows=decided.rows)


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
    branches = _branches(policy_name, rules, static_facts(facts))
    indices = np.array([_INDEX[branch.method] for branch in branches], np.int32)
    return _choose(Sums.of(facts).as_u32(), indices, asked=tuple([branch.asked for branch in branches]))


def _decide(policy_name: str | None, facts: DispatchFacts, rules: str) -> "_Branch":
    facts = host_facts(facts)
    sums = Sums.of(facts)
    for branch in _branches(policy_name, rules, static_facts(facts)):
        for question in branch.asked:
            if not QUESTIONS[question](sums):
                break
        else:
            return branch
    raise AssertionError("a table ends in a row that always holds")


@functools.partial(jax.jit, static_argnames="asked", inline=True)
def _choose(sums: Sums, indices: jax.Array, *, asked: tuple[tuple[str, ...], ...]) -> jax.Array:
    # One small program for each list of questions, whatever the forms that they lead to.
    shape = jnp.broadcast_shapes(jnp.shape(sums.prefix), jnp.shape(sums.total))
    sums = Sums(*(jnp.asarray(x).astype(jnp.uint32) for x in sums))
    result = jnp.full(shape, indices[-1])  # the last branch asks nothing
    for at in reversed(range(len(asked) - 1)):
        holds = functools.reduce(operator.and_, (QUESTIONS[question](sums) for question in asked[at]))
        result = jnp.where(holds, indices[at], result)
    return result


class _Branch(NamedTuple):
    """A form, and what must hold of the sums for it where no earlier branch's questions do; the last asks nothing."""

    asked: tuple[str, ...]
    method: AttnForwardMethod
    rows: tuple[Row, ...]


@functools.lru_cache(maxsize=1024)
def _branches(policy_name: str | None, rules: str, static: StaticFacts) -> tuple[_Branch, ...]:
    tables = named(RULES, rules, what="rules")
    rows = tables.get(policy_name or "", tables["triton"])
    names = ROCM_NAMES if rules == "newer" and static.hip and policy_name != "native" else {}
    found = matches(rows, lambda condition: CONDITIONS[condition](policy_name, static))
    return tuple(_Branch(asked, names.get(path[-1].then, path[-1].then), path) for asked, path in found)
