"""The caller's side of `generate`: logits processors, streamers, criteria, scores, outputs. No models."""
