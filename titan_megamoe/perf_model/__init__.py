"""How long a training step of a job file will take on a cluster that one does not have.

    python -m titan_megamoe.perf_model predict train_configs/qwen3_30b_a3b/32gpu/mega_moe_bf16.toml
    python -m titan_megamoe.perf_model check        # against every measured and published step

A step is a sum of parts (:mod:`.step`). Each part's time is an amount of work over a rate (:mod:`.rates`) or
a measured layer time (:mod:`.layers`), and every rate and time says where it comes from and how far off it
may be (:mod:`.estimate`). There is no factor that is fitted to a step time.
"""
