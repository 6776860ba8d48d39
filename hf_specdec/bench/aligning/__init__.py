"""Trains drafts on their target's answers: collecting the answers, losses, choosing layers, and training."""
