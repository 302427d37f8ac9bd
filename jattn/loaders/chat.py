"""Render the chat template that a model file carries, in jinja2's sandbox: a template is code from a stranger.

Source of the conventions (trim_blocks, raise_exception, strftime_now): https://huggingface.co/docs/transformers/chat_templating
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jattn.loaders.errors import ModelFileError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


def render_chat(metadata: Mapping[str, Any], messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """The prompt text of a conversation, by the template in `metadata` (`GgufModel.metadata`).

    Args: add_generation_prompt: end with the opening of the assistant's turn.
    Raises: ModelFileError if there is no template, or it cannot be rendered; ValueError for malformed messages.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    >>> render_chat({"tokenizer.chat_template": template}, [{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        raise ModelFileError("the model file has no tokenizer.chat_template: want an instruct model, or a plain prompt")
    _check_messages(messages)
    try:
        return _compiled(template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=_token(metadata, "bos"),
            eos_token=_token(metadata, "eos"),
        )
    except Exception as error:  # a template is a program: it may raise anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelFileError(
            f"the file's chat template cannot render these messages ({what}); use a plain prompt"
        ) from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("messages is empty: want at least one {'role': ..., 'content': ...}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages[{i}] is {message!r:.60}: want a mapping with 'role' and 'content'")


def _token(metadata: Mapping[str, Any], name: str) -> str:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return "" if token_id is None else metadata["tokenizer.ggml.tokens"][token_id]


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **kwargs: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **kwargs})  # jinja2's own escapes for HTML


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _environment()


@functools.lru_cache(maxsize=8)  # compiling takes a hundred times as long as rendering
def _compiled(template: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(template)
