"""Text in, text out, in one call."""

from collections.abc import Sequence

from jattn.serving.loaded import Completion, Options, load
from jattn.serving.session import Prompt, Session


def generate(prompts: str | Sequence[Prompt], **options) -> list[Completion]:
    """Continue each prompt with a real model, by speculative decoding, in jitted programs.

    Args:
      prompts: a text, or a list of texts and of token id lists.
      options: fields of `jattn.serving.loaded.Options`, as model="path.gguf", draft="ngram", max_new_tokens=64.
    Returns: one Completion a prompt, in order. Greedy ids do not depend on draft, page size or batch.
    Raises: ValueError with one sentence for a bad file, name, size or prompt.
    """
    batch: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not batch:
        raise ValueError("no prompts: give at least one")
    chosen = Options(**options)
    session = Session(load(chosen), batch, chosen)
    done = [piece.completion for piece in session.stream() if piece.completion is not None]
    return sorted(done, key=lambda completion: completion.index)
