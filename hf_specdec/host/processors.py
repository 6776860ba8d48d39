"""The caller's logits processors, applied as in plain `generate`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host

from hf_specdec.compat.transformers_private import allowed_tokens_of
from hf_specdec.host import suppressed_tokens

# These only read the scores, row by row, so all positions can be processed at once.
SCORES_ONLY = (
    host.TemperatureLogitsWarper,
    host.TopKLogitsWarper,
    host.TopPLogitsWarper,
    host.MinPLogitsWarper,
    host.TypicalLogitsWarper,
    host.EpsilonLogitsWarper,
    host.EtaLogitsWarper,
    host.InfNanRemoveLogitsProcessor,
    host.LogitNormalization,
    host.SuppressTokensLogitsProcessor,
)

# The result of these depends on the text and the scores alone.
ARGUMENTS_ONLY = (
    *SCORES_ONLY,
    host.AlternatingCodebooksLogitsProcessor,
    host.BarkEosPrioritizerLogitsProcessor,
    host.EncoderNoRepeatNGramLogitsProcessor,
    host.EncoderRepetitionPenaltyLogitsProcessor,
    host.ExponentialDecayLengthPenalty,
    host.ForcedBOSTokenLogitsProcessor,
    host.ForcedEOSTokenLogitsProcessor,
    host.MinLengthLogitsProcessor,
    host.MinNewTokensLengthLogitsProcessor,
    host.NoBadWordsLogitsProcessor,
    host.NoRepeatNGramLogitsProcessor,
    host.PrefixConstrainedLogitsProcessor,
    host.RepetitionPenaltyLogitsProcessor,
    host.SequenceBiasLogitsProcessor,
    host.SuppressTokensAtBeginLogitsProcessor,
    host.TopHLogitsWarper,
    host.WatermarkLogitsProcessor,
    host.WhisperNoSpeechDetection,
    host.WhisperTimeStampLogitsProcessor,
)

# These combine the scores of a text with those of a second row without it.
TWO_ROWS_EACH = (host.ClassifierFreeGuidanceLogitsProcessor, host.DiaClassifierFreeGuidanceLogitsProcessor)

CHUNK = 1 << 21  # most scores to process at once
SCALARS = (int, float, str)
FEW = 16  # items; a longer list of numbers is more likely a vocabulary than state


class HostProcessors:
    """The caller's processors, applied to several positions of rows with different lengths.

    Each call of a processor gets what plain `generate` would pass: all rows of the batch in order, at one prefix
    length, including padding. Rows that have no position of that length are cut or padded to it, and their result
    is discarded. `prefix_allowed_tokens_fn` is only called for rows that have the position, since a constraint may
    not be defined for text that was never generated.

    Args:
        processors: the processors that `generate` built, in order.
        pad_token: pads rows that are shorter than the prefix.

    Attributes:
        scores_only: whether all of them are transformers' own, stateless, and only read the scores.
        in_order: whether some may be stateful. They must see each kept text once and in order, see `next_scores`, and
            nothing else; only `for_drafts` may process drafts.
        can_exclude_all: whether they can exclude all tokens of a draft with a trimmed head.
    """

    def __init__(self, processors: LogitsProcessorList, pad_token: int = 0) -> None:
        self.processors = processors
        self.pad_token = pad_token
        self.in_order = not all(map(is_stateless, processors))
        self.scores_only = not self.in_order and all(type(processor) in SCORES_ONLY for processor in processors)
        suppresses = any(isinstance(processor, host.SuppressTokensLogitsProcessor) for processor in processors)
        self.can_exclude_all = suppresses or not self.scores_only
        self._asked: set[int] = set()  # constraints
        self._answers: dict[tuple[int, int, tuple[int, ...]], Any] = {}  # by constraint, row and text

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    @property
    def serve_prepared_rounds(self) -> bool:
        """Whether they can be compiled: all are operations on the scores, a few numbers and lists of tokens."""
        return not self.in_order and all(
            type(processor) in (*SCORES_ONLY, *suppressed_tokens.LISTS) for processor in self.processors
        )

    @property
    def suppressed(self) -> int:
        """The most tokens that are suppressed at a position."""
        names = suppressed_tokens.LISTS
        return sum(len(getattr(one, names[type(one)])) for one in self.processors if type(one) in names)

    @property
    def portable(self) -> bool:
        """Whether the processors work on any device: they only read the scores and hold no tensors."""
        return self.scores_only and not any(
            isinstance(held, Tensor) for p in self.processors for held in vars(p).values()
        )

    def for_drafts(self) -> HostProcessors:
        """The processors for drafts: the stateless ones and those that can be forked."""
        return self._with(p for p in self.processors if is_stateless(p) or hasattr(p, "fork"))

    def forked(self) -> HostProcessors:
        """A copy with forks of the stateful processors, which leave the originals unchanged."""
        return self._with(p if is_stateless(p) else p.fork() for p in self.processors)

    def _with(self, processors: Iterable[Any]) -> HostProcessors:
        made = HostProcessors(LogitsProcessorList(processors), self.pad_token)
        made._answers, made._asked = self._answers, self._asked
        return made

    def next_scores(self, ids: Tensor, scores: Tensor, rows: Sequence[int]) -> Tensor:
        """Process the scores `[B, V]` of the next token of all rows, once, as plain `generate` does.

        Args:
            ids: `[B, n]`, the kept texts; rows that have ended are padded.
            scores: `[B, V]` float32; may be modified in place.
            rows: the rows that have not ended.
        """
        ids = ids.contiguous()
        for processor in self.processors:
            if isinstance(processor, host.PrefixConstrainedLogitsProcessor) and is_stateless(processor):
                scores = self._constrain(processor, ids, scores, rows)
            else:
                scores = suppressed_tokens.apply(processor, ids, scores)
        return scores

    def __call__(self, ids: Tensor, starts: Sequence[int], counts: Sequence[int], scores: Tensor) -> Tensor:
        """Process scores. Modifies `scores` in place unless `scores_only`.

        Args:
            ids: `[B, N]`, left-aligned texts, including drafts.
            starts: the prefix length of each row at position 0.
            counts: the number of positions to process per row; 0 for rows that have ended. Unused if `scores_only`.
            scores: `[B, K, V]` float32.

        Returns:
            Processed scores `[B, K, V]`.
        """
        if self.scores_only:
            return self.process_flat(ids, scores.flatten(0, 1)).view_as(scores)
        for processor in self.processors:
            if type(processor) in SCORES_ONLY:
                scores = suppressed_tokens.apply(processor, ids, scores.flatten(0, 1)).view_as(scores)
            else:
                self._by_prefix(processor, ids, starts, counts, scores)
        return scores

    def process_flat(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Process scores `[N, V]` of any positions, without modifying them. Requires `scores_only`."""
        rows = max(CHUNK // scores.shape[-1], 1)
        if rows >= len(scores) or not self:
            return self._all(ids, scores)
        # Top-p alone holds five times its input, so large inputs are processed in chunks.
        processed = torch.empty_like(scores)
        for start in range(0, len(scores), rows):
            processed[start : start + rows] = self._all(ids, scores[start : start + rows])
        return processed

    def _all(self, ids: Tensor, scores: Tensor) -> Tensor:
        for processor in self.processors:
            scores = suppressed_tokens.apply(processor, ids, scores)
        return scores

    def allowed(self, row: int, text: Tensor, tokens: Sequence[int]) -> int:
        """The number of leading `tokens` that every `prefix_allowed_tokens_fn` allows after a row's `text` `[n]`."""
        constraints = [p for p in self.processors if isinstance(p, host.PrefixConstrainedLogitsProcessor)]
        for position, token in enumerate(tokens if constraints else ()):
            prefix = torch.cat([text, text.new_tensor(tokens[:position])])
            if any(token not in self._answer(p, row, prefix) for p in constraints):
                return position
        return len(tokens)

    def end_round(self) -> None:
        """Forget the constraints' answers of this round."""
        self._answers.clear()

    def _answer(self, constraint: host.PrefixConstrainedLogitsProcessor, row: int, prefix: Tensor) -> Any:
        """The tokens that a constraint allows after a row's `prefix` `[n]`; the constraint is called once per round.

        Drafting and verifying need the same answers, and constraints such as grammars are slow.

        Raises:
            ValueError: the constraint changed its state after its first answer, so it is not a function of its
                arguments.
        """
        key = (id(constraint), row, tuple(prefix.tolist()))
        if key not in self._answers:
            function = allowed_tokens_of(constraint)
            before = _bindings(function)
            found = function(row, prefix)
            if (
                id(constraint) in self._asked
                and _said(function) is None
                and _changed(before, _bindings(function, found))
            ):
                name = getattr(function, "__qualname__", type(function).__name__)
                raise ValueError(
                    f"prefix_allowed_tokens_fn={name} keeps state, but is called for drafts too, which may be "
                    "rejected: set its attribute stateless=False, so that it is called for each kept text once and in "
                    "order, or stateless=True if its answers depend on its arguments alone."
                )
            self._asked.add(id(constraint))
            # A copy, since the function may fill the same list again.
            self._answers[key] = found.clone() if isinstance(found, Tensor) else list(found)
        return self._answers[key]

    def _by_prefix(
        self, processor: LogitsProcessor, ids: Tensor, starts: Sequence[int], counts: Sequence[int], scores: Tensor
    ) -> None:
        """Run a processor once per prefix length and write the results into `scores`."""
        spans = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        lengths, only = {n for span in spans for n in span}, suppressed_tokens.only_length(processor)
        for length in sorted(lengths if only is None else lengths & {only}):
            rows = [row for row, span in enumerate(spans) if length in span]
            positions = [min(max(length - start, 0), scores.shape[1] - 1) for start in starts]
            at_length = scores[torch.arange(len(starts), device=scores.device), positions]
            prefixes = self._prefixes(ids, spans, length, rows)
            if isinstance(processor, host.PrefixConstrainedLogitsProcessor):
                processed = self._constrain(processor, prefixes, at_length, rows)
            else:
                processed = suppressed_tokens.apply(processor, prefixes, at_length)
            scores[rows, [positions[row] for row in rows]] = processed[rows]

    def _constrain(
        self, processor: host.PrefixConstrainedLogitsProcessor, prefixes: Tensor, scores: Tensor, rows: Sequence[int]
    ) -> Tensor:
        """`PrefixConstrainedLogitsProcessor.__call__` for some `rows` of a batch, called with their batch indices."""
        mask = torch.full_like(scores, -torch.inf)
        for row in rows:
            allowed = self._answer(processor, row, prefixes[row])
            if len(allowed) == 0:
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {row}: the constraint is "
                    "unsatisfiable. Return at least one token for every prefix that it allows."
                )
            mask[row, allowed] = 0
        return scores + mask

    def _prefixes(self, ids: Tensor, spans: list[range], length: int, rows: list[int]) -> Tensor:
        """`[B, length]`: the rows' texts, cut or padded to `length`."""
        prefixes = ids[:, :length]
        if len(rows) == len(spans):
            return prefixes
        prefixes = prefixes.clone()
        for row, span in enumerate(spans):
            prefixes[row, max(span.stop - 1, span.start) :] = self.pad_token
        return prefixes


def is_stateless(processor: LogitsProcessor) -> bool:
    """Whether a processor's result depends on its arguments alone, so that it may process drafts, in any order.

    transformers' own are known, and a `prefix_allowed_tokens_fn` is a function of its arguments by contract. Any other
    processor is assumed to keep state. An attribute `stateless` overrides this.
    """
    asked = processor
    if type(processor) is host.PrefixConstrainedLogitsProcessor:
        asked = allowed_tokens_of(processor)
    said = _said(asked)
    return type(processor) in ARGUMENTS_ONLY if said is None else said


def check_processors(processors: LogitsProcessorList) -> None:
    """Refuse processors that need twice as many rows of scores as there are texts.

    Raises:
        ValueError: names the processor, and says what to do instead.
    """
    for processor in processors:
        if isinstance(processor, TWO_ROWS_EACH):
            raise ValueError(
                f"logits_processor=[{type(processor).__name__}] needs two rows of scores for each text, from the "
                "model's own loop: leave it out, or decode without speculation."
            )


def _said(asked: Any) -> bool | None:
    """The attribute `stateless` of a function, a method or its object; None if it has none."""
    said = getattr(asked, "stateless", getattr(getattr(asked, "__self__", None), "stateless", None))
    return None if said is None else bool(said)


def _bindings(function: Any, answer: Any = None) -> dict[Hashable, tuple[type, Any]]:
    """A function's state by place: numbers and strings by value, other objects by identity.

    It covers closures, default values and the function's module, including numbers and strings in small lists and
    dictionaries. Items added to these later are ignored, since they may be a cache of answers; so are the items of
    `answer`, a list that the function may reuse.
    """
    method = getattr(function, "__func__", function)
    held: dict[Hashable, Any] = dict(enumerate(getattr(method, "__defaults__", None) or ()))
    held.update(getattr(method, "__kwdefaults__", None) or {})
    for name, cell in enumerate(getattr(method, "__closure__", None) or ()):
        with suppress(ValueError):  # a name without a value yet
            held["closure", name] = cell.cell_contents
    for name, value in getattr(getattr(function, "__self__", function), "__dict__", {}).items():
        held["attribute", name] = value
    own = {place: (type(item), repr(item) if isinstance(item, SCALARS) else id(item)) for place, item in held.items()}
    names, known = getattr(getattr(method, "__code__", None), "co_names", ()), getattr(method, "__globals__", {})
    held.update({("global", name): known[name] for name in names if name in known})
    return {
        **{place: (type(item), repr(item)) for place, item in _parts(held, answer) if isinstance(item, SCALARS)},
        **own,
    }


def _parts(held: dict[Hashable, Any], answer: Any) -> Iterator[tuple[Hashable, Any]]:
    """The objects in `held`, and the items of small lists and dictionaries among them."""
    for place, item in held.items():
        yield place, item
        # Not their subclasses: a `Counter` or an `OrderedDict` is more likely to hold statistics or cached answers.
        if type(item) in (list, dict) and item is not answer and len(item) <= FEW:
            for key, part in item.items() if isinstance(item, dict) else enumerate(item):
                yield (place, key), part


def _changed(before: dict[Hashable, tuple[type, Any]], after: dict[Hashable, tuple[type, Any]]) -> bool:
    return any(place in before and before[place] != value for place, value in after.items())
