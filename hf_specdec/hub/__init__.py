"""A folder for the hub: speculation through `generate(custom_generate="<repository>")`; `__main__` writes it."""
