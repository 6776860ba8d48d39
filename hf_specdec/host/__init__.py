"""What the caller of `generate` sees: processors, streamers, criteria, scores and outputs; no models."""
