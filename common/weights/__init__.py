"""The weights that a run trains: policies, LoRA, adapters, quantised base, shards, prompt cache."""
