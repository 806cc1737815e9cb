"""One ModelDeployment from ``helm install`` to deletion, on a real kubelet with our own images.

The tests are the stations of one life and run in this order on one node.  ``make cluster-test`` runs
them; they need root and, the first time, the minutes that images take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from hack.cluster import ClusterError, PrerequisiteError
from hack.cluster.node import Node
from hack.cluster.node import node as run_node
from hack.cluster.portforward import port_forward
from hack.images.builder import Builder
from hack.images.project import Images
from hack.scenario import NAME, NAMESPACE, Scenario, runtime_processes

pytestmark = [pytest.mark.node, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    try:
        with run_node() as running:
            yield running
    except PrerequisiteError as error:
        pytest.skip(f"no node: {error}")


@pytest.fixture(scope="module")
def scenario(node: Node) -> Scenario:
    return Scenario(node, Builder.from_environ(node.binaries.cache))


@pytest.fixture(scope="module")
def images(scenario: Scenario) -> Images:
    images, model = scenario.load_images()
    scenario.install(images)
    scenario.fill_model_volume(model)
    return images


@pytest.fixture(scope="module")
def job(scenario: Scenario, images: Images) -> str:
    """The compile Job of the deployment once that serves."""
    scenario.apply()
    name = scenario.wait_compiled()
    scenario.wait_ready()
    return name


def test_the_namespace_refuses_a_pod_below_the_restricted_standard(node, images):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "bad"},
        "spec": {"containers": [{"name": "c", "image": images.runtime}]},
    }
    with pytest.raises(ClusterError, match='violates PodSecurity "restricted'):
        node.kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(pod))


def test_it_becomes_ready_and_the_pod_itself_proves_the_cache_hit(scenario, job):
    conditions = scenario.conditions()
    assert conditions["Ready"][0] == "True"
    assert conditions["CacheHit"][0] == "True"
    assert len(scenario.serving_pods()) == 1
    assert runtime_processes(), "what the last test looks for must be found while it is there"


def test_the_volume_holds_exactly_the_key_that_the_status_names(scenario, node, job):
    key = node.kubectl("-n", NAMESPACE, "get", "mdep", NAME, "-o", "jsonpath={.status.cache.key}")
    assert scenario.compiled_keys() == [key]


def test_the_pod_started_without_a_trace_or_a_compilation(scenario, node, job):
    pod = scenario.serving_pods()[0]
    with port_forward(node, NAMESPACE, f"pod/{pod}", "http") as url:
        report = httpx.get(f"{url}/debug/graphs", trust_env=False, timeout=60).json()
    assert report["cache"]["result"] == "hit"
    assert report["counters"]["graphs_seen"] == 0
    assert report["counters"]["inductor_compilations"] == 0
    assert report["graphs"]["captured"] > 0


def test_the_openai_client_is_answered_through_the_service_from_captured_graphs(scenario, job):
    answer = scenario.ask()
    assert "Paris" in answer.text
    replayed = sum(
        steps for labels, steps in answer.dispatched.items() if 'mode="NONE"' not in labels
    )
    assert replayed > 0


def test_a_bad_request_is_refused_and_the_pod_serves_on(scenario, node, job):
    with (
        port_forward(node, NAMESPACE, f"svc/{NAME}", "http") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model=NAME, prompt="Hello", max_tokens=-1)
        assert client.completions.create(model=NAME, prompt="Hello", max_tokens=1).choices


def test_nothing_can_be_written_outside_the_mounted_folders(scenario, node, job):
    pod = scenario.serving_pods()[0]
    for folder in ("/", "/opt/kerf", "/cache", "/model"):
        with pytest.raises(ClusterError, match="Read-only file system"):
            node.kubectl("-n", NAMESPACE, "exec", pod, "--", "touch", f"{folder}/x")


def test_scaling_from_one_to_two_replicas_starts_no_new_compile_job(scenario, job):
    scenario.scale(2)
    assert len(scenario.serving_pods()) == 2
    assert scenario.jobs() == [job]


def test_deletion_leaves_no_object_and_no_process(scenario, job):
    scenario.delete()
    assert scenario.left_over() == []
