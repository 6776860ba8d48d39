"""Drafts fine-tuned on what their target writes: its answers, the losses, the training, and the judgement after it."""
