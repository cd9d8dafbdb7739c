"""EngineCore: one synchronous, deterministic step loop over scheduler and runner."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.engine.config import StepStats
from quire.engine.messages import Abort, Output, Request, StepOutputs
from quire.engine.schedule.bisection import Isolation
from quire.engine.schedule.plan import StepPlan, StepResult
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.grammar import Grammars
from quire.engine.sequences.grammar_queue import GrammarQueue

COMPILE_WAIT = 0.01  # seconds that a step without anything else to do waits for a grammar
MASK_WAIT = 0.002  # seconds that a mask may take to find before steps go on without its sequence
CAPTURE_SHARE = 0.2  # of the time, at most, goes into captures while requests run


class InFlight(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the device has computed it, and return what it gave."""
        ...

    def has_moved(self, *, wait: bool = False) -> bool:
        """Whether the blocks that it moves between the tiers are where they go; `wait`: block until then."""
        return True


class Runner(Protocol):
    """Executes plans in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step without waiting for it or for those before it.

        Once one has raised, here or when it is waited for, those launched after it raise too, until `settle`.
        MemoryError: the device has not enough memory for it.
        """
        ...

    def settle(self) -> None:
        """After a step has raised: wait until nothing is under way.

        Raises if no step can be computed any more, which is so for a runner that does not say otherwise.
        """
        raise RuntimeError("this runner computes no steps after one that raised")

    @property
    def graphs_left(self) -> int:
        """How many step sizes would be quicker if they were captured."""
        return 0

    def capture(self, *, missed: bool = False) -> None:
        """Capture one step size, if any is left; with `missed`, only if steps have been of such a size."""
        return


class _NotLaunched(InFlight):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


class EngineCore:
    """`add`, `abort` and `step`: the whole engine, driven by whoever owns it.

    A step schedules and launches, and then commits the step before, so that the host works while the
    device does. Transfers between the tiers may take longer than their step; only when nothing else can run
    are they waited for. Serving runs it in a process of its own, offline use and tests step it by hand.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        """Without `grammars` a request with one is refused."""
        self.scheduler = scheduler
        self.grammars = None if grammars is None else GrammarQueue(grammars)
        self.runner = runner
        self.mask_wait = MASK_WAIT
        self.isolation = Isolation(scheduler)
        self.clock = clock
        self.stats = self._stats(0, 0, (0.0, 0.0, 0.0, 0.0))
        self.plan: StepPlan | None = None  # of the last step
        self._capture_at = float("-inf")  # not before then while requests run
        self._launched: deque[InFlight] = deque()
        self._unreturned: list[Output] = []  # of a step that has not ended yet
        self.torn = False  # a step was left where no other can go on
        self._moving: deque[InFlight] = deque()  # committed, but for their transfers

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.grammars)

    def add(self, request: Request) -> None:
        """Queue a request, once its grammar is compiled. Raises ValueError when it could never run."""
        grammar = request.params.grammar
        if not grammar:
            self.scheduler.add(request)
            return
        self.scheduler.queue.capacity.check(request)
        if self.grammars is None:
            raise ValueError("grammar: the model has no tokenizer.json to follow one by, or no eos token")
        known = self.grammars.find(grammar)
        if known is not None:
            self.scheduler.add(request, known)
        else:
            self.grammars.add(request)

    def add_all(self, requests: list[Request]) -> None:
        """Queue requests that are wanted together: those that may take most steps first.

        So few of them are left to run on alone while the device could do more (Graham 1969, longest
        processing time first). One whose grammar has to be compiled follows once it is. Raises ValueError,
        and queues none, when one could never run.
        """
        try:
            for request in sorted(requests, key=lambda request: -request.params.max_tokens):
                self.add(request)
        except BaseException:
            for request in requests:
                self.abort(request.id)
            raise

    def abort(self, request_id: int) -> None:
        """Forget a request, if it is still there."""
        self.scheduler.abort(request_id)
        if self.grammars is not None:
            self.grammars.abort(request_id)

    def handle(self, command: Request | Abort) -> list[Output]:
        """Apply a command that came over the seam; a refusal becomes the request's only outputs."""
        if isinstance(command, Abort):
            self.abort(command.id)
            return []
        try:
            self.add(command)
        except ValueError as refusal:
            return _refuse(command, refusal)
        return []

    def _add_compiled(self) -> list[Output]:
        """Queue requests whose grammars are ready now; what is refused of them."""
        outputs: list[Output] = []
        if self.grammars is None:
            return outputs
        for request, compiled in self.grammars.take(0.0 if self.scheduler.has_work else COMPILE_WAIT):
            if isinstance(compiled, ValueError):
                outputs += _refuse(request, compiled)
            else:
                self.scheduler.add(request, compiled)
        return outputs

    def capture(self) -> bool:
        """Let the runner capture one of the graphs that are left; False when that was the last.

        For whoever has nothing to step, or wants no captures between steps that are to be timed.
        """
        self.runner.capture()
        self.stats = self._stats(0, 0, (0.0, 0.0, 0.0, 0.0))
        return self.stats.graphs_left > 0

    def _capture_beside(self) -> None:
        """While the device computes a step: what steps have missed, for a bounded share of the time."""
        begin = self.clock()
        if begin >= self._capture_at:
            self.runner.capture(missed=True)
            end = self.clock()
            self._capture_at = end + (end - begin) * (1 / CAPTURE_SHARE - 1)

    def step(self) -> StepOutputs:
        """Launch the next step, if there is one, and return what the one before it gave.

        If the runner's `launch` or the wait for a flight is interrupted, nothing is lost, and the next step
        goes on from there. What else is raised leaves the engine `torn`.
        """
        self.torn = True
        if self._launched and self.runner.graphs_left:
            self._capture_beside()
        if self.grammars:
            self._unreturned += self._add_compiled()
        self._unreturned += self.scheduler.unmask(self.mask_wait)
        begin = self.clock()
        interrupted = len(self._launched) > (0 if self.isolation.on_trial else 1)  # before it could commit
        plan = self.plan = None if interrupted else self.isolation.schedule(begin)
        scheduled = self.clock()
        if plan is not None:
            self._launch(plan)
        launched = waited = self.clock()
        outputs = StepOutputs()
        nothing_else = plan is None and not self._launched
        if self._launched and (plan is None or len(self._launched) > 1 or self.isolation.on_trial):
            flight = self._launched[0]
            self.torn = False
            try:
                result = flight.wait()
            except Exception as error:
                self.torn = True
                outputs.others += self._recover(error)
            else:
                self.torn = True
                self._launched.popleft()
                waited = self.clock()
                outputs = self.isolation.passed(self.scheduler.commit(result))
                if self.scheduler.num_deliveries > len(self._moving):
                    self._moving.append(flight)
        if nothing_else:
            self._unreturned += self.scheduler.unmask(None)
        self._deliver(wait=nothing_else)
        outputs.others += self._unreturned
        self._unreturned = []
        committed = self.clock()
        decodes = plan.num_decodes if plan else 0
        prefills = len(plan.prefill_tokens) if plan else 0
        phases = (scheduled - begin, launched - scheduled, waited - launched, committed - waited)
        self.stats = self._stats(prefills, decodes, phases)
        self.torn = False
        return outputs

    def _launch(self, plan: StepPlan) -> None:
        """What raises here is raised when the step's turn has come: those before it may have gone well."""
        try:
            self._launched.append(self.runner.launch(plan))
        except Exception as error:
            self._launched.append(_NotLaunched(error))  # not in a variable, which its frames would hold
        except BaseException:
            self._launched.append(_NotLaunched(RuntimeError("the launch of a step was interrupted")))
            self.torn = False
            raise

    def _recover(self, error: Exception) -> list[Output]:
        """The oldest step that was launched raised `error`. Returns what ends by it; raises what ends all."""
        self.runner.settle()
        self._launched.clear()
        ended = self.isolation.raised(error)
        error.__traceback__ = None  # whose frames hold the step that holds the error: a cycle
        return ended

    def _deliver(self, *, wait: bool) -> None:
        """Book the transfers that are done, in order; with `wait`, the oldest one at least."""
        while self._moving and self._moving[0].has_moved(wait=wait):
            self._moving.popleft()
            self.scheduler.deliver()
            wait = False

    def _stats(self, prefills: int, decodes: int, phases: tuple[float, float, float, float]) -> StepStats:
        scheduler, queue, pool = self.scheduler, self.scheduler.queue, self.scheduler.blocks.pool
        host = scheduler.blocks.host.pool
        return StepStats(
            free_blocks=pool.num_free,
            active_blocks=pool.num_active,
            cached_blocks=pool.num_cached,
            block_references=pool.references,
            tokens_filled=queue.tokens_filled,
            running=queue.rows.num_used,
            waiting=len(queue.waiting) - queue.num_swapped,
            swapped=queue.num_swapped,
            preemptions_recompute=scheduler.yielding.recomputes,
            preemptions_swap=scheduler.yielding.swaps,
            host_free_blocks=host.num_free,
            host_active_blocks=host.num_active,
            host_cached_blocks=host.num_cached,
            swap_out_blocks=scheduler.blocks_swapped_out,
            swap_in_blocks=scheduler.blocks_swapped_in,
            block_allocations=pool.allocations,
            block_evictions=pool.evictions,
            copy_on_write=scheduler.blocks.copies_on_write,
            prefill_tokens=prefills,
            decode_tokens=decodes,
            schedule_seconds=phases[0],
            launch_seconds=phases[1],
            wait_seconds=phases[2],
            commit_seconds=phases[3],
            graphs_left=self.runner.graphs_left,
            requests_in_memory=len(queue.alive),
        )


def _refuse(request: Request, refusal: ValueError) -> list[Output]:
    return [
        Output(request.id, index, [], finish_reason="error", error=str(refusal))
        for index in range(request.params.n)
    ]
