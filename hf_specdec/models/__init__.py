"""Forward passes of one model: runners, caches and their rollback, masks, recordings. No drafting, no acceptance."""
