"""P-09: shapes of messages, over both doors: legal ones count, illegal ones are named."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from cluster.wire import public_v1_pb2 as pb
from tests.router.doors import JSON, Verdict, open_doors, verdict_of
from tests.router.fakes import EOS_ID, MODEL, POOLS, FakeCluster, make_router, speaks

LONG = replace(MODEL, max_model_len=512)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "hi"}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "blue"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
KNOWS_CALLS = (
    "{% for t in tools or [] %}(tool {{ t.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.at }}>"
    "{% endfor %}{% endfor %}[assistant]"
)
DROPS_TOOLS = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
KEEPS_NOTHING_OF_ASSISTANTS = (
    "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
)
CUTS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
)


def doors_with(template):
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    pools = tuple(replace(pool, kv_tokens=1024) for pool in POOLS)
    return open_doors(make_router(cluster, template=template, model=LONG, pools=pools))


async def prompt_of(doors, messages, **more):
    """Return the prompt's text, that both doors make the same of it."""
    answer = await doors.post({"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    told = await doors.once({"messages": messages, **more})
    num_tokens = answer.json()["usage"]["prompt_tokens"]
    assert told.usage.prompt_tokens == num_tokens
    ids = (await doors.post({"messages": messages, **more}, "/tokenize")).json()["tokens"]
    assert len(ids) == num_tokens
    return bytes(ids).decode()


LEGAL = [
    [USER],
    [{"role": "system", "content": "be kind"}, USER],
    [USER, {"role": "system", "content": "now be brief"}],
    [{"role": "developer", "content": "be kind"}, USER],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b", "c")]}],
    [USER, {"role": "assistant", "content": "hello"}, USER],
    [USER, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}, USER],
    [USER, ASKED, RESULT],
    [USER, {**ASKED, "content": ""}, RESULT],
    [USER, {**ASKED, "content": "let me see"}, RESULT, USER],
    [{**USER, "name": "ann"}],
    [USER, {"role": "assistant", "content": "x", "tool_calls": []}],
]


@pytest.mark.parametrize("template", [PLAIN, KNOWS_CALLS], ids=["plain", "knows calls"])
@pytest.mark.parametrize("messages", LEGAL)
async def test_legal_shapes_are_taken_and_each_message_counts(messages, template):
    """Nothing is dropped: each message moves the prompt; nothing is a guess."""
    async with doors_with(template) as doors:
        whole = await prompt_of(doors, messages)
        for number in range(1, len(messages)):
            assert len(await prompt_of(doors, messages[:number])) < len(whole)


async def test_parts_are_their_joined_text():
    parts = [{"type": "text", "text": text} for text in ("one ", "two", " three")]
    async with doors_with(PLAIN) as doors:
        joined = await prompt_of(doors, [{"role": "user", "content": "one two three"}])
        assert await prompt_of(doors, [{"role": "user", "content": parts}]) == joined


async def test_calls_of_tools_are_written_as_the_template_knows_them():
    async with doors_with(KNOWS_CALLS) as doors:
        text = await prompt_of(doors, [USER, ASKED, RESULT], tools=[TOOL])
        assert text == "(tool look)[user]hi[assistant]<look sky>[tool]blue[assistant]"
    async with doors_with(PLAIN) as doors:
        text = await prompt_of(doors, [USER, ASKED, RESULT])
        expected = '[user]hi[assistant]\n<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}'
        assert text == f"{expected}\n</tool_call>[tool]blue[assistant]"
        verdict = await doors.http_verdict({"messages": [USER], "tools": [TOOL]})
        assert (verdict.status, verdict.param) == (400, "tools")
        assert await doors.grpc_verdict({"messages": [USER], "tools": [TOOL]}) == verdict


@pytest.mark.parametrize("template", [PLAIN, KNOWS_CALLS], ids=["plain", "knows calls"])
@pytest.mark.parametrize(
    "arguments",
    [r'{"at": "\ud83d"}', '{"at": ' * 33 + "1" + "}" * 33, '{"at": ' * 900 + "1" + "}" * 900],
)
async def test_arguments_that_are_no_text_as_an_object_stay_as_they_came(template, arguments):
    """P-09: half a character, or nested as deep as no body may be: no fault of ours."""
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    async with doors_with(template) as doors:
        for door in (doors.http_verdict, doors.grpc_verdict):
            verdict = await door({"messages": [USER, {**ASKED, "tool_calls": [call]}, RESULT]})
            assert verdict.status == (400 if len(arguments) > LONG.max_model_len else 200), verdict


@pytest.mark.parametrize(("num_levels", "status"), [(28, 200), (29, 400), (2000, 400)])
async def test_tools_nest_as_deep_at_both_doors(num_levels, status):
    """P-10, S-10: over gRPC parameters are a text, and no other JSON for that."""
    nested = '{"a":' * (num_levels - 1) + "{}" + "}" * (num_levels - 1)
    async with doors_with(KNOWS_CALLS) as doors:
        chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
        chat.tools.add(name="look", parameters=nested)
        body = (
            '{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function",'
            f'"function": {{"name": "look", "parameters": {nested}}}}}]}}'
        )
        told = await doors.http.post("/v1/chat/completions", content=body, headers=JSON)
        assert told.status_code == status
        if status == 200:
            await doors.stub.GenerateOnce(pb.GenerateRequest(chat=chat))
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.stub.GenerateOnce(pb.GenerateRequest(chat=chat))
        assert verdict_of(caught.value).param == "tools[0].function.parameters"


async def test_developers_speak_as_the_system_where_the_template_knows_none():
    async with doors_with(PLAIN) as doors:
        text = await prompt_of(doors, [{"role": "developer", "content": "be kind"}, USER])
        assert text.startswith("[system]be kind")
    async with doors_with(PLAIN + "{# developer #}") as doors:
        text = await prompt_of(doors, [{"role": "developer", "content": "be kind"}, USER])
        assert text.startswith("[developer]be kind")


@pytest.mark.parametrize(
    ("template", "messages", "field"),
    [
        (DROPS_TOOLS, [USER, ASKED, RESULT], "messages[2]"),
        (
            KEEPS_NOTHING_OF_ASSISTANTS,
            [USER, {"role": "assistant", "content": "x1"}],
            "messages[1]",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
            "{% endif %}{{ m.content }}{% endfor %}",
            [USER, ASKED, RESULT, USER],
            "messages[2]",
        ),
        ("{{ messages[0].nothing.at_all }}", [USER], "messages[0]"),
        ("{% for i in range(10**9) %}{{ i }}{% endfor %}", [USER], "messages[0]"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
            [USER],
            "messages",
        ),
        ("{{ ''.__class__.__mro__ }}{{ [].append(1) }}", [USER], "messages[0]"),
        (None, [USER], "messages"),
    ],
)
async def test_what_a_template_drops_or_refuses_is_named(template, messages, field):
    """P-09, S-09: silent loss is worse than refusal; a template's own faults are no crash."""
    async with doors_with(template) as doors:
        verdict = await doors.http_verdict({"messages": messages})
        assert verdict.status in (400, 413)
        assert verdict.param == field
        assert await doors.grpc_verdict({"messages": messages}) == verdict


async def test_thoughts_of_earlier_turns_may_be_cut():
    async with doors_with(CUTS_THOUGHTS) as doors:
        turn = {"role": "assistant", "content": "<think>hm</think>blue"}
        assert await doors.http_verdict({"messages": [USER, turn]}) == Verdict(200)


BOTH = [
    ([], "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([USER, {"role": "assistant"}], "messages[1].content"),
    ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
    ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
    ([{"role": "nobody", "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{**USER, "name": "x" * 129}], "messages[0].name"),
    ([USER] * 257, "messages"),
    ([{"role": "user", "content": "x" * 5_000}], "messages[0].content"),
    ([{"role": "user", "content": "x" * 400}] * 10, "messages"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 65}], "messages[0].content"),
]
JSON_ONLY = [
    (None, "messages"),
    ("hi", "messages"),
    ({"a": 1}, "messages"),
    ([5], "messages[0]"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        "messages[0].content[0].type",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content"),
    ([USER, {"role": "assistant", "tool_calls": 5}], "messages[1].tool_calls"),
    ([USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0]"),
    (
        [USER, {"role": "assistant", "tool_calls": [{**CALL, "type": "code"}]}],
        "messages[1].tool_calls[0].type",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        [USER, {"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
        "messages[1].function_call",
    ),
]


async def test_illegal_shapes_are_named_at_both_doors():
    async with doors_with(PLAIN) as doors:
        for messages, field in BOTH:
            verdict = await doors.http_verdict({"messages": messages})
            assert (verdict.status, verdict.param) == (400, field), (messages, verdict)
            assert await doors.grpc_verdict({"messages": messages}) == verdict, messages
        for messages, field in JSON_ONLY:
            verdict = await doors.http_verdict({"messages": messages}, "/v1/chat/completions")
            assert (verdict.status, verdict.param) == (400, field), (messages, verdict)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [TOOL] * 65}, "tools"),
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_tools_that_force_a_call_or_are_none(given, field):
    async with doors_with(KNOWS_CALLS) as doors:
        verdict = await doors.http_verdict({"messages": [USER], **given})
        assert (verdict.status, verdict.param) == (400, field)
        if given.get("tool_choice") == "required":
            assert await doors.grpc_verdict({"messages": [USER], **given}) == verdict
        for_prompt = await doors.http_verdict({"prompt": "x", **given})
        assert for_prompt.status == 400


async def test_extra_keys_of_messages_are_ignored():
    async with doors_with(PLAIN) as doors:
        plain = await prompt_of(doors, [USER])
        answer = await doors.post({"messages": [{**USER, "cache_control": {"type": "x"}}]})
        assert answer.json()["usage"]["prompt_tokens"] == len(plain)
