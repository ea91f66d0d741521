"""One GRPO update of ours against TRL's, on the same batch."""
