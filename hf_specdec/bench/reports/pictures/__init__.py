"""Pictures, one module per question; the only folder that imports matplotlib."""
