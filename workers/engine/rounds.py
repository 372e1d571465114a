"""Which inputs an encoder computes next. Pure: no torch, no clock, no thread.

Inputs of similar length are computed together, padded to the longest. The order among tenants is the ledger's: a round of
inputs is taken in fair order, sorted by length and cut into batches; the next round is taken when these are done. So nobody is
passed over for the sake of a batch by more than one round, and padding stays a small part of it.
"""

import msgspec

from workers.engine.fairness import NOBODY, Account, TenantLedger
from workers.engine.request import EngineRequest, TenantLimits

PADDING_PART = 8  # one of so many tokens of a batch may be padding,
PADDING_FREE = 128  # and so many may be in any: a batch of its own costs as much


class EncoderRun:
    """The inputs of one request."""

    __slots__ = ("detached", "dimensions", "inputs", "key", "left", "limits", "tenant", "tokens")

    def __init__(self, request: EngineRequest) -> None:
        self.key, self.tenant, self.limits = request.key, request.tenant, request.limits
        self.detached, self.dimensions = request.detached, request.dimensions
        self.inputs = [EncoderInput(self, number, ids) for number, ids in enumerate(request.inputs)]
        self.left = len(self.inputs)  # that have no vector yet
        self.tokens = sum(map(len, request.inputs))

    def let_go(self) -> None:
        self.inputs = []


class EncoderInput:
    """One of them. It waits in the ledger, or is in the round."""

    __slots__ = ("account", "alone", "ids", "in_round", "number", "run")

    def __init__(self, run: EncoderRun, number: int, ids: list[int]) -> None:
        self.run, self.number, self.ids = run, number, ids
        self.account: Account[EncoderInput] = NOBODY
        self.in_round = False
        self.alone = False  # a batch with it raised: it is computed by itself

    @property
    def detached(self) -> bool:
        return self.run.detached


class RoundLimits(msgspec.Struct, frozen=True):
    """Tokens."""

    batch: int  # padding included; a longer input is a batch of its own
    round: int


class Rounds:
    """The inputs that wait and the round that is under way."""

    def __init__(self, limits: RoundLimits, inputs_max: int) -> None:
        """`inputs_max`: of any one tenant in a round."""
        self.ledger: TenantLedger[EncoderInput] = TenantLedger(inputs_max)
        self.limits = limits
        self.tokens = 0  # of all inputs that are not done
        self.running: dict[EncoderInput, None] = {}  # the round, in the order in which it was taken
        self._batches: list[list[EncoderInput]] = []  # of the round, the last one first

    @property
    def idle(self) -> bool:
        return not (self.running or self.ledger.waiting or self.ledger.detached)

    def add(self, run: EncoderRun) -> None:
        """Its inputs begin to wait."""
        limits: TenantLimits = run.limits
        for each in run.inputs:
            self.tokens += len(each.ids)
            self.ledger.add(each, run.tenant, limits)

    def next(self) -> list[EncoderInput]:
        """The next batch; []: there is none. Its inputs stay in the round until they are `done`."""
        while self._batches or self._begin():
            batch = [each for each in self._batches.pop() if each.in_round]
            if batch:
                return batch
        return []

    def done(self, each: EncoderInput) -> None:
        """It has its vector, or needs none any more. Idempotent."""
        if each.in_round:
            each.in_round = False
            del self.running[each]
            self.ledger.leave(each)
        elif each not in each.account.queue(each.detached):
            return
        self.ledger.remove(each)
        self.tokens -= len(each.ids)

    def suspect(self, batch: list[EncoderInput]) -> None:
        """It raised: compute each of it alone, next."""
        for each in batch:
            each.alone = True
        self._batches += [[each] for each in reversed(batch)]

    def check(self) -> None:
        """Assert that the counts are those of the inputs."""
        self.ledger.check(self.running)
        if self.idle:
            assert self.tokens == 0, f"idle, and {self.tokens} tokens wait"

    def _begin(self) -> bool:
        """Take a round. What is detached has what the others leave of it."""
        tokens = 0
        while tokens < self.limits.round:
            each = self.ledger.head() or self.ledger.head(detached=True)
            if each is None:
                break
            self.ledger.admit(each, len(each.ids))
            each.in_round = True
            self.running[each] = None
            tokens += len(each.ids)
        place = {each: number for number, each in enumerate(self.running)}
        self._batches = batches_of(list(self.running), self.limits.batch)
        self._batches.sort(key=lambda batch: min(place[each] for each in batch), reverse=True)
        return bool(self._batches)


def batches_of(inputs: list[EncoderInput], tokens_max: int) -> list[list[EncoderInput]]:
    """Batches of similar length, each of at most `tokens_max` tokens with its padding, or of one input."""
    found: list[list[EncoderInput]] = []
    tokens = 0  # of the last batch
    for each in sorted(inputs, key=lambda each: len(each.ids)):
        length = len(each.ids)
        tokens += length
        padded = length * (len(found[-1]) + 1) if found else tokens_max + 1
        if padded > tokens_max or padded - tokens > max(padded // PADDING_PART, PADDING_FREE):
            found.append([])
            tokens = length
        found[-1].append(each)
    return found
