"""One run over a list of prompts: ids in, pieces of text out, with what it cost."""

import time
from collections.abc import Iterator, Sequence

from jattn.backends import policy_named
from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape, chain
from jattn.loaders.chat import render_chat
from jattn.loaders.tokenizer import StopTexts, StreamDecoder
from jattn.models.draft_head import DraftHead
from jattn.platforms import detect
from jattn.serving.compilations import counting
from jattn.serving.engine import Delta, Engine
from jattn.serving.loaded import Completion, LoadedModel, Options, Piece, Progress, peak_rss_bytes
from jattn.serving.request import check_ids
from jattn.spec import KV_DTYPES, MLASpec

Prompt = str | Sequence[int]
_PREFILL_ROWS_CPU = (128,)  # of a prefill step
_PREFILL_ROWS = (256, 2048)  # elsewhere: rows cost little up to some hundreds
_CONTEXT_STEP = 256  # contexts are rounded up to this, so that similar runs compile the same programs


class Session:
    """Prompts on their way through one engine.

    Args: prompts: text, or token ids. Raises: ValueError for an empty prompt, an id without an embedding, or a prompt
      that the cache cannot hold; nothing is compiled before every prompt is checked.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Prompt],
        options: Options,
        progress: Progress = lambda what, done, total: None,
    ):
        self.loaded, self.options = loaded, options
        self.prompt_ids = [self._encode(at, prompt) for at, prompt in enumerate(prompts)]
        max_context = self._max_context()
        num_slots = min(len(self.prompt_ids), options.max_batch)
        pages_each = -(-max_context // loaded.page_size)
        shapes = () if loaded.drafter is None else self._draft_shapes(num_slots)
        drafting = options.draft != "none" and shapes != (NO_DRAFTS,)
        with counting() as count:
            self.engine = Engine(
                loaded.model,
                num_layers=loaded.config.num_layers,
                num_slots=num_slots,
                num_pages=options.num_pages or num_slots * pages_each,
                page_size=loaded.page_size,
                max_context=max_context,
                num_steps=options.drafts if drafting else 0,
                topk=options.branches if drafting else 1,
                num_nodes=options.num_nodes if drafting else None,
                draft_shapes=shapes,
                kind=loaded.platform.kind,
                prefill_rows=_prefill_rows(sum(map(len, self.prompt_ids))),
                sampler=options.sampler_config(),
                drafter=loaded.drafter if drafting else None,
                kv_dtype=KV_DTYPES[options.kv_dtype] if options.kv_dtype else loaded.model.embed.dtype,
                forms=options.form_options(),
                num_prompt_tokens=sum(map(len, self.prompt_ids)),
                on_program=lambda done, total: progress("programs", done, total),
            )
        self.compilations = count.value
        stop_ids = () if options.ignore_eos else tuple(loaded.tokenizer.eos_ids)
        self.sequences = [
            self.engine.submit(options.request(ids, index=at, stop_ids=stop_ids))
            for at, ids in enumerate(self.prompt_ids)
        ]
        self._decoders = [StreamDecoder(loaded.tokenizer) for _ in prompts]
        self._stops = [StopTexts(options.stop) for _ in prompts]
        self._texts: list[list[str]] = [[] for _ in prompts]
        self._stop_ids = frozenset(stop_ids)

    def stream(self) -> Iterator[Piece]:
        """Serve every prompt; pieces of different prompts interleave, those of one come in order."""
        start = time.perf_counter()
        with counting() as count:
            for delta in self.engine.run():
                index = delta.sequence.index
                text, ended = self._push(delta)
                if not ended:
                    if text:
                        yield Piece(index=index, text=text)
                    continue
                elapsed = time.perf_counter() - start
                yield Piece(index=index, text=text, completion=self._complete(index, elapsed, count.value))

    def _push(self, delta: Delta) -> tuple[str, bool]:
        """Text that is final now, and whether the request has ended: by itself, or because a stop text is complete."""
        sequence, index = delta.sequence, delta.sequence.index
        texts: list[str] = []
        for at, token in enumerate(delta.new_ids):
            if token in self._stop_ids:
                break
            safe, hit = self._stops[index].push(self._decoders[index].push([token]))
            texts.append(safe)
            if hit is not None:
                dropped = len(delta.new_ids) - at - 1
                kept = len(sequence.new_ids) - dropped
                del sequence.new_ids[kept:], sequence.logprobs[kept:]
                self.engine.cancel(sequence)
                sequence.finish_reason = "stop"
                return self._keep(index, texts), True
        if sequence.finish_reason is None:
            return self._keep(index, texts), False
        safe, hit = self._stops[index].push(self._decoders[index].flush())
        texts.append(safe if hit is not None else safe + self._stops[index].flush())
        return self._keep(index, texts), True

    def _keep(self, index: int, texts: list[str]) -> str:
        text = "".join(texts)
        self._texts[index].append(text)
        return text

    def _complete(self, index: int, elapsed: float, compiled: int) -> Completion:
        sequence = self.sequences[index]
        return Completion(
            index=index,
            prompt_ids=list(self.prompt_ids[index]),
            ids=list(sequence.new_ids),
            text="".join(self._texts[index]),
            finish_reason=sequence.finish_reason or "stop",
            new_tokens=len(sequence.new_ids),
            tokens_per_s=len(sequence.new_ids) / elapsed,
            draft=self.options.draft or "none",
            mean_accept=sequence.mean_accept,
            compilations=self.compilations + compiled,
            compilations_while_serving=compiled,
            peak_rss_bytes=peak_rss_bytes(),
            logprobs=None if self.options.logprobs is None else list(sequence.logprobs),
        )

    def _draft_shapes(self, num_slots: int) -> tuple[DraftShape, ...]:
        if self.options.enable_multi_layer_eagle and isinstance(self.loaded.drafter, DraftHead):
            return (chain(self.loaded.drafter.ahead),)
        attn, page_size = self.loaded.model.layers[0].attn, self.loaded.page_size
        rules = policy_named(attn.choice.policy)
        widest = rules.legal_topk(is_mla=isinstance(attn.spec, MLASpec))
        trees = widest is None and (rules.paged_trees or page_size == 1)
        return self.options.draft_shapes(self.loaded.platform.kind, num_slots, trees=trees)

    def _encode(self, at: int, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError(f"prompt {at} is empty: give at least one character")
            if self.options.chat:
                prompt = render_chat(self.loaded.metadata, [{"role": "user", "content": prompt}])
            ids = self.loaded.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise ValueError(f"prompt {at} is empty: give at least one token")
        check_ids(ids, self.loaded.config.vocab_size)
        return ids

    def _max_context(self) -> int:
        limit = self.loaded.config.max_context
        asked = self.options.max_context
        if asked is not None and asked > limit:
            raise ValueError(f"max_context={asked}: this model was trained for {limit} tokens; give at most that")
        longest = max(len(ids) for ids in self.prompt_ids)
        if asked is None:
            needed = longest + self.options.max_new_tokens
            asked = min(limit, -(-needed // _CONTEXT_STEP) * _CONTEXT_STEP)
        return asked


def _prefill_rows(num_tokens: int) -> tuple[int, ...]:
    # sizes of prefill steps, none that is larger than it takes for all prompts: each takes seconds to compile
    every = _PREFILL_ROWS_CPU if detect().is_cpu else _PREFILL_ROWS
    enough = next((n for n in every if n >= num_tokens), every[-1])
    return tuple(n for n in every if n <= enough)
