"""Uses of other libraries' private names: one module per library.

Each function says what it returns if the name is missing. The versions are those of requirements.txt and of the oldest
environment (`make test-oldest`).
"""
