"""What a drafter must offer: propose tokens for a session, and learn what was accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.session import Session


class Drafter(Protocol):
    """Proposes drafts for one session. Drafts only change the speed, never the answer.

    A drafter may have an attribute `grade` (int, set by `propose`): how sure it is of this proposal, in a few
    classes of its own. Acceptance is then measured for each grade apart.
    """

    name: str

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        """A request starts; `tokens` are all ids so far (prompt too), `pinned` documents to look into."""

    def propose(self, limit: int) -> Sequence[int]:
        """Up to `limit` token ids that may follow the tokens seen so far; empty if there is nothing."""

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        """`tokens` were appended to the session; of the last `drafted` drafts `accepted` were kept."""


@runtime_checkable
class StepwiseDrafter(Protocol):
    """A drafter whose every draft costs time, a small model for instance: it is asked for one after the other.

    The engine takes as many steps as its measurements say will pay. `begin` and `observe` are those of Drafter.
    A stepwise drafter reads what it needs from its session: all tokens but the last one seen are committed there
    when `steps` runs, and `Session.last_hidden` is the target's row of the last of them.
    """

    name: str

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None: ...

    def steps(self, prefix: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Drafts that may follow the tokens seen so far and `prefix`, drafts of another drafter.

        Yields (token id, grade), the grade as in Drafter but for this draft alone. Ends if it has nothing more; may be
        left at any point.
        """

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None: ...


AnyDrafter = Drafter | StepwiseDrafter


class DrafterFactory(Protocol):
    """Makes a drafter for a session, or None if it has nothing to offer for that bundle."""

    name: str

    def create(self, session: Session) -> AnyDrafter | None: ...
