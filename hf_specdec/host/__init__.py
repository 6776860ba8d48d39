"""What the caller of `generate` passes and sees: logits processors, streamers, criteria, scores, outputs. No models."""
