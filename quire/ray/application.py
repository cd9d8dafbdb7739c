"""The application: replicas, which Ray scales, and the ingress before them."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from quire.ray.ingress import Ingress
from quire.ray.replica import Replica
from quire.ray.request_router import WishRouter
from quire.ray.settings import RaySettings, read_arguments

_GRACE_SECONDS = 10.0  # beyond the shutdown timeout, for what ends a replica in order
_MAX_INGRESS_REQUESTS = 8192
_REPORT_SECONDS = 10.0  # Ray's own; a mean needs several reports
# Of Ray's own making. A router alone is there, so that another machine's end ends no stream but its own.
_HEAD_NODE = {"node:__internal_head__": 0.001}


def app(arguments: dict[str, Any]) -> Application:
    """Return an application for `serve run quire.ray:app`; `arguments` are the flags of `quire serve` with
    underscores, and those of the table in docs/growing.md, as `min_replicas`. Raises ValueError that names
    the one at fault."""
    settings = read_arguments(arguments)
    grace = settings.arguments.shutdown_timeout + _GRACE_SECONDS
    replicas = serve.deployment(
        name="replica",
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.arguments.max_num_queued_reqs,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_ongoing_requests,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=settings.look_back_period_s,
            metrics_interval_s=min(_REPORT_SECONDS, settings.look_back_period_s / 3),
        ),
        request_router_config=RequestRouterConfig(request_router_class=WishRouter),
        graceful_shutdown_timeout_s=grace,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        **resources(settings),
    )(Replica)
    ingress = serve.deployment(
        name="ingress",
        num_replicas=settings.num_routers,
        max_ongoing_requests=_MAX_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=grace,
        ray_actor_options={"num_cpus": 0, "resources": _HEAD_NODE if settings.num_routers == 1 else {}},
    )(serve.ingress()(Ingress))
    built: Application = ingress.bind(replicas.bind(settings.arguments), settings.arguments)
    return built


def resources(settings: RaySettings) -> dict[str, Any]:
    """Return what Ray is asked for a replica. All GPUs of one are in one bundle, and so in one machine."""
    if settings.num_gpus <= 1:
        return {"ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}}
    bundle = {"CPU": settings.num_cpus, "GPU": settings.num_gpus}
    return {
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
    }
