"""What a user may ask of a run, what comes back, and a model made ready for it."""

import dataclasses
import functools
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jattn.backends import BackendPolicy, policy_named
from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape, round_costs, worth_compiling
from jattn.combinators.tree import num_candidates
from jattn.dispatch import AttnForwardMethod
from jattn.loaders.draft_heads import read_head
from jattn.loaders.models import has_head, locate_head
from jattn.loaders.shape import ModelShape
from jattn.loaders.tokenizer import Tokenizer
from jattn.loaders.weights import ModelFile
from jattn.models.config import ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.draft_head import DraftHead
from jattn.models.load import first_layers
from jattn.platforms import Platform, detect, platform_named
from jattn.sampling import SamplerConfig
from jattn.serving.build import Source, build_head, build_model, build_next_head, open_source
from jattn.serving.forms import FormOptions
from jattn.serving.programs import check_width
from jattn.serving.request import Request, TokenLogprob
from jattn.spec import KV_DTYPES, check_page_size

DRAFTS = ("none", "ngram", "standalone", "eagle", "nextn")
_OF_MODELS = ("standalone", "eagle", "nextn")
DTYPES = ("float32", "bfloat16", "float16")
MAX_TOPK = 8
_NUM_NODES = 16  # of a tree by default: on two CPU cores a step of 16 rows costs twice that of one
_NUM_NODES_EAGLE = 8  # the same, with a draft head: most of what 16 give, at half the rows
# by default; a step of a draft model costs, one of an n-gram does not
_NUM_STEPS = {"standalone": 3, "eagle": 3, "nextn": 3}
_PROGRAMS = {"cpu": 1}  # of rounds that draft, where they are chosen: each takes 10 s to compile there
_MOST_PROGRAMS = 3
_BELONGS = {
    "draft_model": ("standalone", "eagle"),
    "draft_layers": ("standalone",),
    "enable_multi_layer_eagle": ("nextn",),
    "rejection_sampling": _OF_MODELS,
}
_MAX_LOGPROBS = 20
Progress = Callable[[str, int, int], None]  # what, done, total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to generate. None means: chosen for the model, the prompts and the platform.

    Args:
      model: a GGUF file, a Hugging Face folder, or a name of the model table.
      draft: "none", "ngram" (from the request's own text), "standalone" (from a draft model), "eagle" (from a draft
      head on the model's hidden states), or "nextn" (from the model's own layer for it); None is "eagle" where a head
      for the model comes with the package, else "ngram".
      num_steps: drafts a round, or the depth of a tree: 15, with a draft model or "nextn" 3.
      topk: continuations of a draft tree; 1 drafts a chain. num_draft_tokens: its nodes, the newest token included.
      With "eagle", without num_steps and num_draft_tokens, shapes come from the table of round costs, of this topk or
      of any, and are chosen round by round from what is accepted; no drafts where none is worth its cost.
      draft_model: as `model`, with the same vocabulary; None is the model itself. With "eagle" the folder of an EAGLE
      or EAGLE-3 head; None is the one that comes with the package for the model. draft_layers: the draft model's first
      layers only.
      enable_multi_layer_eagle: with "nextn" each step has a layer of its own, as many as the file has (DeepSeek's
      num_nextn_predict_layers) or `num_steps`; without it the first layer drafts every step.
      rejection_sampling: a draft model's chains are drawn as the request samples and accepted by rejection sampling,
      which takes more of them at a high temperature and keeps the distribution, but not the text of a seed.
      temperature ... seed: as in `Request`; request i uses seed + i. stop: texts that end the answer, cut from it.
      logprobs: None for none, n for each token's log-probability and those of the n likeliest, at most 20.
      prefer: kernel sets to try before those of the platform's order, as ("xla",).
      chat: wrap each prompt in the model's chat template. max_context: tokens a request, prompt included.
      num_pages: pages a layer. max_batch: requests that run together.
      random_weights: a config.json, or a folder with one: a model of that shape with random weights takes the place of
        `model`. Without a tokenizer.json beside it, prompts are token ids, as "17 4 230", and so is what is printed.
      as_mla: run a grouped-query model as the latent-attention model that equals it.
      mla_method ... disable_chunked_prefix: as in `FormOptions`; of models with latent attention.
    """

    model: str = "smollm2-135m-instruct"
    draft: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    draft_model: str | None = None
    draft_layers: int | None = None
    enable_multi_layer_eagle: bool = False
    rejection_sampling: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    logprobs: int | None = None
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    chat: bool = False
    policy: str | None = None
    platform: str | None = None
    prefer: tuple[str, ...] = ()
    page_size: int | None = None
    max_context: int | None = None
    num_pages: int | None = None
    max_batch: int = 8
    dtype: str | None = None
    kv_dtype: str | None = None
    random_weights: str | None = None
    as_mla: bool = False
    mla_method: str | None = None
    max_chunk_capacity: int | None = None
    chunked_prefix_threshold: int | None = None
    disable_chunked_prefix: bool = False

    def __post_init__(self):
        if self.draft is None:
            with_head = has_head(self.model) and self.random_weights is None and not self.as_mla
            object.__setattr__(self, "draft", "eagle" if with_head and self.draft_layers is None else "ngram")
        if self.draft not in DRAFTS:
            raise ValueError(f"draft {self.draft!r} is unknown: want one of {', '.join(DRAFTS)}")
        if not 1 <= self.drafts <= 63:
            raise ValueError(
                f"num_steps={self.num_steps}: want 1 to 63 drafts a round; --draft none turns drafting off"
            )
        self._check_tree()
        self._check_draft_model()
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown: want one of {', '.join(DTYPES)}")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is unknown: want one of {', '.join(KV_DTYPES)}")
        if self.page_size is not None:
            check_page_size(self.page_size)
        for field in ("max_context", "num_pages", "max_batch"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}={value}: want at least 1")
        if any(not text for text in self.stop):
            raise ValueError("a stop text is empty: give at least one character")
        if self.logprobs is not None and not 0 <= self.logprobs <= _MAX_LOGPROBS:
            raise ValueError(f"logprobs={self.logprobs}: want 0 to {_MAX_LOGPROBS}, or leave it out")
        self.form_options()  # checks those of latent attention
        self.sampler_config()  # checks the sampling parameters before a model is loaded

    @property
    def drafts(self) -> int:
        """`num_steps`, or what it is by default."""
        if self.num_steps is not None:
            return self.num_steps
        return 5 if self.draft == "eagle" and self.branches > 1 else _NUM_STEPS.get(self.draft or "", 15)

    @property
    def branches(self) -> int:
        """`topk`, or what it is by default."""
        return 1 if self.topk is None else self.topk

    def draft_shapes(self, kind: str, num_seqs: int, *, trees: bool) -> tuple[DraftShape, ...]:
        """What a draft model may draft for a batch on a platform of `kind`, the first also where nothing is known.

        Args: trees: whether the policy allows them, where `topk` leaves it open.
        """
        chosen = self.draft == "eagle" and self.num_steps is None and self.num_draft_tokens is None
        if not chosen or self.rejection_sampling:
            return (DraftShape(num_steps=self.drafts, topk=self.branches, num_nodes=self.num_nodes or self.drafts + 1),)
        costs, topk = round_costs(kind), self.topk if trees or self.topk else 1
        if topk not in (None, *(shape.topk for shape in costs.over_plain)):
            shape = DraftShape(num_steps=self.drafts, topk=self.branches, num_nodes=self.num_nodes or self.drafts + 1)
            return (NO_DRAFTS, shape)
        return NO_DRAFTS, *worth_compiling(
            costs, num_seqs=num_seqs, topk=topk, most=_PROGRAMS.get(kind, _MOST_PROGRAMS)
        )

    def sampler_config(self) -> SamplerConfig:
        """What the programs must hold for these requests."""
        needs = self.request([0]).needs
        return dataclasses.replace(
            needs, rejection=self.rejection_sampling and needs.random, num_logprobs=self.logprobs
        )

    @property
    def num_nodes(self) -> int | None:
        """Nodes of a draft tree; None for a chain."""
        topk = self.branches
        if topk == 1:
            return self.num_draft_tokens
        most = 1 + (num_candidates(topk, self.drafts) if self.draft in _OF_MODELS else topk * self.drafts)
        return self.num_draft_tokens or min(_NUM_NODES_EAGLE if self.draft == "eagle" else _NUM_NODES, most)

    def form_options(self) -> FormOptions:
        """How the prefill of an MLA model is computed."""
        if self.mla_method is not None and self.mla_method not in AttnForwardMethod.__members__:
            raise ValueError(f"mla_method {self.mla_method!r} is unknown: want one of {', '.join(AttnForwardMethod)}")
        return FormOptions(
            method=None if self.mla_method is None else AttnForwardMethod[self.mla_method],
            max_chunk_capacity=self.max_chunk_capacity,
            chunked_prefix_threshold=self.chunked_prefix_threshold,
            chunked_prefix_disabled=self.disable_chunked_prefix,
        )

    def _check_tree(self) -> None:
        if not 1 <= self.branches <= MAX_TOPK:
            raise ValueError(f"topk={self.topk}: want 1 (a chain) to {MAX_TOPK} continuations")
        if self.draft == "none" and (self.branches > 1 or self.num_draft_tokens is not None):
            raise ValueError(
                f"topk={self.topk}, num_draft_tokens={self.num_draft_tokens} with draft 'none': leave them out"
            )
        check_width(
            topk=self.branches, num_steps=self.drafts, num_nodes=self.num_nodes, standalone=self.draft in _OF_MODELS
        )

    def _check_draft_model(self) -> None:
        for name, kinds in _BELONGS.items():
            if getattr(self, name) and self.draft not in kinds:
                raise ValueError(f"{name} with draft {self.draft!r}: it belongs to --draft {' or '.join(kinds)}")
        if self.draft == "eagle" and self.draft_model is None and self.random_weights is None:
            locate_head(self.model)
        if self.draft_layers is not None and self.draft_layers < 1:
            raise ValueError(f"draft_layers={self.draft_layers}: want at least 1, or leave it out for all")
        if self.rejection_sampling and self.branches > 1:
            raise ValueError(f"rejection_sampling with topk={self.topk}: its drafts are chains, so want topk 1")
        if self.draft == "nextn" and self.as_mla:
            raise ValueError("as_mla with draft 'nextn': its layer has grouped queries; leave one of them out")
        if self.enable_multi_layer_eagle and self.branches > 1:
            raise ValueError(
                f"enable_multi_layer_eagle with topk={self.topk}: a layer drafts a step of a chain, so want topk 1"
            )

    def request(self, prompt_ids: Sequence[int], *, index: int = 0, stop_ids: tuple[int, ...] = ()) -> Request:
        """The request of prompt `index`."""
        return Request(
            prompt_ids=prompt_ids,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            accept_threshold_single=self.accept_threshold_single,
            accept_threshold_acc=self.accept_threshold_acc,
            seed=self.seed + index,
            stop_ids=stop_ids,
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class Completion:
    """The answer to one prompt."""

    index: int
    prompt_ids: list[int]
    ids: list[int]  # new tokens; the one that stopped the text included
    text: str  # without the stop token, cut before a stop text
    finish_reason: str  # "stop" | "length"
    new_tokens: int
    tokens_per_s: float  # from the start of serving to this request's last token
    draft: str
    mean_accept: float  # tokens a target step, bonus included
    compilations: int  # programs compiled for this run
    compilations_while_serving: int  # of those, after warm-up: 0
    peak_rss_bytes: int
    logprobs: list[TokenLogprob] | None = None  # of `ids`, where asked for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of one prompt that is final; `completion` is set on its last piece."""

    index: int
    text: str
    completion: Completion | None = None


def peak_rss_bytes() -> int:
    """Most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent held when it started this process, too
        held = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if held:
            return int(held[0].split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder with its tokenizer, ready to serve."""

    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    metadata: Mapping
    platform: Platform
    page_size: int
    weight_bytes: int
    largest_bytes: int
    drafter: Decoder | DraftHead | None = None


def load(options: Options, progress: Progress = lambda what, done, total: None) -> LoadedModel:
    """Read a model and choose its kernels. Raises ValueError, one sentence, for a bad file, name or size."""
    platform = platform_named(options.platform) if options.platform else detect()
    rules = policy_named(options.policy or platform.default_policy)
    source = open_source(options.model, options.random_weights)
    is_mla = options.as_mla or _is_mla(source)
    if not is_mla:
        options.form_options().refuse()
    page_size = options.page_size or _default_page_size(rules.legal_page_sizes(is_mla=is_mla))
    build = functools.partial(_build, options=options, rules=rules, platform=platform, page_size=page_size)
    tokenizer = source.tokenizer()
    drafter: Decoder | DraftHead | None = None
    if options.draft in ("eagle", "nextn"):
        if isinstance(source, ModelShape):
            raise ValueError(f"random_weights with draft {options.draft!r}: a head belongs to one model; leave it out")
        path = options.draft_model or (locate_head(options.model) if options.draft == "eagle" else None)
        head = None if path is None else read_head(path)
        num_layers = _layers_a_step(options, source)
        model = build(source, progress=progress)
        if head is None:
            drafter = build_next_head(source, model, num_layers=num_layers)
        else:
            place: dict[str, Any] = dict(platform=platform, rules=rules, page_size=page_size, topk=options.branches)
            place["prefer"] = options.prefer
            drafter = build_head(head, model, **place)
    elif options.draft == "standalone" and options.draft_model not in (None, options.model):
        assert options.draft_model is not None
        draft_source = open_source(options.draft_model)
        check_same_vocabulary(tokenizer, draft_source.tokenizer())
        model = build(source, progress=progress)
        drafter = build(draft_source, progress=progress, as_mla=options.as_mla and not _is_mla(draft_source))
    else:
        model = build(source, progress=progress)
        drafter = model if options.draft == "standalone" else None
    if isinstance(drafter, Decoder) and options.draft_layers is not None:
        drafter = first_layers(drafter, options.draft_layers)
    sizes = [leaf.nbytes for leaf in {id(leaf): leaf for leaf in jax.tree.leaves((model, drafter))}.values()]
    return LoadedModel(
        model=model,
        config=model.config,
        tokenizer=tokenizer,
        metadata=source.metadata,
        platform=platform,
        page_size=page_size,
        weight_bytes=sum(sizes),
        largest_bytes=max(sizes),
        drafter=drafter,
    )


def check_same_vocabulary(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Refuse a draft model whose ids mean other texts; ValueError names the first."""
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"the draft model's tokenizer has {theirs.vocab_size} tokens and the model's {ours.vocab_size}: want a "
            "draft model of the same vocabulary"
        )
    every = range(ours.vocab_size)
    for token, mine, other in zip(every, ours.pieces(every), theirs.pieces(every), strict=True):
        if mine != other:
            raise ValueError(
                f"token {token} is {other!r} to the draft model and {mine!r} to the model: want a draft model of the "
                "same vocabulary"
            )


def _layers_a_step(options: Options, source: ModelFile) -> int | None:
    # layers that draft, each a step of its own; None: the first drafts every step
    if not options.enable_multi_layer_eagle:
        return None
    held = source.hparams.num_next_layers
    num_layers = held if options.num_steps is None else options.num_steps
    if held and num_layers > held:
        raise ValueError(
            f"num_steps={num_layers} with enable_multi_layer_eagle: {source.path} has {held} layers that predict "
            f"further ahead, and each drafts one step; want at most {held}"
        )
    check_width(topk=1, num_steps=num_layers, num_nodes=options.num_draft_tokens)
    return num_layers


def _is_mla(source: Source) -> bool:
    return source.hparams.kv_lora_rank is not None


def _build(
    source: Source,
    *,
    options: Options,
    rules: BackendPolicy,
    platform: Platform,
    page_size: int,
    progress: Progress,
    as_mla: bool | None = None,
) -> Decoder:
    return build_model(
        source,
        platform=platform,
        rules=rules,
        page_size=page_size,
        topk=options.branches,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        as_mla=options.as_mla if as_mla is None else as_mla,
        prefer=options.prefer,
        seed=options.seed,
        on_tensor=lambda name, done, total: progress("tensors", done, total),
    )


def _default_page_size(legal: frozenset[int] | None) -> int:
    return 16 if legal is None or 16 in legal else min(legal)
