"""A planner, its time and its workers, for stories without I/O."""

from cluster.control.planner import Planner
from cluster.control.settings import ControlSettings
from tests.cluster.control.factory import make_config, make_registration, make_report, make_want

SETTINGS = ControlSettings()


class Story:
    """A planner, its time, and workers that report what they are told to."""

    def __init__(self, *pools, counts=None, settings=SETTINGS, **scheduling):
        self.config = make_config(*pools, **scheduling)
        self.now = 1000.0
        self.planner = Planner(self.config, term=7, settings=settings, now=self.now)
        self.planner.router_joined("a", "a-1", self.now)
        self.workers = {}
        for pool in self.config.pools:
            for index in range((counts or {}).get(pool.name, 1)):
                self.join(make_registration(pool, index))
        self.now += SETTINGS.reconcile_s
        self.beat()

    def join(self, registration):
        self.workers[registration.worker_id] = registration
        decisions = self.planner.register(registration, self.now)
        return decisions + self.report(registration.worker_id)

    def report(self, worker_id, *held, **changes):
        registration = self.workers[worker_id]
        report = make_report(registration, *held, **changes)
        return self.planner.report(worker_id, registration.incarnation, report, self.now)

    def leave(self, worker_id, reason="drained"):
        incarnation = self.workers.pop(worker_id).incarnation
        return self.planner.worker_left(worker_id, incarnation, reason, self.now)

    def beat(self):
        for worker_id in self.workers:
            self.report(worker_id)
        return self.planner.tick(self.now)

    def want(self, request_id="r", router_id="a", **changes):
        return self.planner.want(router_id, make_want(request_id, **changes), self.now)

    def done(self, grant, num_output_tokens=1, *, is_whole=True):
        whole = num_output_tokens if is_whole else 0
        return self.planner.done(
            grant.grant_id, num_output_tokens, self.now, whole_output_tokens=whole
        )

    def view(self):
        return self.planner.view(self.now)

    def entry(self, worker_id):
        return self.planner._ledger.workers[worker_id]

    def advance(self, seconds, *, reporting=()):
        decisions = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for worker_id in reporting:
                decisions += self.report(worker_id)
            decisions += self.planner.tick(self.now)
            self.planner.check()
        return decisions
