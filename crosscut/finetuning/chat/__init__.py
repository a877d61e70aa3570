"""Fine-tune a decoder on conversations: the loss covers only the answers (docs/finetuning.md)."""
