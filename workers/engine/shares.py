"""How the prompt tokens of a step are parted among the sequences that lack them."""

from workers.engine.sequence import Sequence


def shares(prefills: list[Sequence], room: int) -> list[tuple[Sequence, int]]:
    """(sequence, tokens) of those that get any.

    `room` is parted among the tenants by weight, and a tenant's part among its sequences in their order; what one does
    not need, the others get in order.
    """
    owed = [len(sequence.tokens) - sequence.computed for sequence in prefills]
    if sum(owed) <= room:
        return list(zip(prefills, owed, strict=True))
    weights = {sequence.account: sequence.account.limits.weight for sequence in prefills}
    total = sum(weights.values())
    parts = {account: int(room * weight / total) for account, weight in weights.items()}
    counts = []
    for sequence, most in zip(prefills, owed, strict=True):
        count = min(most, parts[sequence.account])
        parts[sequence.account] -= count
        counts.append(count)
    left = room - sum(counts)
    for place, most in enumerate(owed):
        more = min(most - counts[place], left)
        counts[place] += more
        left -= more
    return [(sequence, count) for sequence, count in zip(prefills, counts, strict=True) if count]
