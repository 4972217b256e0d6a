"""What the roles of the Blackwell backward wait for, arrive at and touch, tile by tile, for the model of `model.py`.

As `protocol.py` for the forward. The tensor core's warp walks the plan's own table of products, so that the model runs
what the kernel runs. The reduction's staging, which each warp has for itself, is left out.
"""

from __future__ import annotations

from collections import defaultdict

from jax_fa4.kernels.blackwell.backward_plans import COMPUTE_GROUPS, TILE, WARPS_PER_GROUP
from jax_fa4.kernels.blackwell.product_order import ORDERS, Issue, after_loop, before_loop, refill
from jax_fa4.kernels.blackwell.protocol import Protocol
from jax_fa4.kernels.model import Action, Arrive, Touch, Wait
from jax_fa4.kernels.plan import KernelPlan

HALF = TILE // COMPUTE_GROUPS


class BackwardProtocol(Protocol):
    """The programs of one item that meets `steps` tiles of queries in all."""

    def __init__(self, plan: KernelPlan, steps: int) -> None:
        self.plan, self.steps, self.ctas = plan, steps, plan.cluster[0]
        self.programs: dict[str, list[Action]] = defaultdict(list)
        self.order = ORDERS[str(plan.option("order"))]
        self.counts = self._counts()
        self.issued = 0
        begin = {one.name: one.begin for one in plan.tensor_memory}
        self.has_own_probs = begin["probs"] != begin["scores"]
        for rank in range(self.ctas):
            self._load(rank)
            for group in range(COMPUTE_GROUPS):
                self._compute(rank, group)
            self._reduce(rank)
            if self.ctas == 2:
                self._relay(rank)
        if steps > 0:
            self._mma()

    def _counts(self) -> dict[str, int]:
        """Copies count as arrivals: of both CTAs where the first waits for what both load."""
        found = {}
        for event in self.plan.events:
            copies = (self.ctas if event.waiters == ("mma",) else 1) if event.bytes else 0
            for stage in range(event.stages):
                for rank in range(self.ctas):
                    found[self.event(event.name, stage, rank)] = event.count + copies
        return found

    def ring(self, name: str, use: int, rank: int = 0) -> tuple[str, int]:
        """The event of a ring's use-th use, and which of its phases that is."""
        stages = next(one.stages for one in self.plan.events if one.name == name)
        return self.event(name, use % stages, rank), use // stages

    def _load(self, rank: int) -> None:
        if self.steps == 0:
            return
        once = [("key", "keys_landed"), ("value", "values_landed")]
        once += [("key_columns", "key_columns_landed")] if self.ctas == 2 else []
        for buffer, event in once:
            self._copy_to(rank, buffer, event, 0)
        rings = ["query", "statistics", "grad_out"]
        rings += ["grad_out_columns", "query_columns"] if self.ctas == 2 else []
        for use in range(self.steps):
            for name in rings:
                free = refill(self.order, name, self.stages(name))
                if use >= free.behind:
                    self.programs[f"load {rank}"].append(Wait(*self.ring(free.event, use - free.behind, rank)))
                self._copy_to(rank, name, f"{name}_landed", use)

    def _copy_to(self, rank: int, buffer: str, event: str, use: int) -> None:
        landed, start = self.ring(event, use, rank)[0], f"start of {buffer} {use} by CTA {rank}"
        load, copy = self.programs[f"load {rank}"], self.programs[f"copy of {buffer} {use} by CTA {rank}"]
        if landed.endswith(f"CTA {rank}"):
            load.append(Arrive(landed))
        self.counts[start] = 1
        load.append(Arrive(start))
        copy += [Wait(start, 0), self.stage_of(buffer, use % self.stages(buffer), rank, True), Arrive(landed)]

    def _half(self, buffer: str, group: int, rank: int, is_write: bool) -> Touch:
        """The columns of a warpgroup's 16-bit values; see `parts/gradients.py`."""
        begin = group * HALF // 2 if buffer == "probs" and self.has_own_probs else group * (TILE - HALF // 2)
        return self.columns(buffer, rank, is_write, begin, begin + HALF // 2)

    def _compute(self, rank: int, group: int) -> None:
        program = self.programs[f"compute {rank}.{group}"]
        columns = group * HALF, (group + 1) * HALF
        for use in range(self.steps):
            statistics = self.stage_of("statistics", use % self.stages("statistics"), rank, is_write=False)
            program.append(Wait(*self.ring("statistics_landed", use, rank)))
            program.append(Wait(self.event("scores_ready", 0, rank), use))
            program += [self.columns("scores", rank, False, *columns), statistics]
            program.append(self._half("probs", group, rank, is_write=True))
            program.append(Arrive(self.event("probs_ready", 0, rank), WARPS_PER_GROUP))
            program.append(Wait(self.event("grad_probs_ready", 0, rank), use))
            program.append(self.columns("grad_probs", rank, False, *columns))
            program.append(self._half("grad_probs", group, rank, is_write=True))
            program.append(statistics)
            if use > 0:
                program.append(Wait(self.event("grad_query_ready", 0, rank), use - 1))
            self._keep_or_send(program, rank, group, use)
        if self.steps:
            program.append(Wait(self.event("grads_ready", 0, rank), 0))
        result = ("grad_value", "grad_key")[group]
        program.append(self.columns(result, rank, is_write=self.steps == 0))
        program.append(self.stage_of(f"staged_{result}", 0, rank, is_write=True))

    def _keep_or_send(self, program: list[Action], rank: int, group: int, use: int) -> None:
        """dS to shared memory; of a pair, the half of the other CTA's queries leaves."""
        is_kept = self.ctas == 1 or group == rank
        buffer, stage = ("grad_scores", group) if is_kept else ("leaving_grad_scores", 0)
        program.append(self.stage_of(buffer, stage, rank, is_write=True))
        program.append(Arrive(self.ring("statistics_free", use, rank)[0], WARPS_PER_GROUP))
        program.append(Arrive(self.event("grad_scores_ready", 0, rank), WARPS_PER_GROUP))
        if self.ctas == 1:
            return
        if is_kept:
            program.append(Arrive(self.event("grad_scores_landed", 0, rank), WARPS_PER_GROUP))
            return
        start = f"start of sending {use} by CTA {rank}"
        self.counts[start] = 1
        program.append(Arrive(start))
        self.programs[f"sending {use} by CTA {rank}"] += [
            Wait(start, 0),
            self.stage_of(buffer, 0, rank, is_write=False),
            self.stage_of("grad_scores", rank, 1 - rank, is_write=True),
            Arrive(self.event("grad_scores_landed", 0, 1 - rank)),
        ]

    def _relay(self, rank: int) -> None:
        landed = self.event("grad_scores_landed", 0, rank)
        for use in range(self.steps):
            exchanged = Arrive(self.event("grad_scores_exchanged", 0, rank))
            self.programs[f"relay {rank}"] += [Arrive(landed), Wait(landed, use), exchanged]

    def _reduce(self, rank: int) -> None:
        for use in range(self.steps):
            self.programs[f"reduce {rank}"] += [
                Wait(self.event("grad_query_ready", 0, rank), use),
                self.columns("grad_query", rank, is_write=False),
                Arrive(self.event("grad_query_drained", 0, rank), WARPS_PER_GROUP),
            ]

    def _mma(self) -> None:
        order = self.order
        once = ["keys_landed", "values_landed", *(["key_columns_landed"] if self.ctas == 2 else [])]
        self.programs["mma"] += [Wait(self.event(name, 0), 0) for name in once]
        for issue in before_loop(order):
            self._multiply(issue, 0)
        for tile in range(self.steps - 1):
            for issue in order:
                self._multiply(issue, tile + issue.is_next)
        for issue in after_loop(order):
            self._multiply(issue, self.steps - 1)
        self._commit("grads_ready", 0)

    def _multiply(self, issue: Issue, tile: int) -> None:
        waits = [(wait.event, tile - wait.behind) for wait in issue.waits]
        self.programs["mma"] += [Wait(*self.ring(event, use)) for event, use in waits if use >= 0]
        self._issue([touch for rank in range(self.ctas) for touch in self._operands(issue.product, tile, rank)])
        for event in issue.commits:
            stages = next(one.stages for one in self.plan.events if one.name == event)
            self._commit(event, tile % stages)

    def _operands(self, product: str, tile: int, rank: int) -> list[Action]:
        """What a product reads and writes in one CTA."""
        columns = "_columns" if self.ctas == 2 else ""
        shared = {
            "scores": ["key", "query"],
            "grad_probs": ["value", "grad_out"],
            "grad_value": [f"grad_out{columns}"],
            "grad_key": [f"query{columns}"],
            "grad_query": [f"key{columns}", "grad_scores", "grad_scores"],
        }[product]
        touches: list[Action] = [self.columns(product, rank, is_write=True)]
        for place, name in enumerate(shared):
            stage = place - 1 if name == "grad_scores" else tile % self.stages(name)
            touches.append(self.stage_of(name, stage, rank, is_write=False))
        halves = {"grad_value": "probs", "grad_key": "grad_probs"}.get(product)
        if halves is not None:
            touches += [self._half(halves, group, rank, is_write=False) for group in range(COMPUTE_GROUPS)]
        return touches
