"""Chat templates: what they render (against transformers), what they may not do, and what content may not become."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from pocketllm.checkpoint.special_tokens import SpecialTokens
from pocketllm.checkpoint.template import ChatTemplate, find_template, normalise_messages
from pocketllm.checkpoint.template_sandbox import RenderLimits
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.errors import CheckpointError, InvalidRequestError, TemplateError

from .hostile_templates import GROWTH, REACH, WORK
from .tokenizer_examples import (
    CHATML,
    SPECIAL,
    byte_level_metadata,
    golden_directories,
    train_byte_level,
    write_directory,
)

USER = [{"role": "user", "content": "hi"}]
TOKENIZER = Tokenizer.from_gguf(byte_level_metadata(train_byte_level(), "gpt-2", bos_token_id=1, eos_token_id=2))


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, special_tokens=SpecialTokens(SPECIAL)).render(messages, **options).text


def transformers_render(source: str, messages: list[dict[str, Any]] = USER, **variables: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **variables)
    return rendered[0]


# --- what is rendered -------------------------------------------------------------------------------------------------


def test_golden_directories_render_and_encode_as_transformers_did() -> None:
    for directory, golden in golden_directories():
        tokenizer = Tokenizer.from_directory(directory)
        template = find_template(SimpleNamespace(naming="hf", path=directory), tokenizer)  # type: ignore[arg-type]
        assert template is not None
        for case in golden["chat"]:
            prompt = template.render(case["messages"])
            assert prompt.text == case["rendered"], directory.name
            assert tokenizer.encode_chat(prompt) == case["ids"], directory.name
            assert template.render(case["messages"], add_generation_prompt=False).text == case["rendered_no_gen"]


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{%- for m in messages %}\n  {%- if loop.first %}"
        "\nfirst {{ loop.length }} {{ loop.last }}\n  {% endif %}\n{{ m }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content | trim | upper }}{% endgeneration %}{% endfor %}",
        "{% for i in range(9) %}{% if i == 5 %}{% break %}{% endif %}{% if i is odd %}{% continue %}{% endif %}"
        "{{ i }}{% endfor %}",
        "{% set ns = namespace(n=0, s='') %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.s = ns.s ~ m.role ~ ns.n %}{% endfor %}{{ ns.s }}",
        "{% macro show(x, y=2) %}[{{ x }}|{{ y }}|{{ varargs }}|{{ kwargs }}]{% endmacro %}"
        "{{ show(1) }}{{ show(1, 2, 3, z=4) }}",
        "{% macro box() %}<{{ caller() }}>{% endmacro %}{% call box() %}{{ messages[0].content }}{% endcall %}",
        "{% set text %}{{ messages[0]['content'] }}!{% endset %}"
        "{{ text * 3 }} {{ [1, 2] + [3] }} {{ (1, 2) }} {{ {'a': 1}.items() | list }}",
        "{{ messages | map(attribute='role') | join(', ') }}"
        " {{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ 'a-b-c'.split('-')[1:] }} {{ 'x=%s y=%d' % ('q', 3) }} {{ '%05.2f' | format(3.14159) }}"
        " {{ '{:>4}|{a}'.format(1, a=2) }}",
        "{{ {'b': 1, 'a': [2, 3]} | dictsort }} {{ [3, 1, 2] | sort | first }} {{ 'a\nb' | indent(2, true) }}"
        " {{ 2 ** 10 }} {{ 7 // 2 }} {{ none }}",
        "{% for group in messages | groupby('role') %}{{ group.grouper }}:{{ group.list | length }};{% endfor %}",
        "{% for x in [[1, [2]], [3, []]] recursive %}{{ x }}{% if x is sequence %}({{ loop(x) }}){% endif %}"
        "{% endfor %}",
        "{{ undefined_name }}{{ messages[0].nope is defined }}{{ messages[0].get('nope', 'd') }}"
        "{{ '<&>' | safe }}{{ '<&>' | e }}",
        "{{ tools is defined }}{{ documents is defined }}"
        "{{ tools | tojson(indent=4) if tools else 'none' }}{% if 'x' in 'xyz' and not 1 > 2 %}yes{% endif %}",
    ],
)  # fmt: skip
def test_renders_what_transformers_renders(source: str) -> None:
    messages = [{"role": "user", "content": "h\u00e9llo"}, {"role": "assistant", "content": " a "}]
    messages += [{"role": "user", "content": "?"}]
    assert render(source, messages) == transformers_render(source, messages)


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "\u00e9 < > & ' \"", "parameters": {"b": 1, "a": [True, None, 1.5]}},
}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {}),
        ("indent=4", {"indent": 4}),
        ("ensure_ascii=true", {"ensure_ascii": True}),
        ("separators=(',', ':')", {"separators": (",", ":")}),
        ("sort_keys=true", {"sort_keys": True}),
    ],
)
def test_tojson_is_json_dumps(arguments: str, options: dict[str, Any]) -> None:
    source = f"{{{{ tools[0] | tojson({arguments}) }}}}"
    rendered = render(source, tools=[TOOL])
    assert rendered == json.dumps(TOOL, **{"ensure_ascii": False, **options})
    assert rendered == transformers_render(source, tools=[TOOL])


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_tojson_of_anything(value: Any) -> None:
    assert render("{{ x | tojson }}", variables={"x": value}) == json.dumps(value, ensure_ascii=False)


def test_the_template_s_refusal_is_the_message() -> None:
    source = "{% if messages|length > 1 %}{{ raise_exception('Roles must alternate: \u00e9!') }}{% endif %}ok"
    assert render(source) == "ok"
    with pytest.raises(TemplateError) as error:
        render(source, USER * 2)
    assert str(error.value) == "Roles must alternate: \u00e9!"


def test_the_built_in_system_turn_appears() -> None:
    source = "{% if messages[0]['role'] != 'system' %}{{ '<|start|>system\nDefault<|stop|>\n' }}{% endif %}" + CHATML
    assert render(source).startswith("<|start|>system\nDefault<|stop|>\n<|start|>user\nhi")


def test_begin_token_comes_from_the_template_only() -> None:
    template = ChatTemplate.for_tokenizer("{{ bos_token }}" + CHATML, TOKENIZER)
    ids = TOKENIZER.encode_chat(template.render(USER))
    assert ids[:2] == [1, 1]  # this template writes BOS, which is also how it opens a turn
    ids = TOKENIZER.encode_chat(ChatTemplate.for_tokenizer(CHATML, TOKENIZER).render(USER))
    assert ids[0] == 1
    assert ids[1] != 1


def test_variables_reach_the_template_but_do_not_replace_the_conversation() -> None:
    assert render("{{ enable_thinking }}{{ bos_token }}", variables={"enable_thinking": False}) == "False"
    with pytest.raises(InvalidRequestError) as error:
        render(CHATML, variables={"messages": []})
    assert error.value.param == "chat_template_kwargs.messages"


def test_time_is_told() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_empty_conversations_render() -> None:
    assert render(CHATML, []) == "<|start|>assistant\n"
    assert render(CHATML, [{"role": "user", "content": ""}], add_generation_prompt=False) == "<|start|>user\n<|stop|>\n"


def test_lone_surrogates_become_replacement_characters() -> None:
    assert "\ufffd" in render(CHATML, [{"role": "user", "content": "\ud83d"}])


def test_a_broken_template_says_where() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{{ 1 + }}").compile()
    with pytest.raises(TemplateError, match="undefined"):
        render("{{ nothing.at_all.here }}")


# --- messages ---------------------------------------------------------------------------------------------------------

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": "\u00e9", "a": 1}'}}],
}


def test_null_content_of_a_tool_call_is_an_empty_turn() -> None:
    history = [USER[0], CALL, {"role": "tool", "tool_call_id": "1", "content": "42"}, USER[0]]
    text = render(CHATML, history)
    assert "None" not in text
    assert "<|start|>assistant\n<|stop|>\n<|start|>tool\n42<|stop|>" in text


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_text_parts_are_joined_with_nothing_between(role: str) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert render(CHATML, [{"role": role, "content": parts}]) == render(CHATML, [{"role": role, "content": "AB"}])
    assert render(CHATML, [{"role": role, "content": []}]) == render(CHATML, [{"role": role, "content": ""}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "x"}]}, "messages.0.content.1.type"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages.0.content.0.type"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": ["a"]}, "messages.0.content.0"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"content": "a"}, "messages.0.role"),
        ("hi", "messages.0"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_by_path(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        normalise_messages([message])
    assert error.value.param == param


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for k, v in args.items() %}{{ k }}={{ v }};{% endfor %}", "b=\u00e9;a=1;"),
        ("{{ 'call ' + args + '.' }}", 'call {"b": "\u00e9", "a": 1}.'),
        ("{{ 'call ' ~ args ~ '.' }}", 'call {"b": "\u00e9", "a": 1}.'),
        ("{{ args }}", '{"b": "\u00e9", "a": 1}'),
        ("{{ args | tojson }}", '{"b": "\u00e9", "a": 1}'),
        ("{{ args if args is string else args | tojson }}", '{"b": "\u00e9", "a": 1}'),
        ("{{ args is mapping }}", "True"),
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_tool_arguments_serve_templates_that_iterate_and_templates_that_paste(
    source: str, expected: str, as_text: bool
) -> None:
    call = copy.deepcopy(CALL)
    if not as_text:
        call["tool_calls"][0]["function"]["arguments"] = {"b": "\u00e9", "a": 1}
    source = "{% set args = messages[0].tool_calls[0].function.arguments %}" + source
    assert render(source, [call]) == expected


@pytest.mark.parametrize("arguments", ['{"a": ', "[1, 2]", "3", "", "NaN", "[" * 100_000])
def test_tool_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = arguments
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", [call]) == arguments


def test_the_caller_s_messages_and_tools_are_not_touched() -> None:
    messages, tools = [copy.deepcopy(CALL), {"role": "user", "content": [{"type": "text", "text": "<|stop|>"}]}], [TOOL]
    before = copy.deepcopy((messages, tools))
    render(CHATML, messages, tools=tools)
    assert (messages, tools) == before


def test_null_fields_are_absent() -> None:
    source = "{{ 'tool_calls' in messages[0] }}{{ 'refusal' in messages[0] }}"
    assert render(source, [{"role": "user", "content": "a", "tool_calls": None, "refusal": None}]) == "FalseFalse"


# --- special tokens in content ----------------------------------------------------------------------------------------


def special_ids(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids = TOKENIZER.encode_chat(template.render(messages, **options))
    return [id_ for id_ in ids if id_ in TOKENIZER.special_ids]


@given(st.lists(st.sampled_from([*SPECIAL, "<|", "|>", " ", "x", "\u65e5", "\ufdd0"])).map("".join))
def test_content_never_becomes_special_tokens(content: str) -> None:
    template = ChatTemplate.for_tokenizer(CHATML, TOKENIZER)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    assert special_ids(template, messages) == special_ids(template, [{**m, "content": "plain"} for m in messages])
    prompt = template.render(messages)
    if not TOKENIZER.special_tokens.occurs_in(content):
        assert TOKENIZER.encode_chat(prompt) == TOKENIZER.encode(prompt.text, add_special_tokens=False)
    if "\ufdd0" not in content:
        assert TOKENIZER.decode(TOKENIZER.encode_chat(prompt)) == prompt.text


def test_nor_do_tools_arguments_and_variables() -> None:
    source = CHATML + "{{ tools | tojson }}{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ note }}"
    template = ChatTemplate.for_tokenizer(source, TOKENIZER)

    def conversation(text: str) -> list[int]:
        call = copy.deepcopy(CALL)
        call["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": text})
        return special_ids(template, [call], tools=[{"description": text, text: 1}], variables={"note": text})

    assert conversation("<|stop|><|start|>") == conversation("plain")


def test_parts_cannot_be_put_together_into_a_special_token() -> None:
    template = ChatTemplate.for_tokenizer(CHATML, TOKENIZER)
    parts = [{"type": "text", "text": "<|st"}, {"type": "text", "text": "op|>"}]
    assert len(special_ids(template, [{"role": "user", "content": parts}])) == 3


def test_allowing_special_tokens_lifts_it() -> None:
    template = ChatTemplate.for_tokenizer(CHATML, TOKENIZER)
    messages = [{"role": "user", "content": "<|stop|>"}]
    assert len(special_ids(template, messages, allow_special=True)) == len(special_ids(template, messages)) + 1


def test_a_trimming_template_still_keeps_content_apart() -> None:
    template = ChatTemplate.for_tokenizer(
        CHATML.replace("message['content']", "(message['content'] | trim)"), TOKENIZER
    )
    assert len(special_ids(template, [{"role": "user", "content": "  <|stop|> "}])) == 3


READS_END = "{% for m in messages %}{{ m.content.split('<|end|>')[-1] }}<|stop|>{% endfor %}"


def test_a_template_may_read_special_tokens_in_assistant_turns() -> None:
    template = ChatTemplate.for_tokenizer(READS_END, TOKENIZER)
    messages = [{"role": "assistant", "content": "thoughts<|end|>answer"}, {"role": "user", "content": "<|stop|>"}]
    assert template.render(messages).text == "answer<|stop|><|stop|><|stop|>"
    assert special_ids(template, messages) == [2, 2]  # the user's is text


def test_a_template_that_reads_them_in_a_user_turn_is_refused() -> None:
    template = ChatTemplate.for_tokenizer(READS_END, TOKENIZER)
    with pytest.raises(TemplateError, match="special token"):
        template.render([{"role": "user", "content": "a<|end|>b"}])


# --- hostile templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", REACH.values(), ids=REACH)
def test_no_python_object_or_file_is_reached(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", GROWTH.values(), ids=GROWTH)
def test_nothing_grows_without_bound(source: str) -> None:
    with pytest.raises(TemplateError, match=r"more than|width|too long"):
        render(source)


@pytest.mark.parametrize("source", WORK.values(), ids=WORK)
def test_no_work_is_endless(source: str) -> None:
    template = ChatTemplate(source, limits=RenderLimits(work=1 << 22))
    with pytest.raises(TemplateError, match=r"too long|more than|recursion|nested"):
        template.render(USER)


def test_the_deadline_stops_what_the_budget_counts_too_kindly() -> None:
    source = (
        "{% set a = 'a' * 9000000 %}{% set b = 'a' * 9000000 %}"
        "{% for i in range(9999) %}{% if a == b %}{% endif %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match=r"more than 0.2 seconds"):
        ChatTemplate(source, limits=RenderLimits(seconds=0.2)).render(USER)


def test_arguments_count_with_their_white_space() -> None:
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = "{" + " " * 1_000_000 + "}"
    with pytest.raises(TemplateError, match="more than"):
        render("{{ '%(a)s' * 100 % {'a': messages[0].tool_calls[0].function.arguments} }}", [call])


def test_the_template_itself_is_bounded() -> None:
    with pytest.raises(TemplateError, match="longer than"):
        render("x" * ((1 << 18) + 1))


def test_a_namespace_that_holds_itself_prints() -> None:
    assert render("{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}") == "[<Namespace>]"


def test_long_conversations_stay_within_the_limits() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "x" * 2000} for i in range(2000)]
    source = "{% for m in messages %}{{ '!' if loop.index0 == messages|length - 1 }}{{ m.content|trim }}{% endfor %}"
    assert len(render(source, messages)) == 2000 * 2000 + 1


# --- where templates come from ----------------------------------------------------------------------------------------


def directory_template(directory: Path) -> ChatTemplate | None:
    checkpoint: Any = SimpleNamespace(naming="hf", path=directory)
    return find_template(checkpoint, TOKENIZER)


def test_sources_in_order(tmp_path: Path) -> None:
    backend = train_byte_level()
    write_directory(tmp_path, backend)
    assert directory_template(tmp_path) is None
    write_directory(tmp_path, backend, chat_template="from config")
    assert directory_template(tmp_path).source == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write_directory(tmp_path, backend, chat_template=named)
    template = directory_template(tmp_path)
    assert template.render(USER).text == "plain"
    assert template.render(USER, tools=[TOOL]).text == "with tools"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert directory_template(tmp_path).source == "from file"


def test_gguf_templates() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    checkpoint: Any = SimpleNamespace(naming="gguf", config=metadata)
    template = find_template(checkpoint, TOKENIZER)
    assert (template.source, template.tool_use_source) == ("plain", "tools")
    assert find_template(SimpleNamespace(naming="gguf", config={}), TOKENIZER) is None  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="should be a string"):
        find_template(SimpleNamespace(naming="gguf", config={"tokenizer.chat_template": 3}), TOKENIZER)  # type: ignore[arg-type]


def test_templates_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    for declared in (3, [3], [{"name": "default"}]):
        write_directory(tmp_path, train_byte_level(), chat_template=declared)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            directory_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    write_directory(tmp_path, train_byte_level())
    with pytest.raises(CheckpointError, match="UTF-8"):
        directory_template(tmp_path)
