"""Two tools for the agents of the examples: a look-up in a small inventory, and a sum of money."""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

PRICES = {"apples": 3, "bread": 4, "cheese": 9}


@tool
def price_of(item: Literal["apples", "bread", "cheese"]) -> int:
    """The price of one item in euros."""
    return PRICES[item]


@tool
def multiply(price: int, quantity: int) -> int:
    """The price of several items."""
    return price * quantity


TOOLS = [price_of, multiply]


def earlier_conversation() -> list[AnyMessage]:
    """A question that was answered with both tools: a base model goes on in the way that it is shown."""
    messages: list[AnyMessage] = [HumanMessage("How much do 7 apples cost?")]
    calls = (("price_of", {"item": "apples"}, 3), ("multiply", {"price": 3, "quantity": 7}, 21))
    for number, (name, arguments, result) in enumerate(calls):
        call = {"type": "tool_call", "name": name, "args": arguments, "id": f"example_{number}"}
        messages += [AIMessage("", tool_calls=[call]), ToolMessage(str(result), tool_call_id=call["id"], name=name)]
    return [*messages, AIMessage("7 apples cost 21 euros.")]
