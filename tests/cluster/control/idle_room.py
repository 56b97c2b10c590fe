"""Which wants that wait could be placed: worked out from the workers' room, one by one."""

from cluster.config import Preemption, Role, SchedulingConfig
from cluster.control.settings import ControlSettings

TIERS = SchedulingConfig().tiers


def can_compute(entry, num_tokens, tier):
    limit, taken = SchedulingConfig().run_ahead_tokens, entry.taken(tier + 1)[tier]
    ahead, num_blocks = taken.run_ahead_tokens, -(-num_tokens // 16)
    has_blocks = num_blocks <= entry.registration.num_blocks - taken.blocks
    return has_blocks and (ahead == 0 or ahead + num_blocks * 16 <= limit)


def can_decode(entry, num_tokens, tier):
    taken, num_blocks = entry.taken(tier + 1)[tier], -(-num_tokens // 16)
    has_slot = taken.slots < entry.registration.num_slots
    return has_slot and num_blocks <= entry.registration.num_blocks - taken.blocks


class IdleRoom:
    """A planner's room, as it is between two events.

    ``takes``: whether higher tiers take from lower ones.
    """

    def __init__(self, planner, *, takes, aging_s):
        self.planner = planner
        self.takes = takes
        self.aging_s = aging_s
        self.growth = ControlSettings().growth_tokens

    def tier_of(self, want):
        return TIERS.index(want.priority or "normal") if self.takes else 0

    def check(self):
        """Room is left only where it is held for an export, or for one who has waited too long;
        what lower tiers hold is room."""
        queue, entries = list(self.planner._queue), list(self.planner._ledger.workers.values())
        for waiting in queue:
            if not self.has_route(waiting, entries):
                continue
            holders = [w for w in queue if w is not waiting and self.keeps(w, waiting)]
            if any(w.needs.rivals == waiting.needs.rivals for w in holders):
                continue
            left = [e for e in entries if not any(self.lacks(w, e) for w in holders)]
            assert not self.has_route(waiting, left), f"{waiting.want} could be placed"

    def keeps(self, holder, waiting):
        """Whether a want that has no room keeps others from what it lacks."""
        is_export = holder.want.export is not None
        if waiting.want.export is not None and not is_export:
            return False
        is_above = self.tier_of(waiting.want) > self.tier_of(holder.want)
        if is_export and not is_above:
            return True
        return waiting.ticket.arrived > holder.ticket.arrived + self.aging_s

    def sizes(self, want):
        """Prompt, and what is counted on whoever decodes."""
        output = want.max_tokens - 1
        if self.planner._config.scheduling.preemption is not Preemption.OFF:
            output = min(output, self.growth)
        return want.num_prompt_tokens, want.num_prompt_tokens + output

    def is_single(self, want):
        has_prefill = any(p.role is Role.PREFILL for p in self.planner._config.pools)
        return want.export is None and want.max_tokens == 1 and has_prefill

    def has_room(self, want, entry):
        """Whether it has room for what it does of it."""
        role, tier = entry.registration.role, self.tier_of(want)
        prompt, all_of_it = self.sizes(want)
        if role is Role.PREFILL:
            return want.export is None and can_compute(entry, prompt, tier)
        if role is Role.DECODE:
            return not self.is_single(want) and can_decode(entry, all_of_it, tier)
        is_local = want.export is None and not self.is_single(want)
        return is_local and can_compute(entry, prompt, tier) and can_decode(entry, all_of_it, tier)

    def has_route(self, waiting, entries):
        """Whether it could be placed on some of these workers."""
        want = waiting.want
        roles = {e.registration.role for e in entries if self.has_room(want, e)}
        if want.export is not None:
            export = want.export
            sender = self.planner._ledger.entry(export.worker_id, export.incarnation)
            return sender is not None and Role.DECODE in roles
        if self.is_single(want):
            return Role.PREFILL in roles
        return Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles

    def lacks(self, waiting, entry):
        """Whether it may use that worker and has no room on it; a decode worker may prefill."""
        want, role = waiting.want, entry.registration.role
        if want.export is not None:
            return role is Role.DECODE and not self.has_room(want, entry)
        if self.is_single(want):
            return role is Role.PREFILL and not self.has_room(want, entry)
        prompt, _ = self.sizes(want)
        has_both = self.has_room(want, entry) and can_compute(entry, prompt, self.tier_of(want))
        return not (has_both if role is Role.DECODE else self.has_room(want, entry))
