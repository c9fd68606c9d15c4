"""Makes the pods of an attempt exist, all of them at once or none.

The core asks worker by worker; requests are gathered, so that a gang of 512 is not made one round trip after another.
What the API server refuses (a quota, a missing service account) is tried again, and told until it works or the core
takes the order back. A gang that
could be made only in part is taken back at once and made anew behind a gate, which is lifted when the last pod exists:
so a gang holds nothing while it waits for its missing members, and one that nobody refuses needs no gate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from muster.contract.names import Label, worker_name
from muster.contract.status import Phase
from muster.kube import paths
from muster.kube.client import METADATA, STRATEGIC, Client, Object
from muster.kube.errors import ApiError
from muster.operator.core.decision import CreateWorker
from muster.operator.core.observed import Rejection
from muster.operator.kubernetes import companions
from muster.operator.kubernetes.gangs.choice import gang_ref
from muster.operator.kubernetes.gangs.protocol import Gang, GangRef, Misnamed
from muster.operator.kubernetes.jobs import Job, Jobs
from muster.operator.kubernetes.pods import Pod, Pods, read_pod
from muster.operator.kubernetes.rejections import Rejected, rejected
from muster.operator.kubernetes.render import (
    CLAIMS_API,
    Site,
    Unrenderable,
    hold_back,
    pin,
    render_pod,
    require_node_affinity,
)
from muster.operator.pacing import (
    CAREFUL_SECONDS,
    CREATE_AT_ONCE,
    CREATE_RETRY_SECONDS,
    CREATE_RETRY_SECONDS_MAX,
    SHARED_SECONDS,
)

TAKE_BACK_SECONDS = 5.0  # grace of a pod that is taken back; it has not met the others, so there is nothing to commit

Attempt = tuple[str, int]  # job uid, attempt


@dataclass(slots=True)
class _Order:
    """The workers of one attempt that should exist. rejected: by worker, why it does not yet."""

    workers: dict[int, CreateWorker] = field(default_factory=dict)
    rejected: dict[int, Rejected] = field(default_factory=dict)

    def reject(self, rejected: dict[int, Rejected]) -> None:
        """These are rejected now, and no others."""
        self.rejected = {worker: entry.first_seen(self.rejected.get(worker)) for worker, entry in rejected.items()}


_TAKEN_BACK = "taken back until the whole gang can be made"


@dataclass(frozen=True, slots=True)
class RejectedWorker:
    """A worker that should exist and does not."""

    worker: int
    attempt: int
    node: str
    rejected: Rejected


class Creator:
    """gang_of: the adapter of a job. instance_type: of a node. enqueue: called with the uid of a job that changed.
    enqueue_later: called instead where further changes of the job are expected, so that one look sees them together.
    """

    def __init__(
        self,
        client: Client,
        jobs: Jobs,
        pods: Pods,
        site: Site,
        gang_of: Callable[[Job], Gang],
        instance_type: Callable[[str], str],
        enqueue: Callable[[str], None],
        enqueue_later: Callable[[str], None],
    ) -> None:
        self._client, self._jobs, self._pods, self._site = client, jobs, pods, site
        self._gang_of, self._instance_type = gang_of, instance_type
        self._enqueue, self._enqueue_later = enqueue, enqueue_later
        self._orders: dict[Attempt, _Order] = {}
        self._ordered: dict[str, set[int]] = {}  # job uid → attempts
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._ready_jobs: set[str] = set()  # whose own objects are there
        self._shared: dict[str, float] = {}  # path of what the gangs of a namespace share → when it was seen there
        self._first = asyncio.Lock()
        self._turn = asyncio.Semaphore(CREATE_AT_ONCE)
        self._groups: set[tuple[str, str]] = set()  # (job uid, group) whose objects are there
        self._lifting: set[Attempt] = set()
        self._careful: dict[str, float] = {}  # namespace → until when (monotonic)
        # Job uid → uids of pods that we deleted ourselves, kept as long as the job: a list may be older than a pod.
        self._taken_back: dict[str, set[str]] = {}

    def order(self, uid: str, action: CreateWorker) -> None:
        """Let it exist. Returns at once."""
        key = (uid, action.attempt)
        order = self._orders.setdefault(key, _Order())
        self._ordered.setdefault(uid, set()).add(action.attempt)
        order.workers.setdefault(action.worker, action)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._carry_out(key), name=f"create {uid}/{action.attempt}")

    def cancel(self, uid: str, attempt: int, worker: int) -> None:
        order = self._orders.get((uid, attempt))
        if order is not None:
            order.workers.pop(worker, None)
            order.rejected.pop(worker, None)

    def rejected(self, uid: str) -> tuple[RejectedWorker, ...]:
        return tuple(
            RejectedWorker(worker, attempt, order.workers[worker].node, entry)
            for attempt in self._ordered.get(uid, ())
            if (order := self._orders.get((uid, attempt))) is not None
            for worker, entry in order.rejected.items()
            if worker in order.workers
        )

    def as_made(self, job: Job, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods as the core should see them: one that was taken back waits for its like; it is no failure."""
        taken = self._taken_back.get(job.uid)
        if not taken or job.status.phase is not Phase.STARTING:
            return pods
        return tuple(
            replace(pod, deleting=False, over=False, end=None, running_since=0.0, disruption="", trouble=_TAKEN_BACK)
            if pod.uid in taken and not pod.gone
            else pod
            for pod in pods
        )

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._taken_back.pop(uid, None)
        self._ready_jobs.discard(uid)
        self._groups = {entry for entry in self._groups if entry[0] != uid}

    def reconcile(self, job: Job, pods: tuple[Pod, ...]) -> None:
        """Lift the gates of a gang that is complete, if an operator died between making the last pod and doing so."""
        key = (job.uid, job.status.attempt)
        if job.status.phase is not Phase.STARTING or key in self._tasks or key in self._lifting:
            return
        mine = [pod for pod in pods if pod.attempt == job.status.attempt and not pod.gone]
        gate = self._gang_of(job).gate
        if gate is not None and len(mine) == job.status.gang.wanted and any(gate in pod.gates for pod in mine):
            self._lifting.add(key)
            task = asyncio.create_task(self._lift(job, tuple(mine), gate))
            task.add_done_callback(lambda _: self._lifting.discard(key))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, key: Attempt) -> None:
        """Until all exist, or nobody wants them any more."""
        await asyncio.sleep(0)  # let the rest of the gang be asked for
        pause = CREATE_RETRY_SECONDS
        try:
            while (order := self._orders[key]).workers:
                job = self._jobs.get(key[0])
                if job is None or (job.status.attempt, job.status.phase) != (key[1], Phase.STARTING):
                    return
                await self._make(job, order)
                if not order.rejected:
                    return
                self._enqueue(key[0])
                await asyncio.sleep(pause)
                pause = min(CREATE_RETRY_SECONDS_MAX, 2 * pause)
        finally:
            self._orders.pop(key, None)
            self._tasks.pop(key, None)
            if not (left := self._ordered.get(key[0], set()) - {key[1]}):
                self._ordered.pop(key[0], None)
            else:
                self._ordered[key[0]] = left
            self._enqueue_later(key[0])  # its pods will come up, which is news

    async def _make(self, job: Job, order: _Order) -> None:
        gang = self._gang_of(job)
        wanted = dict(order.workers)
        try:
            ref = gang_ref(job)
            await self._prepare(job, gang, ref)
        except (OSError, Misnamed, Unrenderable) as error:
            order.reject(dict.fromkeys(wanted, rejected(error, time.time())))
            return
        # What is there is not made again: even a refused request counts against a quota for a while.
        made = {pod.worker: pod for pod in self._pods.of(job.uid) if pod.attempt == ref.attempt and not pod.gone}
        absent = [action for worker, action in wanted.items() if worker not in made]
        gate = gang.gate if self._is_careful(job.namespace) and ref.size > 1 else None
        results = await asyncio.gather(*(self._make_one(job, gang, ref, action, gate) for action in absent))
        answers = {action.worker: result for action, result in zip(absent, results, strict=True)}
        made |= {worker: pod for worker, pod in answers.items() if isinstance(pod, Pod)}
        taken = self._taken_back.get(job.uid, set())
        back = Rejected(Rejection.TEMPORARY, _TAKEN_BACK, time.time())
        order.reject(
            {worker: entry for worker, entry in answers.items() if isinstance(entry, Rejected)}
            | {worker: back for worker, pod in made.items() if pod.uid in taken}
        )
        if gang.gate is None:
            return
        if any(isinstance(entry, Rejected) and entry.answered for entry in answers.values()):
            self._careful[job.namespace] = time.monotonic() + CAREFUL_SECONDS
            await self._take_back(job, [pod for pod in made.values() if gang.gate not in pod.gates])
        elif not order.rejected and len(made) == job.status.gang.wanted:
            await self._lift(job, tuple(made.values()), gang.gate)

    def _is_careful(self, namespace: str) -> bool:
        return time.monotonic() < self._careful.get(namespace, 0.0)

    async def _take_back(self, job: Job, pods: list[Pod]) -> None:
        """Others of the gang were refused: these must not hold their nodes. What fails is done at the next try."""

        async def take(pod: Pod) -> None:
            options = {"gracePeriodSeconds": int(TAKE_BACK_SECONDS), "preconditions": {"uid": pod.uid}}
            self._taken_back.setdefault(job.uid, set()).add(pod.uid)
            item = await self._client.delete(paths.core(pod.namespace, "pods", pod.name), options)
            left = read_pod(item)
            if left is not None and any(known.uid == left.uid for known in self._pods.of(job.uid)):
                self._pods.keep(left)  # else the watch was quicker than the answer, and has seen it go

        held = (pod for pod in pods if not pod.deleting and job.status.gang.wanted > 1)
        await asyncio.gather(*(take(pod) for pod in held), return_exceptions=True)

    async def _make_one(
        self, job: Job, gang: Gang, ref: GangRef, action: CreateWorker, gate: str | None
    ) -> Pod | Rejected:
        """The pod, or why there is none."""
        try:
            async with self._turn:  # also to render it: manifests that wait would be most of our memory
                manifest = self._manifest(job, gang, ref, action)
                if gate is not None:
                    hold_back(manifest, gate)
                path = paths.core(job.namespace, "pods")
                # What other schedulers' webhooks made of it must be read; without them it is what we sent.
                item = manifest | await self._client.create(path, manifest, METADATA if gang.places else "")
            if refusal := gang.refusal(item):
                await self._client.delete(paths.core(job.namespace, "pods", item["metadata"]["name"]))
                return rejected(OSError(refusal), time.time())
            pod = read_pod(item)
        except (OSError, Unrenderable) as error:
            if isinstance(error, ApiError) and error.reason == "AlreadyExists":
                return await self._found(job, action)
            return rejected(error, time.time())
        assert pod is not None, "we made its labels"
        self._pods.keep(pod)
        return pod

    def _manifest(self, job: Job, gang: Gang, ref: GangRef, action: CreateWorker) -> Object:
        instance_type = self._instance_type(action.node) or (job.spec.gang.instance_types or ("",))[0]
        manifest = render_pod(job, action, self._site, gang.kind, instance_type)
        if gang.places:
            pin(manifest, action.node)
        else:
            require_node_affinity(manifest, job, time.time())
        gang.decorate(manifest, ref)
        return manifest

    async def _found(self, job: Job, action: CreateWorker) -> Pod | Rejected:
        """A pod of that name is there: ours, unless an earlier job of the same name has left it."""
        name = worker_name(job.name, action.attempt, action.worker)
        item = await self._client.get(paths.core(job.namespace, "pods", name))
        if (item["metadata"].get("labels") or {}).get(Label.JOB_UID) != job.uid:
            why = f"a pod named {name} is there that does not belong to this job; it has to go first"
            return rejected(OSError(why), time.time())
        pod = read_pod(item)
        return pod if pod is not None else rejected(OSError(f"the pod {name} lost its labels; delete it"), time.time())

    async def _prepare(self, job: Job, gang: Gang, ref: GangRef) -> None:
        """What must be there before the first pod: names, the fence's permission, the gang's own objects."""
        async with self._first:  # many jobs may be the first of their namespace
            await self._share(
                paths.group(f"{companions.RBAC}/v1", job.namespace, "rolebindings"),
                companions.fence_binding(job.namespace, self._site.account(job), bool(self._site.watch_namespace)),
                "subjects",
            )
            if job.spec.gang.nodes.max > 1:  # one that will never have another needs no name
                await self._share(paths.core(job.namespace, "services"), companions.service(job.namespace), "spec")
        if job.uid not in self._ready_jobs:
            await self._make_claims(job)
            if (policy := companions.network_policy(job, self._site)) is not None:
                await self._make_sure(
                    paths.group("networking.k8s.io/v1", job.namespace, "networkpolicies"), policy, job.uid
                )
            self._ready_jobs.add(job.uid)
        if (job.uid, ref.group) not in self._groups:
            for item in gang.objects(ref):
                try:
                    await self._make_sure(item.path, item.body, job.uid)
                except ApiError as error:
                    if error.status == 404:
                        raise OSError(f"{item.needs} is not installed in this cluster ({item.path})") from error
                    raise
            self._groups.add((job.uid, ref.group))

    async def _make_sure(self, path: str, body: Object, job_uid: str) -> None:
        try:
            await self._client.create(path, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            found = await self._client.get(f"{path}/{body['metadata']['name']}")
            owners = found["metadata"].get("ownerReferences") or ()
            if all(owner["uid"] != job_uid for owner in owners):
                kind, name = body["kind"], body["metadata"]["name"]
                raise OSError(
                    f"a {kind} named {name} is there that does not belong to this job; delete or rename it"
                ) from error

    async def _share(self, path: str, body: Object, what: str) -> None:
        """What the gangs of a namespace share, and no job owns. what: the key by which one of that name is told for
        ours.
        """
        kind, name = body["kind"], body["metadata"]["name"]
        place = f"{path}/{name}"
        if time.monotonic() - self._shared.get(place, -SHARED_SECONDS) < SHARED_SECONDS:
            return
        try:
            await self._client.create(path, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":  # the platform's trouble, which no job of the namespace can help
                raise OSError(f"{kind} {name}: {error.message}") from error
            ours, found = body[what], (await self._client.get(place))[what]
            same = all(found.get(key) == ours[key] for key in ours) if isinstance(ours, dict) else found == ours
            if not same:
                raise OSError(f"a {kind} named {name} is there that Muster did not make; delete it") from error
        self._shared[place] = time.monotonic()

    async def _make_claims(self, job: Job) -> None:
        """The template of claims, and first whether anybody could ever fulfil them."""
        template = companions.claim_template(job)
        if template is None:
            return
        for request in template["spec"]["spec"]["devices"]["requests"]:
            name = request["exactly"]["deviceClassName"]
            try:
                await self._client.get(f"/apis/{CLAIMS_API}/deviceclasses/{name}")
            except ApiError as error:
                if error.status != 404:
                    raise
                served = error.reason == "NotFound" and "deviceclasses" in error.message
                if served:
                    where = f"spec.gang.deviceClasses.{request['name']}"
                    raise Misnamed(f"{where}: this cluster has no DeviceClass named {name}") from error
                raise OSError(
                    f"spec.gang.deviceClasses: this cluster does not serve {CLAIMS_API} (Kubernetes 1.34)"
                ) from error
        path = paths.group(CLAIMS_API, job.namespace, "resourceclaimtemplates")
        await self._make_sure(path, template, job.uid)

    async def _lift(self, job: Job, pods: tuple[Pod, ...], gate: str) -> None:
        """All of the gang exist: let them be scheduled. Idempotent; what fails is done at the next look."""
        change = {"spec": {"schedulingGates": [{"name": gate, "$patch": "delete"}]}}

        async def lift(pod: Pod) -> None:
            item = await self._client.patch(paths.core(pod.namespace, "pods", pod.name), change, STRATEGIC)
            if (lifted := read_pod(item)) is not None:
                self._pods.keep(lifted)

        held = (pod for pod in pods if gate in pod.gates)
        for error in await asyncio.gather(*(lift(pod) for pod in held), return_exceptions=True):
            if isinstance(error, BaseException):
                self._enqueue(job.uid)
