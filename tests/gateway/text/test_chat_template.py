"""Chat templates as models ship them, and what happens when one refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.text.chat_template import ChatTemplate
from gateway.text.errors import TemplateRefusal, TextError
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text import tiny_tokenizers

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🙂"}]


def test_renders_chatml() -> None:
    assert ChatTemplate(tiny_tokenizers.CHATML, {}).render(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße 🙂<|im_end|>\n<|im_start|>assistant\n"
    )


def test_finds_the_template_and_the_special_tokens(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}!"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "<s></s>!"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "file <s>"


def test_takes_the_default_of_several_and_none_of_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "yes"


def test_what_transformers_templates_may_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}\n"
        '{{ {"ä": 1} | tojson }}{{ strftime_now("%Y") | length }}{{ tools is none }}{{ enable_thinking }}'
    )
    assert ChatTemplate(source, {}).render(MESSAGES, variables={"enable_thinking": False}) == (
        'Be brief.{"ä": 1}4TrueFalse'
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Conversation roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot take these messages"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big|cannot take"),
    ],
)
def test_a_template_that_cannot_take_the_messages_says_why(source: str, words: str) -> None:
    with pytest.raises(TemplateRefusal, match=words):
        ChatTemplate(source, {}).render(MESSAGES)


def test_faults_of_a_directory_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TextError, match=r"chat_template\.jinja: is not a template"):
        ChatTemplate.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TextError, match=r"tokenizer_config\.json: must be"):
        ChatTemplate.from_directory(tmp_path)
