"""The ``pdserve`` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import config as deploy_config
from cluster.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REFUSED = 1
_STOPPED_EARLY = 130
_EXIT_S = 1.5
TRIAL_CONFIG = Path(__file__).parent / "configs" / "trial.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors that we raise on purpose become one line and exit code 1."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        return int(arguments.run(arguments))
    except PdserveError as error:
        print(f"pdserve: {error.message}", file=sys.stderr)
        return _REFUSED
    except KeyboardInterrupt:
        return _STOPPED_EARLY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdserve", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start a cluster and serve until Ctrl-C")
    _add_config(serve)
    serve.add_argument("--model", help="a folder or a Hugging Face id (sets model.path)")
    serve.add_argument("--once", action="store_true", help="exit after the proof")
    serve.set_defaults(run=_serve)

    down = commands.add_parser("down", help="clear what an earlier run left behind")
    _add_config(down)
    _add_cluster(down, "take the app away from this Ray instead")
    down.set_defaults(run=_down)

    _add_cluster_commands(commands)

    status = commands.add_parser("status", help="pools, slots, blocks, queue, pair latencies")
    _add_config(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)

    _add_orders(commands)

    generate = commands.add_parser("generate", help="stream one answer and its timeline")
    _add_config(generate)
    generate.add_argument("prompt")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="measure against references in the same run")
    bench.add_argument("names", nargs="*", metavar="NAME")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    bench.set_defaults(run=_bench)

    _add_lab(commands)
    return parser


def _add_lab(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    lab = commands.add_parser("lab", help="play a workload on several configurations; compare")
    lab.add_argument("workload", nargs="?", metavar="WORKLOAD")
    lab.add_argument("--list", action="store_true", help="what there is to choose from")
    lab.add_argument("--config", nargs="+", default=[], metavar="NAME", dest="names")
    lab.add_argument("--out", type=Path, metavar="FOLDER", help="lab-WORKLOAD where none is given")
    lab.add_argument("--runs", type=int, default=1, metavar="N", help="the medians are told")
    lab.add_argument("--scale", type=float, default=1.0, metavar="F", help="of the time, up to 1")
    lab.add_argument("--seed", type=int, default=0)
    lab.add_argument("--model", default="trial", help="a folder or a Hugging Face id")
    lab.add_argument("--inline", action="store_true", help="in one process, without Ray")
    lab.set_defaults(run=_lab)


def _add_cluster_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="what would run where, and the memory it takes")
    _add_file(plan)
    _add_cluster(plan, "place the workers on the nodes of this Ray")
    plan.set_defaults(run=_plan)

    build = commands.add_parser("build", help="print the file for `serve run` and `serve deploy`")
    _add_file(build)
    build.add_argument("--out", type=Path, metavar="FILE", help="write it there instead")
    build.set_defaults(run=_build)

    deploy = commands.add_parser("deploy", help="put the app on a Ray that runs already")
    _add_file(deploy)
    _add_cluster(deploy, "which Ray; without it, the one that runs on this machine", "auto")
    deploy.add_argument("--wait-nodes", type=float, default=0.0, metavar="SECONDS")
    deploy.add_argument("--wait-ready", type=float, default=1800.0, metavar="SECONDS")
    deploy.set_defaults(run=_deploy)


def _add_orders(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    drain = commands.add_parser("drain", help="have a worker end what it has, and leave")
    _add_config(drain)
    drain.add_argument("worker", metavar="WORKER", help="its id, as `pdserve status` shows it")
    drain.set_defaults(run=_drain)

    set_role = commands.add_parser("set-role", help="drain a worker; it comes back in a role")
    _add_config(set_role)
    set_role.add_argument("worker", metavar="WORKER", help="its id, as `pdserve status` shows it")
    set_role.add_argument("role", choices=[role.value for role in deploy_config.Role])
    set_role.set_defaults(run=_set_role)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=TRIAL_CONFIG, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="FILE", help="the deploy file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")


def _add_cluster(parser: argparse.ArgumentParser, text: str, default: str | None = None) -> None:
    parser.add_argument(
        "--cluster", nargs="?", const="auto", default=default, metavar="ADDRESS", help=text
    )


def _load(arguments: argparse.Namespace) -> deploy_config.DeployConfig:
    return deploy_config.load(arguments.config, arguments.overrides)


def _serve(arguments: argparse.Namespace) -> int:
    from deploy import launch

    same = _chosen(arguments)
    if arguments.model:
        arguments.overrides.append(f"model.path={arguments.model}")
    return _within_bounds(
        lambda: launch.serve(_load(arguments), is_once=arguments.once, arguments=same)
    )


def _within_bounds(call: Callable[[], int]) -> int:
    """Run what a library may have started threads for, and end this process soon after it."""
    code = _STOPPED_EARLY
    try:
        code = call()
    except PdserveError:
        code = _REFUSED
        raise
    finally:
        _end_within(_EXIT_S, code)
    return code


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """Return the options with which another command meets the same cluster, from any folder."""
    is_default = arguments.config.resolve() == TRIAL_CONFIG.resolve()
    same = [] if is_default else ["--config", str(arguments.config.resolve())]
    for override in arguments.overrides:
        same += ["--set", override]
    return same


def _end_within(timeout_s: float, code: int) -> None:
    """End this process in any case: a library's thread or exit hook must not hold its shell."""
    timer = threading.Timer(timeout_s, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _plan(arguments: argparse.Namespace) -> int:
    from deploy import plan

    config = _load(arguments)
    if arguments.cluster is None:
        return plan.show(config)
    from deploy import on_cluster

    return _within_bounds(lambda: plan.show(config, on_cluster.nodes_of(arguments.cluster)))


def _build(arguments: argparse.Namespace) -> int:
    from deploy import serve_config

    text = serve_config.text_of(_load(arguments))
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _deploy(arguments: argparse.Namespace) -> int:
    from deploy import on_cluster

    patience = on_cluster.Patience(nodes_s=arguments.wait_nodes, ready_s=arguments.wait_ready)
    config = _load(arguments)
    same = _chosen(arguments)
    return _within_bounds(lambda: on_cluster.deploy(config, arguments.cluster, patience, same))


def _down(arguments: argparse.Namespace) -> int:
    if arguments.cluster is not None:
        from deploy import on_cluster

        return _within_bounds(lambda: on_cluster.remove(arguments.cluster))
    from deploy import launch

    return launch.down(_load(arguments))


def _status(arguments: argparse.Namespace) -> int:
    from deploy import status

    return status.show(_load(arguments), is_json=arguments.json)


def _drain(arguments: argparse.Namespace) -> int:
    from deploy import orders

    return orders.drain(_load(arguments), arguments.worker)


def _set_role(arguments: argparse.Namespace) -> int:
    from deploy import orders

    return orders.set_role(_load(arguments), arguments.worker, deploy_config.Role(arguments.role))


def _generate(arguments: argparse.Namespace) -> int:
    from deploy import generate

    return generate.stream(_load(arguments), arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from deploy.bench import runner

    return runner.run(arguments.names, json_path=arguments.json)


def _lab(arguments: argparse.Namespace) -> int:
    from deploy.lab import runner

    if arguments.list:
        return runner.list_all()
    options = runner.Options(
        names=tuple(arguments.names),
        out=arguments.out,
        num_runs=arguments.runs,
        scale=arguments.scale,
        seed=arguments.seed,
        model=arguments.model,
        host=deploy_config.Host.INLINE if arguments.inline else deploy_config.Host.RAY,
    )
    return runner.run(arguments.workload or "", options)


if __name__ == "__main__":
    sys.exit(main())
