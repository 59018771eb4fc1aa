"""Tools of every kind, choices, structured output by every method, and langchain's agents, over scripted replies."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.exceptions import ModelInvalidRequestError, OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool, tool
from langchain_scripted import MakeModel, bundles, langchain_bundles, make_model  # noqa: F401
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as BaseModelV1

from langchain_adapter.tools import neutral_choice, neutral_tool, response_schema, tool_data

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


class Weather(BaseModel):
    """Get the weather."""

    city: str


class OldWeather(BaseModelV1):
    """Get the weather."""

    city: str


class WeatherDict(TypedDict):
    """Get the weather."""

    city: Annotated[str, ..., "a city"]


def weather_of(place: dict[str, str]) -> str:
    return weather(**place)


TOOLS: dict[str, Any] = {
    "function": weather,
    "pydantic": Weather,
    "pydantic v1": OldWeather,
    "TypedDict": WeatherDict,
    "BaseTool": tool(weather),
    "StructuredTool": StructuredTool.from_function(weather),
    "runnable": RunnableLambda(weather_of).as_tool(name="weather", description="Get the weather.", arg_types={"city": str}),
    "OpenAI": {"type": "function", "function": {"name": "weather", "description": "x", "parameters": PARAMETERS}},
    "OpenAI function": {"name": "weather", "description": "x", "parameters": PARAMETERS},
    "Anthropic": {"name": "weather", "description": "x", "input_schema": PARAMETERS},
    "Bedrock": {"toolSpec": {"name": "weather", "description": "x", "inputSchema": {"json": PARAMETERS}}},
    "JSON schema": {"title": "weather", "description": "x", **PARAMETERS},
}


@pytest.mark.parametrize("kind", TOOLS)
@pytest.mark.parametrize("strict", [None, True, False])
def test_every_kind_of_tool(make_model: MakeModel, kind: str, strict: bool | None) -> None:  # noqa: F811
    name = neutral_tool(tool_data(TOOLS[kind], strict)).name
    assert name.lower().removeprefix("old").removesuffix("dict") == "weather"
    model = make_model(("Oslo?", f'<|tool_call>call:{name}{{city:<|"|>Oslo<|"|>}}<tool_call|>'))
    answer = model.bind_tools([TOOLS[kind]], strict=strict).invoke("Oslo?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [(name, {"city": "Oslo"})]


def test_forms_of_tool_choice() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("weather", named, {"type": "tool", "name": "weather"}):
        assert neutral_choice(choice) == "weather"
    for choice in ("any", "required", True, {"type": "any"}):
        assert neutral_choice(choice) == "any"
    assert [neutral_choice(choice) for choice in (None, False, "auto", {"type": "auto"})] == ["auto"] * 4
    assert neutral_choice("none") == neutral_choice({"type": "none"}) == "none"
    with pytest.raises(ModelInvalidRequestError, match="tool_choice is 3"):
        neutral_choice(3)


def other(x: int) -> int:
    """Something else."""
    return x


BOTH = '<|tool_call>call:weather{city:<|"|>A<|"|>}<tool_call|><|tool_call>call:other{x:1}<tool_call|>'


def test_choices_are_kept_by_the_grammar(make_model: MakeModel) -> None:  # noqa: F811
    """The script wants the same two calls each time: what is not allowed is masked."""
    model = make_model(("Call.", BOTH), max_tokens=60)
    called = {
        choice: [call["name"] for call in model.bind_tools([weather, other], tool_choice=choice).invoke("Call.").tool_calls]
        for choice in (None, "any", "other", "none")
    }
    assert called[None] == called["any"] == ["weather", "other"]
    assert set(called["other"]) == {"other"}
    assert called["none"] == []
    one = model.bind_tools([weather, other], tool_choice="any", parallel_tool_calls=False).invoke("Call.")
    assert [call["name"] for call in one.tool_calls] == ["weather"]
    talking = make_model(("Call.", "I would rather talk."), max_tokens=60)
    assert talking.bind_tools([weather], tool_choice="any").invoke("Call.").text == ""
    assert talking.bind_tools([weather]).invoke("Call.").text == "I would rather talk."


class City(BaseModel):
    """A city."""

    name: str = Field(description="its name")
    size: int


class OldCity(BaseModelV1):
    """A city."""

    name: str
    size: int


class CityDict(TypedDict):
    """A city."""

    name: Annotated[str, ..., "its name"]
    size: Annotated[int, ..., "people"]


SCHEMAS: dict[str, Any] = {
    "pydantic": City,
    "pydantic v1": OldCity,
    "TypedDict": CityDict,
    "JSON schema": City.model_json_schema(),
}
CITY = {"name": "Oslo", "size": 700000}
ANSWER = '{"name": "Oslo", "size": 700000}'


def plain(value: Any) -> Any:
    return value if isinstance(value, dict) else value.dict() if isinstance(value, BaseModelV1) else value.model_dump()


def city_reply(method: str, schema: Any) -> str:
    if method != "function_calling":
        return ANSWER
    name = tool_data(schema)["function"]["name"]
    return f'<|tool_call>call:{name}{{name:<|"|>Oslo<|"|>,size:700000}}<tool_call|>'


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output(make_model: MakeModel, method: str, kind: str) -> None:  # noqa: F811
    schema = SCHEMAS[kind]
    model = make_model(("Oslo?", city_reply(method, schema)))
    for strict in (None, True, False):
        structured = model.with_structured_output(schema, method=method, strict=strict)
        value = structured.invoke("Oslo?")
        assert plain(value) == CITY
        if isinstance(schema, type) and not issubclass(schema, dict):
            assert isinstance(value, schema)
    assert plain(await structured.ainvoke("Oslo?")) == CITY
    assert plain([value async for value in structured.astream("Oslo?")][-1]) == CITY
    assert plain(list(structured.stream("Oslo?"))[-1]) == CITY
    raw: Any = model.with_structured_output(schema, method=method, include_raw=True).invoke("Oslo?")
    assert isinstance(raw["raw"], AIMessage)
    assert plain(raw["parsed"]) == CITY
    assert raw["parsing_error"] is None


def test_dicts_stream_as_they_are_written(make_model: MakeModel) -> None:  # noqa: F811
    values = list(make_model(("Oslo?", ANSWER), speculate="off").with_structured_output(CityDict).stream("Oslo?"))
    assert len(values) > 2
    assert values[-1] == CITY


def test_any_json_object(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("Oslo?", '{"any": [1, null]}'))
    assert model.with_structured_output(None, method="json_mode").invoke("Oslo?") == {"any": [1, None]}  # type: ignore[arg-type]
    assert model.invoke("Oslo?", response_format={"type": "json_object"}).text == '{"any": [1, null]}'


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("kind", ["pydantic", "JSON schema"])
def test_cut_off_answers_are_errors(make_model: MakeModel, method: str, kind: str) -> None:  # noqa: F811
    """Not None, and not what a lenient parser makes of half an answer."""
    model = make_model(("Oslo?", city_reply(method, SCHEMAS[kind])), max_tokens=9)
    structured = model.with_structured_output(SCHEMAS[kind], method=method)
    with pytest.raises(OutputParserException, match="cut off after 9 tokens"):
        structured.invoke("Oslo?")
    with pytest.raises(OutputParserException, match="cut off"):
        list(structured.stream("Oslo?"))
    raw: Any = model.with_structured_output(SCHEMAS[kind], method=method, include_raw=True).invoke("Oslo?")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)


class EvenCity(City):
    """A city whose size pydantic checks, which no grammar can."""

    @classmethod
    def __get_validators__(cls) -> Any:  # pragma: no cover
        yield

    def model_post_init(self, context: Any) -> None:
        if self.size % 2 == 0:
            raise ValueError("even")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_what_only_pydantic_can_check(make_model: MakeModel, method: str) -> None:  # noqa: F811
    model = make_model(("Oslo?", city_reply(method, EvenCity)))
    with pytest.raises(OutputParserException, match="does not fit the schema"):
        model.with_structured_output(EvenCity, method=method).invoke("Oslo?")


def test_tools_or_an_answer(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("Call.", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'), ("Answer.", ANSWER))
    bound = model.bind_tools([weather], response_format=City)
    assert bound.invoke("Call.").tool_calls[0]["args"] == {"city": "Oslo"}
    assert bound.invoke("Answer.").text == ANSWER


def test_create_agent_with_the_models_own_schema(make_model: MakeModel) -> None:  # noqa: F811
    """structured_output in the profile lets langchain choose the provider's strategy: free calls, then JSON."""
    from langchain.agents import create_agent

    model = make_model(
        ("Oslo?", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'),
        ("sunny in Oslo", ANSWER),
    )
    agent: Any = create_agent(model, [weather], response_format=City, system_prompt="Be brief.")
    result = agent.invoke({"messages": [HumanMessage("Oslo?")]})
    assert result["structured_response"] == City(**CITY)
    assert [message.type for message in result["messages"]] == ["human", "ai", "tool", "ai"]


async def test_create_agent_streams(make_model: MakeModel) -> None:  # noqa: F811
    from langchain.agents import create_agent

    model = make_model(
        ("Oslo and Rome?", BOTH.replace("<|\"|>A<|\"|>", "<|\"|>Oslo<|\"|>")),
        ("sunny in Oslo", "Sunny."),
        ("\n7", "Sunny."),
    )  # fmt: skip
    agent: Any = create_agent(model, [weather, other])
    tokens = [chunk async for chunk, _ in agent.astream({"messages": [HumanMessage("Oslo and Rome?")]}, stream_mode="messages")]
    assert [len(token.tool_call_chunks) for token in tokens if getattr(token, "tool_call_chunks", None)] == [1, 1]
    assert sum(isinstance(token, ToolMessage) for token in tokens) == 2


def test_response_formats() -> None:
    schema = City.model_json_schema()
    openai = {"type": "json_schema", "json_schema": {"name": "City", "schema": schema, "strict": True}}
    assert response_schema(openai) == response_schema(schema) == schema
    assert response_schema({"type": "json_schema", "schema": schema}) == schema
    assert response_schema(None) is response_schema({"type": "text"}) is None
    assert response_schema(City)["properties"].keys() == {"name", "size"}  # type: ignore[index]
    with pytest.raises(ModelInvalidRequestError, match="no schema"):
        response_schema({"type": "json_schema", "json_schema": {}})


INVALID_TOOLS: list[tuple[Any, str]] = [
    ({"type": "web_search"}, "web_search"),
    ({"type": "computer_use_preview"}, "provider's server"),
    (3, "cannot be converted"),
    ({"nonsense": 1}, "cannot be converted"),
    ({"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "wizard"}}}}, "f"),
    ({"name": "f", "parameters": {"type": "object", "properties": 3}}, "f"),
    ({"name": "f", "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/nowhere"}}}}, "f"),
    ({"name": "two words", "parameters": {"type": "object", "properties": {}}}, "two words"),
]


@pytest.mark.parametrize(("wrong", "told"), INVALID_TOOLS)
def test_invalid_tools(make_model: MakeModel, wrong: Any, told: str) -> None:  # noqa: F811
    with pytest.raises(ModelInvalidRequestError, match=told):
        make_model(("", "ok")).bind_tools([wrong], tool_choice="any").invoke("Hello")


def test_invalid_choices_and_schemas(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("", "ok"))
    with pytest.raises(ModelInvalidRequestError, match=r"'wether'.*weather"):
        model.bind_tools([weather], tool_choice="wether").invoke("Hello")
    with pytest.raises(ModelInvalidRequestError, match="at least one tool"):
        model.bind_tools([], tool_choice="any").invoke("Hello")
    with pytest.raises(ModelInvalidRequestError, match="same name"):
        model.bind_tools([weather, weather]).invoke("Hello")
    with pytest.raises(ModelInvalidRequestError, match="not valid"):
        model.with_structured_output({"title": "A", "type": "wizard"}).invoke("Hello")
    with pytest.raises(ModelInvalidRequestError, match=r"'methd'.*'?tools'?"):
        model.with_structured_output(City, methd="json_mode")
    with pytest.raises(ModelInvalidRequestError, match="'guessing'"):
        model.with_structured_output(City, method="guessing")
    with pytest.raises(ModelInvalidRequestError, match="needs a schema"):
        model.with_structured_output(None)  # type: ignore[arg-type]
    with pytest.raises(ModelInvalidRequestError, match="list of tools"):
        model.invoke("Hello", tools="weather")


def test_system_messages_reach_the_prompt_with_tools(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    model = make_model(("", "ok"))
    call = model._call([SystemMessage("Be brief."), HumanMessage("x")], None, {"tools": [weather]})
    text = model._opened().chat.prompt_text(call.messages, tools=call.tools)
    assert text.index("Be brief.") < text.index("declaration:weather")
