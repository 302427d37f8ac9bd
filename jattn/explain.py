"""Why a model and a batch run the way they do: the choice, the rows passed over, and the plan, in words."""

import dataclasses
from collections.abc import Iterator, Sequence

from jattn.backends import policy_named
from jattn.combinators.costs import variants
from jattn.modes import ForwardMode
from jattn.platforms import Evidence, Platform
from jattn.resolve import NoBackendError, resolve
from jattn.spec import AttnSpec, MLASpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Facts of a batch, as `jattn explain` takes them."""

    mode: ForwardMode = ForwardMode.DECODE
    prefix_lens: Sequence[int] = (0,)  # tokens cached before the step, a request each
    q_lens: Sequence[int] = (1,)  # rows of the step, a request each
    page_size: int = 16
    num_steps: int = 0  # drafts a round

    def __post_init__(self):
        if len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(
                f"{len(self.prefix_lens)} prefix lengths but {len(self.q_lens)} query lengths: want a pair a request"
            )


def explain(spec: AttnSpec | MLASpec, policy: str | None, platform: Platform, batch: Batch) -> str:
    """A text with the policy, the kernel of each op with its evidence, each row passed over and why, and the plan.

    Raises: ValueError for an unknown name or an illegal size; a feature that no kernel provides is said in the text's
      place, as NoBackendError.
    """
    rules = policy_named(policy or platform.default_policy)
    choice = resolve(spec, rules.name, platform, page_size=batch.page_size)
    return "\n".join(_lines(spec, rules, platform, batch, choice))


def _lines(spec, rules, platform, batch, choice) -> Iterator[str]:
    yield f"platform  {platform.name} ({platform.kind}), kernel sets {' > '.join(platform.kernel_sets)}"
    yield f"policy    {rules.name}" + (f": {rules.note}" if rules.note else "")
    yield f"needs     {', '.join(sorted(choice.needs)) or 'plain grouped-query attention'}"
    for row in choice.rows:
        evidence = platform.evidence.get(row.name, Evidence.DECLARED)
        yield f"{row.op:<14}{row.name} ({evidence} on {platform.name})"
    for reason in choice.skipped:
        yield f"  passed over: {reason}"
    try:
        declared = resolve(spec, rules.name, platform, page_size=batch.page_size, include_declared=True)
    except NoBackendError:
        declared = choice
    if declared.rows != choice.rows:
        yield f"  once written: {', '.join(row.name for row in declared.rows)}"
    yield from _plan_lines(platform, batch)


def _plan_lines(platform: Platform, batch: Batch) -> Iterator[str]:
    seq_lens = [p + q for p, q in zip(batch.prefix_lens, batch.q_lens, strict=True)]
    pages = [-(-n // batch.page_size) for n in seq_lens]
    shape = f"{len(seq_lens)} requests, {sum(batch.q_lens)} rows, {sum(seq_lens)} keys"
    yield f"plan      {batch.mode.name}: {shape}, {sum(pages)} pages of {batch.page_size}"
    if batch.mode.is_decode() or batch.mode.is_target_verify():
        shapes = variants(num_seqs=len(seq_lens), num_steps=batch.num_steps, kind=platform.kind)
        text = ", ".join(f"{v.rows} rows (up to {v.max_q_len} a request) x{v.cost:.2f}" for v in shapes)
        yield f"round     compiled for {text}; the cheapest that holds the drafts worth trying runs"
