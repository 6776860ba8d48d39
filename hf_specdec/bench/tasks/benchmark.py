"""Compares plain and speculative decoding and transformers' assisted generation, at fixed prompt lengths."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_specdec import embedded
from hf_specdec.bench import results
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, acceptance_rate, tokens_per_round, whole
from hf_specdec.bench.inputs.likely_tokens import likely_tokens
from hf_specdec.bench.inputs.prompts import Prompt, asked_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair, with_trimmed_head
from hf_specdec.bench.records import Interval, Method, Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import bullets, capital, number, percent, ratio, table
from hf_specdec.bench.running.measuring import batches_of, measured
from hf_specdec.bench.running.methods import Contender, chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import (
    assisted_baselines,
    assisted_refusal,
    prompt_lookup,
)
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import PROMPTS_PER_LENGTH
from hf_specdec.config import MAX_ASSISTANT_TOKENS

if TYPE_CHECKING:
    import pandas as pd


EXAMPLES = (
    "Prefill runs from the call to the first delivery (one token in plain decoding, up to lookahead + 1 with a draft). "
    "Time/Token and Tokens/Sec count what came after it; – where nothing did. Of several repeats an example's row is "
    "the one with the median total time. The last row has all tokens / all seconds, and the mean prefill."
)
_NOTE = "{}: it proposes only {}."
_SOURCES = (
    "the most frequent tokens of the embedded corpus (split train), the end of text and those of the chat template",
    "the most frequent tokens of the target's answers to other prompts, and of those prompts, the end of text and the "
    "tokens of the chat template",
    "tokens that follow the prompts on the target's cycle, so that acceptance stays as imposed",
)


def run(settings: Settings, shared: Processes) -> None:
    """Measure, write the result and its report into `settings.output_dir`, print the report."""
    pair = load_pair(settings)
    count = max(settings.limit or PROMPTS_PER_LENGTH[settings.task], settings.batch_size)
    prompts, notes = asked_prompts(settings, pair, count)
    contenders, trimmed = compared(settings, pair), _trimmed(settings, pair, prompts)
    for one in trimmed:
        method = ours(settings.generation_strategy, chosen_keywords(settings, one), one, name="trimmed head")
        contenders.append(method.told(title=f"{method.method.title} with {one.draft_name}"))
    result = measured(settings, contenders, batches_of(prompts, settings, len(prompts)))
    assert result is not None
    source = _SOURCES[2 if pair.synthetic is not None else pair.target_name not in embedded.names()]
    result.notes += [*notes, *(_NOTE.format(one.draft_name, source) for one in trimmed)]
    if settings.assisted_generation and (refusal := assisted_refusal(settings, pair)):
        result.notes.append(refusal)
    sys.stdout.write(results.finish(result, render))


def compared(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """The baselines and the chosen strategy; without assistance plain generate() alone."""
    if not settings.assisted_generation:
        return [plain(pair)]
    strategy = ours(settings.generation_strategy, chosen_keywords(settings, pair), pair)
    theirs = [prompt_lookup(settings, pair)] if settings.drafter in ("suffix", "lookup") else []
    return [one for one in (*baselines(settings, pair), *theirs, strategy) if one.takes(settings.batch_size)]


def baselines(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """Plain generate(), plain on our loop, and transformers' assisted generation."""
    found = [plain(pair), plain_on_engine(chosen_keywords(settings, pair), pair)]
    if assisted_refusal(settings, pair) is None:
        found += assisted_baselines(settings, pair)
    return found


def _trimmed(settings: Settings, pair: LoadedPair, prompts: Sequence[Prompt]) -> list[LoadedPair]:
    """The pair with trimmed output heads of the draft, one for each `draft_vocabulary`."""
    if settings.draft_vocabulary is None or pair.draft is None:
        return []
    # Drafts may go on beyond the last token.
    following = settings.max_new_tokens + MAX_ASSISTANT_TOKENS
    tokens = likely_tokens(pair, settings.draft_vocabulary, prompts, following, settings.seed)
    try:
        return [with_trimmed_head(pair, tokens)]
    except ValueError as error:
        raise BenchError(f"--draft_vocabulary: {settings.draft_vocabulary} is not available ({error})") from error


def render(result: Result) -> list[Block]:
    """Compose the report, for the task decode too."""
    part = whole(result)
    found: list[Block] = [heading(part)]
    if len(result.methods) > 1:
        found += section("Speed", columns.SPEED, method_table({"": part}, columns.speed_columns(result)))
        found += [bullets(conclusions(part)), Picture("by-engine", "gains.by_engine", (part,))]
        groups = by_length(part)
        rounds = method_table(groups, columns.ROUNDS, group="Prompt length", methods=columns.drafted)
        found += section("Rounds", columns.ROUNDS_LEGEND, rounds)
        found.append(Picture("acceptance-by-position", "lookahead.by_position", (part,)))
        if result.settings.task != "decode":  # there the answers that were shown have prepared everything
            found += section("Cold cost", columns.COLD_LEGEND, method_table({"": part}, columns.COLD))
    found += ["## Examples", EXAMPLES]
    for method in part.methods:
        found += [f"### {capital(method.title)}", example_table(part, method)]
    return [*found, *remarks(part, *_short_heads(result))]


def by_length(part: Part) -> Mapping[str, Part]:
    """Group calls by prompt length, plus all together; only all together if every prompt has its own length."""
    lengths = sorted(map(int, part.calls["length"].unique()))
    settings = part.result.settings
    found = {} if settings.task == "decode" or settings.own_lengths else {str(n): part.where(length=n) for n in lengths}
    return found if len(found) == 1 else {**found, "all": part}


def example_table(part: Part, method: Method) -> str:
    """A table with one row per example and one for all; only methods that draft have the last columns."""
    typical = speed.typical_calls(part.of(method.name))
    rows = [_row(str(one["indexes"].iloc[0][0] + 1), one) for _, one in typical.groupby(typical["indexes"].str[0])]
    return table([*rows, _row("all", typical)])


def _row(name: str, calls: pd.DataFrame) -> dict[str, str]:
    rate = speed.decode_rate(calls)
    row = {
        "Example#": name,
        "Prompt Length (tokens)": "" if name == "all" else str(calls["length"].iloc[0]),
        "New Tokens Generated": str(calls["new_tokens"].sum()),
        "Total Time (s)": number(calls["seconds"].sum(), 3),
        "Prefill Phase (ms)": number(1000 * calls["first_seconds"].mean(), 2),
        "Time/Token (ms)": number(None if rate is None else 1000 / rate, 2),
        "Tokens/Sec": number(rate, 1),
    }
    if calls["rounds"].any():
        row |= {"Acceptance": percent(acceptance_rate(calls)), "Tokens/Round": number(tokens_per_round(calls), 2)}
    return row


def chosen_method(part: Part) -> Method:
    """The method of the chosen strategy, or plain decoding if none was chosen."""
    return next((method for method in part.methods if method.ours), part.methods[0])


def gains_of_trimming(part: Part) -> dict[str, Interval]:
    """Speedup of the chosen strategy with each trimmed head over the full head, by a description of the comparison."""
    full, gains = chosen_method(part), {}
    for method in [one for one in part.methods if one.ours and one.draft != full.draft]:
        head = str(method.draft).removeprefix(f"{full.draft}, ")
        gain = speed.speedup(part, method.name, full.name)
        if gain is not None:
            gains[f"{full.title}, {head}, over the whole head"] = gain
    return gains


def conclusions(part: Part) -> list[str]:
    """Sentences on equality of outputs, the strategy's speedup over each baseline, and gains of trimmed heads."""
    chosen, lines = chosen_method(part), []
    if not part.result.settings.sampling:
        lines = [f"Outputs of {method.title}: {_equal(part, method)}." for method in part.methods[1:]]
    for which in speed.BASELINES:
        gain, ends = (speed.over(part, chosen, which, by) for by in ("micro", "end to end"))
        words = f"{capital(chosen.title)} over {columns.baseline_title(part.result, which)}"
        if gain is not None:
            lines.append(f"{words}: **{ratio(gain)}**; end to end {ratio(ends)}.")
        elif ends is not None:
            lines.append(f"{words}: no example had tokens after its first delivery; end to end {ratio(ends)}.")
    return lines + [f"{capital(words)}: **{ratio(gain)}**." for words, gain in gains_of_trimming(part).items()]


def _equal(part: Part, method: Method) -> str:
    equal = columns.equal_outputs(part, method)
    where = [(one.index, found.position) for one in part.result.prompts if (found := one.divergences.get(method.name))]
    first, _, total = equal.partition(" of ")
    if first == total:
        return "equal to plain generate() on every example"
    places = ", ".join(f"example {prompt + 1} at token {position + 1}" for prompt, position in where)
    return f"{equal} equal to plain generate(); first differences: {places}"


def _short_heads(result: Result) -> list[str]:
    """Notes on heads that have fewer tokens than requested."""
    asked = result.settings.draft_vocabulary
    return [
        f"{method.draft}: --draft_vocabulary {asked} asks for more, but these texts hold no other tokens."
        for method in result.methods
        if asked is not None
        and ", head of " in str(method.draft)
        and f"head of {asked:,} tokens" not in str(method.draft)
    ]
