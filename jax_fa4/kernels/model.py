"""A model of a kernel's synchronisation: who waits for what, who touches which memory, and whether all is ordered.

A kernel's protocol is a program for each agent (a warpgroup, a warp, the tensor core, one copy): waits for and arrivals
at events, and touches of memory. `check` runs the programs with a vector clock for each agent and reports

    deadlocks          nobody can go on
    races              two touches of the same memory, one of them a write, that nothing orders
    lost arrivals      an arrival that may come before the phase it is meant for has begun
    lost waits         a wait that may come after the phase it is meant for has been followed by another (a barrier
                       tells phases apart by their parity alone)

Barriers count, and programs do not branch on what they read: so what is ordered before what is the same in every
interleaving, and one run finds everything. Nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Clock = dict[str, int]


@dataclass(frozen=True)
class Wait:
    """Wait until phase `use` of an event is over."""

    event: str
    use: int


@dataclass(frozen=True)
class Arrive:
    """Arrive at an event, `count` times in one phase."""

    event: str
    count: int = 1


@dataclass(frozen=True)
class Touch:
    """Read or write [begin, end) of a memory."""

    memory: str
    begin: int
    end: int
    is_write: bool

    def conflicts(self, other: Touch) -> bool:
        """Whether the order of the two matters."""
        is_apart = self.begin >= other.end or other.begin >= self.end
        return self.memory == other.memory and not is_apart and (self.is_write or other.is_write)


Action = Wait | Arrive | Touch


@dataclass
class _Event:
    """Phases of an event: arrivals of each, with the clock of its end."""

    count: int
    pending: int
    ends: list[Clock] = field(default_factory=list)
    current: Clock = field(default_factory=dict)
    arrivals: list[tuple[str, int, Clock]] = field(default_factory=list)  # agent, phase, clock
    waits: list[tuple[str, int, Clock]] = field(default_factory=list)


def _join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        clock[agent] = max(clock.get(agent, 0), time)


def _is_before(first: Clock, second: Clock) -> bool:
    return all(time <= second.get(agent, 0) for agent, time in first.items())


class Run:
    """One run of a protocol."""

    def __init__(self, programs: Mapping[str, Sequence[Action]], counts: Mapping[str, int]) -> None:
        self.programs = programs
        self.events = {name: _Event(count, count) for name, count in counts.items()}
        self.clocks: dict[str, Clock] = {agent: {agent: 0} for agent in programs}
        self.places = dict.fromkeys(programs, 0)
        self.touches: dict[str, list[tuple[str, Touch, Clock]]] = defaultdict(list)
        self.complaints: list[str] = []

    def run(self) -> list[str]:
        """Everything that is wrong, in sentences."""
        while any([self._advance(agent) for agent in self.programs]):
            pass
        for agent, program in self.programs.items():
            if self.places[agent] < len(program):
                self.complaints.append(f"{agent} waits for ever: {program[self.places[agent]]}")
        self._find_races()
        for name, event in self.events.items():
            self._find_lost(name, event)
        return self.complaints

    def _advance(self, agent: str) -> bool:
        """Run an agent as far as it goes; whether it went at all."""
        program, start = self.programs[agent], self.places[agent]
        while self.places[agent] < len(program) and self._do(agent, program[self.places[agent]]):
            self.places[agent] += 1
        return self.places[agent] > start

    def _do(self, agent: str, action: Action) -> bool:
        clock = self.clocks[agent]
        if isinstance(action, Wait):
            event = self.events[action.event]
            if action.use >= len(event.ends):
                return False
            _join(clock, event.ends[action.use])
            clock[agent] += 1
            event.waits.append((agent, action.use, dict(clock)))
            return True
        clock[agent] += 1
        if isinstance(action, Touch):
            self.touches[action.memory].append((agent, action, dict(clock)))
            return True
        event = self.events[action.event]
        event.arrivals.append((agent, len(event.ends), dict(clock)))
        _join(event.current, clock)
        event.pending -= action.count
        if event.pending < 0:
            self.complaints.append(f"{agent} arrives at {action.event} once too often in phase {len(event.ends)}")
        if event.pending <= 0:
            event.ends.append(event.current)
            event.current, event.pending = {}, event.count
        return True

    def _find_races(self) -> None:
        for touches in self.touches.values():
            for place, (agent, touch, clock) in enumerate(touches):
                for other_agent, other, other_clock in touches[:place]:
                    is_ordered = _is_before(other_clock, clock) or _is_before(clock, other_clock)
                    if agent != other_agent and touch.conflicts(other) and not is_ordered:
                        self.complaints.append(f"nothing orders {other_agent}: {other} and {agent}: {touch}")

    def _find_lost(self, name: str, event: _Event) -> None:
        for agent, phase, clock in event.arrivals:
            if phase > 0 and not _is_before(event.ends[phase - 1], clock):
                self.complaints.append(f"{agent} may arrive at {name} for phase {phase} while {phase - 1} is not over")
        for agent, phase, clock in event.waits:
            if phase + 1 < len(event.ends) and not _is_before(clock, event.ends[phase + 1]):
                self.complaints.append(f"{agent} may come to {name} for phase {phase} when {phase + 1} is over")


def check(programs: Mapping[str, Sequence[Action]], counts: Mapping[str, int]) -> list[str]:
    """Everything that is wrong with a protocol, in sentences; none where it is right.

    Args:
        programs: what each agent does, in its order.
        counts: arrivals that end a phase of each event.
    """
    return Run(programs, counts).run()
