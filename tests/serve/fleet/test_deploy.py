"""The files in deploy/ray are what Ray and the application take."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy" / "ray"
CONFIG: dict[str, Any] = yaml.safe_load((DEPLOY / "config.yaml").read_text(encoding="utf-8"))


def test_kuberay_gets_the_same_config() -> None:
    service = list(yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text(encoding="utf-8")))[1]
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == CONFIG
    keys = CONFIG["applications"][0]["args"]["flags"]["api_key_file"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert keys.startswith(spec["containers"][0]["volumeMounts"][0]["mountPath"])
        assert spec["volumes"][0]["secret"]["secretName"] == "outrider-keys"


def test_ray_takes_the_config_and_the_application_its_arguments() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'outrider[ray]'")
        from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
        from ray.serve.schema import ServeDeploySchema

        from outrider.serve.fleet.ray import build

        (application,) = ServeDeploySchema.model_validate(CONFIG).applications
        assert application.import_path == f"{build.__module__}:build"
        built = call_user_app_builder_with_args_if_necessary(build, application.args)
    assert built._bound_deployment.name == "FrontDoor"
    (replicas, arguments) = built._bound_deployment.init_args
    deployment = replicas._bound_deployment
    assert deployment.max_ongoing_requests > 32 + 256
    assert (deployment._deployment_config.autoscaling_config.max_replicas, arguments["doors"]) == (8, 2)
    assert deployment.ray_actor_options["num_cpus"] == 4
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 60
