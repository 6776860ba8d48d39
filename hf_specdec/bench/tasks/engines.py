"""Compares each engine at each batch size, without and with a draft, with the settings of transformers' own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.bench import results
from hf_specdec.bench.figures import passes, speed
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.inputs.prompts import asked_prompts
from hf_specdec.bench.models.loading import LoadedPair, gguf_path, load_pair
from hf_specdec.bench.models.precision import GGUF
from hf_specdec.bench.records import Interval, Method, Model, Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import capital, percent, ratio
from hf_specdec.bench.running import memory
from hf_specdec.bench.running.llama_cpp_methods import (
    LLAMA_CPP_ENGINES,
    check_llama_cpp,
    llama_cpp_methods,
    llama_cpp_refusal,
)
from hf_specdec.bench.running.measuring import batches_of, measured
from hf_specdec.bench.running.methods import (
    ENGINES,
    STOP_ENTROPY,
    STOP_LOOKAHEAD,
    Contender,
    fixed_lookahead,
    ours,
    plain,
    plain_on_engine,
)
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import (
    SCHEDULES,
    assisted,
    assisted_refusal,
    can_assist,
    can_ensemble,
    ensemble,
    own_drafts,
    prompt_lookup,
)
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks import PROMPTS_PER_LENGTH
from hf_specdec.compat.transformers_private import compiled_on_any_device
from hf_specdec.config import COPYING, OWN_DRAFTERS

LOOKAHEADS = (2, 4, 6, 8)

WAITING = "Waiting: share of row-rounds in which a row had ended while others of its batch went on."
LLAMA_CPP_LEGEND = (
    "Speedups of our loop over llama.cpp, each in the best of its draft settings: the same models, prompts, number of "
    "threads and count of tokens, greedy. bf16 and q8_0 (8 bits a weight) say how llama.cpp stores the weights that "
    "ours have in the dtype named above."
)
WIDE_HEAD = " The output head of our int8 models keeps its dtype, while q8_0 stores it in 8 bits."
CHOSEN = "It was chosen on the calls that it is measured on, which flatters it slightly."


def run(settings: Settings, shared: Processes) -> None:
    """Measure calls, bare passes and memory bandwidth; write the result and its report, and print the report."""
    check_llama_cpp(settings)
    pair = load_pair(settings)
    rows = settings.limit or len(settings.prompts) or PROMPTS_PER_LENGTH[settings.task]
    contenders = compared(settings, pair)
    # Drafts may go on beyond the last token.
    spare = max(one.longest for one in contenders)
    count = max(rows, *settings.batch_sizes)
    prompts, notes = asked_prompts(settings, pair, count, spare=spare)
    read_rate = partial(memory.device_rate, pair.target.device)
    result = measured(settings, contenders, batches_of(prompts, settings, rows), read_rate=read_rate)
    assert result is not None
    result.memory = memory.describe(pair, len(prompts[0].token_ids) + settings.max_new_tokens // 2)
    result.notes += filter(None, (*notes, assisted_refusal(settings, pair), llama_cpp_refusal(settings, pair)))
    sys.stdout.write(results.finish(result, render))


def compared(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """Plain generate(), transformers' own at each setting, then ours on each engine, and llama.cpp.

    The `role` of ours is fixed, auto, stopped, block, or floor (the worst case: drafting cannot pay). With a synthetic
    pair, methods that depend on texts or on the draft's confidence are left out, since they mean nothing there.
    """
    found = [plain(pair)]
    on_gpu = pair.target.device.type != "cpu"
    if settings.precision is not None and not on_gpu and memory.has_room(4 * pair.target.num_parameters()):
        wide = replace(pair, target=_in_float32(settings, pair))
        found.append(plain(wide).told(name="plain float32", title="plain generate(), float32 weights"))
    if on_gpu or "compiled" in settings.engines:
        # Compiling takes half a minute or more for each batch size.
        static = plain(pair).told(
            name="plain static", title="plain generate(), static cache, compiled", keywords=ENGINES["static"]
        )
        compiling = {} if on_gpu else {"compile_config": compiled_on_any_device()}
        found.append(replace(static, most_rows=1, models=compiling))
    if assisted_refusal(settings, pair) is None:
        if settings.drafter in OWN_DRAFTERS:
            found += own_drafts(settings, pair)
        elif can_assist(pair):
            schedules = [schedule for schedule in SCHEDULES if pair.synthetic is None or not schedule.confidence]
            found += [assisted(settings, pair, schedule) for schedule in schedules]
        if pair.synthetic is None:
            found += [ensemble(settings, pair)] if can_ensemble(pair) else []
            found.append(prompt_lookup(settings, pair))
    lengths = [
        n for n in settings.grid.get("num_assistant_tokens") or LOOKAHEADS if n != "auto"
    ]  # added above with its own title
    # On a GPU nothing is recorded, so that "recorded" is "eager".
    for engine in dict.fromkeys("eager" if on_gpu and one == "recorded" else one for one in settings.engines):
        if engine not in LLAMA_CPP_ENGINES:
            found += _on_engine(settings, pair, engine, lengths)
        elif llama_cpp_refusal(settings, pair) is None:
            found += llama_cpp_methods(pair, engine, lengths or LOOKAHEADS)
    if pair.draft is None:
        return found
    if pair.synthetic is not None:
        return [one for one in found if one.method.role not in ("stopped", "block")]
    # The costliest possible draft: shows how much "auto" loses when drafting never pays.
    own = replace(pair, draft=pair.target, draft_name=pair.target_name)
    floor = ours("speculative", {"num_assistant_tokens": "auto"}, own, name="floor")
    title = f"speculative, auto, the target as its own draft, {floor.method.engine}"
    return [*found, replace(floor.told(title=title, role="floor"), pair=pair, most_rows=1)]


def _in_float32(settings: Settings, pair: LoadedPair) -> PreTrainedModel:
    """The target without quantization: what plain generate() decodes with where memory suffices."""
    if settings.precision == GGUF:
        return hf_specdec.load_gguf(gguf_path(pair.target_name)).dequantize()
    return load_pair(replace(settings, precision=None, dtype="float32", assisted_generation=False)).target


def _on_engine(settings: Settings, pair: LoadedPair, engine: str, lengths: list[int]) -> list[Contender]:
    found = [plain_on_engine(ENGINES[engine], pair)]
    for role, title, keywords in _drafting(settings, pair, engine, lengths):
        if settings.drafter is not None:
            title, keywords = f"drafter {settings.drafter}, {title}", keywords | {"drafter": settings.drafter}
        name = f"{title}, {found[0].method.engine}"
        found.append(ours("speculative", keywords | ENGINES[engine], pair, name=name, title=title).told(role=role))
    return found


def _drafting(
    settings: Settings, pair: LoadedPair, engine: str, lengths: list[int]
) -> list[tuple[str, str, dict[str, Any]]]:
    """The role, title and keywords of generate() for each way of drafting."""
    if settings.drafter == "none":
        return []
    rows: list[tuple[str, str, dict[str, Any]]] = [
        *(("fixed", f"speculative, γ = {tokens}", {"num_assistant_tokens": tokens}) for tokens in lengths),
        ("auto", "speculative, auto", {"num_assistant_tokens": "auto"}),
    ]
    if settings.drafter in COPYING:  # copies have no confidence to stop at
        return rows
    tokens = fixed_lookahead(settings, pair)
    words, judged = f"γ = {tokens}", {"num_assistant_tokens": tokens}
    stopping: dict[str, Any] = {"num_assistant_tokens": STOP_LOOKAHEAD, "entropy_threshold": STOP_ENTROPY}
    stop = f"entropy stop {STOP_ENTROPY:g}"
    rows.append(("stopped", f"speculative, {stop}", stopping))
    if engine != "compiled":
        rows.append(("stopped", f"speculative, auto, {stop}", stopping | {"num_assistant_tokens": "auto"}))
        words, judged = stop, stopping
    if settings.sampling:
        # In greedy decoding block verification is the same rule.
        rows.append(("block", f"speculative, {words}, block", judged | {"verification": "block"}))
    return rows


def render(result: Result) -> list[Block]:
    """Compose the report."""
    part = whole(result)
    sizes = {str(batch): part.where(batch=batch) for batch in part.batch_sizes}
    found: list[Block] = [heading(part), f"{columns.SPEED} No text ends early here: all decode equally many tokens."]
    for batch, here in sizes.items():
        found += [f"## Batch size {batch}", method_table({batch: here}, columns.speed_columns(result))]
    found.append(Picture("by-engine", "gains.by_engine", (part,)))
    found += section("Over llama.cpp", llama_cpp_legend(result.models["target"]), over_llama_cpp(part))
    shown = {**columns.ROUNDS, **columns.WAITING}
    rounds = method_table(sizes, shown, group="Batch size", methods=columns.drafted)
    found += section("Rounds", f"{columns.ROUNDS_LEGEND} {WAITING}", rounds)
    found += section("Cold cost", columns.COLD_LEGEND, method_table(sizes, columns.COLD, group="Batch size"))
    return [*found, *remarks(part, *conclusions(part))]


def llama_cpp_legend(target: Model) -> str:
    """The table's legend. The heads of synthetic models are quantized; transformers leaves heads as they are."""
    return LLAMA_CPP_LEGEND + (WIDE_HEAD if target.dtype.startswith("int8") and target.synthetic is None else "")


def over_llama_cpp(part: Part) -> str:
    """A table with one row per batch size and engine, plain and with drafts; empty without llama.cpp."""
    theirs = dict.fromkeys(method.engine for method in part.methods if method.kind == "llama.cpp")
    if not theirs:
        return ""
    shown: dict[str, Any] = {
        "Engine": lambda here, method: method.engine,
        "Decoding": lambda here, method: "plain" if method.lookahead is None else "with a draft",
        **columns.N,
        **columns.RATE,
    }
    for engine in theirs:
        shown[f"Speedup over {engine}"] = partial(_over, engine=engine)
    sizes = {str(batch): part.where(batch=batch) for batch in part.batch_sizes}
    return method_table(sizes, shown, group="Batch size", methods=lambda here: list(fastest_of_ours(here)))


def fastest_of_ours(part: Part) -> Iterator[Method]:
    """Yield this package's fastest methods on each engine, plain and with drafts."""
    for engine in speed.engines_of(part):
        alone = [method for method in part.methods if (method.kind, method.engine) == ("none", engine)]
        yield from filter(None, (speed.fastest(part, alone), speed.fastest(part, speed.drafting(part, engine))))


def _over(part: Part, own: Method, engine: str) -> str:
    """A method's speedup over llama.cpp, which drafts if the method drafts."""
    theirs = [method for method in part.methods if (method.kind, method.engine) == ("llama.cpp", engine)]
    fit = [method for method in theirs if (method.lookahead is None) == (own.lookahead is None)]
    best = speed.fastest(part, fit)
    return ratio(None if best is None else speed.speedup(part, own.name, best.name))


def conclusions(part: Part) -> list[str]:
    """Sentences on where drafting pays, the share of the memory's bandwidth, and what could not be measured."""
    lines = [_where_it_pays(part, engine) for engine in speed.engines_of(part)]
    return [*filter(None, lines), *_not_compiled(part), *_without_rate(part), *_bandwidth(part)]


def _where_it_pays(part: Part, engine: str) -> str:
    """A sentence on the batch sizes at which the fastest draft is faster, or slower, than plain on the same engine."""
    sizes: dict[str, list[str]] = {}
    for batch in part.batch_sizes:
        here = part.where(batch=batch)
        best = speed.fastest(here, speed.drafting(here, engine))
        gain = None if best is None else speed.over(here, best, "engine")
        if gain is not None:
            sizes.setdefault(_verdict(gain), []).append(f"{batch} ({ratio(gain)})")
    words = " and ".join(f"{verdict} at batch size {', '.join(some)}" for verdict, some in sizes.items())
    return f"On the {engine} engine the fastest draft setting {words}. {CHOSEN}" if words else ""


def _verdict(gain: Interval) -> str:
    if gain.low is None:
        return "was measured on too few examples for an interval"
    unsure = "is not shown to be faster"
    return (
        "is faster than plain decoding" if gain.faster else "is slower than plain decoding" if gain.slower else unsure
    )


def _not_compiled(part: Part) -> list[str]:
    """A note on the batch sizes at which nothing could be compiled."""
    compiled = part.calls[part.calls["method"].isin([m.name for m in part.methods if m.engine == "compiled"])]
    left = [n for n in sorted(map(int, compiled["batch"].unique())) if not passes.costs(part.result, "compiled", n)]
    if not left:
        return []
    why = "these models, this machine or its compiler don't support it; a warning on stderr said why"
    sizes = ", ".join(map(str, left))
    return [f"Nothing was compiled at batch size {sizes}: {why}. The methods named compiled ran uncompiled."]


def _without_rate(part: Part) -> list[str]:
    """Notes on methods without Tokens/Sec, with the reason."""
    lines = []
    for batch in part.batch_sizes:
        here = part.where(batch=batch)
        lacking = [m.title for m in here.methods if speed.decode_rate(here.of(m.name)) is None]
        if lacking:
            why = "no tokens after the first delivery, so no Tokens/Sec: raise --max_new_tokens."
            lines.append(f"{capital(', '.join(lacking))} at batch size {batch}: {why}")
    return lines


def _bandwidth(part: Part) -> list[str]:
    """Sentences on the share of memory bandwidth that plain decoding reaches; none if the model may fit into caches."""
    found, on_cpu = part.result.memory, part.result.models["target"].device.startswith("cpu")
    rates = part.calls["read_rate"].dropna() / 1e9
    if found is None or found.weight_bytes is None or not len(rates):
        return []
    if on_cpu and found.weight_bytes < memory.BUFFER["cpu"]:
        return []
    read = found.weight_bytes + (found.cache_bytes or 0)
    lines = [
        f"A step at batch size 1 reads {read / 1e9:.2f} GB (weights, and the cache of {found.context} tokens); the "
        f"device reads {rates.min():.1f} to {rates.max():.1f} GB/s, measured after each call without a draft."
    ]
    for method in (one for one in part.methods if one.kind in ("plain", "none")):
        share = passes.bandwidth_share(part, method)
        beyond = share is not None and share > 1
        why = ": memory was read faster during these calls than when its speed was measured" if beyond else ""
        lines.append(f"{capital(method.title)} reaches {percent(share)} of the bandwidth limit{why}.")
    return lines
