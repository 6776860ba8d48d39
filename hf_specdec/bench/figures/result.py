"""What a result holds, for annotations: the dictionary that tasks write, its calls read back as `Call`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# "task", "arguments", "environment", "models", "methods", "prompts", "calls", "passes", and what the task adds.
Result = Mapping[str, Any]
# One of "methods", as `Method.describe` gives it: "name", "title", "kind", "engine", "same_engine", "lookahead", …
MethodDict = Mapping[str, Any]
