"""One model's forward passes: what feeds it, its cache and the rollback; knows nothing of drafting or acceptance."""
