"""Chat templates: the real one reproduces the reference; a stranger's code stays in its sandbox."""

import pytest

from jattn.loaders.chat import render_chat
from jattn.loaders.errors import ModelFileError

ASK = [{"role": "user", "content": "Hi"}]


def test_the_reference_chat_prompts_come_out_exactly(smol, smol_tokenizer, reference):
    chats = {name: prompt for name, prompt in reference["prompts"].items() if name.endswith("_chat")}
    assert chats
    for name, prompt in chats.items():
        question = prompt["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        text = render_chat(smol.metadata, [{"role": "user", "content": question}])
        assert text == prompt["text"], name
        assert smol_tokenizer.encode(text) == prompt["prompt_ids"], name


def test_a_conversation_renders_turn_by_turn(vocabulary):
    messages = [*ASK, {"role": "assistant", "content": "Yo"}]
    want = "[user]Hi<|im_end|>[assistant]Yo<|im_end|>"
    assert render_chat(vocabulary, messages, add_generation_prompt=False) == want
    assert render_chat(vocabulary, messages) == want + "[assistant]"


def render(template):
    return render_chat({"tokenizer.chat_template": template}, ASK)


def test_blocks_leave_no_blank_lines_and_the_usual_helpers_exist():
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n") == "Hi\n"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ {'a': 'ü<'} | tojson }}") == '{"a": "ü<"}'
    assert render("{{ messages | tojson(indent=1) }}").startswith("[\n {")
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{{ bos_token }}|{{ eos_token }}") == "|"


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ missing.field }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(10000000) | list }}", "OverflowError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_clear_sentence(template, reason):
    with pytest.raises(ModelFileError, match=f"chat template cannot render these messages .*{reason}") as error:
        render(template)
    assert "\n" not in str(error.value)


def test_a_file_without_a_template_and_malformed_messages_are_refused(vocabulary):
    with pytest.raises(ModelFileError, match="no tokenizer.chat_template"):
        render_chat({}, ASK)
    with pytest.raises(ValueError, match="messages is empty"):
        render_chat(vocabulary, [])
    with pytest.raises(
        ValueError, match=r"messages\[1\] is {'role': 'user'}: want a mapping with 'role' and 'content'"
    ):
        render_chat(vocabulary, [*ASK, {"role": "user"}])
