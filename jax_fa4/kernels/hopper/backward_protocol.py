"""What the roles of the Hopper backward wait for, arrive at and touch, step by step, for the model of `model.py`: of a
block with one item.

It says again, without arithmetic, what the device code does; buffers and counts come of the plan. Each computing
warpgroup, its tensor core (whose products are done in the order of their issue) and every copy are agents of their own.
Named barriers are events of the agents that meet there. Registers of a warpgroup that products touch are memory too.
"""

from __future__ import annotations

from collections import defaultdict

from jax_fa4.kernels.hopper.backward_plans import GROUPS
from jax_fa4.kernels.hopper.plans import WARPS_PER_GROUP
from jax_fa4.kernels.model import Action, Arrive, Touch, Wait
from jax_fa4.kernels.plan import KernelPlan

NAMED = ("staged", "added", "read")  # one for each warpgroup, with one other agent


class BackwardProtocol:
    """The programs of one item of so many steps."""

    def __init__(self, plan: KernelPlan, steps: int) -> None:
        self.plan, self.steps = plan, steps
        self.stages = {one.name: one.stages for one in plan.shared}
        self.is_ahead, self.is_turned = bool(plan.option("ahead")), bool(plan.option("turned_scores"))
        self.programs: dict[str, list[Action]] = defaultdict(list)
        self.counts = {
            f"{event.name}[{stage}]": event.count + (event.bytes > 0)
            for event in plan.events
            for stage in range(event.stages)
        }
        self.counts |= {f"{name} {group}": 2 for name in NAMED for group in range(GROUPS)} | {"meeting": GROUPS}
        self.issued: list[list[str]] = [[] for _ in range(GROUPS)]  # ends of products, in order
        self._load()
        self._add()
        for group in range(GROUPS):
            self._compute(group)

    def ring(self, name: str, use: int) -> tuple[str, int]:
        """The event of a ring's use-th use, and which of its phases that is."""
        stages = next(one.stages for one in self.plan.events if one.name == name)
        return f"{name}[{use % stages}]", use // stages

    def half(self, buffer: str, use: int, group: int | None, is_write: bool) -> Touch:
        """A warpgroup's part of a buffer's stage, or all of it."""
        parts = range(GROUPS) if group is None else range(group, group + 1)
        return Touch(f"{buffer}[{use % self.stages[buffer]}]", parts.start, parts.stop, is_write)

    def registers(self, name: str, group: int, is_write: bool) -> Touch:
        """A warpgroup's operands or results of a product."""
        return Touch(f"{name} in registers of {group}", 0, 1, is_write)

    def _load(self) -> None:
        for use in range(self.steps):
            for once, ring, row_values in (("keys", "queries", "lse"), ("values", "grads", "delta")):
                if use >= self.stages[ring]:
                    self.programs["load"].append(Wait(*self.ring(f"{ring}_free", use - self.stages[ring])))
                self._copy_to(f"{ring}_landed", use, ring, row_values)
                if use == 0:
                    self._copy_to(f"{once}_landed", 0, once)

    def _copy_to(self, event: str, use: int, *buffers: str) -> None:
        start, landed = f"start of {buffers[0]} {use}", Arrive(self.ring(event, use)[0])
        self.counts[start] = 1
        self.programs["load"] += [landed, Arrive(start)]
        touches = [self.half(buffer, use, None, is_write=True) for buffer in buffers]
        self.programs[f"copy of {buffers[0]} {use}"] += [Wait(start, 0), *touches, landed]

    def _add(self) -> None:
        program = self.programs["add"]
        for use in range(self.steps):
            for group in range(GROUPS):
                if use == 0:
                    program.append(Arrive(f"added {group}"))
            for group in range(GROUPS):
                program += self._meet(f"staged {group}", use)
                program.append(self.half("staged_sums", 0, group, is_write=False))
                if use + 1 < self.steps:
                    program.append(Arrive(f"added {group}"))

    def _meet(self, barrier: str, use: int) -> list[Action]:
        return [Arrive(barrier), Wait(barrier, use)]

    def _issue(self, group: int, name: str, *touches: Touch) -> None:
        """A product of a warpgroup."""
        start, done = (f"{moment} of {name} of {group}" for moment in ("start", "end"))
        self.issued[group].append(done)
        self.counts |= {start: 1, done: 1}
        self.programs[f"compute {group}"].append(Arrive(start))
        self.programs[f"products of {group}"] += [Wait(start, 0), *touches, Arrive(done)]

    def _wait_products(self, group: int, but: int) -> None:
        """All but so many have ended."""
        if len(self.issued[group]) > but:
            self.programs[f"compute {group}"].append(Wait(self.issued[group][-1 - but], 0))

    def _scores(self, group: int, use: int) -> None:
        self.programs[f"compute {group}"].append(Wait(*self.ring("queries_landed", use)))
        result = self.registers("scores", group, is_write=True)
        reads = self.half("keys", 0, group, False), self.half("queries", use, None, False)
        self._issue(group, f"scores {use}", result, *reads)

    def _grad_probs(self, group: int, use: int) -> None:
        self.programs[f"compute {group}"].append(Wait(*self.ring("grads_landed", use)))
        result = self.registers("grad_probs", group, is_write=True)
        reads = self.half("values", 0, group, False), self.half("grads", use, None, False)
        self._issue(group, f"grad_probs {use}", result, *reads)

    def _release(self, group: int, ring: str, use: int) -> None:
        self.programs[f"compute {group}"].append(Arrive(self.ring(f"{ring}_free", use)[0], WARPS_PER_GROUP))

    def _compute(self, group: int) -> None:
        program = self.programs[f"compute {group}"]
        if self.steps:
            self._free_grad_scores(group)
            program.append(Wait(*self.ring("keys_landed", 0)))
            if self.is_ahead:
                self._scores(group, 0)
            program.append(Wait(*self.ring("values_landed", 0)))
        for use in range(self.steps):
            (self._step_ahead if self.is_ahead else self._step_alone)(group, use)
        self._wait_products(group, 0)
        if self.steps:
            if self.is_ahead:
                self._release(group, "queries", self.steps - 1)
            for ring in ("keys", "values"):
                self._release(group, ring, 0)
        program += self._meet("meeting", self.steps)
        for buffer in ("keys", "values"):
            program.append(self.half(buffer, 0, group, is_write=True))

    def _step_ahead(self, group: int, use: int) -> None:
        is_last = use + 1 == self.steps
        if use == 0:
            self._wait_products(group, 0)
        self._grad_probs(group, use)
        self._probs(group, use)
        self._wait_products(group, 1)
        if use > 0:
            self._release(group, "queries", use - 1)
        self._wait_products(group, 0)
        self._grad_scores(group, use)
        if not is_last:
            self._scores(group, use + 1)
        self.programs[f"compute {group}"] += self._meet("meeting", use)
        self._wait_products(group, 0 if is_last else 1)
        self._release(group, "grads", use)
        self._grad_query(group, use)
        self._grad_key(group, use)
        self._stage(group, use)

    def _step_alone(self, group: int, use: int) -> None:
        self._scores(group, use)
        self._grad_probs(group, use)
        self._wait_products(group, 1)
        self._probs(group, use)
        self._wait_products(group, 0)
        self._grad_scores(group, use)
        self.programs[f"compute {group}"] += self._meet("meeting", use)
        self._grad_query(group, use)
        self._wait_products(group, 1)
        self._release(group, "grads", use)
        self._grad_key(group, use)
        self._stage(group, use)
        self._wait_products(group, 0)
        self._release(group, "queries", use)

    def _probs(self, group: int, use: int) -> None:
        self.programs[f"compute {group}"] += [
            self.half("lse", use, None, is_write=False),
            self.registers("scores", group, is_write=True),
            self.registers("probs", group, is_write=True),
        ]

    def _grad_scores(self, group: int, use: int) -> None:
        """dS to shared memory, and dV."""
        program = self.programs[f"compute {group}"]
        if self.stages["grad_scores"] == 1:
            program += self._meet(f"read {group}", use)
        program.append(self.half("delta", use, None, is_write=False))
        program += [self.registers(one, group, is_write=False) for one in ("scores", "grad_probs")]
        program += [self.registers(one, group, is_write=True) for one in ("probs", "grad_scores")]
        program.append(self.half("grad_scores", use, group, is_write=True))
        reads = self.registers("probs", group, False), self.half("grads", use, None, False)
        self._issue(group, f"grad_value {use}", *reads)

    def _grad_query(self, group: int, use: int) -> None:
        result = self.registers("grad_query", group, is_write=True)
        reads = self.half("grad_scores", use, None, False), self.half("keys", 0, None, False)
        self._issue(group, f"grad_query {use}", result, *reads)

    def _grad_key(self, group: int, use: int) -> None:
        scores = self.registers("grad_scores", group, is_write=False)
        if self.is_turned:
            scores = self.half("grad_scores", use, group, is_write=False)
        self._issue(group, f"grad_key {use}", scores, self.half("queries", use, None, is_write=False))

    def _free_grad_scores(self, group: int) -> None:
        if self.stages["grad_scores"] == 1:
            self.programs[f"compute {group}"].append(Arrive(f"read {1 - group}"))

    def _stage(self, group: int, use: int) -> None:
        """Sums of query gradients for the adding warp."""
        self._wait_products(group, 1)
        if use + 1 < self.steps:
            self._free_grad_scores(group)
        self.programs[f"compute {group}"] += [
            *self._meet(f"added {group}", use),
            self.registers("grad_query", group, is_write=False),
            self.half("staged_sums", 0, group, is_write=True),
            Arrive(f"staged {group}"),
        ]
