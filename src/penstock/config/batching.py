"""`scheduler_config`: who waits in front, and how much cache a request needs to start."""

from penstock.config.base import StrictModel, setting
from penstock.config.run import CapacityPolicy, QueuePolicy


class SchedulerConfig(StrictModel):
    capacity_scheduler_policy: CapacityPolicy = setting(
        CapacityPolicy.MAX_UTILIZATION,
        "MAX_UTILIZATION starts a request when its prompt fits and recomputes the youngest one "
        "when the cache runs out. GUARANTEED_NO_EVICT starts it only when prompt and all of its "
        "output fit, so nothing is ever recomputed. The first is the default because a request "
        "without max_tokens may fill the whole context: reserving that for each would let only a "
        "few run at a time.",
        strict=False,
    )
    waiting_queue_policy: QueuePolicy = setting(
        QueuePolicy.PRIORITY,
        "priority: larger request priority first, equal ones first come first served; fcfs: "
        "arrival order alone.",
        status="beta",
        strict=False,
    )
