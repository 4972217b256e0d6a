"""What the roles of the Blackwell forward wait for, arrive at and touch, step by step, for the model of `model.py`.

It says again, without arithmetic, what the device code does; buffers and counts come of the plan. Each stage's softmax
warpgroup, the correction's part for it, every copy and the tensor core (whose products are done in the order of their
issue) are agents of their own; with a pair of CTAs there are two of all but the tensor core and its warp.
"""

from __future__ import annotations

from collections import defaultdict

from jax_fa4.kernels.blackwell.geometry import FRAGMENTS, HEAD_FRAGMENTS, KEY_TILE, STAGES, WARPS_PER_GROUP
from jax_fa4.kernels.model import Action, Arrive, Touch, Wait
from jax_fa4.kernels.plan import KernelPlan

HEAD_COLUMNS = KEY_TILE // 2 * HEAD_FRAGMENTS // FRAGMENTS  # of the probs, two keys to a column


class Protocol:
    """The programs of one item with `steps` key tiles."""

    def __init__(self, plan: KernelPlan, steps: int) -> None:
        self.plan, self.steps = plan, steps
        self.ctas = plan.cluster[1]
        self.has_own_probs = bool(plan.option("own_probs"))
        self.programs: dict[str, list[Action]] = defaultdict(list)
        self.counts = self._counts()
        self.issued = 0
        for rank in range(self.ctas):
            self._load(rank)
            for stage in range(STAGES):
                self._softmax(rank, stage)
            self._correction(rank)
            self._epilogue(rank)
        if steps > 0:
            self._mma()

    def event(self, name: str, stage: int, rank: int = 0) -> str:
        """An event's name; what the tensor core's warp waits for is the first CTA's."""
        waiters = next(one.waiters for one in self.plan.events if one.name == name)
        return f"{name}[{stage}] of CTA {0 if waiters == ('mma',) else rank}"

    def _counts(self) -> dict[str, int]:
        counts = {
            self.event(event.name, stage, rank): event.count + (self.ctas if event.bytes else 0)  # copies count as well
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

    def _load(self, rank: int) -> None:
        order: list[tuple[str, int]] = [("keys", 0), *(("query", stage) for stage in range(STAGES))]
        for step in range(1, self.steps):
            pair = [("values", step - 1), ("keys", step)]
            order += pair[::-1] if self.has_own_probs else pair
        order.append(("values", self.steps - 1))
        for name, use in order if self.steps else []:
            self._copy(rank, name, use)

    def _copy(self, rank: int, name: str, use: int) -> None:
        stages = STAGES if name == "query" else self.stages(name)
        stage, turn = use % stages, use // stages
        load, copy = self.programs[f"load {rank}"], self.programs[f"copy of {name} {use} by CTA {rank}"]
        if turn > 0:
            load.append(Wait(self.event(f"{name}_free", stage, rank), turn - 1))
        landed, start = self.event(f"{name}_landed", stage, rank), f"start of {name} {use} by CTA {rank}"
        if rank == 0:
            load.append(Arrive(landed))
        self.counts[start] = 1
        load.append(Arrive(start))
        copy += [Wait(start, 0), self.stage_of(name, stage, rank, is_write=True), Arrive(landed)]

    def _softmax(self, rank: int, stage: int) -> None:
        program, told = self.programs[f"softmax {rank}.{stage}"], Arrive(f"told[{stage}] of CTA {rank}")
        for step in range(self.steps):
            program.append(Wait(self.event("scores_ready", stage, rank), step))
            program.append(self.columns(f"scores_{stage}", rank, is_write=False))
            if self.has_own_probs:
                program.append(Arrive(self.event("scores_read", stage, rank), WARPS_PER_GROUP))
                if step > 0:
                    program.append(Wait(self.event("out_updated", stage, rank), step - 1))
            if step > 0:
                program += [self.stage_of("factors", stage, rank, is_write=True), told]
            program.append(self.columns(f"probs_{stage}", rank, True, 0, HEAD_COLUMNS))
            program.append(Arrive(self.event("output_ready", stage, rank), WARPS_PER_GROUP))
            program.append(self.columns(f"probs_{stage}", rank, True, HEAD_COLUMNS))
            program.append(Arrive(self.event("probs_ready", stage, rank), WARPS_PER_GROUP))
        if self.steps:
            program.append(Wait(self.event("out_done", stage, rank), 0))
        program += [self.stage_of(name, stage, rank, is_write=True) for name in ("sums", "maxima")]
        program.append(told)

    def _correction(self, rank: int) -> None:
        program = self.programs[f"correction {rank}"]

        def hear(stage: int, use: int) -> None:
            event = f"told[{stage}] of CTA {rank}"
            program.extend([Arrive(event), Wait(event, use)])

        if self.steps:
            program += [Arrive(self.event("output_ready", stage, rank), WARPS_PER_GROUP) for stage in range(STAGES)]
        for step in range(1, self.steps):
            for stage in range(STAGES):
                hear(stage, step - 1)
                program.append(self.stage_of("factors", stage, rank, is_write=False))
                program.append(self.columns(f"out_{stage}", rank, is_write=True))
                program.append(Arrive(self.event("output_ready", stage, rank), WARPS_PER_GROUP))
        for stage in range(STAGES):
            hear(stage, max(self.steps - 1, 0))
            program += [self.stage_of(name, stage, rank, is_write=False) for name in ("sums", "maxima")]
            if self.steps:
                program.append(Wait(self.event("out_done", stage, rank), 0))
            program.append(self.columns(f"out_{stage}", rank, is_write=False))
            program.append(self.stage_of("staged_out", stage, rank, is_write=True))
            program.append(Arrive(self.event("out_staged", stage, rank), WARPS_PER_GROUP))

    def _epilogue(self, rank: int) -> None:
        for stage in range(STAGES):
            self.programs[f"epilogue {rank}"] += [
                Wait(self.event("out_staged", stage, rank), 0),
                self.stage_of("staged_out", stage, rank, is_write=False),
            ]

    def _mma(self) -> None:
        self._await("keys_landed", 0)
        for stage in range(STAGES):
            self._wait("query_landed", stage, 0)
            self._multiply_keys(stage, 0)
        self._free("keys", 0)
        for step in range(self.steps - 1):
            self._step(step)
        last = self.steps - 1
        self._await("values_landed", last)
        for stage in range(STAGES):
            self._multiply_values(stage, last)
            self._commit("out_done", stage)

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
