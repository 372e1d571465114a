"""How often each token occurs in a sequence, kept up to date token by token and read as arrays."""

from collections.abc import Sequence

import numpy as np

from shared.wire import Sampling

CAPACITY = 64  # of an array at first; it doubles


def penalises(sampling: Sampling) -> bool:
    """Whether a token's chance depends on those before it by more than the model."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


class Counts:
    """Counts of the output's tokens, and the set of those of prompt and output together."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.counted = 0  # output tokens
        self._places: dict[int, int] = {}  # of a token in `_output`
        self._output = np.empty(CAPACITY, dtype=np.int64)
        self._times = np.empty(CAPACITY, dtype=np.float32)
        seen = sorted(set(prompt))
        self._known = set(seen)
        self._seen = np.array(seen, dtype=np.int64)

    @property
    def output(self) -> np.ndarray:
        """[n] int64: the different tokens of the output."""
        return self._output[: len(self._places)]

    @property
    def times(self) -> np.ndarray:
        """[n] float32: how often each of `output` occurs."""
        return self._times[: len(self._places)]

    @property
    def seen(self) -> np.ndarray:
        """[m] int64: the different tokens of prompt and output."""
        return self._seen[: len(self._known)]

    def add(self, tokens: Sequence[int]) -> None:
        """Count further tokens of the output."""
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == len(self._output):
                    self._output, self._times = _grown(self._output), _grown(self._times)
                self._output[place], self._times[place] = token, 0
            self._times[place] += 1
            if token not in self._known:
                if len(self._known) == len(self._seen):
                    self._seen = _grown(self._seen)
                self._seen[len(self._known)] = token
                self._known.add(token)
        self.counted += len(tokens)


def _grown(array: np.ndarray) -> np.ndarray:
    larger = np.empty(max(CAPACITY, 2 * len(array)), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
