"""A LangGraph graph on a base model: a structured decision, a branch, a tool, an answer; the state is checkpointed.

Run: python -m examples.graph
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from examples.agent import show
from examples.agent_tools import TOOLS
from langchain_adapter import ChatGemmaCoreML


class Route(BaseModel):
    """Where a question is asked. The words were chosen by trying: with "price" and "other" the 270M model is often wrong."""

    place: Literal["shop", "school"] = Field(description="shop: what something costs; school: anything else")


class State(TypedDict):
    """The conversation, and where its last question belongs."""

    messages: Annotated[list[AnyMessage], add_messages]
    place: str


EXAMPLES = {
    "How much are the eggs?": "shop",
    "When do you open?": "school",
    "What does a melon cost?": "shop",
    "Who wrote Hamlet?": "school",
}


def routing_messages(question: str) -> list[AnyMessage]:
    """The question after some that were decided: a base model goes on in the way that it is shown."""
    messages: list[AnyMessage] = [SystemMessage("The assistant says what each question is about.")]
    for example, place in EXAMPLES.items():
        messages += [HumanMessage(example), AIMessage(f'{{"place": "{place}"}}')]
    return [*messages, HumanMessage(question)]


def make_graph(model: ChatGemmaCoreML) -> Any:
    """A compiled graph with the state `State`."""
    router = model.with_structured_output(Route)
    caller = model.bind_tools(TOOLS[:1], tool_choice="price_of")

    def route(state: State) -> dict[str, Any]:
        answer = router.invoke(routing_messages(state["messages"][-1].text))
        assert isinstance(answer, Route)
        return {"place": answer.place}

    def call(state: State) -> dict[str, Any]:
        return {"messages": [caller.invoke(state["messages"])]}

    def answer(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(State)
    graph.add_node("route", route)
    graph.add_node("call", call)
    graph.add_node("tools", ToolNode(TOOLS[:1]))
    graph.add_node("answer", answer)
    graph.add_edge(START, "route")
    graph.add_conditional_edges("route", lambda state: state["place"], {"shop": "call", "school": "answer"})
    graph.add_edge("call", "tools")
    graph.add_edge("tools", "answer")
    graph.add_edge("answer", END)
    return graph.compile(checkpointer=InMemorySaver())


def main() -> None:
    graph = make_graph(ChatGemmaCoreML(model="gemma3-local", max_tokens=40, stop=["\n"]))
    for thread, question in enumerate(("What does the cheese cost?", "What is the capital of France?")):
        state = graph.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": str(thread)}})
        print(f"place: {state['place']}")
        show(state["messages"])


if __name__ == "__main__":
    main()
