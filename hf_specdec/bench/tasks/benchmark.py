"""The task `benchmark`: prompts of exact lengths, decoded by every method in turn, into one report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hf_specdec.bench.inputs.likely_tokens import likely_tokens
from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair, with_trimmed_head
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods_by_task import of_benchmark, with_trimmed_draft
from hf_specdec.bench.running.transformers_methods import assisted_refusal
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import finish
from hf_specdec.bench.tasks.interleaving import batches_of, measured
from hf_specdec.config import MAX_ASSISTANT_TOKENS

PROMPTS_PER_LENGTH = 5
_NOTE = "{}: it proposes only {}."
_SOURCES = (
    "the most frequent tokens of the embedded corpus (split train), the end of text and those of the chat template",
    "tokens that follow the prompts on the target's cycle, so that acceptance stays as imposed",
)


def run_benchmark(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    Raises `BenchError` for what the user can put right, before heavy work where that can be known before.
    """
    results.check_output(settings)
    pair = load_pair(settings)
    count = max(settings.limit or PROMPTS_PER_LENGTH, settings.batch_size)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, count, settings.max_new_tokens)
    batches = batches_of(prompts, settings, len(prompts))
    methods, trimmed = of_benchmark(settings, pair), _trimmed(settings, pair, prompts)
    methods += [with_trimmed_draft(settings, one) for one in trimmed]
    result = measured(settings, pair, methods, prompts, batches, trimmed)
    result["notes"] += [_NOTE.format(one.draft_name, _SOURCES[pair.synthetic is not None]) for one in trimmed]
    if settings.assisted_generation and (refusal := assisted_refusal(settings, pair)):
        result["notes"].append(refusal)
    finish(result, settings)
    sys.stdout.write(rendering.render(result))


def _trimmed(settings: Settings, pair: LoadedPair, prompts: Sequence[Prompt]) -> list[LoadedPair]:
    """The pair with a draft whose head is trimmed, where that is asked for."""
    if settings.draft_vocabulary is None or pair.draft is None:
        return []
    # Drafts may go on behind the last token.
    following = settings.max_new_tokens + MAX_ASSISTANT_TOKENS
    tokens = likely_tokens(pair, settings.draft_vocabulary, prompts, following, settings.seed)
    try:
        return [with_trimmed_head(pair, tokens)]
    except ValueError as error:
        raise BenchError(f"--draft_vocabulary: {settings.draft_vocabulary} can't be had ({error})") from error
