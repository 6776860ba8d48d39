"""`custom_generate/generate.py` of a repository on the hub; transformers calls `generate` in place of its own."""

from __future__ import annotations

from typing import Any

import hf_specdec

# Arguments for locating this file, which transformers passes on with those of the call.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "revision", "token")


def generate(model: Any, *args: Any, **arguments: Any) -> Any:
    """Call `model.generate` with hf_specdec's settings among the arguments.

    The strategy is taken from the call, else from the model's `generation_config`, else it is `"speculative"`.
    """
    kept = {name: value for name, value in arguments.items() if name not in HUB_ARGUMENTS}
    with hf_specdec.enable(model, generation_strategy="speculative"):
        # The class's method: in a model loaded from a repository with this file, this function replaces `generate`.
        return type(model).generate(model, *args, **kept)
