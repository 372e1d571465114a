"""Which tokens the next step computes. Pure: no torch, no clock, no thread.

One rule instead of two phases (after vLLM V1): the computed part of a sequence catches up with its tokens. A decode is a
sequence that lacks one token; a prompt, the rest of a chunked prompt, a resumed prefix and a preempted sequence all lack more;
what the prefix cache has is computed already. `plan` and `commit` are the only places where a sequence moves on.
"""

from collections import OrderedDict

from workers.engine.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from workers.engine.fairness import Account, TenantLedger
from workers.engine.pacer import Pacer
from workers.engine.prefix import PrefixCache
from workers.engine.request import TenantLimits
from workers.engine.sequence import Load, Sequence, Slice, StepPlan, load_of
from workers.engine.shares import shares

PREEMPTIONS_MAX = 3  # of one sequence: then nobody is admitted before it, and others leave rather than it
RESIDENCE_WEIGHT = 0.1  # of the newest in the moving mean
UNLIMITED = TenantLimits()


class Scheduler:
    """Slots and blocks, and the sequences that have or await them.

    Every sequence given to `add` must fit into its tenant's part of the pool on its own (`capacity`): then a plan is never
    empty while a sequence is here.
    """

    def __init__(
        self,
        pool: BlockPool,
        slots: int,
        prefill_chunk: int,
        reserved_fraction: float = 0.0,
        length_max: int = 0,
        pacer: Pacer | None = None,
        prefix_cache: str = "tenant",
    ) -> None:
        """`reserved_fraction`: of slots and of blocks, out of reach of any single tenant; but it may always have a sequence of
        `length_max` tokens. `prefix_cache`: "tenant" (nobody is served what another computed: timing would tell), "shared"
        or "off".
        """
        assert slots >= 1
        assert prefill_chunk >= 1
        self.pool = pool
        self.slots = slots
        self.cache = PrefixCache(pool, prefix_cache)
        self.slots_limit = slots  # below `slots` once a step did not fit into memory
        self.ledger: TenantLedger[Sequence] = TenantLedger(slots - int(slots * reserved_fraction))
        self.pacer = pacer or Pacer()
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # in the order of admission
        self.detached: OrderedDict[Sequence, None] = OrderedDict()  # of these, the detached ones
        self.preemptions = 0
        self.steps = 0
        self.blocked = (
            False  # some wait for a slot, memory or a smaller batch, not only for caps that leave others a part
        )
        self.short = False  # one of these waits for a slot, memory or a smaller batch that nobody can leave it
        self.late = False  # a prefill is about to miss its target: whoever has a clock says so before `plan`
        self.places = 0  # sequences in the batch of the last plan
        self.residence = 0.0  # steps from admission to the end: a moving mean
        self._slots_reserved = int(slots * reserved_fraction)
        self._blocks_max = max(
            pool.total - int(pool.total * reserved_fraction), min(pool.total, blocks_for(length_max))
        )
        self._prefill_chunk = prefill_chunk
        self._free_slots = list(range(slots - 1, -1, -1))
        self._suspects: OrderedDict[Sequence, None] = OrderedDict()
        self._worn: OrderedDict[Sequence, None] = OrderedDict()  # preempted often: they come first and stay
        self._growing: list[Sequence] = []  # may need a block for their next token
        self._yielded: list[Sequence] = []  # detached ones that left for others in this plan
        self._stood_back = False  # in the last step some prompts had nothing: see `_first_to_begin`

    @property
    def waiting(self) -> int:
        """Sequences that wait for the batch, but for the detached ones."""
        return self.ledger.waiting + sum(suspect.slot < 0 for suspect in self._suspects)

    @property
    def idle(self) -> bool:
        return not (self.running or self.ledger.waiting or self.ledger.detached or self._suspects)

    def capacity(self, limits: TenantLimits) -> int:
        """Tokens of the longest sequence that a tenant with these limits can ever have."""
        return self._blocks_cap(limits) * BLOCK_TOKENS

    def add(self, sequence: Sequence, limits: TenantLimits = UNLIMITED) -> None:
        """`sequence` begins to wait."""
        assert sequence.length_max <= self.capacity(limits), f"{sequence.length_max} tokens can never fit"
        self.ledger.add(sequence, sequence.tenant, limits)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended: its slot and blocks are free from here on."""
        self._suspects.pop(sequence, None)
        self._worn.pop(sequence, None)
        if sequence.slot >= 0:
            stayed = self.steps - sequence.entered
            self.residence += (RESIDENCE_WEIGHT if self.residence else 1.0) * (stayed - self.residence)
            self._release(sequence)
        self.ledger.remove(sequence)

    def plan(self) -> StepPlan:
        """The next step: every decode, then unfinished prefills, then admissions, at last of detached sequences."""
        self.steps += 1
        self._yielded.clear()
        if self._suspects:
            return self._plan_alone()
        preempted, admits = self._grow() if self._growing else (0, True)
        slices: list[Slice] = []
        prefills: list[Sequence] = []
        room, context = self._prefill_chunk, 0
        for sequence in self.running:
            length = len(sequence.tokens)
            if length - sequence.computed != 1:
                prefills.append(sequence)
                continue
            context += length
            if sequence.draft:
                slices.append(_guess(sequence, length, room))
                room -= len(slices[-1].draft)
            else:
                slices.append(Slice(sequence, length - 1, 1, True))
        decodes = len(slices) + self._prefill_chunk - room
        load = Load(len(slices), decodes, context) if self.pacer.bounds else None
        self.blocked = self.short = not admits
        if prefills or self.ledger.waiting or self.ledger.detached:
            if load is not None:
                start = prefills[0].computed if prefills else 0
                room = min(room, self.pacer.room(load.decodes, load.context, start, self.late))
            self._prefill(slices, prefills, max(1, room), admits)
            load = load_of(slices, load if not self._yielded else None) if load is not None else None
        self.places = len(self.running)
        return StepPlan(slices, preempted + len(self._yielded), load)

    def commit(self, plan: StepPlan, tokens: list[int], counts: list[int] | None = None) -> None:
        """The step is done. `tokens` were sampled, in the order of the slices that sample.

        Each of those drew one, or as many as `counts` says: 1 and one more for each token of its draft that was right.
        """
        drawn = iter(tokens)
        several = iter(counts) if counts is not None else None
        for part in plan.slices:
            sequence, start = part.sequence, part.start
            end = start + part.count
            if part.draft:
                end -= len(part.draft)
            if part.samples:
                sequence.tokens.append(next(drawn))
                sequence.account.output += 1
                if several is not None and (more := next(several) - 1):
                    assert 0 < more <= len(part.draft), f"{more + 1} tokens for a draft of {len(part.draft)}"
                    sequence.tokens += [next(drawn) for _ in range(more)]
                    sequence.account.output += more
                    end += more
                if sequence.alone:
                    sequence.alone = False
                    del self._suspects[sequence]
            sequence.computed = end
            if end // BLOCK_TOKENS != start // BLOCK_TOKENS:
                self._growing.append(sequence)
                self.cache.completed(sequence, start // BLOCK_TOKENS, end // BLOCK_TOKENS)

    def outlook(self) -> tuple[int, Load]:
        """How many of the next plans are sure to be a token for each in the batch and nothing else, and the load of the first.

        That holds as long as nobody is added, removed or given a draft; 0: not known. For whoever knows what such a step
        takes and need not see it: a simulation can `decode` them at once. At most one block less than a block's tokens.
        """
        running, steps, context = self.running, BLOCK_TOKENS - 1, 0
        load = Load(len(running), len(running))
        waiting = self.ledger.waiting or self.ledger.detached
        if self._suspects or (waiting and len(running) < self.slots_limit) or (self.ledger.waiting and self.detached):
            return 0, load
        for sequence in running:
            length = len(sequence.tokens)
            if length - sequence.computed != 1 or sequence.draft:
                return 0, load
            steps = min(steps, sequence.length_max - length)
            context += length
        load.context = context
        # each begins one block at most in so many steps
        if not running or self.pool.free < len(running):
            return 0, load
        for account in self.ledger.active:
            if account.slots > 1 and account.blocks + account.slots > self._blocks_cap(account.limits):
                return 0, load
        return steps, load

    def decode(self, steps: int, token: int = 0) -> None:
        """`plan` and `commit` so many times, of what `outlook` said: each in the batch draws `token` in each of them.

        The result is the same to the last block.
        """
        if self._growing:
            self._grow()
        crossing: dict[int, list[Sequence]] = {}
        drawn = [token] * steps
        for account in self.ledger.active:
            account.output += steps * account.slots
        for sequence in self.running:
            computed = sequence.computed
            crosses = BLOCK_TOKENS - computed % BLOCK_TOKENS  # the step that completes its block
            if crosses <= steps:
                crossing.setdefault(crosses, []).append(sequence)
            sequence.tokens += drawn
            sequence.computed = computed + steps
        for step in sorted(crossing):
            if self._growing:
                self._grow()
            self._growing = crossing[step]
            for sequence in self._growing:
                end = (sequence.computed - steps + step) // BLOCK_TOKENS
                self.cache.completed(sequence, end - 1, end)
        if self._growing and steps not in crossing:
            self._grow()
        self.steps += steps
        self.blocked = self.ledger.waiting > 0
        self.places = len(self.running)

    def suspect(self, sequence: Sequence) -> None:
        """A step with this sequence raised: compute it anew, alone, before anything else goes on."""
        sequence.failures += 1
        sequence.alone = True
        self.pool.forget(sequence.blocks)  # what it computed may be the cause, and must not spread
        self._release(sequence)
        self._suspects[sequence] = None

    @property
    def limits(self) -> str:
        return f"{self.slots_limit} slots, {self._prefill_chunk} tokens of prompts"

    def shrink(self, plan: StepPlan) -> bool:
        """This step did not fit into memory: plan smaller ones from now on. False if there are none smaller."""
        prefill = sum(part.count for part in plan.slices if part.count > 1)
        if prefill:
            self._prefill_chunk = max(1, prefill // 2)
            return True
        if len(plan.slices) == 1:
            return False
        self.slots_limit = len(plan.slices) // 2
        while len(self.running) > self.slots_limit:
            self._preempt(self._leaver())
        return True

    def check(self) -> None:
        """Assert that every block and slot is either free or held by exactly the sequences in the batch."""
        self.pool.check()
        self.ledger.check(self.running)
        held = {block for sequence in self.running for block in sequence.blocks}
        assert len(held) == self.pool.used, f"{len(held)} blocks held, {self.pool.used} used"
        assert list(self.detached) == [sequence for sequence in self.running if sequence.detached]
        slots = [sequence.slot for sequence in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.slots)), f"slots {sorted(slots)}"
        for sequence in self.running:
            assert sequence.computed < len(sequence.tokens) <= sequence.length_max
            assert sequence.computed <= len(sequence.blocks) * BLOCK_TOKENS
        self.cache.check()

    # -- the batch ---------------------------------------------------------------------------------------------------

    def _grow(self) -> tuple[int, bool]:
        """A block for each decode that begins one; sequences leave the batch while there are too few.

        How many left, and whether others may be admitted in this step: where it was a tenant's own cap, others may.
        """
        preempted, admits = 0, True
        growing, self._growing = self._growing, []
        for sequence in growing:
            while sequence.slot >= 0 and len(sequence.tokens) > len(sequence.blocks) * BLOCK_TOKENS:
                victim = self._victim(sequence, 1)
                if victim is None:
                    sequence.blocks += self.pool.take(1, sequence.blocks[-1], sequence.account)
                    continue
                if self.pool.free:
                    victim.account.preempted = self.steps
                else:
                    admits = False
                self._preempt(victim)
                preempted += 1
        return preempted, admits

    def _prefill(self, slices: list[Slice], prefills: list[Sequence], room: int, admits: bool) -> None:
        """Share `room` tokens among `prefills` and whoever else can be admitted; add their slices.

        Detached sequences have what the others leave.
        """
        first = [sequence for sequence in prefills if not sequence.detached]
        owed = _owed(first)
        while admits:
            # One tenant's long prompt does not keep all others out: when it takes the whole step, another's may enter.
            besides = None
            if owed >= room:
                besides = first[0].account
                if any(sequence.account is not besides for sequence in first):
                    break
            admitted = self._admit(besides)
            if admitted is None:
                break
            first.append(admitted)
            owed += len(admitted.tokens) - admitted.computed
        if self._yielded:
            slices[:] = [part for part in slices if part.sequence.slot >= 0]
        first = self._first_to_begin(first, room)
        rest = [sequence for sequence in prefills if sequence.detached and sequence.slot >= 0]
        room_left = 0 if self._stood_back else max(0, room - owed)
        if room_left and not self.short and self.ledger.detached:
            self._fill(rest, room_left)
        for sequence, count in shares(first, room) + shares(rest, room_left):
            start = sequence.computed
            slices.append(Slice(sequence, start, count, start + count == len(sequence.tokens)))

    def _first_to_begin(self, prefills: list[Sequence], room: int) -> list[Sequence]:
        """Whose prompts the step carries: only those of tenants with nothing else in the batch, where it can do all of these.

        It is shorter for them without the others, which stand back for one step at a time.
        """
        alone = [sequence for sequence in prefills if sequence.account.slots == 1]
        self._stood_back = not self._stood_back and 0 < len(alone) < len(prefills) and _owed(alone) <= room
        return alone if self._stood_back else prefills

    def _fill(self, prefills: list[Sequence], room: int) -> None:
        """Admit detached sequences, by the ledger, to what is left of the step, of slots and of memory."""
        owed = _owed(prefills)
        while owed < room and len(self.running) < self.slots_limit:
            admitted = None
            for account in self.ledger.order(detached=True):
                sequence = next(iter(account.detached))
                if self.ledger.at_cap(account, detached=True) or sequence in self._yielded:
                    continue
                if not self.cache.is_awaited(sequence):
                    admitted = self._try(sequence, in_turn=True)
                    if admitted is not None or not sequence.capped:
                        break
            if admitted is None:
                return
            prefills.append(admitted)
            owed += len(admitted.tokens) - admitted.computed

    def _plan_alone(self) -> StepPlan:
        sequence = next(iter(self._suspects))
        preempted = 0
        if sequence.slot < 0:
            while (victim := self._victim(sequence, blocks_for(len(sequence.tokens)))) is not None:
                self._preempt(victim)
                preempted += 1
            self._enter(sequence, [], in_turn=False)
        start = sequence.computed
        count = min(len(sequence.tokens) - start, self._prefill_chunk)
        return StepPlan([Slice(sequence, start, count, start + count == len(sequence.tokens))], preempted)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, besides: Account[Sequence] | None) -> Sequence | None:
        """Let the next sequence in. `besides`: not of this tenant, if it is its turn nobody enters."""
        if not self.ledger.waiting:
            return None
        if len(self.running) >= self.slots_limit and not self.detached:
            self.blocked = self.short = True
            return None
        worn = next((each for each in self._worn if each.slot < 0), None)
        if worn is not None:
            return self._try(worn, in_turn=False)
        capped = False
        for account in self.ledger.order():
            if account is besides:
                return None
            sequence = next(iter(account.waiting))
            if self.ledger.at_cap(account) or account.preempted == self.steps:
                capped = True
            elif not self.cache.is_awaited(sequence):
                entered = self._try(sequence, in_turn=True)
                if entered is not None or self.blocked:
                    return entered
                capped = capped or sequence.capped
            account.backlogged = None  # passed over: it is not the others that it waits for
        self.blocked = capped and not self._slots_reserved
        return None

    def _try(self, sequence: Sequence, in_turn: bool) -> Sequence | None:
        """Let `sequence` in, if it has the memory for all its tokens. If what it lacks is memory or pace, `blocked` is set.

        Unless it is detached itself, those that are leave the batch for it.
        """
        pool, account = self.pool, sequence.account
        while self.running and not self._is_paced(sequence):
            sequence.capped = False
            if not self._yields_to(sequence, None):
                self._note_short(sequence)
                return None
        if self.running and sequence.lacked == pool.returned and (sequence.detached or not self.detached):
            self._note_short(sequence)
            return None
        while True:
            found = self.cache.find(sequence)
            if found is None:
                return None
            taken = blocks_for(len(sequence.tokens)) - len(found) + pool.idle(found)
            cap = self._blocks_cap(account.limits)
            sequence.capped = account.slots > 0 and account.blocks + taken + account.slots > cap
            if not sequence.capped and (not self.running or taken + self._growth(sequence.preemptions) <= pool.free):
                break
            if not self._yields_to(sequence, account if sequence.capped else None):
                sequence.lacked = pool.returned
                self._note_short(sequence)
                return None
        if self.ledger.at_cap(account, detached=True):
            self._yields_to(sequence, account)
        self._enter(sequence, found, in_turn)
        return sequence

    def _note_short(self, sequence: Sequence) -> None:
        """`sequence` cannot enter; for its tenant's cap that is its own affair, and a detached one keeps nobody waiting."""
        if not (sequence.capped or sequence.detached):
            self.blocked = self.short = True

    def _is_paced(self, sequence: Sequence) -> bool:
        """Whether there is a slot for one more, and steps with it are in time.

        A tenant that has none in the batch enters on top of that, as far as slots are reserved: where pace and not slots is
        what is short, the others' sequences are not to end first, of which a disturbed step makes it wait for many.
        """
        running = len(self.running)
        if running >= self.slots_limit:
            return False
        if not self.pacer.bounds:
            return True
        context = sum([len(each.tokens) for each in self.running]) + len(sequence.tokens)
        on_top = self._slots_reserved if not (sequence.account.slots or sequence.detached) else 0
        return self.pacer.admits(running + 1 - on_top, context)

    def _yields_to(self, sequence: Sequence, account: Account[Sequence] | None) -> bool:
        """Whether a detached sequence has left the batch for `sequence`; `account`: one of that tenant."""
        if sequence.detached:
            return False
        candidates = [each for each in self.detached if account is None or each.account is account]
        if not candidates:
            return False
        victim = self.ledger.victim(candidates)
        self._put_back(victim)
        self._yielded.append(victim)
        return True

    def _growth(self, doublings: int) -> int:
        """Blocks that must stay free for those in the batch: without them, an admission would end in preemption.

        Each of them soon needs one more, as far as its tenant's cap lets it. Whoever was preempted for lack of them comes back
        when there are twice as many, and so on.
        """
        doublings = min(doublings, PREEMPTIONS_MAX)
        return sum(
            min(account.slots << doublings, max(0, self._blocks_cap(account.limits) - account.blocks))
            for account in self.ledger.active
        )

    def _blocks_cap(self, limits: TenantLimits) -> int:
        return self._blocks_max if limits.blocks_max is None else min(self._blocks_max, limits.blocks_max)

    def _enter(self, sequence: Sequence, found: list[int], in_turn: bool) -> None:
        pool, account = self.pool, sequence.account
        sequence.slot = self._free_slots.pop()
        pool.share(found, account)
        after = sequence.slot * pool.total // self.slots - 1  # where this slot's blocks are likely to be contiguous
        if found and pool.follows(found[-1]):
            after = found[-1]
        sequence.blocks = found + pool.take(blocks_for(len(sequence.tokens)) - len(found), after, account)
        sequence.computed = len(found) * BLOCK_TOKENS
        sequence.entered = self.steps
        self.running[sequence] = None
        if sequence.detached:
            self.detached[sequence] = None
        uncached = len(sequence.tokens) - sequence.computed if sequence.cached < 0 else 0  # else charged before
        self.ledger.admit(sequence, uncached, in_turn)
        self.cache.entered(sequence)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _victim(self, sequence: Sequence, count: int) -> Sequence | None:
        """Who leaves, so that `sequence` can take `count` blocks more; None: it can."""
        account = sequence.account
        others = account.slots - (sequence.slot >= 0)
        if others and account.blocks + count > self._blocks_cap(account.limits):
            of_tenant = [each for each in self.running if each.account is account]
            return next((each for each in reversed(of_tenant) if each.detached), of_tenant[-1])
        if count <= self.pool.free:
            return None
        return self._leaver()

    def _leaver(self) -> Sequence:
        fresh = [each for each in self.running if each not in self._worn]
        return self.ledger.victim(self.detached or fresh or self.running)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        if sequence.preemptions >= PREEMPTIONS_MAX and not sequence.detached:
            self._worn[sequence] = None
        self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._release(sequence)
        self.ledger.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.detached.pop(sequence, None)
        self.cache.leaves(sequence)
        self.pool.give_back(sequence.blocks)
        self._free_slots.append(sequence.slot)
        self.ledger.leave(sequence)
        sequence.blocks = []
        sequence.slot = -1
        sequence.computed = 0


def _owed(prefills: list[Sequence]) -> int:
    """Tokens of prompts that these still lack."""
    return sum(len(sequence.tokens) - sequence.computed for sequence in prefills)


def _guess(sequence: Sequence, length: int, room: int) -> Slice:
    """A decode that verifies as much of the draft as there is room for."""
    most = min(room, sequence.length_max - length - 1, len(sequence.blocks) * BLOCK_TOKENS - length)
    draft = sequence.draft[: max(0, most)]
    return Slice(sequence, length - 1, 1 + len(draft), True, draft)
