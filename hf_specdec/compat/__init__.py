"""Names that other libraries do not promise to keep: one module per library.

Each function says what it gives where the name is missing. The versions are those of requirements.txt and of the
oldest environment (`make test-oldest`).
"""
