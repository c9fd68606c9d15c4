"""Workers and gangs: what comes of the operator's actions. They start, pass the fence, meet, train, commit and end."""

from __future__ import annotations

from typing import Any

from muster.local.cluster import NotFound
from muster.operator.core.decision import Action, CreateWorker, RemoveJob, RemoveWorker
from muster.operator.core.observed import Rejection, WorkerState
from muster.words.names import ExitCode, WorkerId, worker_name
from muster.words.signals import Cause, Signal, WorkerExit
from muster.words.status import JobStatus
from muster.worker import fence
from tests.sim.physics import Process, SimJob, Training
from tests.sim.store import Store

BUG = "IndexError: index out of range"
REJECTED_SECONDS_MAX = 150.0  # so long after it was refused a gang has given its nodes back, or exists
REFUSED_SECONDS_MAX = 150.0  # so long after its nodes could not start it a gang has given them back


class Gangs(Store):
    # --- what the operator asks for ---

    def act(self, uid: str, action: Action, who: str) -> None:
        job = self.jobs.get(uid)
        if job is None or job.removed:
            raise NotFound(uid)
        match action:
            case CreateWorker():
                self._create(job, action, who)
            case RemoveWorker():
                self._remove(job, action, who)
            case RemoveJob():
                self.check.job_removed(job)
                job.removed = True
                self.log(lambda: f"{who}: {job.name} is removed")
                self.after(self.rng.uniform(1.0, 20.0), lambda: self._collect_garbage(job))
                self.news(uid)

    def _collect_garbage(self, job: SimJob) -> None:
        """What a removed job still owns goes, as by owner references."""
        for process in list(job.processes.values()):
            self.end(process, 137, signal=9)
            self.forget(job, process)

    def _create(self, job: SimJob, action: CreateWorker, who: str) -> None:
        id = action.id
        old = job.processes.get(id)
        if old is not None and old.visible:
            return
        process = Process(
            job.uid,
            id.attempt,
            id.worker,
            action.node,
            len(action.nodes),
            action.resume_step,
            self.t,
            since=self.t,
            incarnation=id.incarnation,
        )
        if old is not None and old.alive:
            # A ghost keeps running under the same name where nobody can reach it.
            job.processes[WorkerId(id.attempt, -1 - self._count)] = old
        job.processes[id] = process
        job.created.add(id)
        self.log(lambda: f"{who}: create {worker_name(job.name, id)} on {action.node}")
        if self._is_rejected(job, process):
            self.crew_changed(job)
            return
        if job.mistyped:
            process.reason = process.refusal = "ErrImagePull: not found"
            job.allow(id.attempt, Cause.USER_ERROR)
            self.after(REFUSED_SECONDS_MAX, lambda: self.check.refused_gives_back(job, process))
            self.crew_changed(job)
            return
        delay = self.rng.uniform(0.2, 3.0)
        if self.chance(self.weather.slow_start):
            delay = self.rng.uniform(30.0, 500.0)
        if self.chance(self.weather.never_starts):
            process.reason = "ImagePullBackOff"
            job.allow(id.attempt, Cause.INFRASTRUCTURE)
        else:
            self.after(delay, lambda: self._start(job, process))
        self.crew_changed(job)

    def _is_rejected(self, job: SimJob, process: Process) -> bool:
        """Whether the API server lets it not exist; a quota is asked again until it has room."""
        if job.misnamed:
            process.rejection, process.reason = Rejection.PERMANENT, "serviceaccount not found"
            job.allow(process.attempt, Cause.USER_ERROR)
            return True
        if self.t >= self.quota_until.get(job.namespace, 0.0):
            return False
        process.rejection, process.reason = Rejection.TEMPORARY, "exceeded quota"
        job.rejected.add(process.attempt)
        self.after(self.rng.uniform(1.0, 30.0), lambda: self._ask_again(job, process))
        self.after(REJECTED_SECONDS_MAX, lambda: self.check.rejected_gives_back(job, process))
        return True

    def _ask_again(self, job: SimJob, process: Process) -> None:
        if not process.visible or process.removing or process.rejection is None:
            return
        if self.t < self.quota_until.get(job.namespace, 0.0):
            self.after(self.rng.uniform(1.0, 30.0), lambda: self._ask_again(job, process))
            return
        process.rejection, process.reason, process.since = None, "", self.t
        self.after(self.rng.uniform(0.2, 3.0), lambda: self._start(job, process))
        self.crew_changed(job)

    def _start(self, job: SimJob, process: Process) -> None:
        node = self.nodes[process.node]
        if not process.visible or process.removing or process.state is not WorkerState.STARTING:
            return
        if not node.up or node.gone or not node.reachable:
            job.allow(process.attempt, Cause.INFRASTRUCTURE)
            self.after(10.0, lambda: self._start(job, process))
            return
        process.alive, process.state, process.since = True, WorkerState.RUNNING, self.t
        self.check.process_started(job, process)
        self.crew_changed(job)
        self.after(self.rng.uniform(0.1, 1.0), lambda: self._confirm(job, process))

    def _confirm(self, job: SimJob, process: Process) -> None:
        """The worker asks whether its attempt and its own life are current, before it joins the rendezvous."""
        if not process.alive:
            return
        if self.unreachable_from(process):
            self.after(2.0, lambda: self._confirm(job, process))
        elif not self.current(job, process):
            self.end(process, ExitCode.STALE_ATTEMPT)
        else:
            self.check.process_joins(job, process)
            process.joined = True
            process.since = self.t
            self._rendezvous(job, process.attempt, process.wanted)

    def current(self, job: SimJob, process: Process) -> bool:
        """Return whether the fence lets the worker pass, by the status as it is stored now."""
        gang = None if job.removed else fence.gang_in(_fence_document(job.status))
        return not fence.refusal(gang, job.uid, process.attempt, process.index, process.incarnation)

    def unreachable_from(self, process: Process) -> bool:
        return self.t < self.outage_until or not self.nodes[process.node].reachable

    def _rendezvous(self, job: SimJob, attempt: int, wanted: int) -> None:
        here = [p for p in job.processes.values() if p.attempt == attempt and p.joined and p.alive]
        # Of two lives of a worker the newer one meets the others, at the address that both have.
        newest = {p.index: p.incarnation for p in sorted(here, key=lambda p: p.incarnation)}
        members = [p for p in here if p.incarnation == newest[p.index]]
        if len(newest) < wanted or attempt in job.trainings:
            return
        training = Training(
            job.uid,
            attempt,
            tuple(members),
            self.t,
            job.load_seconds,
            members[0].resume_step,
            job.steps,
            job.step_seconds,
        )
        training.committed_step = training.resume_step
        job.trainings[attempt] = training
        self.check.training_began(job, training)
        self.log(lambda: f"gang {job.name}-{attempt} meets, from step {training.resume_step}")
        self._next_commit(job, training, training.resume_step)
        if job.bug_step is not None and job.bug_step > training.resume_step:
            done = job.bug_step - training.resume_step - 1
            at = training.met_at + training.load_seconds + (done + 0.5) * training.step_seconds
            self.at(at, lambda: self._strike_bug(job, training))
        self.at(training.finishes_at(), lambda: self._finish(job, training))
        self.news(job.uid)
        self.after(job.load_seconds, lambda: self.news(job.uid))

    # --- training ---

    def _strike_bug(self, job: SimJob, training: Training) -> None:
        if training.broken_at is None and not training.over and training.drain_at is None:
            self.end(training.members[0], 1, message=f"{BUG} at sample {self.rng.randint(0, 10**6)}")

    def _next_commit(self, job: SimJob, training: Training, step: int) -> None:
        target = step + job.commit_every
        if target >= training.steps:
            return
        at = training.met_at + training.load_seconds + (target - training.resume_step) * training.step_seconds
        self.at(at, lambda: self._commit_due(job, training, target))

    def _commit_due(self, job: SimJob, training: Training, step: int) -> None:
        if training.over or training.broken_at is not None:
            return
        if not self.chance(self.weather.commit_fails):
            self.after(self.rng.expovariate(1 / self.weather.commit_lag), lambda: self.publish(job, training, step))
        self._next_commit(job, training, step)

    def publish(self, job: SimJob, training: Training, step: int) -> bool:
        """The commit confirms the attempt once more and is then visible; a broken gang can't complete one."""
        if training.broken_at is not None or (training.over and step < training.steps):
            return False
        if any(self.unreachable_from(p) for p in training.members) or not self.current(job, training.speaker):
            return False
        if all(commit[0] != step for commit in job.commits):
            job.commits.append((step, training.attempt, self.t, self.wall))
            training.committed_step = max(training.committed_step, step)
            self.log(lambda: f"{job.name}-{training.attempt} commits step {step}")
            self.check.committed(job, training, step)
            self.news(job.uid)
        return True

    def _finish(self, job: SimJob, training: Training) -> None:
        if training.over or training.broken_at is not None:
            return
        if not self.publish(job, training, training.steps):
            self.after(5.0, lambda: self._finish(job, training))
            return
        training.over = True
        job.finished_training = True
        job.trained_seconds += (training.steps - training.resume_step) * training.step_seconds
        self.log(lambda: f"gang {job.name}-{training.attempt} is done")
        for process in training.members:
            self.after(self.rng.uniform(0.05, 2.0), lambda p=process: self.end(p, 0))  # type: ignore[misc]

    def break_gang(self, job: SimJob, attempt: int, peers_notice: bool = True) -> None:
        """Collectives can't go on. The peers learn of it soon, with an error, or hang until they are ended."""
        training = job.trainings.get(attempt)
        if training is None or training.broken_at is not None or training.over:
            return
        training.broken_at = self.t
        job.trained_seconds += training.trained_seconds(self.t)
        job.allow(attempt, Cause.HANG)
        if not peers_notice:
            return
        for process in training.members:
            if process.alive and self.rng.random() < 0.8:
                code = self.rng.choice((1, ExitCode.PEER_LOST, ExitCode.PREFLIGHT_FAILED))
                self.after(self.rng.uniform(0.05, 20.0), lambda p=process, c=code: self.end(p, int(c)))  # type: ignore[misc]

    def end(self, process: Process, code: int, reason: str = "", signal: int | None = None, message: str = "") -> None:
        """The process ends; what it did to the gang follows."""
        if not process.alive:
            return
        job = self.jobs[process.uid]
        process.alive, process.died_at = False, self.t
        if process.visible and self.nodes[process.node].reachable:
            self._ended_in_sight(job, process, code, reason, signal, message)
        self.log(lambda: f"{worker_name(job.name, process.id)} ends with {code} {reason}".rstrip())
        job.deaths[process.id] = code
        if code != 0:
            if process.id == job.status.current(process.index) or process.attempt != job.status.attempt:
                job.allow(process.attempt, *_explanations(code, reason, process.told_to_stop))
            self.break_gang(job, process.attempt)
        elif process.attempt in job.trainings and not job.trainings[process.attempt].over:
            self.break_gang(job, process.attempt)
        self.crew_changed(job)

    def _ended_in_sight(
        self, job: SimJob, process: Process, code: int, reason: str, signal: int | None, message: str
    ) -> None:
        process.state, process.since, process.reason = WorkerState.EXITED, self.t, reason
        training = job.trainings.get(process.attempt)
        process.exit = WorkerExit.model_construct(
            exit_code=code,
            at=self.wall,
            rank=process.index,
            signal=signal,
            step=training.stepped(self.t) if training else None,
            message=message or (f"rank {process.index} said {code}" if code not in (0, 137) else ""),
            log_tail="",
        )
        if process.removing and self.chance(self.weather.vanishes):
            self.forget(job, process)
        elif process.removing:
            self.after(self.rng.uniform(0.1, 5.0), lambda: self.forget(job, process))

    def forget(self, job: SimJob, process: Process) -> None:
        process.visible = False
        if not process.alive:
            for key in [key for key, value in job.processes.items() if value is process]:
                del job.processes[key]
        self.crew_changed(job)

    def _remove(self, job: SimJob, action: RemoveWorker, who: str) -> None:
        process = job.processes.get(action.id)
        if process is None or not process.visible:
            return
        self.check.worker_removed(job, process, who)
        self.log(lambda: f"{who}: remove {worker_name(job.name, action.id)}, grace {action.grace_seconds:.0f} s")
        node = self.nodes[process.node]
        if not process.alive or node.gone:
            # An ended (or never started) worker is only swept; a node that is gone took its process with it.
            self.forget(job, process)
            return
        if not node.reachable or not node.up:
            process.removing = True
            if action.grace_seconds == 0:
                process.ghost = True
                self.log(lambda: f"{worker_name(job.name, action.id)} is forgotten; its node does not answer")
                self.forget(job, process)
            else:
                self.crew_changed(job)
            return
        kill_at = self.t + action.grace_seconds
        # A kill that fell due while the node did not answer is still owed.
        if process.removing and process.kill_at is not None and self.t < process.kill_at <= kill_at:
            return
        first = not process.removing
        if first:
            self.check.preemption.asked_to_stop(job, action.grace_seconds)
        process.removing, process.kill_at = True, kill_at
        self.at(kill_at, lambda: self._kill_if_due(process))
        if first and action.grace_seconds > 0:
            self._terminate(job, process)
        self.crew_changed(job)

    def _kill_if_due(self, process: Process) -> None:
        if (
            process.alive
            and process.kill_at is not None
            and process.kill_at <= self.t
            and self.nodes[process.node].reachable
        ):
            process.told_to_stop = True
            self.end(process, 137, signal=9)

    def _terminate(self, job: SimJob, process: Process) -> None:
        """SIGTERM: ranks that train agree to commit and end with 85; others end at once; some do not listen."""
        training = job.trainings.get(process.attempt)
        if self.chance(self.weather.ignores_term):
            return
        process.told_to_stop = True
        if training is None or training.broken_at is not None or training.over:
            self.after(
                self.rng.uniform(0.05, 1.0),
                lambda: self.end(process, 143 if not process.joined else ExitCode.PREEMPTED_NO_COMMIT),
            )
        elif training.drain_at is None:
            training.drain_at = self.t + self.rng.uniform(0.2, 3.0) + self.rng.expovariate(1 / self.weather.commit_lag)
            self.at(training.drain_at, lambda: self._drained(job, training))

    def _drained(self, job: SimJob, training: Training) -> None:
        if training.broken_at is not None or training.over:
            return
        step = training.stepped(self.t)
        saved = step == training.committed_step or (
            not self.chance(self.weather.commit_fails) and self.publish(job, training, step)
        )
        training.broken_at = self.t
        job.trained_seconds += training.trained_seconds(self.t)
        for process in training.members:
            process.told_to_stop = True
            code = ExitCode.PREEMPTED_COMMITTED if saved else ExitCode.PREEMPTED_NO_COMMIT
            self.after(self.rng.uniform(0.05, 1.0), lambda p=process, c=code: self.end(p, int(c)))  # type: ignore[misc]

    def signal(self, job: SimJob, signal: Signal) -> None:
        job.signals.append(signal)
        self.log(lambda: f"signal {signal.kind} about {job.name}-{signal.attempt}")
        self.news(job.uid)


def _fence_document(status: JobStatus) -> dict[str, Any]:
    """The part of a stored status that the fence reads."""
    last = [{"number": each.number, "endedAt": each.ended_at} for each in status.attempts[-1:]]
    return {"attempt": status.attempt, "attempts": last, "gang": {"incarnations": status.gang.incarnations}}


def _explanations(code: int, reason: str, told: bool) -> tuple[Cause, ...]:
    """What would be a true account of such an end."""
    stated = {80: Cause.USER_ERROR, 81: Cause.OUT_OF_MEMORY, 82: Cause.NUMERIC, 83: Cause.STORAGE}
    if reason == "OOMKilled":
        return (Cause.OUT_OF_MEMORY,)
    if code in stated:
        return (stated[code],)
    if code in (85, 86):
        return (Cause.PREEMPTION,) if not told else (Cause.PREEMPTION, Cause.EVICTION)
    if code in (84, 87, 88) or code > 128:
        return (Cause.INFRASTRUCTURE,)
    return (Cause.UNKNOWN,)
