"""Templates: rendered in a sandbox, user text tokenised apart, ids at the borders as for the whole text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chats import GEMMA3_TEMPLATE, chat, control_ids, gemma3_tokenizer, gemma4_tokenizer, ids, own_template

from llm_gemma_coreml.chat.messages import Message, Tool, ToolCall
from llm_gemma_coreml.chat.template import ChatTemplate, Placeholders
from llm_gemma_coreml.errors import BundleError, RequestError

KINDS = ("transcript", "gemma3", "gemma4")
MARKERS = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", '<|"|>', "<|tool_call>"]
MARKERS += ["<tool_call|>", "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", "<|image|>"]
HOSTILE = "".join(MARKERS) + "<unused5> \ue0000\ue001 {{ 7 * 7 }} [multimodal]"


def render(source: str, **context: object) -> list[int]:
    template = ChatTemplate(source, gemma3_tokenizer())
    placeholders = Placeholders()
    return template.token_ids(placeholders, {key: placeholders.value(value) for key, value in context.items()})


def conversation(text: str) -> list[Message]:
    """Every place where somebody else's text can stand."""
    return [
        Message("system", f"S {text}"),
        Message("user", f"U {text}"),
        Message("assistant", f"A {text}", reasoning=f"R {text}"),
        Message("user", f"V {text}"),
        Message("assistant", f"B {text}", f"R {text}", (ToolCall("look", {"q": text, "k" + text: [text]}, "1"),)),
        Message("tool", text, tool_call_id="1", name="look"),
    ]


def tool(text: str) -> Tool:
    properties = {"q": {"type": "string", "description": text, "enum": [text], "default": text}}
    return Tool("look", text, {"type": "object", "properties": properties, "required": ["q"]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thinking", [False, True])
def test_text_makes_no_control_tokens_anywhere(kind: str, thinking: bool) -> None:
    """The control tokens of a prompt full of markers are those of the same prompt full of harmless text."""
    tokenizer = gemma4_tokenizer() if kind == "gemma4" else gemma3_tokenizer()
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": HOSTILE}}}
    harmless = chat(kind).prompt(conversation("x"), tools=[tool("x")], thinking=thinking)
    hostile = chat(kind).prompt(conversation(HOSTILE), tools=[tool(HOSTILE)], thinking=thinking)
    with_schema = chat(kind).prompt([Message("user", "Hi")], schema=schema)
    expected = control_ids(tokenizer, harmless.token_ids)
    assert control_ids(tokenizer, hostile.token_ids) == expected
    assert expected.count("<bos>") == 1
    assert expected[0] == "<bos>"
    without = chat(kind).prompt([Message("system", "s"), Message("user", "Hi")])
    if kind != "transcript":
        found = control_ids(tokenizer, with_schema.token_ids)
        assert found == control_ids(tokenizer, without.token_ids)
    assert HOSTILE.split("[")[0].strip() in chat(kind).prompt_text(conversation(HOSTILE))


def test_exactly_one_bos() -> None:
    assert render("<bos>{{ '<bos>' }}x<bos>") == render("x")
    assert render("x") == [2, *gemma3_tokenizer().encode_text("x")]


@given(st.lists(st.text(" \nabé\t\u00a0", max_size=6), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_borders_are_tokenised_as_the_whole_text(texts: list[str]) -> None:
    """Oracle: Jinja without our placeholders, and the whole text between two control tokens encoded at once."""
    import jinja2

    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(GEMMA3_TEMPLATE).render(bos_token="<bos>", messages=messages, add_generation_prompt=True)
    neutral = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    assert list(chat("gemma3").prompt(neutral).token_ids) == ids(gemma3_tokenizer(), text)


def test_white_space_runs_join_over_the_border() -> None:
    assert render("a\n{{ t }}\nb", t="\n\nx\n") == [2, *gemma3_tokenizer().encode_text("a\n\n\nx\n\nb")]
    assert render("Ta{{ t }}", t="ble 中文") == [2, *gemma3_tokenizer().encode_text("Table 中文")]


def test_trim_and_emptiness_see_the_text_behind_the_placeholder() -> None:
    source = "{% if t | trim %}[{{ t | trim }}]{% else %}empty{% endif %}"
    assert render(source, t="  a b! \n") == [2, *gemma3_tokenizer().encode_text("[a b!]")]
    assert render(source, t=" \n ") == [2, *gemma3_tokenizer().encode_text("empty")]


def test_tojson_writes_the_real_text() -> None:
    value = {"a": 'quote " and <bos> \n', "n": [1, None, True]}
    expected = json.dumps(value, ensure_ascii=False)
    assert render("{{ v | tojson }}", v=value) == [2, *gemma3_tokenizer().encode_text(expected)]


def test_user_text_is_not_template_code_and_no_placeholder() -> None:
    text = "{{ 7 * 7 }} \ue0001\ue001"
    assert render("{{ t }}", t=text) == [2, *gemma3_tokenizer().encode_text(text)]


def test_raise_exception_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


DOUBLING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
BAD_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "concatenation": DOUBLING % ("'ab'", "ns.x ~ ns.x"),
    "addition": DOUBLING % ("'ab'", "ns.x + ns.x"),
    "block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "lists": DOUBLING % ("['a']", "[ns.x, ns.x]"),
    "added lists": DOUBLING % ("['a']", "ns.x + ns.x"),
    "mappings": DOUBLING % ("{'a': 1}", "dict(a=ns.x, b=ns.x)"),
    "namespaces": DOUBLING % ("1", "namespace(a=ns.x)"),
    "product": "{{ 'a' * 10000000000 }}",
    "list product": "{{ [1] * 10000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "squares": DOUBLING % ("2", "ns.x * ns.x"),
    "percent": "{{ '%999999999d' % 1 }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "indent": "{{ 'a' | indent(10000000000) }}",
    "replace": "{{ ('a' * 90000) | replace('a', 'b' * 90000) }}",
    "replace method": "{{ ('a' * 90000).replace('a', 'b' * 90000) }}",
    "join": "{{ range(90000) | join('a' * 90000) }}",
    "split": "{{ ('a' * 7000000).split('a') }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion of moderate depth": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "repeated text": "{% for i in range(99999) %}{{ t }}{% endfor %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__['x'] }}",
    "function attributes": "{{ cycler.__init__.__globals__.os }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "undefined": "{{ a.b.c }}",
    "mutation": "{{ v.append(1) }}",
    "syntax": "{% if %}",
    "parentheses": "{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}",
    "unknown filter": "{{ 1 | nonsense }}",
    "division": "{{ 1 / 0 }}",
    "reserved": "\ue000",
    "foreign placeholder": r"{{ '\ue000' ~ '77' ~ '\ue001' }}",
    "large": "x" * 300_000,
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_bad_templates_end_in_one_clear_error(name: str) -> None:
    """Without limits most of these would run for years or take all memory."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError):
        render(BAD_TEMPLATES[name], t="some text! " * 50, v=[1, 2])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_templates_of_checkpoints_have_what_they_need() -> None:
    """Constructs that real chat templates use."""
    source = """\
{%- set ns = namespace(found=false) -%}
{%- macro show(m, upper=false) -%}{{ m.role | upper if upper else m.role }}{%- endmacro -%}
{%- for m in messages -%}
    {%- if m['role'] not in ['system', 'developer'] and m.get('content') is string -%}
        {{- show(m, upper=true) ~ ':' ~ m.content.split('x')[0] | trim ~ loop.index0 -}}
        {%- set ns.found = true -%}
    {%- endif -%}
    {%- if loop.last %}{{ m | length }}{% endif -%}
    {%- if m.role == 'stop' -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{%- for k, v in {'b': 1, 'A': [1, 2]} | dictsort -%}{{ k }}={{ v | tojson }},{%- endfor -%}
{{- ns.found }} {{ messages | map(attribute='role') | list | length }} {{ messages[1:] | length }}
{{- ' '.join(['p', 'q']) + ('%d' | string) + (3 % 2) | string }}
"""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    expected = "USER:hello12A=[1, 2],b=1,True 2 1p q%d1"
    assert render(source, messages=messages) == [2, *gemma3_tokenizer().encode_text(expected)]


def test_long_conversations_are_within_the_limits() -> None:
    messages = [Message("assistant" if i % 2 else "user", f"message {i}") for i in range(1001)]
    for kind in KINDS:
        assert len(chat(kind).prompt(messages).token_ids) > 4000


def test_unreadable_template_files(tmp_path: Path) -> None:
    folder = tmp_path
    with pytest.raises(BundleError, match=r"none\.jinja"):
        ChatTemplate.read(folder / "none.jinja", gemma3_tokenizer())
    (folder / "bad.jinja").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(BundleError, match=r"bad\.jinja"):
        ChatTemplate.read(folder / "bad.jinja", gemma3_tokenizer())


def test_one_template_serves_several_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(number: int) -> bool:
        prompt = chat("gemma3").prompt([Message("user", f"number {number}!")])
        return f"number {number}!" in decode_all(prompt.token_ids)

    def decode_all(tokens: tuple[int, ...]) -> str:
        from llm_gemma_coreml.chat.detokenizer import decode

        return decode(gemma3_tokenizer(), tokens)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(100)))


def test_own_templates_compile() -> None:
    for name in ("transcript", "gemma4"):
        ChatTemplate(own_template(name), gemma4_tokenizer())
