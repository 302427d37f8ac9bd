"""policy x platform x features -> which kernels run, decided before tracing, with a reason for each row passed over."""

import dataclasses
import functools
from collections.abc import Callable

from jattn.backends import BackendPolicy, policy_named
from jattn.features import Feature
from jattn.kernel_sets import KERNELS, MLA_OPS, OPS, KernelRow, candidates
from jattn.platforms import Platform, detect, platform_named
from jattn.spec import AttnSpec, MLASpec, check_page_size


class NoBackendError(ValueError):
    """No kernel row provides what was asked; the message says what each row lacks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernels that serve one layer: static and hashable, so it may be closed over or be a static argument."""

    policy: str
    platform: str
    needs: frozenset[Feature]
    rows: tuple[KernelRow, ...]  # one an op, in the order of OPS or MLA_OPS
    skipped: tuple[str, ...]  # one sentence for each row passed over
    interpret: bool = False  # on a CPU, where Pallas kernels of a GPU set are interpreted
    num_splits: int = 1  # parts of the keys attended apart and merged

    def row(self, op: str) -> KernelRow:
        """The kernel that serves `op`. Raises NoBackendError if the layer that was resolved never calls it."""
        for row in self.rows:
            if row.op == op:
                return row
        ops = ", ".join(row.op for row in self.rows)
        raise NoBackendError(f"this choice serves {ops}, not {op}: resolve the spec of the layer that asks for it")

    def function(self, op: str) -> Callable:
        """The code of that kernel. Raises NoBackendError if the row is declared only."""
        row = self.row(op)
        if row.function is None:
            raise NoBackendError(f"{row.name} is declared, not written yet: resolve without include_declared")
        return self._ready(row, row.function, row.interpreted)

    def ragged(self) -> Callable:
        """The code of "attend" over packed keys. Raises NoBackendError if that kernel has none."""
        row = self.row("attend")
        if row.ragged is None:
            raise NoBackendError(f"{row.name} attends to paged keys only; resolve with prefer=('xla',)")
        return self._ready(row, row.ragged, row.ragged_interpreted)

    def writes(self, op: str) -> Callable | None:
        """The code of "attend" or "attend_latent" that writes a step's own rows, too; None if that kernel has none."""
        row = self.row(op)
        return None if row.writes is None else self._ready(row, row.writes, row.writes_interpreted)

    def rotates(self, *, head_dim: int, v_dim: int, dtype) -> Callable | None:
        """The code of "write_kv" from unrotated rows of such heads; None if that kernel has none for them."""
        row = self.row("write_kv")
        if row.rotates is None or row.rotates_serves is None:
            return None
        served = row.rotates_serves(head_dim=head_dim, v_dim=v_dim, dtype=dtype)
        return self._ready(row, row.rotates, row.rotates_interpreted) if served else None

    def _ready(self, row: KernelRow, function: Callable, interpreted: Callable | None) -> Callable:
        function = interpreted if self.interpret and interpreted is not None else function
        return functools.partial(function, device=self.platform) if row.takes_device else function

    @property
    def kv_layout(self) -> str | None:
        """What `PagedKV.create` or `MLACache.create` takes as `layout`; None where the cache lies as it comes."""
        layouts = {row.op: row.layout for row in self.rows}
        layout = layouts.get("attend_latent", layouts.get("attend", "token_major"))
        return None if layout == "token_major" else layout


def resolve(
    spec: AttnSpec | MLASpec,
    policy: str | None = None,
    platform: Platform | str | None = None,
    *,
    page_size: int | None = None,
    topk: int | None = None,
    include_declared: bool = False,
    prefer: tuple[str, ...] = (),
    num_splits: int = 1,
    interpret: bool = False,
) -> Choice:
    """Choose the kernels of a layer.

    Args:
      policy: a name of `jattn.backends.POLICIES`; None takes the platform's default.
      platform: a row or a name of `PLATFORMS`; None asks the device once.
      page_size, topk: checked against what the policy allows, where given.
      include_declared: decide as if declared kernels existed, and all had run on their device: for tests of a platform
        that is not at hand.
      prefer: kernel sets to try first, as ("hopper",); the policy's and the platform's order follow. A kernel that has
        not run on its device yet is chosen only so.
      num_splits: split-KV parts, merged by the `merge_states` kernel.
      interpret: run Pallas kernels in their interpreter, where the platform is not the device at hand; a CPU row always
        does.

    Raises: NoBackendError naming the missing features; ValueError for an unknown name or a size the policy forbids.

    >>> choice = resolve(AttnSpec(num_q_heads=9, num_kv_heads=3, head_dim=64), "native", "cpu")
    >>> choice.row("attend").name
    'xla/attend'
    """
    row = detect() if platform is None else platform if isinstance(platform, Platform) else platform_named(platform)
    rules = policy_named(row.default_policy if policy is None else policy)
    check_policy(rules, spec, page_size=page_size, topk=topk)
    _check_asked(prefer, num_splits)
    return _choose(
        rules.name, rules.kernel_preference, row, _asked(spec), include_declared, prefer, num_splits, interpret
    )


def check_policy(rules: BackendPolicy, spec: AttnSpec | MLASpec, *, page_size: int | None, topk: int | None) -> None:
    """Refuse what the policy forbids, with the legal values. Nothing is overridden."""
    name, is_mla = rules.name, isinstance(spec, MLASpec)
    if rules.refused:
        raise NoBackendError(f"policy {name!r} cannot run attention: {rules.refused}; use 'native'")
    if is_mla and not rules.supports_mla:
        raise NoBackendError(f"policy {name!r} does not serve MLA models; use 'native'")
    if not is_mla and (rules.mla_only or not rules.supports_mha):
        raise NoBackendError(f"policy {name!r} serves MLA models only, and this layer is MHA/GQA; use 'native'")
    _check_sizes(rules, is_mla, page_size, topk)
    if rules.kv_dtypes is not None and spec.kv_dtype is not None and spec.kv_dtype not in rules.kv_dtypes:
        legal = ", ".join(sorted(rules.kv_dtypes))
        raise ValueError(
            f"kv_dtype={spec.kv_dtype!r} is not legal under policy {name!r}: want one of {legal}, or use 'native'"
        )
    if isinstance(spec, AttnSpec) and spec.sinks and not rules.sinks:
        raise NoBackendError(f"policy {name!r} does not serve attention sinks; use 'native'")


def _check_sizes(rules: BackendPolicy, is_mla: bool, page_size: int | None, topk: int | None) -> None:
    name, sizes, widest = rules.name, rules.legal_page_sizes(is_mla=is_mla), rules.legal_topk(is_mla=is_mla)
    if page_size is not None:
        if sizes is None:
            check_page_size(page_size)
        elif page_size not in sizes:
            legal = ", ".join(map(str, sorted(sizes)))
            raise ValueError(
                f"page_size={page_size} is not legal under policy {name!r}: want one of {legal}, or use 'native'"
            )
    if topk is None:
        return
    if topk < 0:
        raise ValueError(f"topk={topk}: want at least 1, or 0 for no draft")
    if widest is not None and topk > widest:
        raise ValueError(f"topk={topk} is not legal under policy {name!r}: at most {widest}, or use 'native'")
    if topk > 1 and page_size is not None and page_size > 1 and not rules.paged_trees:
        raise ValueError(
            f"topk={topk} with page_size={page_size} is not legal under policy {name!r}: want page_size=1 or topk=1, "
            "or use 'native'"
        )


def _check_asked(prefer: tuple[str, ...], num_splits: int) -> None:
    known = tuple(dict.fromkeys(row.set for row in KERNELS))
    for name in prefer:
        if name not in known:
            raise ValueError(f"unknown kernel set {name!r} in prefer: want some of {', '.join(known)}")
    if num_splits < 1:
        raise ValueError(f"num_splits={num_splits}: want at least 1 (keys attended in one part)")


def _asked(spec: AttnSpec | MLASpec) -> tuple[tuple[str, frozenset[Feature]], ...]:
    # what each op of the layer must provide
    needs = spec.needs()
    if isinstance(spec, AttnSpec):
        return tuple((op, needs) for op in OPS)
    expanded = spec.expanded.needs() | {Feature.RAGGED, Feature.FULL}
    return tuple((op, expanded if op in OPS else needs) for op in MLA_OPS)


@functools.cache  # reads static facts only, so it is safe while tracing
def _choose(policy, preference, platform, asked, include_declared, prefer, num_splits, interpret=False) -> Choice:
    preference = tuple(name for name in preference if name in platform.kernel_sets)  # a set runs where its rows do
    order = tuple(dict.fromkeys((*prefer, *preference, *platform.kernel_sets)))
    rows, skipped = [], []
    for op, needs in asked:
        chosen, reasons = _first(op, order, needs, include_declared, prefer)
        if chosen is None:
            wanted = ", ".join(sorted(needs)) or "plain attention"
            raise NoBackendError(f"no kernel of {platform.name} serves {op} with {wanted}: " + "; ".join(reasons))
        rows.append(chosen)
        skipped.extend(reasons)
    return Choice(
        policy=policy,
        platform=platform.name,
        needs=asked[0][1],
        rows=tuple(rows),
        skipped=tuple(skipped),
        num_splits=num_splits,
        interpret=platform.is_cpu or interpret,
    )


def _first(op, order, needs, include_declared, prefer) -> tuple[KernelRow | None, list[str]]:
    reasons = []
    for row in candidates(op, order):
        missing = sorted(needs - row.provides)
        if missing:
            reasons.append(f"{row.name} lacks {', '.join(missing)}")
        elif row.function is None and not include_declared:
            reasons.append(f"{row.name} is declared, not written yet")
        elif row.when_asked and row.set not in prefer and not include_declared:
            reasons.append(f"{row.name} has not run on a device yet: ask for it with prefer=({row.set!r},)")
        else:
            return row, reasons
    return None, reasons
