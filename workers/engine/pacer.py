"""How much prefill a step may carry, and how many sequences a batch, so that no stream waits too long for its next token.

Pure: no torch, no clock. A step's time is taken to be linear in what it computes. The coefficients are measured when the engine
starts (see probe.py); running, they are corrected by one factor for steps that only decode and one for those that also
prefill, which follow what such steps really took.
"""

import math

import msgspec

from workers.engine.sequence import Load

PREFILL_MIN = 16  # tokens: a prefill goes on, whatever the bound
WEIGHT_MIN = 0.05  # of a new observation; the first ones weigh more
WEIGHT_SLOWER = 0.25  # at least, of one that took longer than expected: what slows one step slows the next ones too
OUTLIER = 2.0  # an observation counts as at most so many times what was expected
NOISE_START = 0.1
NOISE_MARGIN = 2.0  # a normal distribution has its 99th percentile at 2.9 times the mean deviation from its mean
MARGIN_MIN = 0.12  # however calm it was: one slow step in a hundred is a 99th percentile


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step: its own, and for each unit of what it computes."""

    step: float
    decode: float = 0.0  # a sequence that decodes
    context: float = 0.0  # a token of the contexts of those
    prefill: float = 0.0  # a prompt token
    pair: float = 0.0  # a prompt token and a token that it attends to

    def ms(self, load: Load) -> float:
        return (
            self.step
            + self.decode * load.decodes
            + self.context * load.context
            + self.prefill * load.prefill
            + self.pair * load.pairs
        )

    def prefill_within(self, ms: float, start: int) -> int:
        """Prompt tokens from position `start` on that take at most `ms`."""
        if ms <= 0:
            return 0
        each = self.prefill + self.pair * start  # and pair * n / 2 more, for n of them attend to one another
        if self.pair > 0:
            return int((math.sqrt(each * each + 2 * self.pair * ms) - each) / self.pair)
        return int(ms / each) if each > 0 else 1 << 30


class _Factor:
    """What steps of one kind really take, as a multiple of what was expected, and how much that varies."""

    def __init__(self) -> None:
        self.value = 1.0
        self.noise = NOISE_START
        self._count = 0

    @property
    def margin(self) -> float:
        """What a step may take longer than expected, as a share of it."""
        return max(MARGIN_MIN, NOISE_MARGIN * self.noise)

    def observe(self, ratio: float) -> None:
        error = ratio / self.value
        error = min(max(error, 1 / OUTLIER), OUTLIER)
        self._count += 1
        weight = max(WEIGHT_SLOWER if error > 1 + MARGIN_MIN else WEIGHT_MIN, 1 / (1 + self._count))
        self.value *= 1 + weight * (error - 1)
        self.noise += weight * (abs(error - 1) - self.noise)


class Pacer:
    """Bounds a step by `tpot_ms_target`, the time from one token of a stream to its next that 99 of 100 should clear.

    Without a target, or before the cost is known, there is no bound.
    """

    def __init__(self, tpot_ms_target: float | None = None, cost: Cost | None = None) -> None:
        self.target = tpot_ms_target
        self.cost = cost
        self._decoding = _Factor()
        self._mixed = _Factor()

    @property
    def bounds(self) -> bool:
        """Whether there is a bound."""
        return self.target is not None and self.cost is not None

    def room(self, decodes: int, context: int, start: int, late: bool = False) -> int:
        """Prompt tokens that a step may carry beside `decodes` sequences with `context` tokens in all.

        `start`: where the first of the prefills goes on. `late`: one of them is about to miss its own target, and the
        margin for noise is used up for it.
        """
        if self.target is None or self.cost is None or decodes == 0:
            return 1 << 30
        aim = self.target if late else self.target / (1 + self._mixed.margin)
        left = aim / self._mixed.value - self.cost.ms(Load(decodes, decodes, context))
        return max(PREFILL_MIN, self.cost.prefill_within(left, start))

    def admits(self, sequences: int, context: int) -> bool:
        """Whether a batch of so many sequences, with `context` tokens in all, decodes within the target."""
        if self.target is None or self.cost is None or sequences <= 1:
            return True
        expected = self._decoding.value * self.cost.ms(Load(sequences, sequences, context))
        return expected * (1 + self._decoding.margin) <= self.target

    def observe(self, load: Load, ms: float) -> None:
        """A step with this load took `ms`."""
        if self.cost is not None:
            factor = self._mixed if load.prefill else self._decoding
            factor.observe(ms / max(self.cost.ms(load), 1e-6))

    def expected_ms(self, load: Load) -> float:
        """What a step with this load should take; 0 if that is not known."""
        if self.cost is None:
            return 0.0
        return (self._mixed if load.prefill else self._decoding).value * self.cost.ms(load)
