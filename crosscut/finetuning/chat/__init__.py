"""Fine-tuning of a decoder on conversations: the loss covers the answers only (docs/finetuning.md)."""
