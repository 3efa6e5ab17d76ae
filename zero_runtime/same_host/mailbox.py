"""The tokens that have come to one rank of a group, by what waits for them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from zero_runtime.same_host.links import Link, Token
from zero_runtime.same_host.what import MESSAGE


class Place(NamedTuple):
    """What a token belongs to: a phase of a collective."""

    number: int
    phase: int
    is_read: bool


REFUSED = 255  # the phase of a token that says what another rank issued, or that a rank could not go on


class Mailbox:
    """Tokens of one group, until they are taken."""

    def __init__(self, ranks: range) -> None:
        self._collectives: dict[int, dict[Place, Token]] = {rank: {} for rank in ranks}
        self._messages: dict[int, deque[Token]] = {rank: deque() for rank in ranks}  # in the order of their sending
        self._read: dict[int, dict[int, Token]] = {rank: {} for rank in ranks}  # answers to own messages, by number
        self._refused: dict[int, list[Token]] = {}  # by number of a collective

    def receive(self, link: Link, *, ended: bool) -> None:
        """Take the tokens that have come over the link. ended: its process has."""
        for token in link.receive(ended=ended):
            if token.what != MESSAGE and token.phase == REFUSED:
                self._refused.setdefault(token.number, []).append(token)
            elif token.what != MESSAGE:
                self._collectives[link.rank][Place(token.number, token.phase, token.is_read)] = token
            elif token.is_read:
                self._read[link.rank][token.number] = token
            else:
                self._messages[link.rank].append(token)

    def take(self, rank: int, place: Place) -> Token | None:
        return self._collectives[rank].pop(place, None)

    def refusals(self, number: int) -> list[Token]:
        """What ranks issued as a number that failed: rank `address`, which failed itself if `is_read`."""
        return self._refused.get(number, [])

    def take_message(self, rank: int, tag: int) -> Token | None:
        """The first message of the rank with this tag."""
        for token in self._messages[rank]:
            if token.place == tag:
                self._messages[rank].remove(token)
                return token
        return None

    def take_read(self, rank: int, number: int) -> Token | None:
        """The rank's answer to this message: "read", or what it expected instead, in phase REFUSED."""
        return self._read[rank].pop(number, None)
