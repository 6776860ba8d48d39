"""`custom_generate/generate.py` of a repository on the hub; transformers calls `generate` in place of its own."""

from __future__ import annotations

from typing import Any

import hf_specdec

# Arguments that say where transformers finds this file; it hands them on with those of the call.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "revision", "token")


def generate(model: Any, *args: Any, **arguments: Any) -> Any:
    """`model.generate` with the settings of hf_specdec among its arguments.

    The strategy is that of the call, else of the model's `generation_config`, else `"speculative"`.
    """
    kept = {name: value for name, value in arguments.items() if name not in HUB_ARGUMENTS}
    with hf_specdec.enable(model, generation_strategy="speculative"):
        # The class's own: a model loaded from a repository with this file has `generate` replaced by this function.
        return type(model).generate(model, *args, **kept)
