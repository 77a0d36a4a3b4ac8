"""Helpers of CI's two files of random programs: blocks of programs, each run once, and the text of a failure."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Generator, Iterable

from aotlab.maintenance.fuzz.block import Block, Failure
from aotlab.maintenance.fuzz.plan import BLOCK, Plan
from aotlab.maintenance.fuzz.workers import run_there

#: The programs of CI are the same every time.
FIXED = Plan(seed=4, programs=1000)

#: The number of programs of a fresh block of 200 that may differ from eager. One in some thousands differs; of the
# fixed programs, no program differs. The known open differences are in ``corpus/open``. This limit must only ever be
# lowered.
STILL_DIFFER = 1
#: So many are compiled for every call. The programs are made to be hard: what two in five of them do runs eagerly by
#: design. What people write is counted by `tests.programs.test_census`, where nothing may run eagerly.
COMPILED = 0.58

#: Some behind Dynamo, where a program takes ten times as long; none of them may differ.
BEHIND_DYNAMO = Plan(seed=4, programs=100, dynamo=True)
COMPILED_BEHIND_DYNAMO = 0.65

#: Short ones about two related inputs; of others of their kind one in some hundreds differs.
RELATED = Plan(seed=3, programs=200, related=True)

#: Programs that are compiled once for all sizes and called with several.
SIZES = Plan(seed=4, programs=400, sizes=True)

#: And some that nobody has seen before, so that each run of CI looks at a new corner.
FRESH = Plan(seed=secrets.randbits(32), programs=200)


class Blocks:
    """Some blocks of a plan; each runs on request, in a separate process.

    A program that crashes torch must end neither the tests nor the rest of its block.
    """

    def __init__(self, plan: Plan, numbers: Iterable[int]) -> None:
        self.plan = plan
        self._todo = [(number, dict(plan.blocks())[number]) for number in numbers]
        self._done: dict[int, Block] = {}
        self._running: Generator[Block, None, None] | None = None
        #: A program that was already shrunk is not shrunk again in every block.
        self._known: Counter[str] = Counter()

    def __getitem__(self, number: int) -> Block:
        """Run all blocks up to this one. Failures are reported unshrunk; `aotlab fuzz` shrinks them."""
        if self._running is None:
            self._running = run_there(self.plan, self._todo, self._known, 0.0, lambda _: None, self._failed, jobs=1)
        while number not in self._done:
            block = next(self._running)
            self._done[block.number] = block
        return self._done[number]

    def _failed(self, failure: Failure) -> None:
        self._known[failure.name] += failure.cell is not None

    def close(self) -> None:
        """End the process."""
        if self._running is not None:
            self._running.close()

    def all(self) -> list[Block]:
        """Run them all."""
        return [self[number] for number, _ in self._todo]


def check(plan: Plan, block: Block) -> None:
    """Fail if more programs of a block failed than are allowed, with their texts and a command to repeat them."""
    options = " --dynamo" * plan.dynamo + " --related" * plan.related + " --sizes" * plan.sizes
    options += f" --without {' '.join(plan.without)}" * bool(plan.without)
    again = f"aotlab fuzz{options} --seed {plan.seed} --programs {(block.number + 1) * BLOCK}"
    texts = [failure.cell or f"# {failure.name}" for failure in block.failures]
    told = "\n\n".join([f"{len(texts)} programs failed; to see them again: {again}", *texts])
    assert len(texts) <= (STILL_DIFFER if plan == FRESH else 0), told
    # Programs of which eager itself crashes are left out, and should be next to none.
    assert len(block.rows) >= block.size - 1


def share(blocks: list[Block]) -> tuple[float, dict[str, int]]:
    """Return the share of compiled programs, and the reasons why others were not compiled.

    Programs that raise earlier are not counted, nor are differences that Dynamo alone causes.
    """
    rows = [row for block in blocks for row in block.rows if row.status not in ("alike", "dynamo")]
    reasons: dict[str, int] = {}
    for row in rows:
        for reason in row.reasons:
            reasons[reason] = reasons.get(reason, 0) + 1
    return sum(row.status == "accepted" for row in rows) / len(rows), reasons
