"""The adapter for TorchTitan 0.3: the op, the options and the numbers of the 0.2 converter.

0.3 has no TOML and no registry of model converters. Three ways lead to mega_moe, each in its module:

* :mod:`.overrides`: ``--override.imports
  'titan_megamoe.torchtitan.v03.overrides.mega_moe={"precision":"bf16"}'``
* :mod:`.converter`: ``model_registry("30B-A3B", converters=[MegaMoEConverter.Config(precision="bf16")])``
* :mod:`.job_file`: ``torchrun … -m titan_megamoe.torchtitan job.toml``, with a job file of 0.2

Underneath is one module, :class:`.experts.MegaMoERoutedExperts`. Nothing of TorchTitan is imported here, so
that the CPU shim (:mod:`.cpu_shim`) can act first.
"""
