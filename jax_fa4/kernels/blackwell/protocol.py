"""What the roles of the Blackwell forward wait for, arrive at and touch, step by step, for the model of `model.py`.

It says again, without arithmetic, what the device code does; buffers and counts come of the plan. Each stage's softmax
warpgroup, the correction's part for it, every copy and the tensor core (whose products are done in the order of their
issue) are agents of their own; with a pair of CTAs there are two of all but the tensor core and its warp. With several
items the agents do one after the other; with cluster launch control the hardware that answers is one more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jax_fa4.kernels.blackwell.geometry import ANSWERS, FRAGMENTS, HEAD_FRAGMENTS, KEY_TILE, STAGES, WARPS_PER_GROUP
from jax_fa4.kernels.model import Action, Arrive, Touch, Wait
from jax_fa4.kernels.plan import KernelPlan

HEAD_COLUMNS = KEY_TILE // 2 * HEAD_FRAGMENTS // FRAGMENTS  # of the probs, two keys to a column


@dataclass(frozen=True)
class Item:
    """An item, and what came before it in its CTA.

    Attributes:
        steps: key tiles that it visits.
        number: items before.
        visiting: of these, with steps.
        done: steps before.
    """

    steps: int
    number: int
    visiting: int
    done: int

    @staticmethod
    def each(steps: Sequence[int]) -> list[Item]:
        """The items of a CTA by their steps."""
        before = [steps[:number] for number in range(len(steps))]
        return [
            Item(steps[number], number, sum(one > 0 for one in past), sum(past)) for number, past in enumerate(before)
        ]


class Protocol:
    """The programs of a CTA, or a pair, for items with so many key tiles each."""

    def __init__(self, plan: KernelPlan, *steps: int) -> None:
        self.plan, self.items = plan, Item.each(steps)
        self.ctas = plan.cluster[1]
        self.has_own_probs, scheduling = bool(plan.option("own_probs")), plan.option("scheduling")
        self.has_many_items, self.has_answers = scheduling != "grid", scheduling == "cluster"
        self.programs: dict[str, list[Action]] = defaultdict(list)
        self.counts = self._counts()
        self.issued = 0
        if self.has_answers:
            self._schedule()
        for rank in range(self.ctas):
            self.programs[f"correction {rank}"] += [self._allow_output(rank, stage) for stage in range(STAGES)]
        for item in self.items:
            for rank in range(self.ctas):
                self._load_item(rank, item)
                for stage in range(STAGES):
                    self._softmax(rank, stage, item)
                self._correction(rank, item)
                self._epilogue(rank, item)
            self._mma_item(item)

    def event(self, name: str, stage: int, rank: int = 0) -> str:
        """An event's name; what only a warp of the first CTA waits for is that CTA's."""
        waiters = next(one.waiters for one in self.plan.events if one.name == name)
        return f"{name}[{stage}] of CTA {0 if waiters in (('mma',), ('schedule',)) else rank}"

    def _counts(self) -> dict[str, int]:
        # Copies of both CTAs count as well, and the one answer.
        copies = {event.name: self.ctas for event in self.plan.events if event.bytes} | {"item_known": 1}
        counts = {
            self.event(event.name, stage, rank): event.count + copies.get(event.name, 0)
            for event in self.plan.events
            for stage in range(event.stages)
            for rank in range(self.ctas)
        }
        # A warp of the softmax tells its correction warp through a named barrier at which both arrive.
        counts |= {f"told[{stage}] of CTA {rank}": 2 for stage in range(STAGES) for rank in range(self.ctas)}
        return counts

    def columns(self, buffer: str, rank: int, is_write: bool, begin: int = 0, end: int | None = None) -> Touch:
        """Columns [begin, end) of a buffer of tensor memory."""
        found = next(one for one in self.plan.tensor_memory if one.name == buffer)
        last = found.columns if end is None else end
        return Touch(f"tensor memory {rank}", found.begin + begin, found.begin + last, is_write)

    def stage_of(self, buffer: str, stage: int, rank: int, is_write: bool) -> Touch:
        """A stage of a shared buffer."""
        size = next(one.bytes for one in self.plan.shared if one.name == buffer)
        begin = self.plan.shared_offsets[buffer] + stage * size
        return Touch(f"shared memory {rank}", begin, begin + size, is_write)

    def stages(self, ring: str) -> int:
        """Stages of a ring."""
        return next(one.stages for one in self.plan.shared if one.name == ring)

    def _schedule(self) -> None:
        """The scheduling warps, and the hardware."""
        for use in range(len(self.items)):
            stage, turn = use % ANSWERS, use // ANSWERS
            self.counts[f"question {use}"] = 1
            self.programs["hardware"].append(Wait(f"question {use}", 0))
            for rank in reversed(range(self.ctas)):
                known, program = self.event("item_known", stage, rank), self.programs[f"schedule {rank}"]
                program.append(Arrive(known))
                if rank == 0:
                    if turn > 0:
                        program.append(Wait(self.event("item_taken", stage), turn - 1))
                    program.append(Arrive(f"question {use}"))
                self.programs["hardware"] += [self.stage_of("answers", stage, rank, is_write=True), Arrive(known)]
                program += [Wait(known, turn), self.stage_of("answers", stage, rank, is_write=False)]
                if rank != 0:
                    program.append(Arrive(self.event("item_taken", stage)))

    def _take(self, agent: str, rank: int, item: Item, warps: int) -> None:
        """At the end of an item: the answer to the item's question."""
        if self.has_answers:
            stage, turn = item.number % ANSWERS, item.number // ANSWERS
            self.programs[agent].append(Wait(self.event("item_known", stage, rank), turn))
            self.programs[agent].append(self.stage_of("answers", stage, rank, is_write=False))
            self.programs[agent].append(Arrive(self.event("item_taken", stage), warps))

    def _load_item(self, rank: int, item: Item) -> None:
        first = item.done
        if item.steps:
            self._copy(rank, "keys", first)
        for stage in range(STAGES):
            free = self.event("query_free", stage, rank) if self.has_many_items else ""
            if self.has_many_items and item.number > 0:
                self.programs[f"load {rank}"].append(Wait(free, item.number - 1))
            if self.has_many_items:
                self.programs[f"load {rank}"].append(Arrive(free))
            if item.steps:
                self._copy(rank, "query", stage + STAGES * item.visiting)
        for step in range(1, item.steps):
            pair = [("values", first + step - 1), ("keys", first + step)]
            for name, use in pair[::-1] if self.has_own_probs else pair:
                self._copy(rank, name, use)
        if item.steps:
            self._copy(rank, "values", first + item.steps - 1)
        self._take(f"load {rank}", rank, item, 1)

    def _copy(self, rank: int, name: str, use: int) -> None:
        stages = STAGES if name == "query" else self.stages(name)
        stage, turn = use % stages, use // stages
        load, copy = self.programs[f"load {rank}"], self.programs[f"copy of {name} {use} by CTA {rank}"]
        if turn > 0 and name != "query":
            load.append(Wait(self.event(f"{name}_free", stage, rank), turn - 1))
        landed, start = self.event(f"{name}_landed", stage, rank), f"start of {name} {use} by CTA {rank}"
        if rank == 0:
            load.append(Arrive(landed))
        self.counts[start] = 1
        load.append(Arrive(start))
        copy += [Wait(start, 0), self.stage_of(name, stage, rank, is_write=True), Arrive(landed)]

    def _softmax(self, rank: int, stage: int, item: Item) -> None:
        program, told = self.programs[f"softmax {rank}.{stage}"], Arrive(f"told[{stage}] of CTA {rank}")
        for step in range(item.steps):
            program.append(Wait(self.event("scores_ready", stage, rank), item.done + step))
            program.append(self.columns(f"scores_{stage}", rank, is_write=False))
            if self.has_own_probs:
                program.append(Arrive(self.event("scores_read", stage, rank), WARPS_PER_GROUP))
                if step > 0:
                    use = item.done - item.visiting + step - 1
                    program.append(Wait(self.event("out_updated", stage, rank), use))
            if step > 0:
                program += [self.stage_of("factors", stage, rank, is_write=True), told]
            program.append(self.columns(f"probs_{stage}", rank, True, 0, HEAD_COLUMNS))
            program.append(Arrive(self.event("output_ready", stage, rank), WARPS_PER_GROUP))
            program.append(self.columns(f"probs_{stage}", rank, True, HEAD_COLUMNS))
            program.append(Arrive(self.event("probs_ready", stage, rank), WARPS_PER_GROUP))
        if item.steps:
            program.append(Wait(self.event("out_done", stage, rank), item.visiting))
            program += [self.stage_of(name, stage, rank, is_write=True) for name in ("sums", "maxima")]
            program.append(told)
        self._take(f"softmax {rank}.{stage}", rank, item, WARPS_PER_GROUP)

    def _allow_output(self, rank: int, stage: int) -> Arrive:
        return Arrive(self.event("output_ready", stage, rank), WARPS_PER_GROUP)

    def _correction(self, rank: int, item: Item) -> None:
        program = self.programs[f"correction {rank}"]

        def hear(stage: int, use: int) -> None:
            event = f"told[{stage}] of CTA {rank}"
            program.extend([Arrive(event), Wait(event, item.done + use)])

        for step in range(1, item.steps):
            for stage in range(STAGES):
                hear(stage, step - 1)
                program.append(self.stage_of("factors", stage, rank, is_write=False))
                program.append(self.columns(f"out_{stage}", rank, is_write=True))
                program.append(self._allow_output(rank, stage))
        for stage in range(STAGES):
            if item.steps:
                hear(stage, item.steps - 1)
                program += [self.stage_of(name, stage, rank, is_write=False) for name in ("sums", "maxima")]
            if self.has_many_items and item.number > 0:
                program.append(Wait(self.event("query_free", stage, rank), item.number - 1))
            if item.steps:
                program.append(Wait(self.event("out_done", stage, rank), item.visiting))
                program.append(self.columns(f"out_{stage}", rank, is_write=False))
            program.append(self.stage_of("staged_out", stage, rank, is_write=True))
            if item.steps and self.has_many_items:
                program.append(self._allow_output(rank, stage))
            program.append(Arrive(self.event("out_staged", stage, rank), WARPS_PER_GROUP))
        self._take(f"correction {rank}", rank, item, WARPS_PER_GROUP)

    def _epilogue(self, rank: int, item: Item) -> None:
        program = self.programs[f"epilogue {rank}"]
        for stage in range(STAGES):
            program.append(Wait(self.event("out_staged", stage, rank), item.number))
            program.append(self.stage_of("staged_out", stage, rank, is_write=False))
            if self.has_many_items:
                program.append(Arrive(self.event("query_free", stage, rank)))
        self._take(f"epilogue {rank}", rank, item, 1)

    def _mma_item(self, item: Item) -> None:
        if item.steps:
            self._await("keys_landed", item.done)
            for stage in range(STAGES):
                self._wait("query_landed", stage, item.visiting)
                self._multiply_keys(stage, item.done)
            self._free("keys", item.done)
            for step in range(item.steps - 1):
                self._step(item.done + step)
            last = item.done + item.steps - 1
            self._await("values_landed", last)
            for stage in range(STAGES):
                self._multiply_values(stage, last)
                if stage == 1 and self.has_many_items:
                    self._free("values", last)
                self._commit("out_done", stage)
        self._take("mma", 0, item, 1)

    def _step(self, step: int) -> None:
        if self.has_own_probs:
            self._await("keys_landed", step + 1)
            for stage in range(STAGES):
                self._wait("scores_read", stage, step)
                self._multiply_keys(stage, step + 1)
            self._free("keys", step + 1)
            self._await("values_landed", step)
            for stage in range(STAGES):
                self._multiply_values(stage, step)
                self._commit("out_updated", stage)
            self._free("values", step)
            return
        self._await("values_landed", step)
        for stage in range(STAGES):
            self._multiply_values(stage, step)
            if stage == 0:
                self._await("keys_landed", step + 1)
            else:
                self._free("values", step)
            self._multiply_keys(stage, step + 1)
        self._free("keys", step + 1)

    def _wait(self, name: str, stage: int, use: int) -> None:
        self.programs["mma"].append(Wait(self.event(name, stage), use))

    def _await(self, name: str, use: int) -> None:
        stages = self.stages(name.removesuffix("_landed"))
        self._wait(name, use % stages, use // stages)

    def _issue(self, actions: list[Action]) -> None:
        """The tensor core does these when the warp has issued them and all before is done."""
        start = f"issue {self.issued}"
        self.issued += 1
        self.counts[start] = 1
        self.programs["mma"].append(Arrive(start))
        self.programs["tensor core"] += [Wait(start, 0), *actions]

    def _multiply_keys(self, stage: int, step: int) -> None:
        touches: list[Action] = []
        for rank in range(self.ctas):
            touches.append(self.stage_of("query", stage, rank, is_write=False))
            touches.append(self.stage_of("keys", step % self.stages("keys"), rank, is_write=False))
            touches.append(self.columns(f"scores_{stage}", rank, is_write=True))
        self._issue(touches)
        self._commit("scores_ready", stage)

    def _multiply_values(self, stage: int, step: int) -> None:
        for name, columns in (("output_ready", (0, HEAD_COLUMNS)), ("probs_ready", (HEAD_COLUMNS, KEY_TILE // 2))):
            self._wait(name, stage, step)
            touches: list[Action] = []
            for rank in range(self.ctas):
                touches.append(self.columns(f"probs_{stage}", rank, False, *columns))
                touches.append(self.stage_of("values", step % self.stages("values"), rank, is_write=False))
                touches.append(self.columns(f"out_{stage}", rank, is_write=True))
            self._issue(touches)

    def _commit(self, name: str, stage: int) -> None:
        self._issue([Arrive(self.event(name, stage, rank)) for rank in range(self.ctas)])

    def _free(self, ring: str, use: int) -> None:
        self._commit(f"{ring}_free", use % self.stages(ring))
