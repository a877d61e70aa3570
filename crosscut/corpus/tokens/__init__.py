"""Token ids of the remaining documents: the tokenizer, the encoding of each part, and the published token shards."""
