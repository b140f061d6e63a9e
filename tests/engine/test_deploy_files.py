"""Manifests in deploy/: they fit together, their commands parse, their metrics and paths exist."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from server_process import Server

from penstock.cli.flags import add_serve_flags, normalize
from penstock.cli.serve import build_config
from penstock.config.http import HttpConfig
from penstock.config.schema import EngineConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "penstock.yaml").read_text()))
NODES = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "penstock-nodes.yaml").read_text()))
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())
UNIT = (DEPLOY / "systemd" / "penstock.service").read_text()
METRIC = re.compile(r"\b(?:penstock|trtllm|vllm)[_:]\w+")


@pytest.fixture(scope="module")
def server():
    with Server("tiny", num_threads=1, kv_cache_config={"max_tokens": 1024}) as server:
        server.post("/v1/completions", prompt="What is 3 + 4?", max_tokens=4)
        yield server


@pytest.fixture(scope="module")
def samples(server) -> set[str]:
    """Names of all samples of the exposition, also of those that come with their first event."""
    text = server.http.get("/prometheus/metrics").text
    found = set(re.findall(r"(?m)^([a-z][\w:]*)(?:\{| )", text))
    families = re.findall(r"(?m)^# TYPE (\S+) counter$", text)
    return found | {name if name.endswith("_total") else f"{name}_total" for name in families}


def one(kind: str) -> dict:
    [found] = [manifest for manifest in KUBERNETES if manifest["kind"] == kind]
    return found


def config_of(words: list[str]) -> EngineConfig:
    """What `penstock serve WORD...` would run with."""
    assert words[:2] == ["penstock", "serve"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    parser.set_defaults(needs_model=False)
    return build_config(parser.parse_args(normalize(words[2:])))


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_manifests_are_valid_for_kubernetes():
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in KUBERNETES:
        validate.validate(manifest, validate.latest_version(), strict=True)
    broken = one("Deployment") | {"spec": {"template": {}}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_the_ranks_of_a_leader_worker_set_are_those_of_its_pods(server):
    """Of the LeaderWorkerSet itself there is no schema here: its pods are checked as such."""
    validate = pytest.importorskip("kubernetes_validate")
    group, service = NODES
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [template[f"{role}Template"] for role in ("leader", "worker")]
    for pod in pods:
        manifest = {"apiVersion": "v1", "kind": "Pod"} | pod
        validate.validate(manifest, validate.latest_version(), strict=True)
        [container] = pod["spec"]["containers"]
        words = shlex.split(container["command"][2])
        config = config_of(words[words.index("penstock") :])
        per_pod = int(words[words.index("--nproc_per_node") + 1])
        assert config.tensor_parallel_size == template["size"] * per_pod
        assert container["resources"]["limits"]["nvidia.com/gpu"] == per_pod
        [secret] = [one for one in container["env"] if one["name"] == "PENSTOCK_RANK_SECRET"]
        assert secret["valueFrom"]["secretKeyRef"]["name"] == "penstock-ranks"
    validate.validate(service, validate.latest_version(), strict=True)
    leader, worker = (pod["metadata"]["labels"] for pod in pods)
    assert service["spec"]["selector"].items() <= leader.items()
    assert not service["spec"]["selector"].items() <= worker.items()
    for probe in ("startupProbe", "readinessProbe"):
        asked = pods[0]["spec"]["containers"][0][probe]["httpGet"]
        assert server.http.get(asked["path"]).status_code == 200


def test_every_metric_of_the_dashboard_is_in_the_exposition(samples):
    queries = [*expressions(), *(item["query"] for item in DASHBOARD["templating"]["list"])]
    names = {name for query in queries for name in METRIC.findall(query)}
    assert len(names) > 15
    assert names - samples == set()
    assert all(METRIC.search(query) for query in queries)
    assert "penstock_nothing" not in samples


def test_the_dashboard_has_a_place_for_every_panel():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(places) == len(set(places)) == 12
    for query in expressions():
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        assert query.count("rate(") == query.count("[$__rate_interval]")


def test_a_deployment_serves_a_recipe_on_the_port_of_its_service(server):
    pod = one("Deployment")["spec"]["template"]
    [container] = pod["spec"]["containers"]
    config = config_of(container["command"] + container["args"])
    [port] = container["ports"]
    assert (config.host, config.port) == ("0.0.0.0", port["containerPort"])
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == config.tensor_parallel_size
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert server.http.get(asked["path"]).status_code == 200
    annotations = pod["metadata"]["annotations"]
    assert server.http.get(annotations["prometheus.io/path"]).status_code == 200
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    labels = pod["metadata"]["labels"]
    assert one("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert one("Service")["spec"]["selector"] == labels
    assert one("Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    claims = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
    assert {"claimName": one("PersistentVolumeClaim")["metadata"]["name"]} in claims
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert pod["spec"]["terminationGracePeriodSeconds"] > HttpConfig().shutdown_timeout


def test_the_autoscaler_counts_what_waits(samples):
    scaler = one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == one("Deployment")["metadata"]["name"]
    [metric] = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] in samples
    assert "replicas" not in one("Deployment")["spec"]  # they would argue


def test_compose_serves_is_scraped_and_shown(server):
    service = COMPOSE["services"]["penstock"]
    words = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
    config = config_of(words)
    assert (config.model, config.host, config.tensor_parallel_size) == ("tiny", "0.0.0.0", 1)
    assert all(
        port.startswith("127.0.0.1:")
        for one in COMPOSE["services"].values()
        for port in one["ports"]
    )
    scrape = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    [job] = scrape["scrape_configs"]
    assert server.http.get(job["metrics_path"]).status_code == 200
    assert job["static_configs"] == [{"targets": [f"penstock:{config.port}"]}]
    folder = DEPLOY / "compose" / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    [shown] = yaml.safe_load((folder / "dashboards" / "penstock.yaml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in COMPOSE["services"]["grafana"]["volumes"])
    assert mounts["../grafana"] == shown["options"]["path"]
    for mount in (*mounts, "./prometheus.yml"):
        assert (DEPLOY / "compose" / mount).exists()


def test_the_unit_is_valid_and_gives_requests_time_to_end(tmp_path):
    fields = dict(re.findall(r"(?m)^(\w+)=(.*)$", UNIT))
    assert int(fields["TimeoutStopSec"]) > HttpConfig().shutdown_timeout
    program, command, *_ = fields["ExecStart"].split()
    assert (Path(program).name, command) == ("penstock", "serve")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd on this machine")
    unit = tmp_path / "penstock.service"
    unit.write_text(UNIT.replace(program, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "penstock.service" in line]
    assert ours == [], done.stderr
