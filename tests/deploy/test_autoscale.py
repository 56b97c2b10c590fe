"""The policy as Serve calls it, and what the Serve config says of it."""

from types import SimpleNamespace

import pytest
import yaml

from cluster import config as deploy_config
from cluster.policy.load import Load, PoolLoad, to_stats
from deploy import autoscale
from deploy.autoscale import PoolPolicy
from deploy.serve_config import serve_config

TREE = {
    "pools": [
        {"name": "p", "role": "prefill", "count": 2},
        {"name": "d", "role": "decode", "min": 1, "max": 3, "max_num_seqs": 4},
        {"name": "e", "role": "decode", "min": 0, "max": 2, "cost_per_hour": 2.0},
    ],
    "scaling": {"quiet_s": 10.0},
}


def app_of(tree):
    config = deploy_config.from_tree(tree)
    return serve_config(config, model_path="m")["applications"][0]


class Controller:
    """What Serve does with a policy: contexts in, targets kept."""

    def __init__(self):
        self.policy = PoolPolicy(**app_of(TREE)["autoscaling_policy"]["policy_kwargs"])
        self.targets = {"control": 1, "d": 1, "e": 0}
        self.now = 1000.0
        self.told = {}
        """The control plane's numbers by replica: when, and what."""

    def tell(self, replica="c1", at=None, sequences=0):
        load = Load(pools={"d": PoolLoad(num_workers=1, num_sequences=sequences)})
        self.told.setdefault(replica, []).append((at or self.now, to_stats(load)))

    def tick(self, seconds=0.1):
        self.now += seconds
        decisions, state = self.policy({("id", name): self._context(name) for name in self.targets})
        assert state == {}
        self.targets |= {name: target for (_, name), target in decisions.items()}
        return {name: target for (_, name), target in decisions.items()}

    def _context(self, name):
        raw = {}
        for replica, points in self.told.items() if name == "control" else ():
            for at, stats in points:
                for key, value in stats.items():
                    series = raw.setdefault(key, {}).setdefault(replica, [])
                    series.append(SimpleNamespace(timestamp=at, value=value))
        return SimpleNamespace(
            deployment_name=name, deployment_id=("id", name), raw_metrics=raw,
            target_num_replicas=self.targets[name], current_time=self.now,
        )  # fmt: skip


def test_each_reading_decides_once():
    controller = Controller()
    assert controller.tick() == {}, "nothing was told yet"
    controller.tell(sequences=4)
    assert controller.tick() == {"d": 2, "e": 0}
    assert controller.tick() == {}
    controller.tell(sequences=12)
    assert controller.tick() == {"d": 3, "e": 1}


def test_what_is_old_changes_nothing():
    """The control plane is away: its last word is not what is asked for now."""
    controller = Controller()
    controller.tell(sequences=4)
    assert controller.tick(6.0) == {}


def test_of_two_control_planes_the_later_word_counts():
    controller = Controller()
    controller.tell("old", sequences=12)
    controller.tell("new", at=controller.now + 0.05, sequences=0)
    assert controller.tick() == {"d": 1, "e": 0}


def test_why_is_in_serves_log(caplog):
    controller = Controller()
    controller.tell(sequences=4)
    with caplog.at_level("INFO", logger="ray.serve"):
        controller.tick()
    (line,) = [record.getMessage() for record in caplog.records]
    why = "decode is asked for 4.0 sequences of 4.0: d 1 x 4 by slots"
    assert line == f"pool=d workers=2 before=1: {why}"


def test_the_serve_config_names_the_policy_and_the_bounds():
    app = app_of(TREE)
    assert app["autoscaling_policy"]["policy_function"] == autoscale.POLICY
    by_name = {each["name"]: each["autoscaling_config"] for each in app["deployments"]}
    assert set(by_name) == {"control", "d", "e"}, "a fixed pool is none of Serve's business"
    bounds = {name: (one["min_replicas"], one["max_replicas"]) for name, one in by_name.items()}
    assert bounds == {"control": (1, 1), "d": (1, 3), "e": (0, 2)}
    assert yaml.safe_load(yaml.safe_dump(app)) == app
    fixed = {"pools": [*TREE["pools"][:1], {"name": "d", "role": "decode"}]}
    assert not app_of(fixed).keys() & {"autoscaling_policy", "deployments"}


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_serves_own_schema_takes_every_key_of_it():
    """Serve itself would take a misspelt one in silence."""
    config = pytest.importorskip("ray.serve.config")
    schema = pytest.importorskip("ray.serve.schema")
    app = app_of(TREE)
    schema.ServeApplicationSchema.model_validate(app)
    assert app.keys() <= schema.ServeApplicationSchema.model_fields.keys()
    assert app["autoscaling_policy"].keys() <= config.AutoscalingPolicy.model_fields.keys()
    for each in app["deployments"]:
        assert each["autoscaling_config"].keys() <= config.AutoscalingConfig.model_fields.keys()
        config.AutoscalingConfig(**each["autoscaling_config"])
