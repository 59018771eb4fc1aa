"""Two tools for the agents of the examples: a look-up in a small inventory, and a sum of money."""

from __future__ import annotations

from typing import Literal

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
