"""Combinations of settings in which sampling is compared with exact distributions, and how they are compared."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, set_seed

from helpers.models import EOS, PAD, llama, noisy, resized
from helpers.pairwise import pairwise
from helpers.word_tokenizer import piece_tokenizer, word_tokenizer
from hf_specdec import SpeculativeDecoding, trim_draft_head
from hf_specdec.config import DRAFTERS as DRAFTERS_BY_NAME
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.rules.verification import SAMPLING_RULES

VOCABULARY, NEW_TOKENS = 4, 3
PROMPTS = ([2, 3, 3, 2, 3, 2], [3, 2, 3], [2, 2, 3, 3, 2])
CALLS, ROWS = 6, 360  # of a batch: outputs in all
SINGLE_CALLS = 100
SAME_SEED = {"rows": 1, "one": 4}  # calls that are made again
Output = tuple[int, ...]

STRATEGIES = {
    "speculative": {},
    "bild": {"rollback_threshold": 0.0, "fallback_threshold": 0.45},
    "lenient": {"lenience": 1.0},
    "typical": {"posterior_threshold": math.inf},
    "ensemble": {"assistant_ensemble_weight": 1.0},
}
TOKENIZERS = {
    "other ids": (word_tokenizer(VOCABULARY), word_tokenizer(VOCABULARY + 2, order=-1)),
    "other pieces": (piece_tokenizer(["a", "b"]), piece_tokenizer(["ab", "ba", "aa", "bb"], "[P]", "[E]")),
}
DRAFTERS = ("model", "suffix", "hybrid", "none", "larger vocabulary", "trimmed head", "other device", *TOKENIZERS)
STOPS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "entropy": {"entropy_threshold": 0.55},
    "auto": {"num_assistant_tokens": "auto"},
    "auto, entropy": {"num_assistant_tokens": "auto", "entropy_threshold": 0.55},
}
CONFIDENCE = {"assistant_confidence_threshold": 0.5}
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "eta": {"eta_cutoff": 0.3},
    "repetition": {"repetition_penalty": 1.7},
}
ENDS = {"end of text": {"eos_token_id": EOS}, "no end": {"eos_token_id": None}}
CACHES = ("default", "static", "the caller's", "off")
ENGINES = ("eager", "recorded", "captured", "compiled")
PREPARED = ("captured", "compiled")


class Combination(NamedTuple):
    """A value of each axis."""

    strategy: str = "speculative"
    verification: str = "token"
    drafter: str = "model"
    stop: str = "fixed"
    processor: str = "none"
    end: str = "end of text"
    batch: str = "rows"
    cache: str = "default"
    engine: str = "eager"


EXCLUDED: dict[str, Callable[[Combination], bool]] = {
    # refused by the package
    "an ensemble with copies": lambda c: c.strategy == "ensemble" and c.drafter in ("suffix", "hybrid"),
    "an ensemble across tokenizers": lambda c: c.strategy == "ensemble" and c.drafter in TOKENIZERS,
    # without effect
    "a stop rule where nothing is drafted": lambda c: c.drafter == "none" and c.stop != "fixed",
    "entropy of copies": lambda c: c.drafter == "suffix" and "entropy" in c.stop,
    "pieces of which BiLD accepts none at these thresholds": lambda c: (
        c.strategy == "bild" and c.drafter == "other pieces" and c.processor in ("temperature", "top_p", "eta")
    ),
    "processors that another device can't run": lambda c: (
        c.drafter == "other device" and c.processor in ("repetition", "eta")
    ),
    "recorded passes without a cache of the package's": lambda c: (
        c.engine == "recorded" and c.cache in ("the caller's", "off")
    ),
    "recorded passes of shapes that don't come again": lambda c: (
        c.engine == "recorded" and c.batch == "rows" and (c.end == "end of text" or c.stop != "fixed")
    ),
    "prepared rounds of other drafters": lambda c: c.engine in PREPARED and c.drafter in ("other device", *TOKENIZERS),
    "prepared rounds that read the text": lambda c: c.engine in PREPARED and c.processor == "repetition",
    "compiled rounds of a processor that reads scores on the host": lambda c: (
        c.engine == "compiled" and c.processor == "eta"
    ),
    "captured rounds without static caches": lambda c: c.engine == "captured" and c.cache != "static",
    "compiled rounds with the caller's cache or none": lambda c: (
        c.engine == "compiled" and c.cache in ("the caller's", "off")
    ),
}


def allowed(*values: str) -> bool:
    combination = Combination(*values)
    return not any(excludes(combination) for excludes in EXCLUDED.values())


def cost(*values: str) -> float:
    return 6.0 if Combination(*values).batch == "one" else 1.0


AXES = (
    tuple(STRATEGIES),
    tuple(SAMPLING_RULES),
    DRAFTERS,
    tuple(STOPS),
    tuple(PROCESSORS),
    tuple(ENDS),
    ("rows", "one"),
    CACHES,
    ENGINES,
)
COMBINATIONS = [Combination(*row) for row in pairwise(*AXES, allowed=allowed, cost=cost)]
# Each combination compares its outputs once and neighbouring rows once for each token.
FALSE_FAILURE = 1e-6 / (len(COMBINATIONS) * (1 + NEW_TOKENS) + 20)


@functools.cache
def models() -> dict[str, PreTrainedModel]:
    """The target, and the drafts near it by their drafter."""
    target = llama(seed=5, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    draft = noisy(target, 0.5)
    larger = resized(draft, VOCABULARY + 2).to(torch.float64)
    trimmed = deepcopy(draft)
    trim_draft_head(trimmed, [EOS, 3])
    drafts = {"model": draft, "trimmed head": trimmed, "larger vocabulary": larger}
    drafts |= dict.fromkeys(TOKENIZERS, larger)
    return {"target": target, **drafts}


def arguments(c: Combination) -> dict[str, Any]:
    """What plain `generate` takes as well."""
    return {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, **PROCESSORS[c.processor], **ENDS[c.end]}


def speculation(c: Combination) -> SpeculativeDecoding:
    """What the package takes."""
    settings = {"num_assistant_tokens": 2, **STRATEGIES[c.strategy], **STOPS[c.stop]}
    if c.drafter in TOKENIZERS:
        settings["tokenizer"], settings["assistant_tokenizer"] = TOKENIZERS[c.drafter]
    return SpeculativeDecoding(
        models().get(c.drafter, models()["model"]),
        c.strategy,
        verification=c.verification,
        drafter=c.drafter if c.drafter in DRAFTERS_BY_NAME else "model",
        compile=c.engine == "compiled",
        disable_tqdm=True,
        **settings,
    )


def batch(c: Combination) -> dict[str, Tensor]:
    """The first prompt alone, or all in turn, padded on the left."""
    if c.batch == "one":
        return {
            "input_ids": torch.tensor(PROMPTS[:1]),
            "attention_mask": torch.ones(1, len(PROMPTS[0]), dtype=torch.long),
        }
    length = max(map(len, PROMPTS))
    ids = torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    return {"input_ids": ids.repeat(ROWS // len(ids), 1), "attention_mask": mask.repeat(ROWS // len(ids), 1)}


class Draws:
    """Sampled outputs of a combination, by call and row, and how many tokens the calls drafted and accepted.

    Args:
        c: the combination.
        seed: set before the first call.
        calls: their number; None for enough to judge.
        plain: the model that writes the outputs in plain `generate`; None for the combination's own way.
    """

    def __init__(
        self, c: Combination, seed: int = 1, calls: int | None = None, plain: PreTrainedModel | None = None
    ) -> None:
        model, inputs = plain or models()["target"], batch(c)
        speculative = None if plain else speculation(c)
        set_seed(seed)
        self.outputs: list[list[Output]] = []
        self.drafted = self.accepted = 0
        for _ in range(calls or {"rows": CALLS, "one": SINGLE_CALLS}[c.batch]):
            cache: dict[str, dict[str, Any]] = {
                "default": {},
                "static": {"cache_implementation": "static"},
                "the caller's": {CACHE_NAME: DynamicCache(config=model.config)},
                "off": {"use_cache": False},
            }
            output = model.generate(**inputs, **arguments(c), **cache[c.cache], custom_generate=speculative)
            output = output[:, inputs["input_ids"].shape[1] :]
            output = torch.nn.functional.pad(output, (0, NEW_TOKENS - output.shape[1]), value=PAD)
            self.outputs.append([tuple(row) for row in output.tolist()])
            if speculative is not None:
                self.drafted += sum(sum(round_.drafted) for round_ in speculative.stats.rounds)
                self.accepted += sum(sum(round_.accepted) for round_ in speculative.stats.rounds)

    def of(self, prompt: int) -> list[Output]:
        """The outputs of a prompt."""
        return [output for outputs in self.outputs for output in outputs[prompt :: len(PROMPTS)]]


@functools.cache
def exact(prompt: int, processor: str, end: str) -> dict[Output, float]:
    """The target's distribution over whole outputs of a prompt alone, padded after an end of text.

    Every prefix is fed to the model; the processors are those that `generate` makes. They see the prompt padded as in a
    batch: in transformers 5.17, a repetition penalty counts the padding.
    """
    finished: dict[Output, float] = {}

    @torch.no_grad()
    def enumerate_outputs(
        model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList, **rest: Any
    ) -> Tensor:
        prefixes: dict[Output, float] = {(): 1.0}
        while prefixes:
            prefix, weight = prefixes.popitem()
            if len(prefix) == NEW_TOKENS or (end == "end of text" and EOS in prefix):
                finished[(*prefix, *[PAD] * (NEW_TOKENS - len(prefix)))] = weight
                continue
            text = torch.cat([input_ids, torch.tensor([prefix], dtype=torch.long)], dim=1)
            alone = text[:, padding:]
            probs = logits_processor(text, model(alone).logits[:, -1].float()).softmax(-1)[0].double()
            prefixes |= {(*prefix, token): weight * float(p) for token, p in enumerate(probs) if p > 0}
        return input_ids

    inputs = {name: rows[prompt : prompt + 1] for name, rows in batch(Combination()).items()}
    padding = int((inputs["attention_mask"] == 0).sum())
    call = arguments(Combination(processor=processor, end=end))
    models()["target"].generate(**inputs, custom_generate=enumerate_outputs, **call)
    return finished


def odds(samples: Sequence[Sequence[Output]], distributions: Sequence[dict[Output, float]]) -> float:
    """A bound on the probability of deviations at least as large; 0 where the impossible occurred.

    n times the divergence of the observed frequencies from a distribution over k outputs has at most the
    moment-generating function of a gamma variable of shape k - 1 (Agrawal 2020), so that sums over several
    distributions have that of the summed shapes.
    """
    divergence, shape = 0.0, 0
    for outputs, distribution in zip(samples, distributions, strict=True):
        counts = Counter(outputs)
        if not distribution.keys() >= counts.keys():
            return 0.0
        divergence += sum(n * math.log(n / (len(outputs) * distribution[output])) for output, n in counts.items())
        shape += len(distribution) - 1
    return 1.0 if divergence <= shape else math.exp(shape - divergence + shape * math.log(divergence / shape))


def odds_of_outputs(draws: Draws, c: Combination) -> float:
    """The odds that each prompt's outputs come from its distribution."""
    prompts = range(1 if c.batch == "one" else len(PROMPTS))
    return odds([draws.of(p) for p in prompts], [exact(p, c.processor, c.end) for p in prompts])


def odds_of_independence(draws: Draws, c: Combination) -> float:
    """The least odds that the tokens of two neighbouring rows, at one position, come from the product distribution."""
    found = []
    for position in range(NEW_TOKENS):
        one, other = (Counter[Output]() for _ in range(2))
        for prompt, marginal in enumerate((one, other)):
            for output, weight in exact(prompt, c.processor, c.end).items():
                marginal[output[position : position + 1]] += weight  # type: ignore[assignment]
        joint = {(*a, *b): one[a] * other[b] for a in one for b in other}
        pairs = zip(draws.of(0), draws.of(1), strict=True)
        found.append(odds([[(a[position], b[position]) for a, b in pairs]], [joint]))
    return min(found)


def judged(c: Combination) -> Draws:
    """Outputs of a combination, which are distributed as the target's own; rows of a batch are independent."""
    draws = Draws(c)
    assert odds_of_outputs(draws, c) > FALSE_FAILURE
    if c.batch == "rows":
        assert odds_of_independence(draws, c) > FALSE_FAILURE
    return draws
