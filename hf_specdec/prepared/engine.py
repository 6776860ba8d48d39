"""`Engine`: the static buffers of a target and its draft, and the prepared steps that run over them."""

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
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.round_steps import Drafts, Plan, Side, draft_step, verify_step

LEAST_CAPACITY_STEP = 128  # see `prepared_capacity`
KEPT_ENGINES = 4  # of a target; each holds its caches, and the steps of one length, or of a ladder of them
BURST = 4  # drafts between two checks of the host, see `burst_of`


class Steps:
    """The prepared steps of rounds of one lookahead, over an engine's buffers.

    Preparing runs them once; the round that follows overwrites what that wrote.

    Args:
        plan: the settings of the rounds.
        target, draft: the models; without a draft, drafting returns blanks.
        state, uniforms: the engine's buffers.
        compile: compile the steps.

    Attributes:
        run_draft, run_verify: the prepared `draft_step` and `verify_step`.
    """

    def __init__(
        self, plan: Plan, target: Side, draft: Side | None, state: Tensor, uniforms: Tensor, *, compile: bool
    ) -> None:
        self._plan, self._target_side, self._draft_side = plan, target, draft
        self._state, self._uniforms = state, uniforms
        self._blanks = _blank_drafts(plan, len(state), state.device), state[:, 3] > 0
        # One plain run allocates the caches, which must exist before anything is compiled or captured.
        self._verify(self._draft()[0])
        self.run_verify: Callable[[Drafts], Tensor] = cuda_graphs.prepare(self._verify, state.device, compile=compile)
        self.run_draft: Callable[[], tuple[Drafts, Tensor]] = self._draft
        if draft is not None:
            self.run_draft = cuda_graphs.prepare(self._draft, state.device, compile=compile)
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
    """The static buffers of a target and its draft, and the prepared steps over them; serves one call at a time.

    Args:
        plan: the settings of the rounds, with the longest lookahead.
        target, draft: the models' runners before their first pass; the engine keeps their caches. None decodes plainly.
        compile: compile the steps.

    Attributes:
        plan, compile: as given.
        steps: the prepared steps by lookahead.
        looks: whether the host checks between bursts of drafts if any row goes on, see `burst_of`.
        state: `[B, 4]`, see `draft_step`.
        uniforms: the draws of a round, see `draft_step` and `verify_step`.
        tails: each row's last two tokens.
    """

    def __init__(self, plan: Plan, target: StaticRunner, draft: StaticRunner | None, compile: bool) -> None:
        self.plan = plan
        self.compile = compile
        self.target = _side(target)
        self.draft = None if draft is None else _side(draft)
        device, rows = target.positions.device, len(target.read)
        # On an accelerator the check would wait for the device.
        self.looks = plan.stop.reads_probabilities and device.type == "cpu"
        self.state = torch.zeros(rows, 4, dtype=torch.long, device=device)
        self.uniforms = torch.zeros(rows, 2 * plan.lookahead + 1, device=device)
        self.tails: list[list[int]] = []
        self.steps: dict[int, Steps] = {}

    def adopt(self, target: StaticRunner, draft: StaticRunner | None) -> None:
        """Hand the engine's buffers to a call's runners, so that they read the prompt into them."""
        for side, runner in ((self.target, target), (self.draft, draft)):
            if side is not None and runner is not None:
                side.positions.copy_(_bounded_positions(runner))
                side.visible.copy_(runner.visible)
                runner.cache, runner.positions, runner.visible = side.cache, side.positions, side.visible

    def lengths(self, lookahead: int) -> range:
        """The lookaheads whose steps a round of up to `lookahead` needs: every length at which a burst can end it."""
        burst = burst_of(lookahead) if self.looks else lookahead
        return range(burst, lookahead + 1, max(burst, 1))

    def load(self, tails: Sequence[Sequence[int]], lengths: Sequence[int], limits: Sequence[int]) -> None:
        """Copy the round's inputs to the device: last two tokens, lengths and the most tokens to draft, by row."""
        rows = zip(tails, lengths, limits, strict=True)
        self.state.copy_(torch.tensor([[tail[0], tail[-1], n, limit] for tail, n, limit in rows]))

    def prepare(self, lookahead: int) -> None:
        """Prepare the steps that rounds of up to `lookahead` lack. The state of a round must be loaded."""
        drafting, *longer = self.lengths(lookahead)
        for length in (drafting, *longer):
            if length not in self.steps:
                plan, draft = replace(self.plan, lookahead=length), self.draft if 0 < length == drafting else None
                with ordinary_tensors():
                    self.steps[length] = Steps(
                        plan, self.target, draft, self.state, self.uniforms, compile=self.compile
                    )

    def run_draft(self, lengths: Sequence[int], limits: Sequence[int], lookahead: int) -> tuple[Drafts, int]:
        """Draft up to `lookahead` tokens for texts of these lengths, for each row at most its limit.

        Returns:
            The drafts, and their width: the lookahead of the steps that verify them.
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
            # Bursts read the first columns, verification those behind them.
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
    """How many tokens to draft between two checks: `BURST`, or the whole lookahead if it is no multiple of that."""
    return BURST if lookahead and lookahead % BURST == 0 else lookahead


def prepared_capacity(tokens: int) -> int:
    """The cache slots of a call that reaches `tokens` tokens, rounded up so that calls of similar length share steps.

    Attention reads all slots, so calls of more than 512 tokens are rounded up by at most a quarter.
    """
    step = max(LEAST_CAPACITY_STEP, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Record no gradients, but make tensors that later calls can write to outside the caller's `inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _side(runner: StaticRunner) -> Side:
    positions, visible = _bounded_positions(runner).clone(), runner.visible.clone()
    return Side(runner.model, runner.cache, positions, visible, runner.keeps_logits)


def _bounded_positions(runner: StaticRunner) -> Tensor:
    """Positions clamped to the model's tables; only drafts past a text's end, which are dropped, exceed them."""
    bound = context_length(runner.model)
    return runner.positions if bound is None else runner.positions.clamp(max=bound - 1)


def _blank_drafts(plan: Plan, rows: int, device: torch.device) -> Drafts:
    tokens = torch.zeros(rows, plan.lookahead, dtype=torch.long, device=device)
    probs = None
    if plan.keep_probs and plan.lookahead:
        probs = torch.full((*tokens.shape, plan.vocabulary), 1.0 / plan.vocabulary, device=device)
    return tokens, torch.zeros(rows, dtype=torch.long, device=device), probs


def _joined(parts: Sequence[Drafts]) -> Drafts:
    """The drafts of several bursts as one."""
    if len(parts) == 1:
        return parts[0]
    tokens, lengths, probs = zip(*parts, strict=True)
    kept = [p for p in probs if p is not None]
    return torch.cat(tokens, dim=1), torch.stack(lengths).sum(dim=0), torch.cat(kept, dim=1) if kept else None
