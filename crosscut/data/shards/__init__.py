"""Token shards on the disk: their writing and reading, and the files of Megatron-LM."""
