"""The collectives of a group, each as a generator that yields the ranks it waits for, and ends when it is complete.

A rank first tells the others where its tensor lies ("ready"), reads theirs as they become ready, tells them so
("read"), and ends when all that had to read its own tensor have done so: the tensor may be written again then.

Sums are made element by element in rank order, ((rank 0 + rank 1) + ...), which gives all ranks the same bits, and
those of messages over gloo (zero_runtime/gloo.py).

Ranks that issued different collectives must not wait for each other: whoever has nothing to be read tells the root so,
which lets both compare, and a rank whose collective fails tells all others (`Call.refuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zero_runtime.errors import PeerError
from zero_runtime.same_host import peer_memory
from zero_runtime.same_host.links import Link, Token
from zero_runtime.same_host.mailbox import REFUSED, Mailbox, Place
from zero_runtime.same_host.progress import Steps
from zero_runtime.same_host.sizes import CHUNK
from zero_runtime.same_host.what import MESSAGE, NAMES, told

Add = Callable[..., torch.Tensor]  # a binary function of torch with `out`


class DisagreementError(PeerError):
    """An error of a collective of which all ranks of the group are told."""


@dataclass(frozen=True)
class Call:
    """One rank's part in a collective of its group. All ranks must agree on what a token says of it, see `Token`."""

    rank: int
    links: Mapping[int, Link]
    mailbox: Mailbox
    number: int
    what: int
    numel: int
    dtype: int
    place: int = 0

    def tell(self, peer: int, part: torch.Tensor | None, phase: int = 0) -> None:
        """Tell a peer that it may read this contiguous tensor; None: that there is nothing to read."""
        address, nbytes = (0, 0) if part is None else (part.data_ptr(), part.nbytes)
        self.links[peer].send(self._token(phase, is_read=False, address=address, nbytes=nbytes))

    def read(self, token: Token, peer: int, into: torch.Tensor, start: int = 0) -> None:
        """Copy the peer's bytes from `start` on. Raises PeerError if it has ended."""
        try:
            peer_memory.read_into(into, self.links[peer].pid, token.address + start)
        except OSError as error:
            raise PeerError(f"rank {peer} of the group (process {self.links[peer].pid}): {error.strerror}") from error

    def say_read(self, peer: int, phase: int = 0) -> None:
        self.links[peer].send(self._token(phase, is_read=True))

    def until_ready(
        self, peers: Iterable[int], phase: int = 0, each: Callable[[int, Token], None] | None = None
    ) -> Steps:
        """Wait for the peers' tensors, and call `each` with a peer and its token, as they become ready."""
        missing = set(peers)
        while True:
            self._heed()
            for peer in sorted(missing):
                token = self.mailbox.take(peer, Place(self.number, phase, False))
                if token is not None:
                    self._check(peer, token)
                    missing.remove(peer)
                    if each is not None:
                        each(peer, token)
            if not missing:
                return
            yield frozenset(missing)

    def until_read(self, peers: Iterable[int], phase: int = 0) -> Steps:
        """Wait until the peers have read this rank's tensor, and compare what they say of the collective before."""
        missing = set(peers)
        while True:
            self._heed()
            for peer in sorted(missing):
                if (token := self.mailbox.take(peer, Place(self.number, phase, False))) is not None:
                    self._check(peer, token)
            missing = {peer for peer in missing if self.mailbox.take(peer, Place(self.number, phase, True)) is None}
            if not missing:
                return
            yield frozenset(missing)

    def _token(self, phase: int, *, is_read: bool, address: int = 0, nbytes: int = 0) -> Token:
        size = (self.numel, self.dtype, self.place)
        return Token(self.number, phase, self.what, is_read, *size, address, nbytes)

    def refuse(self, issued: Token, by: int, *, has_failed: bool = False) -> None:
        """Tell all other ranks what a rank issued as this number: they may wait for ranks that have failed."""
        for link in self.links.values():
            link.send(issued._replace(number=self.number, phase=REFUSED, is_read=has_failed, address=by, nbytes=0))

    def refusing(self, steps: Steps) -> Steps:
        """The steps; if they fail, the other ranks hear of it."""
        try:
            yield from steps
        except DisagreementError:
            raise
        except Exception:
            self.refuse(self._token(0, is_read=False), self.rank, has_failed=True)
            raise

    def _heed(self) -> None:
        for token in self.mailbox.refusals(self.number):
            self._compare(token.address, token)
            if token.is_read:  # it issued the same, and what the others issued came before
                told_of = f"{NAMES[self.what]} number {self.number}"
                raise DisagreementError(f"rank {token.address} of the group failed in {told_of}")

    def _check(self, peer: int, token: Token) -> None:
        try:
            self._compare(peer, token)
        except DisagreementError:
            self.refuse(token, peer)
            self.refuse(self._token(0, is_read=False), self.rank)
            raise

    def _compare(self, peer: int, token: Token) -> None:
        if (token.what, token.numel, token.dtype, token.place) == (self.what, self.numel, self.dtype, self.place):
            return
        own, other = told(self.what, self.numel, self.dtype), told(token.what, token.numel, token.dtype)
        places = f" (units or roots number {self.place} and {token.place})" if token.place != self.place else ""
        raise DisagreementError(
            f"the ranks issued different collectives as number {self.number} of the group: rank {self.rank} {own}, "
            f"rank {peer} {other}{places}"
        )


def all_gather(call: Call, parts: Sequence[torch.Tensor], own: torch.Tensor, *, phase: int = 0) -> Steps:
    """Fill parts[r], contiguous, from every rank r's `own`, which may be parts[rank] itself."""
    for peer in call.links:
        call.tell(peer, own, phase)
    if parts[call.rank].data_ptr() != own.data_ptr():
        parts[call.rank].copy_(own)

    def read(peer: int, token: Token) -> None:
        call.read(token, peer, parts[peer])
        call.say_read(peer, phase)

    yield from call.until_ready(call.links, phase, read)
    yield from call.until_read(call.links, phase)


def reduce_scatter(call: Call, total: torch.Tensor, parts: Sequence[torch.Tensor], add: Add) -> Steps:
    """Set `total` to the sum of every rank's parts[rank]; it may be this rank's parts[rank]."""
    for peer in call.links:
        call.tell(peer, parts[peer])
    yield from _sum(call, call.links, total, parts[call.rank], add)
    for peer in call.links:
        call.say_read(peer)
    yield from call.until_read(call.links)


def all_reduce(call: Call, tensor: torch.Tensor, add: Add, divide_by: int = 1) -> Steps:
    """Sum the flat contiguous tensor over the ranks, in place: each rank sums a part, which the others copy."""
    parts = tensor.tensor_split(len(call.links) + 1)
    for peer in call.links:
        call.tell(peer, parts[peer])
    # The others do not read this part before they are told of its sum.
    yield from _sum(call, call.links, parts[call.rank], parts[call.rank], add)
    _divide(parts[call.rank], divide_by)
    # A rank that is ready in phase 1 has read what it needed in phase 0, so its part of this tensor may be written.
    yield from all_gather(call, parts, parts[call.rank], phase=1)


def all_reduce_small(call: Call, tensor: torch.Tensor, add: Add, divide_by: int = 1) -> Steps:
    """The same in one meeting of the ranks: each sums all of the tensor, aside until the others have read it."""
    for peer in call.links:
        call.tell(peer, tensor)
    total = torch.empty_like(tensor)
    yield from _sum(call, call.links, total, tensor, add)
    for peer in call.links:
        call.say_read(peer)
    yield from call.until_read(call.links)
    _divide(total, divide_by)
    tensor.copy_(total)


def reduce(call: Call, tensor: torch.Tensor, add: Add, root: int) -> Steps:
    """Sum the flat contiguous tensor over the ranks into the root's."""
    if call.rank != root:
        call.tell(root, tensor)
        yield from call.until_read([root])
        return
    for peer in call.links:
        call.tell(peer, None)
    yield from _sum(call, call.links, tensor, tensor, add)
    for peer in call.links:
        call.say_read(peer)


def exchange(call: Call, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Steps:
    """Fill received[r] from every other rank r's sent[rank]; the part of this rank itself is copied."""
    for peer in call.links:
        call.tell(peer, sent[peer])
    if received[call.rank].data_ptr() != sent[call.rank].data_ptr():
        received[call.rank].copy_(sent[call.rank])

    def read(peer: int, token: Token) -> None:
        if token.nbytes != received[peer].nbytes:
            raise PeerError(
                f"all_to_all number {call.number}: rank {call.rank} expected {received[peer].nbytes} bytes from rank "
                f"{peer}, which sends {token.nbytes}"
            )
        call.read(token, peer, received[peer])
        call.say_read(peer)

    yield from call.until_ready(call.links, 0, read)
    yield from call.until_read(call.links)


def from_root(call: Call, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> Steps:
    """Fill each rank's tensor from the root's: a broadcast, or with `parts` (on the root) a scatter."""
    if call.rank == root:
        for peer in call.links:
            call.tell(peer, tensor if parts is None else parts[peer])
        if parts is not None:
            tensor.copy_(parts[root])
        yield from call.until_read(call.links)
        return
    call.tell(root, None)

    def read(peer: int, token: Token) -> None:
        call.read(token, peer, tensor)
        call.say_read(peer)

    yield from call.until_ready([root], 0, read)


def to_root(call: Call, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> Steps:
    """Fill the root's `parts` from every rank's tensor."""
    if call.rank != root:
        call.tell(root, tensor)
        yield from call.until_read([root])
        return
    assert parts is not None
    for peer in call.links:
        call.tell(peer, None)
    own = parts
    own[root].copy_(tensor)

    def read(peer: int, token: Token) -> None:
        call.read(token, peer, own[peer])
        call.say_read(peer)

    yield from call.until_ready(call.links, 0, read)


def barrier(call: Call) -> Steps:
    """End when every rank has come."""
    for peer in call.links:
        call.tell(peer, None)
    yield from call.until_ready(call.links)


def send(call: Call, tensor: torch.Tensor, peer: int) -> Steps:
    """Let a peer read the tensor. call.place is the message's tag, call.number that of messages to the peer."""
    call.tell(peer, tensor)
    while (answer := call.mailbox.take_read(peer, call.number)) is None:
        yield frozenset([peer])
    if answer.phase == REFUSED:
        sent, expected = told(MESSAGE, tensor.numel(), call.dtype), told(MESSAGE, answer.numel, answer.dtype)
        raise PeerError(f"rank {call.rank} sends rank {peer} a {sent}, which expects a {expected}")


def receive(call: Call, tensor: torch.Tensor, peers: Sequence[int], found: Callable[[int], None]) -> Steps:
    """Fill the tensor with the first message of any of the peers that has call.place as its tag; calls `found`."""
    while True:
        for peer in peers:
            token = call.mailbox.take_message(peer, call.place)
            if token is None:
                continue
            if (token.numel, token.dtype) != (call.numel, call.dtype):
                expected, sent = (told(MESSAGE, one.numel, one.dtype) for one in (call, token))
                refusal = token._replace(is_read=True, phase=REFUSED, numel=call.numel, dtype=call.dtype)
                call.links[peer].send(refusal)
                raise PeerError(f"rank {call.rank} expects a {expected} from rank {peer}, which sends a {sent}")
            call.read(token, peer, tensor)
            call.links[peer].send(token._replace(is_read=True))
            found(peer)
            return
        yield frozenset(peers)


def _sum(call: Call, peers: Iterable[int], total: torch.Tensor, own: torch.Tensor, add: Add) -> Steps:
    """Set `total` to the sum of the peers' tensors and `own`, which may be `total` itself. Waits for the peers."""
    tokens: dict[int, Token] = {}
    yield from call.until_ready(peers, 0, tokens.__setitem__)
    if not tokens:
        total.copy_(own)  # the only rank
        return
    size = max(1, CHUNK // total.element_size())
    terms = torch.empty(2, min(size, total.numel()), dtype=total.dtype, device=total.device)
    for start in range(0, total.numel(), size):
        numel = min(size, total.numel() - start)
        so_far: torch.Tensor | None = None
        for rank in range(len(tokens) + 1):
            if rank == call.rank:
                term = own[start : start + numel]
            else:
                # The sum so far may be in the first row.
                term = terms[0 if so_far is None else 1, :numel]
                call.read(tokens[rank], rank, term, start * total.element_size())
            if so_far is None:
                so_far = term
            elif rank == len(tokens):
                add(so_far, term, out=total[start : start + numel])
            else:
                so_far = add(so_far, term, out=terms[0, :numel])


def _divide(total: torch.Tensor, by: int) -> None:
    if by != 1:
        total.div_(by)
