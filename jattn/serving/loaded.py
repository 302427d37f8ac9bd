"""What a user may ask of a run, what comes back, and a model made ready for it."""

import dataclasses
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jattn.backends import policy_named
from jattn.loaders.hparams import HParams
from jattn.loaders.models import locate
from jattn.loaders.open import open_model
from jattn.loaders.tokenizer import Tokenizer
from jattn.loaders.weights import load_arrays
from jattn.models.config import ExpertsConfig, ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.load import build_decoder
from jattn.models.rope import FactorScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling
from jattn.platforms import Platform, detect, platform_named
from jattn.resolve import resolve
from jattn.serving.programs import check_width
from jattn.serving.request import Request
from jattn.spec import KV_DTYPES, check_page_size

DRAFTS = ("none", "ngram")
DTYPES = ("float32", "bfloat16", "float16")
MAX_TOPK = 8
_NUM_NODES = 16  # of a tree by default: on two CPU cores a step of 16 rows costs twice that of one
Progress = Callable[[str, int, int], None]  # what, done, total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to generate. None means: chosen for the model, the prompts and the platform.

    Args:
      model: a GGUF file, a Hugging Face folder, or a name of the model table.
      draft: "none" or "ngram". num_steps: drafts a round, or the depth of a tree.
      topk: continuations of a draft tree; 1 drafts a chain. num_draft_tokens: its nodes, the newest token included.
      temperature ... seed: as in `Request`; request i uses seed + i. stop: texts that end the answer, cut from it.
      chat: wrap each prompt in the model's chat template. max_context: tokens a request, prompt included.
      num_pages: pages a layer. max_batch: requests that run together.
    """

    model: str = "smollm2-135m-instruct"
    draft: str = "ngram"
    num_steps: int = 15
    topk: int = 1
    num_draft_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    chat: bool = False
    policy: str | None = None
    platform: str | None = None
    page_size: int | None = None
    max_context: int | None = None
    num_pages: int | None = None
    max_batch: int = 8
    dtype: str | None = None
    kv_dtype: str | None = None

    def __post_init__(self):
        if self.draft not in DRAFTS:
            raise ValueError(f"draft {self.draft!r} is unknown: want one of {', '.join(DRAFTS)}")
        if not 1 <= self.num_steps <= 63:
            raise ValueError(
                f"num_steps={self.num_steps}: want 1 to 63 drafts a round; --draft none turns drafting off"
            )
        self._check_tree()
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
        self.request([0])  # checks the sampling parameters before a model is loaded

    @property
    def num_nodes(self) -> int | None:
        """Nodes of a draft tree; None for a chain."""
        if self.topk == 1:
            return self.num_draft_tokens
        return self.num_draft_tokens or min(_NUM_NODES, 1 + self.topk * self.num_steps)

    def _check_tree(self) -> None:
        if not 1 <= self.topk <= MAX_TOPK:
            raise ValueError(f"topk={self.topk}: want 1 (a chain) to {MAX_TOPK} continuations")
        if self.draft == "none" and (self.topk > 1 or self.num_draft_tokens is not None):
            raise ValueError(
                f"topk={self.topk}, num_draft_tokens={self.num_draft_tokens} with draft 'none': leave them out"
            )
        check_width(topk=self.topk, num_steps=self.num_steps, num_nodes=self.num_nodes)

    def request(self, prompt_ids: Sequence[int], *, index: int = 0, stop_ids: tuple[int, ...] = ()) -> Request:
        """The request of prompt `index`."""
        return Request(
            prompt_ids=prompt_ids,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
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


def load(options: Options, progress: Progress = lambda what, done, total: None) -> LoadedModel:
    """Read a model and choose its kernels. Raises ValueError, one sentence, for a bad file, name or size."""
    platform = platform_named(options.platform) if options.platform else detect()
    rules = policy_named(options.policy or platform.default_policy)
    page_size = options.page_size or _default_page_size(rules.legal_page_sizes(is_mla=False))
    file = open_model(locate(options.model))
    config = config_of(file.hparams)
    dtype = options.dtype or ("float32" if platform.is_cpu else "bfloat16")
    specs = config.attn_specs(options.kv_dtype)
    choices = {
        spec: resolve(spec, rules.name, platform, page_size=page_size, topk=options.topk)
        for spec in dict.fromkeys(specs)
    }
    tokenizer = file.tokenizer()
    arrays = load_arrays(file, on_tensor=lambda name, done, total: progress("tensors", done, total))
    model = build_decoder(
        config,
        specs,
        tuple(choices[spec] for spec in specs),
        arrays,
        dtype=jnp.dtype(dtype),
        weight_first=platform.is_cpu,
    )
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(model)]
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        metadata=file.metadata,
        platform=platform,
        page_size=page_size,
        weight_bytes=sum(sizes),
        largest_bytes=max(sizes),
    )


_SCALINGS: dict[str, Callable[[dict], Scaling]] = {
    "linear": lambda given: LinearScaling(**given),
    "freq_factors": lambda given: FactorScaling(factors=given["freq_factors"]),
    "llama3": lambda given: Llama3Scaling(**given),
    "yarn": lambda given: YarnScaling(**given),
}


def config_of(hparams: HParams) -> ModelConfig:
    """Model hyperparameters from a file's: fields of the same name are the same thing."""
    scaling, given = None, {}
    if hparams.rope_scaling is not None:
        given = {name: value for name, value in dataclasses.asdict(hparams.rope_scaling).items() if value is not None}
        scaling = _SCALINGS[given.pop("kind")](given)
    experts = None
    if hparams.num_experts:
        assert hparams.swiglu_limit is not None and hparams.swiglu_alpha is not None
        experts = ExpertsConfig(
            num_experts=hparams.num_experts,
            top_k=hparams.experts_per_token,
            limit=hparams.swiglu_limit,
            alpha=hparams.swiglu_alpha,
        )
    own = {field.name for field in dataclasses.fields(ModelConfig)} - {"rope_scaling", "experts"}
    return ModelConfig(rope_scaling=scaling, experts=experts, **{name: getattr(hparams, name) for name in own})


def _default_page_size(legal: frozenset[int] | None) -> int:
    return 16 if legal is None or 16 in legal else min(legal)
