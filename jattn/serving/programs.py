"""The compiled programs of an engine: lowered and compiled before the first token, so that serving never compiles."""

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.combinators.costs import Variant, branches_wait, variants
from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape
from jattn.combinators.drafter import LanguageModel
from jattn.combinators.extend import admit, extend, release
from jattn.combinators.model_drafts import Lineage, rows_ahead
from jattn.combinators.ngram import check_trie
from jattn.combinators.round import decode_round, model_round, tree_round
from jattn.combinators.state import DecodeState, RoundReport
from jattn.combinators.tree import check_size
from jattn.dispatch import AttnForwardMethod
from jattn.models.decoder import Decoder
from jattn.models.draft_head import DraftHead, WithStreams
from jattn.sampling import Chosen, Logprobs, SamplerConfig
from jattn.serving.forms import PrefillForms, WithForm


def check_width(*, topk: int, num_steps: int, num_nodes: int | None, standalone: bool = False) -> None:
    """Raise ValueError unless drafts of this depth and breadth can have `num_nodes` nodes.

    Args: num_nodes: the newest token included; None means num_steps + 1. standalone: of a draft model, else n-grams.
    """
    if topk > 1:
        num_nodes = num_steps + 1 if num_nodes is None else num_nodes
        if not standalone:
            check_trie(topk=topk, num_steps=num_steps, num_nodes=num_nodes)
        check_size(topk=topk, num_steps=num_steps, num_nodes=num_nodes)
    elif num_nodes not in (None, num_steps + 1):
        raise ValueError(
            f"num_draft_tokens={num_nodes} with topk=1: a chain of num_steps={num_steps} has {num_steps + 1}, the "
            "newest token included; leave it out, or raise topk"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramConfig:
    """Static facts that shape the programs."""

    num_seqs: int
    max_context: int
    num_steps: int  # drafts a request and round, at most; 0 decodes plainly
    max_stops: int
    prefill_rows: tuple[int, ...]  # chunk sizes, ascending
    kind: str  # of the platform, for the cost table
    sampler: SamplerConfig  # what requests may ask for; what they may not is left out of the programs
    topk: int = 1  # continuations of a draft tree; 1 drafts a chain
    num_nodes: int | None = None  # of a tree, the newest token included; a chain has num_steps + 1
    draft_shapes: tuple[DraftShape, ...] = ()  # of a draft model, a program each; () drafts from the request's own text
    lineage: Lineage = "parent"  # of a draft model's tree, as in `model_drafts.propose`
    forms: PrefillForms | None = None  # of an MLA model

    def __post_init__(self):
        if self.sampler.rejection and not (self.standalone and all(shape.topk == 1 for shape in self.draft_shapes)):
            raise ValueError(
                f"rejection sampling with draft_shapes={self.draft_shapes}: it wants chains (topk 1) of a draft model, "
                "whose probabilities it weighs"
            )
        if self.standalone and self.num_steps != max(shape.num_steps for shape in self.draft_shapes):
            raise ValueError(f"num_steps={self.num_steps} with draft_shapes={self.draft_shapes}: want the most of them")
        if not self.standalone:
            check_width(topk=self.topk, num_steps=self.num_steps, num_nodes=self.num_nodes)

    @property
    def standalone(self) -> bool:
        """Whether a draft model proposes."""
        return bool(self.draft_shapes)

    @property
    def width(self) -> int:
        """Rows of a request in the widest target step."""
        if self.standalone:
            return max(shape.num_nodes for shape in self.draft_shapes)
        return self.num_nodes or self.num_steps + 1

    @property
    def rows_in_flight(self) -> int:
        """Rows of a request that two rounds may write before the host hears of the first."""
        drafting = [shape for shape in self.draft_shapes if shape != NO_DRAFTS]
        ahead = [2 + rows_ahead(topk=shape.topk, num_steps=shape.num_steps) for shape in drafting]
        return self.num_steps + 1 + max(self.width, *ahead, 0)

    def shapes(self, drafts: DraftShape | None = None) -> tuple[Variant, ...]:
        """Target-step shapes inside the round; with a draft model, inside the round that drafts so."""
        width = self.width if drafts is None else drafts.num_nodes
        of_model = drafts is not None and drafts != NO_DRAFTS
        return variants(num_seqs=self.num_seqs, num_steps=width - 1, kind=self.kind, standalone=of_model)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Executables. All but the weights and `held` of `report` is donated and comes back in the same place.

    A GPU's command buffer is recorded again, in 1.8 ms for SmolLM2, whenever an array lies elsewhere than in the round
    before. So nothing does: a report takes the place of the last one, and is copied to one that was read long ago.
    weights: `weights_of` the model's and the draft model's parameters.
    """

    rounds: tuple[Callable, ...]  # (weights, state, report) -> (state, report); one, or one a shape of `draft_shapes`
    prefill: dict[tuple[int, AttnForwardMethod | None], Callable]  # (weights, state, report, q_lens) -> the same
    admit: Callable  # (state, ...) -> state
    release: Callable  # (state, slot) -> state
    pages: Callable  # (page table, new one on the host) -> page table
    report: Callable  # (held, spare) -> a copy of `held` in the place of `spare`


def weights_of(params: nnx.State) -> tuple[jax.Array, ...]:
    """A model's arrays as the programs take them: a tuple is taken apart some ten times faster than NNX variables."""
    return tuple(jax.tree.leaves(params))


Report = tuple[jax.Array, Logprobs | None]
"""i32[seqs, 3 + width], as `report_of` reads it, and log-probabilities where the programs report them."""


def empty_report(config: ProgramConfig) -> Report:
    """A report's arrays, of which nothing is read."""
    shape = (config.num_seqs, config.num_steps + 1)
    words = jnp.zeros((config.num_seqs, 3 + config.num_steps + 1), jnp.int32)
    return words, Chosen.none(shape, config.sampler).logprobs


def _words(report: RoundReport, width: int) -> Report:
    # one array: each that is copied to the host costs some 60 microseconds of a GPU's round
    if extra := width - report.tokens.shape[1]:

        def wider(x):
            return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))

        tokens, logprobs = jax.tree.map(wider, (report.tokens, report.logprobs))
        report = dataclasses.replace(report, tokens=tokens, logprobs=logprobs)
    columns = jnp.stack([report.counts, report.drafted, report.status], axis=1)
    return jnp.concatenate([columns, report.tokens], axis=1), report.logprobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What a round did, on the host: lists with an entry a slot."""

    counts: list[int]
    drafted: list[int]
    status: list[int]
    tokens: list[list[int]]  # past the count they mean nothing
    logprobs: Logprobs | None


def report_of(report: Report) -> HostReport:
    """Read a program's report; waits until it is there."""
    words, logprobs = report
    rows = np.asarray(words).tolist()
    counts, drafted, status = ([row[i] for row in rows] for i in range(3))
    return HostReport(
        counts=counts,
        drafted=drafted,
        status=status,
        tokens=[row[3:] for row in rows],
        logprobs=jax.tree.map(np.asarray, logprobs),
    )


def compile_programs(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: DecodeState,
    config: ProgramConfig,
    on_program: Callable[[int, int], None],
) -> Programs:
    """Compile every program an engine will run. `on_program` hears (done, total) as each is ready.

    Args: graphdef, params: `nnx.split` of a tuple: the model, and the draft model where there is one.
    """
    table = _lowerings(graphdef, params, state, config)
    ready: dict[str, Callable] = {}
    for name, lower in table.items():  # one after another: side by side XLA would hold the memory of all at once
        _return_freed_memory()
        ready[name] = lower().compile()
        on_program(len(ready), len(table))
    return Programs(
        rounds=tuple(ready[name] for name in _round_names(config)),
        prefill={key: ready[_prefill_name(*key)] for key in _prefill_keys(config)},
        **{name: ready[name] for name in ("admit", "release", "pages", "report")},
    )


def _return_freed_memory() -> None:
    # glibc keeps what loading and each compilation freed, 30 to 200 MB for a model of 135M, and the peak grows by it
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _lowerings(graphdef, params, state, config: ProgramConfig) -> dict[str, Callable]:
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    scalar = ints(())

    def lower(function: Callable, *args, donate: int | tuple[int, ...]) -> Callable:
        return lambda: jax.jit(function, donate_argnums=donate).lower(*args)

    weights, treedef = weights_of(params), jax.tree.structure(params)
    report = jax.eval_shape(lambda: empty_report(config))

    def with_model(function, weights, state, held, *args):
        params = jax.tree.unflatten(treedef, weights)
        state, report = function(*_prepared(*nnx.merge(graphdef, params)), state, *args)
        return state, _in_place_of(held, _words(report, config.num_steps + 1))

    def prefill(*args, method: AttnForwardMethod | None, **kwargs):
        model, *drafter, state, q_lens = args
        if method is not None and config.forms is not None:
            model = WithForm(model, config.forms.form(method, state, q_lens))
        return extend(model, state, q_lens, drafter=drafter[0] if drafter else None, **kwargs)

    table = {
        name: lower(functools.partial(with_model, step), weights, state, report, donate=(1, 2))
        for name, step in zip(_round_names(config), _rounds(config), strict=True)
    }
    for rows, method in _prefill_keys(config):
        chunk = functools.partial(
            prefill, method=method, rows=rows, report_width=config.num_steps + 1, sampler=config.sampler
        )
        table[_prefill_name(rows, method)] = lower(
            functools.partial(with_model, chunk), weights, state, report, ints((config.num_seqs,)), donate=(1, 2)
        )
    row = (ints((config.max_context,)), ints((3,)), ints((config.max_stops,)))
    sampling = jax.tree.map(lambda every: jax.ShapeDtypeStruct(every.shape[1:], every.dtype), state.sampling)
    table["admit"] = lower(admit, state, scalar, *row, sampling, donate=0)
    table["release"] = lower(release, state, scalar, donate=0)
    table["pages"] = lower(_in_place_of, state.page_table, ints(state.page_table.shape), donate=0)
    table["report"] = lower(lambda held, spare: _in_place_of(spare, held), report, report, donate=1)
    return table


def _rounds(config: ProgramConfig) -> list[Callable]:
    branches = not branches_wait(config.kind)
    common: dict[str, Any] = dict(sampler=config.sampler)
    if not config.standalone:
        common |= dict(num_steps=config.num_steps, shapes=config.shapes(), may_skip=branches)
        if config.topk > 1:
            return [functools.partial(tree_round, topk=config.topk, num_nodes=config.width, **common)]
        return [functools.partial(decode_round, **common)]
    common |= dict(lineage=config.lineage, max_behind=config.num_steps + 1, unroll=not branches)
    return [
        functools.partial(
            model_round,
            **dataclasses.asdict(drafts),
            shapes=config.shapes(drafts),
            may_skip=branches and drafts == NO_DRAFTS,  # else one shape: nothing to wait for
            **common,
        )
        for drafts in config.draft_shapes
    ]


def _round_names(config: ProgramConfig) -> list[str]:
    return [f"round with {drafts}" for drafts in config.draft_shapes] or ["round"]


def _in_place_of[T](old: T, new: T) -> T:
    # `new`, in the memory of donated arrays: the barrier makes them a part of the program, or they would be left out
    return jax.lax.optimization_barrier((new, old))[0]


def _prepared(model: Decoder, drafter: Decoder | DraftHead | None = None) -> tuple:
    # as the combinators take them: a head may want the streams behind some layers, a model becomes a drafter
    if isinstance(drafter, DraftHead):
        return WithStreams(model, drafter.taps) if drafter.taps else model, drafter
    return (model,) if drafter is None else (model, LanguageModel(drafter, drafter.config.vocab_size))


def _prefill_keys(config: ProgramConfig) -> list[tuple[int, AttnForwardMethod | None]]:
    methods = (None,) if config.forms is None else config.forms.methods
    return [(rows, method) for rows in config.prefill_rows for method in methods]


def _prefill_name(rows: int, method: AttnForwardMethod | None) -> str:
    return f"prefill of {rows}" if method is None else f"prefill of {rows} by {method}"
