"""Writes a repository for the hub, for speculation through `generate(custom_generate="<repository>")`."""
