"""Outrider on Ray Serve: the app of `outrider serve` as a deployment of replicas, behind a deployment that is its front door.

The front door reads the body of a request, which Ray's own proxy does not, and hands it to a replica that `FleetRouter` chooses.
`build` is what a Serve config imports: `import_path: outrider.serve.fleet.ray:build`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from outrider.errors import InvalidParameter
from outrider.routing import ReplicaLoad, RequestKeys, Router, RouterOptions, ScalingRule, wanted_replicas
from outrider.serve.cli import open_app, settings_of
from outrider.serve.connection import ABORT
from outrider.serve.flags import ServeFlags, flags_of
from outrider.serve.fleet.door import FrontDoor
from outrider.serve.fleet.upstream import REPLICA_HEADER, Call, NoReplica, ReplicaLost, Reply, WholeReply
from outrider.serve.service import Service

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError, RayError
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise InvalidParameter("ray", f"needs {error.name}: pip install 'outrider[ray]'") from None

__all__ = ["Door", "FleetPlan", "FleetRouter", "Replica", "WantedReplicas", "build"]

_LOST = (RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.WorkerCrashedError)
_POLL_S, _STATE_S = 1.0, 5.0  # between two looks at all replicas, and the time they have to answer
_STATS_S = 0.5  # between two reports of a replica's load
_OVERHEAD = 64  # requests of a replica beyond those that run and wait in it: health, metrics
_QUIET = {"enable_access_log": False}  # ours names the client and the tokens: --access-log
_HERE = "outrider.serve.fleet.ray"


@dataclasses.dataclass(frozen=True, slots=True)
class FleetPlan:
    """What the arguments of a Serve application say. All have defaults."""

    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `outrider serve`, with underscores
    scaling: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of ScalingRule
    routing: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of RouterOptions
    num_cpus: float = 1.0  # of a replica
    num_gpus: float = 0.0  # of a replica
    doors: int = 1  # front doors

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> FleetPlan:
        """The plan, with unknown names refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values.keys() - known:
            raise InvalidParameter(name, f"is no argument of the application; known are {', '.join(sorted(known))}")
        plan = cls(**values)
        for kind, given in ((ScalingRule, plan.scaling), (RouterOptions, plan.routing)):
            try:
                kind(**given)
            except TypeError:
                names = ", ".join(field.name for field in dataclasses.fields(kind))
                raise InvalidParameter("scaling" if kind is ScalingRule else "routing", f"knows {names} alone") from None
        return plan

    def serve_flags(self) -> ServeFlags:
        """The flags of one replica: it may be reached from outside of its machine, and uses the CPUs that Ray gives it."""
        place = {"device": "cuda"} if self.num_gpus else {"device": "cpu", "threads": max(int(self.num_cpus), 1)}
        return settings_of(flags_of({"host": "0.0.0.0", **place, **self.flags}))


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application of a Serve config: front door and replicas."""
    plan = FleetPlan.parse(arguments)
    flags, rule = plan.serve_flags(), ScalingRule(**plan.scaling)
    policy = AutoscalingPolicy(
        policy_function=f"{_HERE}:WantedReplicas",
        policy_kwargs={"capacity": flags.slots, "rule": dataclasses.asdict(rule)},
    )
    replicas = serve.deployment(Replica).options(
        name="Replica",
        max_ongoing_requests=flags.slots + flags.max_queue + _OVERHEAD,
        ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
        graceful_shutdown_timeout_s=flags.drain_timeout + 5,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        logging_config=_QUIET,
        health_check_timeout_s=15,
        request_router_config=RequestRouterConfig(
            request_router_class=FleetRouter,
            request_router_kwargs=dict(plan.routing) | {"capacity": flags.slots},
            request_routing_stats_period_s=_STATS_S,
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=rule.min_replicas,
            max_replicas=rule.max_replicas,
            upscale_delay_s=rule.up_s,
            downscale_delay_s=rule.down_s,
            metrics_interval_s=_STATS_S,
            look_back_period_s=2 * _STATS_S,
            policy=policy,
        ),
    )
    door = serve.deployment(serve.ingress()(Door)).options(
        name="FrontDoor",
        num_replicas=plan.doors,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
        logging_config=_QUIET,
        graceful_shutdown_timeout_s=flags.drain_timeout + 5,
    )
    values = dataclasses.asdict(plan)
    return door.bind(replicas.bind(values), values)


class WantedReplicas:
    """The autoscaling policy: (running + waiting) ÷ capacity of all replicas. Ray applies the rule's delays."""

    def __init__(self, capacity: int, rule: Mapping[str, Any]) -> None:
        self._capacity, self._rule = capacity, ScalingRule(**rule)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        sequences = sum(sum((metrics.get(name) or {}).values()) for name in ("running", "waiting"))
        total = max(sequences, context.total_num_requests or 0)  # requests that wait for a replica are in no replica's report
        return wanted_replicas(round(total), 0, self._capacity, self._rule), {}


class Replica:
    """One engine with its app. Its front door calls `answer`, Ray the rest."""

    async def __init__(self, arguments: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        flags = FleetPlan.parse(arguments).serve_flags()
        self._app = open_app(flags)
        self._service: Service = self._app.state.service
        self._capacity = flags.slots
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        while self._service.status == "loading":
            await asyncio.sleep(0.05)
        if self._service.failure is not None:
            raise self._service.failure

    async def answer(self, call: Call) -> AsyncIterator[Any]:
        """The status and headers of an answer, then its body in pieces."""
        messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=16)
        task = asyncio.ensure_future(self._serve(call, messages))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message.get("headers", ()), (REPLICA_HEADER, _own_name().encode())]
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            task.cancel()

    async def _serve(self, call: Call, messages: asyncio.Queue[Any]) -> None:
        """Run the app on a call. Cancelling this is what a client that leaves is to it."""
        received = False

        async def receive() -> dict[str, Any]:
            nonlocal received
            if received:
                await asyncio.Event().wait()
            received = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        try:
            await self._app(_scope(call), receive, messages.put)
        except Exception:
            await messages.put(None)
            raise
        await messages.put(None)  # nobody reads it where this was cancelled

    async def whole(self, call: Call) -> tuple[str, WholeReply]:
        """This replica's name, and a complete answer."""
        status, headers, body = 500, [], b""
        async for item in self.answer(call):
            if isinstance(item, bytes):
                body += item
            else:
                status, headers = item
        return _own_name(), WholeReply(status, headers, body)

    async def state(self) -> dict[str, Any]:
        """What the front door shows of this replica."""
        fingerprint = self._service.ready().fingerprint.as_dict() if self._service.status == "ok" else None
        state = {"name": _own_name(), "status": self._service.status, "sequences": self._service.in_flight, "pid": os.getpid()}
        return state | {"fingerprint": fingerprint}

    def record_routing_stats(self) -> dict[str, Any]:
        running = min(self._service.in_flight, self._capacity)
        return {"running": running, "waiting": self._service.in_flight - running, "capacity": self._capacity}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.record_routing_stats().items()}

    def check_health(self) -> None:
        if self._service.status == "dead":
            raise RuntimeError(str(self._service.failure))


class FleetRouter(RequestRouter):
    """Ray's side of `Router`. A replica's load is what it reports, or what was sent from here and is not answered."""

    def initialize_state(self, capacity: int = 1, **options: Any) -> None:
        self._chooser = Router(RouterOptions(**options))
        self._capacity = capacity
        self._sequences: Counter[str] = Counter()
        self._calls: dict[str, tuple[str, int]] = {}  # replica and sequences by request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if not by_name:
            return []
        loads = {name: self._load(name, replica.routing_stats) for name, replica in by_name.items()}
        chosen = self._chooser.choose(_call_of(pending_request).keys, loads, time.monotonic())
        others = [replica for name, replica in by_name.items() if name != chosen]
        return [[by_name[chosen]], others]  # the others where the chosen one takes no more

    def _load(self, name: str, stats: Mapping[str, Any]) -> ReplicaLoad:
        total = max(self._sequences[name], stats.get("running", 0) + stats.get("waiting", 0))
        return ReplicaLoad(min(total, self._capacity), max(total - self._capacity, 0), self._capacity)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        call, name = _call_of(pending_request), replica_id.unique_id
        self._chooser.sent(name, call.keys)
        self._calls[pending_request.metadata.internal_request_id] = name, call.sequences
        self._sequences[name] += call.sequences

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        name, sequences = self._calls.pop(internal_request_id, ("", 0))
        if name in self._sequences:  # else the replica is gone
            self._sequences[name] -= sequences

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = {replica.unique_id for replica in self._replica_id_set}
        super().update_replicas(replicas)
        for name in before - {replica.replica_id.unique_id for replica in replicas}:
            self._forget(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def _forget(self, name: str) -> None:
        self._chooser.gone(name)
        self._sequences.pop(name, None)


class RayFleet:
    """A `Fleet` of Ray Serve's replicas, as one front door sees it."""

    def __init__(self, handle: DeploymentHandle[Any], settings: ServeFlags) -> None:
        self.settings = settings
        self._handle = handle
        self._states: dict[str, dict[str, Any]] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.ensure_future(self._poll())

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def state(self) -> dict[str, Any]:
        prints = {state["fingerprint"]["digest"] for state in self._states.values() if state["fingerprint"]}
        ready = any(state["status"] == "ok" for state in self._states.values())
        replicas = {name: dict(state) for name, state in self._states.items()}
        return {"status": "ok" if ready else "loading", "same_tokens": len(prints) <= 1, "replicas": replicas}

    async def send(self, call: Call) -> Reply:
        items = self._handle.options(stream=True).answer.remote(call)
        try:
            status, headers = await anext(items)
        except (RayError, BackPressureError, DeploymentUnavailableError) as error:
            raise _translated(error) from error
        except BaseException:
            items.cancel()
            raise

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for item in items:
                    yield item
            except RayError as error:
                raise _translated(error) from error

        return Reply(status, [(bytes(name).lower(), bytes(value)) for name, value in headers], chunks(), items.cancel)

    async def each(self, call: Call) -> dict[str, WholeReply]:
        return dict(await self._broadcast("whole", call))

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        try:
            response = self._handle.broadcast(method, *arguments)
            results = await response.results_async(timeout_s=_STATE_S, return_exceptions=True)
        except (RayError, TimeoutError, DeploymentUnavailableError):
            return []
        return [result for result in results if not isinstance(result, BaseException)]

    async def _poll(self) -> None:
        """Follow the state of all replicas."""
        while True:
            if self._handle.is_initialized and not self._handle.running_replicas_populated():
                self._states = {}
            else:
                self._states = {state.pop("name"): state for state in await self._broadcast("state")}
            await asyncio.sleep(_POLL_S)


class Door:
    """The deployment that Ray's proxies pass HTTP requests on to. Its app is the front door."""

    def __init__(self, replicas: DeploymentHandle[Any], arguments: Mapping[str, Any]) -> None:
        self._replicas, self._arguments = replicas, arguments

    def __serve_build_asgi_app__(self) -> FrontDoor:
        return FrontDoor(RayFleet(self._replicas, FleetPlan.parse(self._arguments).serve_flags()))


def _own_name() -> str:
    """The name of the replica that this runs in."""
    return str(serve.get_replica_context().replica_id.unique_id)


def _call_of(pending_request: PendingRequest | None) -> Call:
    """The call that is to be routed; one without keys where another method of the replica is called."""
    arguments = () if pending_request is None else pending_request.args
    return next((argument for argument in arguments if isinstance(argument, Call)), Call("GET", "/", keys=RequestKeys()))


def _translated(error: Exception) -> Exception:
    if isinstance(error, _LOST):
        return ReplicaLost(str(error))
    return NoReplica(str(error)) if isinstance(error, BackPressureError | DeploymentUnavailableError) else error


def _scope(call: Call) -> dict[str, Any]:
    path, _, query = call.target.partition("?")
    client = dict(call.headers).get(b"x-forwarded-for", b"").decode("latin-1")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [*call.headers, (b"content-length", b"%d" % len(call.body))],
        "client": (client, 0),
        "server": ("replica", 0),
        ABORT: lambda: None,
    }
