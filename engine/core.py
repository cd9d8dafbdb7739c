"""EngineCore: one synchronous, deterministic step loop over scheduler and runner."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine.config import StepStats
from quire.engine.messages import Abort, EndSample, Output, Request, StepOutputs
from quire.engine.records import RequestRecord
from quire.engine.schedule.bisection import Bisection
from quire.engine.schedule.commit import finish_transfers, resume_masked
from quire.engine.schedule.plan import Runner, StepHandle, StepPlan, StepResult
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.grammar import Grammars
from quire.engine.sequences.grammar_queue import GrammarQueue

COMPILE_WAIT = 0.01  # seconds that a step without anything else to do waits for a grammar
MASK_WAIT = 0.002  # seconds that a mask may take to find before steps go on without its sequence
CAPTURE_SHARE = 0.2  # of the time, at most, goes into captures while requests run


class _LaunchInterrupted(Exception):
    """Nobody is to blame for a step that was not launched."""


class _NotLaunched(StepHandle):
    """A step whose launch raised."""

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
        self.bisection = Bisection(scheduler)
        self.clock = scheduler.state.clock = scheduler.blocks.history.clock = clock
        self.stats = self._stats(0, 0, (0.0, 0.0, 0.0, 0.0))
        self.plan: StepPlan | None = None  # of the last step
        self.records: list[RequestRecord] = []  # of requests that ended since the step before the last one
        self._capture_at = float("-inf")  # not before then while requests run
        self._unreturned: list[Output] = []  # of a step that has not ended yet
        self.torn = False  # a step was left where no other can go on
        self._interrupted = False  # the last one was left while it launched, or waited

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.grammars)

    def add(self, request: Request) -> None:
        """Queue a request, once its grammar is compiled. Raises ValueError when it could never run."""
        grammar = request.params.grammar
        if not grammar:
            self.scheduler.add(request)
            return
        self.scheduler.state.capacity.check(request)
        if self.grammars is None:
            raise ValueError("grammar: the model has no tokenizer to follow one by, or no eos token")
        known = self.grammars.find(grammar)
        if known is not None:
            self.scheduler.add(request, known)
        else:
            self.grammars.add(request)

    def add_all(self, requests: list[Request]) -> None:
        """Queue requests that are wanted together, those that may take most steps first.

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

    def end_sample(self, request_id: int, index: int) -> None:
        """Sample no further token of one of a request's samples, if it is still there."""
        self.scheduler.end_sample(request_id, index)

    def handle(self, command: Request | Abort | EndSample) -> list[Output]:
        """Apply a command that came over the seam; a refusal becomes the request's only outputs."""
        if isinstance(command, Abort):
            self.abort(command.id)
            return []
        if isinstance(command, EndSample):
            self.end_sample(command.id, command.index)
            return []
        try:
            self.add(command)
        except ValueError as refusal:
            return _refuse(command, str(refusal))
        return []

    def _add_compiled(self) -> list[Output]:
        """Queue requests whose grammars are ready now; return the refusals of the others."""
        outputs: list[Output] = []
        if self.grammars is None:
            return outputs
        for request, compiled in self.grammars.take(0.0 if self.scheduler.has_work else COMPILE_WAIT):
            if isinstance(compiled, ValueError):
                outputs += _refuse(request, f"the grammar is refused: {compiled}")
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
        """Capture what steps have missed while the device computes one, for a bounded share of the time."""
        begin = self.clock()
        if begin >= self._capture_at:
            self.runner.capture(missed=True)
            end = self.clock()
            self._capture_at = end + (end - begin) * (1 / CAPTURE_SHARE - 1)

    def step(self) -> StepOutputs:
        """Launch the next step, if there is one, and return what the one before it gave.

        If the runner's `launch` or the wait for a step is interrupted, nothing is lost, and the next step
        goes on from there. What else is raised leaves the engine `torn`.
        """
        self.torn = True
        in_flight, bisection = self.scheduler.state.in_flight, self.bisection
        if in_flight and self.runner.graphs_left:
            self._capture_beside()
        if self.grammars:
            self._unreturned += self._add_compiled()
        self._unreturned += resume_masked(self.scheduler.state, self.mask_wait)
        begin = self.clock()
        # Who was preempted may come back once the step that was in flight then is committed, and not before.
        plan = self.plan = None if self._interrupted else bisection.schedule(begin)
        scheduled = self.clock()
        if plan is not None:
            self._launch(plan)
        launched = waited = self.clock()
        outputs = StepOutputs()
        nothing_else = plan is None and not in_flight
        if in_flight and (plan is None or len(in_flight) > 1 or bisection.in_progress):
            handle = in_flight[0].handle
            assert handle is not None, "a step that was never launched"
            self.torn, self._interrupted = False, True
            try:
                result = handle.wait()
            except Exception as error:
                self.torn, self._interrupted = True, False
                outputs.others += self._recover(error)
            else:
                self.torn, self._interrupted = True, False
                waited = self.clock()
                outputs = bisection.committed(self.scheduler.commit(result))
        if nothing_else:
            self._unreturned += resume_masked(self.scheduler.state, None)
        self._finish_transfers(wait=nothing_else)
        outputs.others += self._unreturned
        self._unreturned = []
        committed = self.clock()
        decodes = plan.num_decodes if plan else 0
        prefills = len(plan.prefill_tokens) if plan else 0
        phases = (scheduled - begin, launched - scheduled, waited - launched, committed - waited)
        self.stats = self._stats(prefills, decodes, phases)
        self.records = self.scheduler.state.take_records()
        self.torn = False
        return outputs

    def _launch(self, plan: StepPlan) -> None:
        """Launch the newest step in flight, whose plan this is.

        What raises here is raised when the step's turn has come: those before it may have gone well.
        """
        in_flight = self.scheduler.state.in_flight
        try:
            in_flight[-1].handle = self.runner.launch(plan)
        except Exception as error:
            in_flight[-1].handle = _NotLaunched(error)  # not in a variable, which its frames would hold
        except BaseException:
            in_flight[-1].handle = _NotLaunched(_LaunchInterrupted())
            self.torn, self._interrupted = False, True
            raise

    def _recover(self, error: Exception) -> list[Output]:
        """Undo the steps in flight, the oldest of which raised `error`; return what ends by it.

        Raises what ends all.
        """
        self.runner.settle()
        ended: list[Output] = []
        if isinstance(error, _LaunchInterrupted):
            self.bisection.undo()
        else:
            ended = self.bisection.raised(error)
        error.__traceback__ = None  # whose frames hold the step that holds the error: a cycle
        return ended

    def _finish_transfers(self, *, wait: bool) -> None:
        """Book the transfers that are done, in order; with `wait`, the oldest one at least."""
        transfers = self.scheduler.state.transfers
        while transfers and transfers[0].are_done(wait=wait):
            finish_transfers(self.scheduler.state)
            wait = False

    def _stats(self, prefills: int, decodes: int, phases: tuple[float, float, float, float]) -> StepStats:
        scheduler, state, pool = self.scheduler, self.scheduler.state, self.scheduler.blocks.pool
        host = scheduler.blocks.host.pool
        compiling = 0 if self.grammars is None else len(self.grammars)
        return StepStats(
            free_blocks=pool.num_free,
            active_blocks=pool.num_active,
            cached_blocks=pool.num_cached,
            block_references=pool.references,
            tokens_filled=state.tokens_filled,
            running=len(state.running),
            waiting=len(state.waiting) - state.num_swapped + compiling,
            swapped=state.num_swapped,
            preemptions_recompute=scheduler.preemption.recomputes,
            preemptions_swap=scheduler.preemption.swaps,
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
            requests_in_memory=len(state.alive) + compiling,
            behind_window_blocks=state.behind_window_blocks,
            sequences_running=state.rows.num_used,
        )


def _refuse(request: Request, refusal: str) -> list[Output]:
    return [
        Output(request.id, index, [], finish_reason="error", error=refusal)
        for index in range(request.params.n)
    ]
