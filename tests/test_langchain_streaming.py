"""Streams of the chat model: what LangChain makes of the chunks under v0, v1, events v2 and v3, and that invoke agrees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_scripted import MakeModel, bundles, langchain_bundles, make_model  # noqa: F401

CALLS = (
    "<|channel>thought\nTwo cities.\n<channel|>Let me look."
    '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:get_weather{city:<|"|>Rom<|"|>}<tool_call|>'
)
EXPECTED_ARGUMENTS = [{"city": "Oslo"}, {"city": "Rom"}]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


def summed(chunks: Sequence[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:  # one after the other, as most callers do
        whole = whole + chunk
    return whole


@pytest.fixture(params=["v0", "v1"])
def version(request: pytest.FixtureRequest) -> Any:
    return request.param


def asking(make_model: MakeModel, reply: str = CALLS, **fields: Any) -> Any:  # noqa: F811
    model = make_model(("Which?", reply), thinking=True, **fields)
    return model.bind_tools([get_weather])


def test_parallel_calls_and_text_and_thoughts(make_model: MakeModel, version: str) -> None:  # noqa: F811
    chunks = list(asking(make_model, output_version=version).stream("Which?"))
    message = summed(chunks)
    assert [call["args"] for call in message.tool_calls] == EXPECTED_ARGUMENTS
    assert len({call["id"] for call in message.tool_calls}) == 2
    assert message.invalid_tool_calls == []
    assert [chunk["index"] for chunk in message.tool_call_chunks] == [0, 1]
    assert message.text == "Let me look."
    kinds = [block["type"] for block in message.content_blocks]
    assert kinds == ["reasoning", "text", "tool_call", "tool_call"]
    assert message.content_blocks[0]["reasoning"] == "Two cities."  # type: ignore[typeddict-item]
    assert message.response_metadata["finish_reason"] == "tool_calls"


def test_each_chunk_holds_one_kind_of_thing(make_model: MakeModel, version: str) -> None:  # noqa: F811
    chunks = list(asking(make_model, output_version=version).stream("Which?"))
    for chunk in chunks:
        held = [bool(chunk.text), bool(chunk.tool_call_chunks), "reasoning" in str(chunk.content or chunk.additional_kwargs)]
        assert sum(held) == (0 if chunk is chunks[-1] else 1)
    last = chunks[-1]
    assert last.chunk_position == "last"
    assert not last.content
    assert [chunk.usage_metadata is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all("model_name" not in chunk.response_metadata for chunk in chunks[:-1])


def test_text_after_a_call_is_a_block_of_its_own(make_model: MakeModel) -> None:  # noqa: F811
    reply = CALLS + "Done. " + '<|tool_call>call:get_weather{city:<|"|>Bonn<|"|>}<tool_call|>'
    message = summed(list(asking(make_model, reply, output_version="v1").stream("Which?")))
    kinds = [block["type"] for block in message.content_blocks]
    assert kinds == ["reasoning", "text", "tool_call", "tool_call", "text", "tool_call"]
    assert message.tool_calls[2]["args"] == {"city": "Bonn"}


def test_sums_leave_names_and_statistics_whole(make_model: MakeModel, version: str) -> None:  # noqa: F811
    """merge_dicts joins repeated strings and adds up numbers."""
    model = make_model(("Count.", "one two three four five six seven eight nine ten"), output_version=version)
    chunks = list(model.stream("Count."))
    assert len(chunks) > 4
    metadata = summed(chunks).response_metadata
    assert metadata["model_name"] == "gemma4"
    assert metadata["model_provider"] == "gemma_coreml"
    assert metadata["statistics"] == chunks[-1].response_metadata["statistics"]
    assert metadata["statistics"]["rounds"] >= 1
    usage = summed(chunks).usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == len(model.get_token_ids("one two three four five six seven eight nine ten"))
    assert usage["input_tokens"] == model.get_num_tokens_from_messages([("user", "Count.")])  # type: ignore[list-item]


def without_volatile(message: AIMessage) -> dict[str, Any]:
    """What must be equal however the answer came: not ids, times and block indexes."""
    dumped = message.model_dump(include={"content", "additional_kwargs", "tool_calls", "invalid_tool_calls", "usage_metadata"})
    dumped["response_metadata"] = {k: v for k, v in message.response_metadata.items() if k != "statistics"}
    text = json.dumps(dumped, ensure_ascii=False)
    for call in (*message.tool_calls, *message.invalid_tool_calls):
        text = text.replace(str(call["id"]), "id")
    loaded: dict[str, Any] = json.loads(text)
    loaded["usage_metadata"].pop("input_token_details")
    for block in loaded["content"] if isinstance(loaded["content"], list) else []:
        block.pop("index", None)
    for call in loaded["invalid_tool_calls"]:
        call.pop("error")
    return loaded


@pytest.mark.parametrize("reply", [CALLS, "Just text.", '<|tool_call>call:get_weather{city:<|"|>Os'])
async def test_all_ways_give_the_same_answer(make_model: MakeModel, version: str, reply: str) -> None:  # noqa: F811
    model = asking(make_model, reply, output_version=version, max_tokens=60 if reply in (CALLS, "Just text.") else 8)
    invoked = without_volatile(model.invoke("Which?"))
    assert without_volatile(summed(list(model.stream("Which?")))) == invoked
    assert without_volatile(await model.ainvoke("Which?")) == invoked
    assert without_volatile(summed([chunk async for chunk in model.astream("Which?")])) == invoked
    assert without_volatile(model.batch(["Which?"])[0]) == invoked
    assert without_volatile((await model.abatch(["Which?"]))[0]) == invoked
    assert without_volatile(model.invoke("Which?", stream=True)) == invoked


async def test_events_v2(make_model: MakeModel) -> None:  # noqa: F811
    events = [event async for event in asking(make_model).astream_events("Which?", version="v2")]
    kinds = [event["event"] for event in events if event["event"].startswith("on_chat_model")]
    assert kinds[0] == "on_chat_model_start"
    assert kinds[-1] == "on_chat_model_end"
    streamed = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
    assert [call["args"] for call in summed(streamed).tool_calls] == EXPECTED_ARGUMENTS
    end = next(event for event in events if event["event"] == "on_chat_model_end")
    assert end["data"]["output"].tool_calls == summed(streamed).tool_calls


async def test_events_v3(make_model: MakeModel, version: str) -> None:  # noqa: F811
    model = asking(make_model, output_version=version)
    stream = model.stream_events("Which?", version="v3")
    events = list(stream)
    finished = [event["content"] for event in events if event["event"] == "content-block-finish"]
    assert [block["type"] for block in finished] == ["reasoning", "text", "tool_call", "tool_call"]
    assert [block["args"] for block in finished[2:]] == EXPECTED_ARGUMENTS
    assert events[0]["metadata"]["provider"] == "gemma_coreml"
    assert [call["args"] for call in stream.output.tool_calls] == EXPECTED_ARGUMENTS
    astream = await model.astream_events("Which?", version="v3")
    again = [event["content"] async for event in astream if event["event"] == "content-block-finish"]
    assert [block["type"] for block in again] == [block["type"] for block in finished]
    assert (await astream.output).usage_metadata["output_tokens"] == stream.output.usage_metadata["output_tokens"]


def test_half_a_call_is_invalid_and_never_run(make_model: MakeModel, version: str) -> None:  # noqa: F811
    """LangChain completes half of a JSON text; a call that max_tokens has cut must not become one."""
    model = asking(
        make_model, '<|tool_call>call:get_weather{city:<|"|>New York<|"|>}<tool_call|>', output_version=version, max_tokens=7
    )
    for message in (model.invoke("Which?"), summed(list(model.stream("Which?")))):
        assert message.tool_calls == []
        (invalid,) = message.invalid_tool_calls
        assert invalid["name"] == "get_weather"
        assert "get_weather" in invalid["args"]
        assert message.response_metadata["finish_reason"] == "length"
        assert "could not be read" in message.response_metadata["warnings"][0]
    assert "could not be read" in model.invoke("Which?").invalid_tool_calls[0]["error"]


def test_half_a_json_call_of_a_base_model_is_invalid(make_model: MakeModel) -> None:  # noqa: F811
    reply = 'Call: {"name": "get_weather", "arguments": {"city": "New York"}}'
    model = make_model(("Which?", reply), model="base", max_tokens=14).bind_tools([get_weather])
    for message in (model.invoke("Which?"), summed(list(model.stream("Which?")))):
        assert message.tool_calls == []
        assert len(message.invalid_tool_calls) == 1
    assert model.invoke("Which?", max_tokens=60).tool_calls[0]["args"] == {"city": "New York"}


def test_disable_streaming(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("Count.", "one two three four five six seven"), disable_streaming=True)
    (only,) = [chunk for chunk in model.stream("Count.") if chunk.content]
    assert only.content == "one two three four five six seven"
    by_tools = asking(make_model, disable_streaming="tool_calling")
    assert len(list(by_tools.stream("Which?"))) == 1


class CountingLimiter(BaseRateLimiter):
    def __init__(self) -> None:
        self.count = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.count += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        self.count += 1
        return True


async def test_rate_limiter_and_cache(make_model: MakeModel) -> None:  # noqa: F811
    limiter = CountingLimiter()
    model = make_model(("Count.", "one two"), rate_limiter=limiter, cache=InMemoryCache())
    first = model.invoke("Count.")
    assert model.invoke("Count.").content == "one two"
    assert (await model.ainvoke("Count.")).usage_metadata["total_cost"] == 0  # type: ignore[index,typeddict-item]
    assert limiter.count == 1  # two answers came from the cache
    assert model.invoke("Count.", stop=["two"]).text.strip() == "one"
    assert model.invoke("Count.", seed=2, temperature=1.0).content == "one two"
    assert limiter.count == 3
    assert first.usage_metadata is not None


def test_the_cache_key_holds_all_that_decides(make_model: MakeModel) -> None:  # noqa: F811
    def key(call: dict[str, Any] | None = None, **fields: Any) -> str:
        return make_model(**fields)._get_llm_string(**(call or {}))

    changes: list[dict[str, Any]] = [
        {"model": "base"},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"seed": 7},
        {"max_tokens": 3},
        {"stop": ["x"]},
        {"context": 100},
        {"speculate": "off"},
        {"thinking": True},
        {"exact": True},
        {"output_version": "v1"},
    ]
    keys = {key(), *(key(**change) for change in changes), key({"stop": ["y"]}), key({"model": "gemma4-other"}), key({"seed": 8})}
    assert len(keys) == len(changes) + 4
    assert key() == key()


def test_the_cache_key_follows_the_weights(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    """The same name for other weights is another key."""
    before = make_model()._get_llm_string()
    manifest = bundles / "gemma4" / "bundle.json"
    text = manifest.read_text(encoding="utf-8")
    try:
        manifest.write_text(text + " ", encoding="utf-8")
        assert make_model()._get_llm_string() != before
    finally:
        manifest.write_text(text, encoding="utf-8")


def test_tracing_parameters(make_model: MakeModel) -> None:  # noqa: F811
    params = make_model(temperature=0.5, max_tokens=9, stop=["x"])._get_ls_params()
    assert params["ls_provider"] == "gemma_coreml"
    assert params["ls_model_name"] == "gemma4"
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 9, ["x"])
    called = make_model()._get_ls_params(stop=["y"], model="base", temperature=0.1)
    assert (called["ls_model_name"], called["ls_temperature"], called["ls_stop"]) == ("base", 0.1, ["y"])


def test_settings_of_a_call(make_model: MakeModel) -> None:  # noqa: F811
    make_model(("Count.", "one two three"), model="gemma4-other")
    model = make_model(("Count.", "one two three"), stop=["three"])
    assert model.invoke("Count.").text.strip() == "one two"
    assert model.invoke("Count.", stop=["two"]).text.strip() == "one"
    assert model.bind(max_tokens=1).invoke("Count.").response_metadata["finish_reason"] == "length"
    assert model.invoke("Count.", model="gemma4-other", max_tokens=1).response_metadata["model_name"] == "gemma4-other"
    off = model.invoke("Count.", speculate="off", stop=[])
    assert off.content == "one two three"
    assert "drafted" not in off.response_metadata["statistics"]


def test_same_seed_same_text(make_model: MakeModel) -> None:  # noqa: F811
    """The scripted model favours its reply so little at this temperature that texts are noise, keyed by the seed."""
    model = make_model(("Count.", "one two three"), temperature=10.0, max_tokens=12)
    texts = [model.invoke("Count.", seed=seed).content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
