"""A pod holds more containers than ours: only the trainer's, and init containers that don't restart, end a worker."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.seen import NODES, running, settled, starting, with_status
from tests.unit.kubernetes.making import make_job, node_item, pod_item

from muster.operator.core.decide import decide
from muster.operator.core.observed import ObservedJob, ObservedWorker, WorkerState
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.nodes import read_node
from muster.operator.kubernetes.pods import PodCache, read_pod
from muster.operator.kubernetes.refusals import is_refusal, says_no_cause
from muster.operator.kubernetes.settings import TOLERATIONS
from muster.words.signals import Cause
from muster.words.status import Attempt, Phase

RUNNING = {"phase": "Running", "attempt": 1, "gang": {"wanted": 2, "nodes": list(NODES)}}
NATIVE = {"initContainers": [{"name": "preflight"}, {"name": "proxy", "restartPolicy": "Always"}]}


def ended(name: str, code: int, **more: Any) -> dict[str, Any]:
    end = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": "2026-11-20T09:00:00Z"}
    return {"name": name, "state": {"terminated": end}} | more


def runs(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"running": {"startedAt": "2026-11-20T08:00:20Z"}}} | more


def waits(name: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}}


def status(phase: str, inits: list[dict[str, Any]], containers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"phase": phase, "initContainerStatuses": inits, "containerStatuses": containers}


def worker(index: int, pod: dict[str, Any], image: str | None = "registry.example/trainer:1") -> ObservedWorker:
    made = read_pod(pod_item(index, status=pod, spec={"nodeName": NODES[index]} | NATIVE))
    assert made is not None
    job = make_job(RUNNING, runtime={"image": image} if image else {})
    (seen,) = observe.workers(
        job, (made,), (), lambda name: read_node(node_item(name=name), TOLERATIONS, now=100.0), lambda pod: ()
    )
    return seen


def gang(first: dict[str, Any], second: dict[str, Any]) -> ObservedJob:
    """A gang that runs, of which the cluster shows this now."""
    seen = running()
    found = [
        replace(entry, created_at=seen.now - 50, since=seen.now - 1, heartbeats=mine.heartbeats)
        for entry, mine in zip((worker(0, first), worker(1, second)), seen.workers, strict=True)
    ]
    return replace(seen, workers=tuple(found))


HEALTHY = status("Running", [ended("preflight", 0), runs("proxy")], [runs("trainer")])


@pytest.mark.parametrize("code", [137, 143])
@pytest.mark.parametrize("native", [True, False])
def test_a_sidecar_that_is_killed_after_the_trainers_success_leaves_it_a_success(code: int, native: bool) -> None:
    done = ended("trainer", 0)
    pod = (
        status("Succeeded", [ended("preflight", 0), ended("proxy", code)], [done])
        if native
        else status("Failed", [ended("preflight", 0)], [ended("fluent-bit", code), done])
    )
    assert decide(gang(pod, pod)).status.phase is Phase.SUCCEEDED


@pytest.mark.parametrize(
    ("inits", "containers", "words"),
    [
        ([ended("proxy", 1)], [runs("trainer")], "container proxy exited with 1"),
        ([waits("proxy", "CrashLoopBackOff")], [runs("trainer")], ""),
        (
            [runs("proxy", lastState={"terminated": {"exitCode": 2}})],
            [runs("trainer")],
            "container proxy exited with 2",
        ),
        ([runs("proxy")], [ended("fluent-bit", 1), runs("trainer")], "container fluent-bit exited with 1"),
        ([runs("proxy")], [ended("fluent-bit", 0), runs("trainer")], ""),
    ],
)
def test_a_sidecar_that_crashes_ends_no_gang_and_is_a_warning(
    inits: list[dict[str, Any]], containers: list[dict[str, Any]], words: str
) -> None:
    seen = gang(status("Running", [ended("preflight", 0), *inits], containers), HEALTHY)
    assert (seen.workers[0].state, seen.workers[0].warning) == (WorkerState.RUNNING, words)
    decision = decide(seen)
    assert decision.status.phase is Phase.RUNNING
    found = {entry.type: entry for entry in decision.status.conditions}.get("SidecarFailed")
    assert (found.message if found else "") == (words and f"{words} in the pod of worker 0")
    if found:
        well = decide(replace(with_status(seen, decision.status), workers=gang(HEALTHY, HEALTHY).workers)).status
        assert {entry.type: entry.status for entry in well.conditions}["SidecarFailed"] == "False"


def test_a_sidecar_that_crashes_before_the_trainer_starts_is_said_and_ends_nothing() -> None:
    crashing = waits("proxy", "CrashLoopBackOff", "back-off 10s restarting failed container")
    seen = worker(0, status("Pending", [ended("preflight", 0), crashing], [waits("trainer", "PodInitializing")]))
    assert (seen.state, seen.reason) == (
        WorkerState.STARTING,
        "CrashLoopBackOff: back-off 10s restarting failed container",
    )
    between = status("Pending", [ended("preflight", 0), ended("proxy", 1)], [waits("trainer", "PodInitializing")])
    assert worker(0, between).state is WorkerState.STARTING


def test_an_init_container_that_does_not_restart_ends_its_worker() -> None:
    seen = worker(0, status("Failed", [ended("preflight", 84)], [waits("trainer", "PodInitializing")]))
    assert seen.exit is not None
    assert (seen.state, seen.exit.exit_code) == (WorkerState.EXITED, 84)
    assert seen.exit.message == "init container preflight exited with 84"


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("python3", "the image has no python3 on its PATH: a program's image needs Python 3.9 or newer"),
        ("python", "the image has no python on its PATH, so it is not one of Muster's trainer"),
    ],
)
def test_an_image_without_python_is_the_users_to_correct(missing: str, says: str) -> None:
    """The runtime can't start the container: nothing in it can say so, and another try finds the same image."""
    message = (
        f'failed to create containerd task: runc create failed: exec: "{missing}": executable file not found in $PATH'
    )
    end = {"exitCode": 128, "reason": "StartError", "message": message, "finishedAt": "2026-11-20T09:00:00Z"}
    after = decide(gang(status("Failed", [], [{"name": "trainer", "state": {"terminated": end}}]), HEALTHY)).status
    assert after.last_failure is not None
    assert after.last_failure.cause is Cause.USER_ERROR
    assert after.last_failure.message == f"{says}; correct runtime.image, and submit the job again"
    assert after.ends_as is Phase.FAILED


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present"),
        ("OutOfnvidia.com/gpu", "Node didn't have enough resource: nvidia.com/gpu, requested: 8, used: 8"),
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality"),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
        ("SomethingNew", "that a later kubelet says"),
    ],
)
def test_a_pod_that_its_kubelet_rejects_is_the_infrastructures_in_the_kubelets_words(reason: str, message: str) -> None:
    seen = gang({"phase": "Failed", "reason": reason, "message": message, "containerStatuses": []}, HEALTHY)
    after = decide(seen).status
    assert after.phase is Phase.RESTARTING
    assert after.last_failure is not None
    assert (after.last_failure.cause, after.last_failure.node) == (Cause.INFRASTRUCTURE, NODES[0])
    assert after.last_failure.message == f"worker 0 on {NODES[0]}: {reason}: {message}"
    assert after.last_failure.message in after.because, "so it is in the status, the event and `muster why`"


def test_an_eviction_says_what_the_kubelet_says_of_it() -> None:
    seen = gang({"phase": "Failed", "reason": "Evicted", "message": "low on memory", "containerStatuses": []}, HEALTHY)
    after = decide(seen).status
    assert after.last_failure is not None
    assert (after.last_failure.cause, after.last_failure.message) == (
        Cause.EVICTION,
        f"worker 0 on {NODES[0]}: Evicted: low on memory",
    )


NO_HOST = "dial tcp: lookup ghrc.io on 10.96.0.10:53: no such host"
NOT_FOUND = 'rpc error: code = NotFound desc = failed to resolve reference "registry.example/t:1": not found'


@pytest.mark.parametrize(
    ("reason", "message", "refused"),
    [
        ("InvalidImageName", "couldn't parse image name", True),
        ("ErrImageNeverPull", 'Container image "t:1" is not present with pull policy of Never', True),
        ("ErrImagePull", NOT_FOUND, True),
        ("ImagePullBackOff", f'Back-off pulling image "t:1": ErrImagePull: {NOT_FOUND}', True),
        ("ErrImagePull", "failed to fetch anonymous token: unexpected status: 401 Unauthorized", True),
        ("ErrImagePull", "pull access denied, repository does not exist or may require authorization", True),
        ("ErrImagePull", "reading manifest 9 in docker.io/t: manifest unknown", True),
        ("CreateContainerConfigError", 'secret "hf-token" not found', True),
        ("CreateContainerConfigError", 'configmap "settings" not found', True),
        ("CreateContainerConfigError", "couldn't find key token in Secret team/hf", True),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition", False),
        ("ErrImagePull", NO_HOST, True),
        ("ImagePullBackOff", f'Back-off pulling image "t:1": ErrImagePull: {NO_HOST}', True),
        ("ErrImagePull", "dial tcp: lookup ghcr.io on 10.96.0.10:53: server misbehaving", False),
        ("ErrImagePull", "dial tcp: lookup ghcr.io: i/o timeout", False),
        ("ErrImagePull", "lookup ghcr.io on 10.96.0.10:53: read udp: connection refused", False),
        ("ErrImagePull", "rpc error: code = DeadlineExceeded desc = context deadline exceeded", False),
        ("ErrImagePull", "dial tcp 10.1.1.1:443: i/o timeout", False),
        ("ErrImagePull", "429 Too Many Requests: toomanyrequests: your unauthenticated pull rate limit", False),
        ("ErrImagePull", "exec docker-credential-ecr-login: executable file not found in $PATH", False),
        ("ImagePullBackOff", 'Back-off pulling image "t:1"', False),
        ("RegistryUnavailable", "", False),
        ("ContainerCreating", "", False),
    ],
)
def test_a_registry_that_says_no_is_not_one_that_says_nothing(reason: str, message: str, refused: bool) -> None:
    assert is_refusal(reason, message) == refused
    seen = worker(0, status("Pending", [], [waits("trainer", reason, message)]))
    assert bool(seen.refusal) == refused


def test_the_user_is_told_what_to_correct() -> None:
    mistyped = status("Pending", [waits("preflight", "InvalidImageName", "no name")], [])
    assert "correct runtime.image" in worker(0, mistyped).refusal
    assert "ask its administrator" in worker(0, mistyped, image=None).refusal
    elsewhere = status("Pending", [], [waits("trainer", "ErrImagePull", NO_HOST)])
    assert "the nodes know no registry ghrc.io: correct runtime.image" in worker(0, elsewhere).refusal
    assert "ask its administrator" in worker(0, elsewhere, image=None).refusal
    missing = status("Pending", [], [waits("trainer", "CreateContainerConfigError", 'secret "x" not found')])
    assert "create what is missing" in worker(0, missing).refusal


def test_the_image_of_a_container_that_somebody_injected_is_not_the_users_to_correct() -> None:
    pod = status("Pending", [waits("proxy", "ErrImagePull", NOT_FOUND)], [waits("trainer", "PodInitializing")])
    seen = worker(0, pod)
    assert (seen.refusal, seen.reason) == ("", f"ErrImagePull: {NOT_FOUND}")


def test_an_older_kubelet_says_only_once_why_it_backs_off() -> None:
    assert says_no_cause('ImagePullBackOff: Back-off pulling image "t:1"')
    assert not says_no_cause(f'ImagePullBackOff: Back-off pulling image "t:1": ErrImagePull: {NOT_FOUND}')
    pods = PodCache(lambda uid: None)

    def shows(version: int, reason: str, message: str) -> tuple[bool, str]:
        pods.put(pod_item(0, version=version, status=status("Pending", [], [waits("trainer", reason, message)])))
        (pod,) = pods.all()
        return pod.refused, pod.trouble

    first = shows(1, "ErrImagePull", NOT_FOUND)
    assert first == (True, f"ErrImagePull: {NOT_FOUND}")
    for version in (2, 3):
        assert shows(version, "ImagePullBackOff", 'Back-off pulling image "t:1"') == first
    assert not shows(4, "ErrImagePull", "i/o timeout")[0]
    assert not shows(5, "ImagePullBackOff", 'Back-off pulling image "t:1"')[0]


def test_a_mistyped_image_is_the_users_error_once_the_kubelet_has_tried_again() -> None:
    mistyped = status("Pending", [], [waits("trainer", "ErrImagePull", NOT_FOUND)])
    seen = starting()
    crew = tuple(replace(worker(i, mistyped), created_at=seen.now, since=seen.now) for i in (0, 1))
    seen = replace(seen, workers=crew)
    begun = seen.now
    for second in range(0, 20, 5):
        seen = replace(with_status(seen, decide(seen).status), now=begun + second)
        assert seen.status.phase is Phase.STARTING, "the first refusal may be a registry's mistake"
    seen = replace(seen, now=begun + 21)
    after = decide(seen).status
    assert (after.phase, after.ends_as) == (Phase.STOPPING, Phase.FAILED)
    assert after.last_failure is not None
    assert after.last_failure.cause is Cause.USER_ERROR
    assert (after.node_faults, after.excluded_nodes) == ((), ()), "no node is charged"
    assert "not found" in after.because
    gone = replace(with_status(seen, after), workers=())
    over = settled(gone).status
    assert (over.phase, over.gang.nodes) == (Phase.FAILED, ()), "and its nodes are free"


def test_a_job_that_has_trained_is_restarted_where_a_node_may_not_pull_its_image() -> None:
    """Its image exists: the node's credentials have ended, or the registry takes none for a while."""
    mistyped = status("Pending", [], [waits("trainer", "ErrImagePull", "unexpected status: 403 Forbidden")])
    seen = starting()
    earlier = Attempt(number=0, created_at=1.0, first_step_at=2.0, ended_at=3.0)
    trained = seen.status.model_copy(update={"attempts": (earlier, *seen.status.attempts)})
    crew = tuple(replace(worker(i, mistyped), created_at=seen.now, since=seen.now) for i in (0, 1))
    seen = replace(with_status(seen, trained), workers=crew)
    seen = replace(with_status(seen, decide(seen).status), now=seen.now + 21)
    after = decide(seen).status
    assert (after.phase, after.ends_as) == (Phase.RESTARTING, None)
    assert after.last_failure is not None
    assert (after.last_failure.cause, after.last_failure.node) == (Cause.INFRASTRUCTURE, NODES[0])


def test_a_secret_that_comes_a_moment_later_is_no_error() -> None:
    missing = status("Pending", [], [waits("trainer", "CreateContainerConfigError", 'secret "hf" not found')])
    seen = starting()
    begun = seen.now
    seen = replace(seen, workers=tuple(worker(i, missing) for i in (0, 1)))
    seen = replace(with_status(seen, decide(seen).status), now=begun + 15)
    comes = status("Pending", [], [waits("trainer", "ContainerCreating")])
    well = replace(seen, workers=tuple(replace(worker(i, comes), since=begun) for i in (0, 1)), now=begun + 16)
    after = decide(well).status
    assert (after.phase, after.suspicion) == (Phase.STARTING, None)
    assert decide(replace(with_status(well, after), now=begun + 40)).status.phase is Phase.STARTING
