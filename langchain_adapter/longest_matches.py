"""Longest common runs of a sequence with several others, in linear time however repetitive they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class _State:
    """Runs that end at the same places; `first` is where the first of these ends."""

    length: int
    first: int
    link: int = -1
    following: dict[str | int, int] = field(default_factory=dict)


class SourceIndex:
    """A suffix automaton over all sources. Memory grows with their length: some hundred bytes for each item."""

    def __init__(self, sources: Iterable[Sequence[str]]) -> None:
        self._states = [_State(0, -1)]
        self._last = 0
        self._owners: list[tuple[int, int]] = []
        for number, source in enumerate(sources):
            for place, item in enumerate(source):
                self._add(item)
                self._owners.append((number, place))
            self._add(number)  # no run goes from one source into the next
            self._owners.append((number, len(source)))

    def longest_ending_at(self, items: Sequence[str]) -> list[int]:
        """For each item, how long the longest run is that ends with it and that some source has."""
        lengths = []
        state = length = 0
        for item in items:
            while state and item not in self._states[state].following:
                state = self._states[state].link
                length = self._states[state].length
            if item in self._states[state].following:
                state = self._states[state].following[item]
                length += 1
            lengths.append(length)
        return lengths

    def first_place(self, items: Sequence[str]) -> tuple[int, int] | None:
        """Source and place in it where the first occurrence of this run begins; None if no source has it."""
        state = 0
        for item in items:
            following = self._states[state].following.get(item)
            if following is None:
                return None
            state = following
        source, end = self._owners[self._states[state].first]
        return source, end - len(items) + 1

    def _add(self, item: str | int) -> None:
        states = self._states
        new = len(states)
        states.append(_State(states[self._last].length + 1, len(self._owners)))
        at = self._last
        while at >= 0 and item not in states[at].following:
            states[at].following[item] = new
            at = states[at].link
        if at < 0:
            states[new].link = 0
        else:
            target = states[at].following[item]
            if states[target].length == states[at].length + 1:
                states[new].link = target
            else:
                states[new].link = states[target].link = self._split(at, target, item)
        self._last = new

    def _split(self, at: int, target: int, item: str | int) -> int:
        """A state for the runs of `target` that are no longer than what leads to it from `at`."""
        states = self._states
        copy = len(states)
        old = states[target]
        states.append(_State(states[at].length + 1, old.first, old.link, dict(old.following)))
        while at >= 0 and states[at].following.get(item) == target:
            states[at].following[item] = copy
            at = states[at].link
        return copy
