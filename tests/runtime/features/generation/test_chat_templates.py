"""Chat templates, whose output is limited to what fits into the model's context."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.language_models import bpe_tokenizer
from tsx_runtime.features.generation.worker import chat_templates
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import InvalidInput

CONTEXT = 64
MIN_CHARACTERS = 1 << 16
MAX_BYTES = 16 << 20
TEXT = "{% set ns = namespace(t='x' * 10000, l=[]) %}"
ENDLESS_TEMPLATES = {
    "an operator": "{{ messages[0].content[:1] * 1000000000 }}",
    "an operator, the other way round": "{{ 1000000000 * 'x' }}",
    "a list": "{{ ['x'] * 100000000 }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "squares": "{% set ns = namespace(n=10) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "a sum": "{% set ns = namespace(t='xx') %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "a concatenation": "{% set ns = namespace(t='xx') %}{% for i in range(40) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
    "many parts": TEXT + "{{ [ns.t" + " ~ ns.t" * 500 + "] | length }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width that is an argument": "{{ '%*d' % (1000000000, 1) }}",
    "a format": "{{ '{:1000000000}'.format('x') }}",
    "a nested format": "{{ '{:{}}'.format('x', 1000000000) }}",
    "a format whose width is text": "{{ '{:{}}'.format('x', '1000000000') }}",
    "a format whose width lies in a value": "{{ '{:{w[0][n]}}'.format('x', w=[{'n': 1000000000}]) }}",
    "a format of a mapping": "{{ '{x[b]:{x[a]}}'.format_map({'x': {'a': 1000000000, 'b': 1}}) }}",
    "a chain of escapes": "{{ ('&' * 50000)" + " | forceescape" * 40 + " | length }}",
    "a chain of encodings": "{{ ('&' * 50000)" + " | urlencode" * 12 + " | length }}",
    "a formatting filter": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "a mapped filter": "{{ ['x'] | map('center', 1000000000) | join }}",
    "indent": TEXT + "{{ ('x\n' * 100000) | indent(10000) }}",
    "join": TEXT + "{{ range(10000) | join(ns.t) }}",
    "replace": TEXT + "{{ ('x' * 10000) | replace('x', ns.t) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "a method that has another name": "{% set f = 'x'.ljust %}{{ f(1000000000) }}",
    "the method replace": TEXT + "{{ ('x' * 10000).replace('x', ns.t) }}",
    "the method join": TEXT + "{{ ns.t.join(['x'] * 10000) }}",
    "bytes of a number": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(1000000) }}",
    "json": "{{ [[1]] | tojson(indent=1000000000) }}",
    "nested lists": "{% set ns = namespace(l=['x']) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "a chain of lists": TEXT
    + "{% for i in range(10000) %}{% set ns.l = [ns.l, ns.t[i:]] %}{% endfor %}",
    "output": TEXT + "{% for i in range(10000) %}{{ ns.t }}{% endfor %}",
    "output that is kept": TEXT
    + "{% set t %}{% for i in range(10000) %}{{ ns.t[i:] }}{% endfor %}{% endset %}",
    "text in loops": (
        "{% macro m() %}{% for i in range(9999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}{% endmacro %}{{ m() }}"
    ),
    "text in loops over letters": TEXT
    + "{% set u %}{% for i in ns.t %}{% for j in ns.t %}x{% endfor %}{% endfor %}{% endset %}",
    "a macro that calls itself": TEXT
    + "{% macro m(t) %}{% if t %}{{ m(t[1:]) }}{% endif %}{% endmacro %}{{ m(ns.t) }}",
}
PLAIN_TEMPLATES = {
    "{{ '**{}** {{{}}}'.format(1700000000, 'a') }} {{ '**%d**' % 1700000000 }}": "**1700000000** {a} **1700000000**",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }}: {{ m.content | trim }}\n{% endfor %}": "1/1 user: hello",
    "{{ '%05.1f|%-4s|%d' % (1.5, 'a', 1700000000) }} {{ '{:>4}'.format('a') }} {{ '%d' | format(1700000000) }}": (
        "001.5|a   |1700000000    a 1700000000"
    ),
    "{{ messages | tojson(indent=1) | replace('\"', '') }}": "[\n {\n  role: user,\n  content: hello\n }\n]",
    "{{ ['a', 'b'] | join(', ') }}{{ '-' * 3 }}{{ 7 % 4 }}{{ 2 ** 0.5 > 1 }}{{ 1.5 * 1700000000 }}{{ 1700000000 * 1000 }}": (
        "a, b---3True2550000000.01700000000000"
    ),
    "{% set ns = namespace(t='') %}{% for m in messages * 3 %}{% set ns.t = ns.t + m['content'] ~ loop.index %}{% endfor %}{{ ns.t }}": (
        "hello1hello2hello3"
    ),
    "{% macro f(t, n=2) %}{{ t | upper | indent(n) }}{% endmacro %}{{ f('a') }}{% set t %}b{% endset %}{{ t }}{{ none }}": "AbNone",
    "{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ v }}{% else %}no{% endfor %}{% for x in nothing %}{% endfor %}": "a1",
    "{% for t in tree recursive %}{{ t.n }}{{ loop(t.c) }}{% endfor %}": "",
    "{% generation %}{{ messages[0]['content'][:2] }}{% endgeneration %}{{ messages | map(attribute='role') | list }}": "he['user']",
}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    tokenizer = bpe_tokenizer()
    old_template = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = old_template


def a_generator(tokenizer: Any, template: str) -> TextGenerator:
    tokenizer.chat_template = template
    engine: Any = SimpleNamespace(context_length=CONTEXT, adapters=())
    metrics: Any = None
    return TextGenerator(tokenizer, engine, None, len(tokenizer), metrics)


HELLO_MESSAGES = [{"role": "user", "content": "hello"}]


def render(tokenizer: Any, template: str, messages: Any = HELLO_MESSAGES, **options: Any) -> str:
    generator = a_generator(tokenizer, template)
    return str(generator.decode(generator.encode_chat(messages, **options).token_ids))


@pytest.mark.parametrize("template", ENDLESS_TEMPLATES.values(), ids=ENDLESS_TEMPLATES)
def test_a_template_that_would_write_too_much_is_stopped_and_refused(
    tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "MIN_CHARS", MIN_CHARACTERS)
    generator = a_generator(tokenizer, template)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="ValueError: it writes much more"):
            generator.encode_chat(HELLO_MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("template", "text"), PLAIN_TEMPLATES.items())
def test_a_plain_template_renders_its_text(tokenizer: Any, template: str, text: str) -> None:
    assert render(tokenizer, template).strip() == text


def test_the_limit_applies_to_each_rendering_separately(tokenizer: Any) -> None:
    generator = a_generator(tokenizer, "{{ ('x' * (messages[0].content | length)) | length }}")
    long_messages = [{"role": "user", "content": "y" * 3_000_000}]
    for _ in range(5):
        assert generator.decode(generator.encode_chat(long_messages).token_ids) == "3000000"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (None, "hello"),
        ({"other": 1}, "hello"),
        ({"enable_thinking": False}, "quiet hello"),
    ],
)
def test_variables_of_a_request_reach_the_template(
    tokenizer: Any, variables: Any, text: str
) -> None:
    quiet = "{% if enable_thinking is defined and not enable_thinking %}quiet {% endif %}"
    template = quiet + "{{ messages[0].content }}"
    assert render(tokenizer, template, variables=variables) == text


TOOL = {"type": "function", "function": {"name": "clock"}}


def test_a_template_gets_the_tools_of_a_request(tokenizer: Any) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }}: {% endfor %}hello"
    assert render(tokenizer, template, tools=[TOOL]) == "clock: hello"


@pytest.mark.parametrize(
    "template", ["hello", "{# no tools #}hello", "{% if tools %}{% endif %}hello"]
)
def test_tools_are_refused_by_a_template_that_does_not_write_them(
    tokenizer: Any, template: str
) -> None:
    with pytest.raises(RefusedField, match="knows no tools") as exc_info:
        render(tokenizer, template, tools=[TOOL])
    assert exc_info.value.param == "tools"


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "return_dict", "messages", "conversations", "self"],
)
def test_variables_do_not_replace_those_of_the_server(tokenizer: Any, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"cannot set {name},"):
        render(tokenizer, "{{ messages[0].content }}", variables={name: "{{ 1 }}"})
