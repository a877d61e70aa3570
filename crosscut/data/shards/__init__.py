"""Token shards on disk: writing, reading, and conversion from and to Megatron-LM's files."""
