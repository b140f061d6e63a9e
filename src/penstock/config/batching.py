"""`scheduler_config`: who waits in front, how much cache a request needs to start, and how large a
part of a prompt may run beside decodes."""

from penstock.config.base import StrictModel, setting
from penstock.config.run import CapacityPolicy, QueuePolicy


class SchedulerConfig(StrictModel):
    capacity_scheduler_policy: CapacityPolicy = setting(
        CapacityPolicy.EXPECTED_OUTPUT,
        "EXPECTED_OUTPUT starts a request when the cache will do for it and all that run, if "
        "outputs become as long as recent ones; if it runs out all the same, the youngest one "
        "leaves it, and comes back from host memory (kv_cache_config.host_cache_size) or is "
        "recomputed. MAX_UTILIZATION starts it when its prompt fits. GUARANTEED_NO_EVICT starts it "
        "only when prompt and all of its output fit, so nothing ever leaves; of requests without "
        "max_tokens, which may fill the whole context, only a few then run at a time.",
        strict=False,
    )
    waiting_queue_policy: QueuePolicy = setting(
        QueuePolicy.PRIORITY,
        "priority: larger request priority first, equal ones first come first served; fcfs: "
        "arrival order alone.",
        status="beta",
        strict=False,
    )
    max_prompt_tokens_beside_decodes: int | None = setting(
        None,
        "Most prompt tokens in a step that also decodes, so that streams do not stop for a long "
        "prompt; one without decodes has max_num_tokens. null: on a CPU as many as take about 0.6 "
        "s, by the measured time of steps, and 256 at least; on a GPU 512, for which there are "
        "graphs, but max_num_tokens without cuda_graph_config.enable_mixed, and in a burst 2048 "
        "less the decodes: while at least 8 sequences, and a sixteenth of those that decode, wait "
        "for their first token.",
        ge=1,
        le=1 << 20,
        status="beta",
    )
