"""Prepared steps over static buffers, and who keeps them: an engine for each pair and way of running rounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.traits import context_length
from hf_specdec.prepared import captured
from hf_specdec.prepared.steps import Drafts, Plan, Side, draft_step, verify_step

LEAST_CAPACITY_STEP = 128  # see `prepared_capacity`
KEPT_ENGINES = 4  # of a target; each holds its caches, and the steps of one length, or of a ladder of them
BURST = 4  # drafts between two looks, see `burst_of`


class Steps:
    """The two prepared steps of rounds of one length, over an engine's buffers.

    What they write in being prepared, the round that follows writes over.

    Args:
        plan: how they run.
        target, draft: whose passes they are; no draft: nothing is drafted by them.
        state, uniforms: the engine's, of that round.
        compile: compile them.

    Attributes:
        run_draft, run_verify: the prepared `draft_step` and `verify_step`; without a draft the former gives blanks.
    """

    def __init__(
        self, plan: Plan, target: Side, draft: Side | None, state: Tensor, uniforms: Tensor, *, compile: bool
    ) -> None:
        self._plan, self._target_side, self._draft_side = plan, target, draft
        self._state, self._uniforms = state, uniforms
        self._blanks = _blank_drafts(plan, len(state), state.device), state[:, 3] > 0
        # Once as they are, so that the caches exist before anything is compiled or captured.
        self._verify(self._draft()[0])
        self.run_verify: Callable[[Drafts], Tensor] = captured.prepared(self._verify, state.device, compile=compile)
        self.run_draft: Callable[[], tuple[Drafts, Tensor]] = self._draft
        if draft is not None:
            self.run_draft = captured.prepared(self._draft, state.device, compile=compile)
        self.run_verify(self.run_draft()[0])

    def _draft(self) -> tuple[Drafts, Tensor]:
        if self._draft_side is None:
            return self._blanks
        return draft_step(self._draft_side, self._plan, self._state, self._uniforms)

    def _verify(self, drafts: Drafts) -> Tensor:
        lookahead = self._plan.lookahead
        uniforms = self._uniforms[:, lookahead : 2 * lookahead + 1]
        return verify_step(self._target_side, self._plan, self._state, *drafts, uniforms)


class Engine:
    """Static buffers of a pair and the prepared steps over them; serves one call at a time.

    Args:
        plan: how rounds run, of the longest lookahead; kept as an attribute, and `compile`, too.
        target, draft: the models' runners, before their first pass, whose caches it keeps; no draft: plain decoding.
        compile: compile the steps.

    Attributes:
        steps: those that are prepared, by their lookahead.
        looks: whether the host looks between bursts of drafts whether any row goes on, see `burst_of`.
        uniforms: what draws read, see `draft_step` and `verify_step`.
        tails: the rows' last two tokens.
    """

    def __init__(self, plan: Plan, target: StaticRunner, draft: StaticRunner | None, compile: bool) -> None:
        self.plan = plan
        self.compile = compile
        self.target = _side(target)
        self.draft = None if draft is None else _side(draft)
        device, rows = target.positions.device, len(target.read)
        # On an accelerator a look would wait for it.
        self.looks = plan.stop.reads_probabilities and device.type == "cpu"
        self.state = torch.zeros(rows, 4, dtype=torch.long, device=device)
        self.uniforms = torch.zeros(rows, 2 * plan.lookahead + 1, device=device)
        self.tails: list[list[int]] = []
        self.steps: dict[int, Steps] = {}

    def adopt(self, target: StaticRunner, draft: StaticRunner | None) -> None:
        """Let a call's runners read into the engine's buffers."""
        for side, runner in ((self.target, target), (self.draft, draft)):
            if side is not None and runner is not None:
                side.positions.copy_(_bounded_positions(runner))
                side.visible.copy_(runner.visible)
                runner.cache, runner.positions, runner.visible = side.cache, side.positions, side.visible

    def lengths(self, lookahead: int) -> range:
        """The lookaheads whose steps serve rounds of up to this one: itself, or all that bursts can come to."""
        burst = burst_of(lookahead) if self.looks else lookahead
        return range(burst, lookahead + 1, max(burst, 1))

    def load(self, tails: Sequence[Sequence[int]], lengths: Sequence[int], limits: Sequence[int]) -> None:
        """One copy to the device: last tokens, lengths, the most tokens to draft."""
        rows = zip(tails, lengths, limits, strict=True)
        self.state.copy_(torch.tensor([[tail[0], tail[-1], n, limit] for tail, n, limit in rows]))

    def prepare(self, lookahead: int) -> None:
        """Make the steps of rounds of up to this lookahead that are not there yet; the state of one is loaded."""
        drafting, *longer = self.lengths(lookahead)
        for length in (drafting, *longer):
            if length not in self.steps:
                plan, draft = replace(self.plan, lookahead=length), self.draft if 0 < length == drafting else None
                with ordinary_tensors():
                    self.steps[length] = Steps(
                        plan, self.target, draft, self.state, self.uniforms, compile=self.compile
                    )

    def run_draft(self, lengths: Sequence[int], limits: Sequence[int], lookahead: int) -> tuple[Drafts, int]:
        """Draft up to `lookahead` tokens behind texts of these lengths, up to its limit for each row.

        Returns:
            The drafts, and for how many tokens they have room: the lookahead of the steps that judge them.
        """
        burst, *longer = self.lengths(lookahead)
        self.load(self.tails, lengths, limits)
        drafts, goes_on = self._burst(burst)
        parts, rows, tails = [drafts], list(range(len(lengths))), self.tails
        for reached in longer:
            drafted = reached - burst
            rows = [row for row in rows if limits[row] > drafted and goes_on[row]]
            if not rows:
                break
            left = [limit - drafted if row in rows else 0 for row, limit in enumerate(limits)]
            tails = [[*tail, *new][-2:] for tail, new in zip(tails, drafts[0].tolist(), strict=True)]
            self.load(tails, [n + drafted for n in lengths], left)
            drafts, goes_on = self._burst(burst)
            parts.append(drafts)
        if len(parts) > 1:
            self.load(self.tails, lengths, limits)
        return _joined(parts), len(parts) * burst

    def _burst(self, count: int) -> tuple[Drafts, Tensor]:
        if self.plan.do_sample:
            # What the steps that judge read stands behind what a burst reads.
            torch.rand(self.uniforms.shape, out=self.uniforms)
        return self.steps[count].run_draft()


class Engines:
    """A target's engines, the last used last; they go with the model, and copies of it start without."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Engine] = OrderedDict()

    def __deepcopy__(self, memo: object) -> Engines:
        return Engines()

    def __reduce__(self) -> tuple[type[Engines], tuple[()]]:
        return Engines, ()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._kept.values())

    def take(self, key: Hashable) -> Engine | None:
        """An engine for one call; nobody else gets it until it is put back."""
        return self._kept.pop(key, None)

    def put(self, key: Hashable, engine: Engine) -> None:
        """Keep an engine for later calls; the least used of too many goes."""
        self._kept[key] = engine
        while len(self._kept) > KEPT_ENGINES:
            self._kept.popitem(last=False)


def kept_engines(model: PreTrainedModel, *, compile: bool) -> list[Engine]:
    """The engines that a target keeps for calls with or without `compile`, whose steps can be timed by themselves."""
    return [engine for engine in model.__dict__.get("_speculation_engines", ()) if engine.compile == compile]


def burst_of(lookahead: int) -> int:
    """How many tokens to draft between two looks: `BURST`, or the lookahead itself if that is no multiple of it."""
    return BURST if lookahead and lookahead % BURST == 0 else lookahead


def prepared_capacity(tokens: int) -> int:
    """Slots of the caches of calls that reach this many tokens: calls of similar length share their steps.

    Attention looks at all of them, so that of more than 512 tokens at most a quarter is added.
    """
    step = max(LEAST_CAPACITY_STEP, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """No gradients, but tensors that calls within and without the caller's `inference_mode` can write to."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _side(runner: StaticRunner) -> Side:
    positions, visible = _bounded_positions(runner).clone(), runner.visible.clone()
    return Side(runner.model, runner.cache, positions, visible, runner.keeps_logits)


def _bounded_positions(runner: StaticRunner) -> Tensor:
    """Positions within the model's tables; those beyond belong to drafts past a text's end, which are dropped."""
    bound = context_length(runner.model)
    return runner.positions if bound is None else runner.positions.clamp(max=bound - 1)


def _blank_drafts(plan: Plan, rows: int, device: torch.device) -> Drafts:
    tokens = torch.zeros(rows, plan.lookahead, dtype=torch.long, device=device)
    probs = None
    if plan.keep_probs and plan.lookahead:
        probs = torch.full((*tokens.shape, plan.vocabulary), 1.0 / plan.vocabulary, device=device)
    return tokens, torch.zeros(rows, dtype=torch.long, device=device), probs


def _joined(parts: Sequence[Drafts]) -> Drafts:
    """Drafts of several bursts behind one another."""
    if len(parts) == 1:
        return parts[0]
    tokens, lengths, probs = zip(*parts, strict=True)
    kept = [p for p in probs if p is not None]
    return torch.cat(tokens, dim=1), torch.stack(lengths).sum(dim=0), torch.cat(kept, dim=1) if kept else None
