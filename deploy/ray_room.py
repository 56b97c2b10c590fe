"""What a running Ray has, and what others than our app use of it: each asked in bounded time."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.errors import StartupError
from deploy.bounded import bounded
from deploy.fit import COUNTED, Node
from deploy.serve_config import APP_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
ANSWER_S = 10.0
"""For an answer of Ray or Serve."""
_ASKED_AS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""How Serve calls what a replica asks for."""


def ask_serve(question: Callable[[], T]) -> T:
    """Return what one of Serve's calls does; raises StartupError where its controller hangs, or is
    gone.
    """
    from ray.exceptions import RayError

    try:
        return bounded("Ray Serve", ANSWER_S, question)
    except RayError as error:
        told = (str(error).splitlines() or ["no reason given"])[0]
        raise StartupError(f"Ray Serve cannot be asked: {told}") from error


def app_details() -> dict[str, Any]:
    """Return all that Serve knows of the app; nothing where it isn't there."""
    from ray.serve.context import _get_global_client

    def ask() -> Any:
        client: Any = _get_global_client(raise_if_no_controller_running=False)
        return {} if client is None else client.get_serve_details()

    app: dict[str, Any] = ask_serve(ask).get("applications", {}).get(APP_NAME, {})
    return app


def ray_nodes() -> list[Node]:
    """Return the living nodes of the Ray that this process has joined; raises StartupError.

    What the app itself uses of them is not in use: a new version of it comes in its place.
    """
    import ray
    from ray._private.state import available_resources_per_node

    told: list[dict[str, Any]] = bounded("Ray", ANSWER_S, ray.nodes)
    free: dict[str, dict[str, float]] = bounded("Ray", ANSWER_S, available_resources_per_node)
    own = own_use(app_details())
    return [
        Node(
            name=f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})",
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            labels=node["Labels"],
            used=used_by_others(node["Resources"], free.get(node["NodeID"]), own[node["NodeID"]]),
        )
        for node in told
        if node["Alive"]
    ]


def own_use(app: Mapping[str, Any]) -> defaultdict[str, Counter[str]]:
    """Return what the app's replicas hold, by node id, from what Serve knows of it.

    Serve tells what a deployment asks for now, and of a replica neither that nor its version: while
    an update that changes it is under way, old replicas are taken to hold what new ones do.
    """
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for deployment in app.get("deployments", {}).values():
        options = deployment["deployment_config"].get("ray_actor_options") or {}
        asked = {kind: options.get(name) or 0.0 for kind, name in _ASKED_AS.items()}
        for replica in deployment["replicas"]:
            if replica["node_id"]:  # one that waits for a node holds nothing
                held[replica["node_id"]].update(asked)
    return held


def used_by_others(
    total: Mapping[str, float], free: Mapping[str, float] | None, own: Mapping[str, float]
) -> dict[str, float]:
    """Return what is neither free nor ours; ``free`` lacks what there is nothing left of.

    None: Ray knows nothing of it yet, since the node has only just come.
    """
    if free is None:
        return {}
    return {
        kind: max(0.0, total[kind] - free.get(kind, 0.0) - own.get(kind, 0.0))
        for kind in COUNTED
        if kind in total
    }
