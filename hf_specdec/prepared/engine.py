"""`Engine`: the prepared steps of rounds with the same settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.host.suppressed_tokens import LISTS, Suppression
from hf_specdec.models.traits import context_length, vocabulary_size
from hf_specdec.models.trimmed_head import head_tokens
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.buffers import Buffers, ordinary_tensors
from hf_specdec.prepared.compiled_step import CompiledStep, Step, kernels_as_compiled
from hf_specdec.prepared.few_token_products import reads_slots_in_use
from hf_specdec.prepared.round_steps import Drafts, Plan, draft_lengths, draft_token, first_slots, verify_step

SHARED_CAPACITY, SPARE, LEAST_CAPACITY_STEP = 8192, 128, 128  # slots, see `prepared_capacity`; for drafts beyond a text
DraftToken = Callable[..., tuple[tuple[Tensor, ...], ...]]
BURST = 4  # drafts between two checks on the host, see `burst_of`


class Steps:
    """The prepared steps of rounds of one lookahead, over an engine's buffers.

    Args:
        plan: the settings of the rounds.
        buffers: the buffers that they read and write.
        tokens: the prepared `draft_token` of a round's first pass and of later ones; None drafts blanks.
        uniforms: the engine's uniform numbers.
        compile: compile the steps.

    Attributes:
        run_draft, run_verify: draft γ tokens; the prepared `verify_step`.
        blanks: γ placeholder drafts, made without a model.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: Buffers,
        tokens: tuple[DraftToken, DraftToken] | None,
        uniforms: Tensor,
        *,
        compile: bool,
    ) -> None:
        target, state = buffers.target, buffers.state
        device, count = state.device, plan.lookahead
        draws = (uniforms[:, count : 2 * count + 1],) if plan.do_sample else ()  # after those of the drafts
        self.blanks = blanks = _blank_drafts(plan, len(state), device)
        step: Step = partial(verify_step, target, plan)
        args = state, *blanks.parts(), *draws
        if not target.cache.tensors():
            # An uncompiled run allocates the cache, which must exist before anything is compiled or captured.
            with kernels_as_compiled(device, compile=compile):
                step(*args)
        name = f"verification of {count} token{'s' if count > 1 else ''}" if count else "step without drafts"
        verify = cuda_graphs.prepare(step, device, name, args, compile=compile, pool=buffers.pool, lent=buffers.lent)
        self.run_verify: Callable[[Drafts], Tensor] = lambda drafts: verify(state, *drafts.parts(), *draws)
        self.run_draft: Callable[[], Drafts] = lambda: blanks
        if tokens is not None:
            draft = partial(_draft, tokens, plan, state, uniforms)
            self.run_draft = cuda_graphs.prepare(draft, device, "drafts", compile=False, pool=buffers.pool)

    def run_once(self) -> None:
        """Finish preparing: wait for compilation, and capture. The round that follows overwrites the result."""
        self.run_verify(self.run_draft())


class Engine:
    """The prepared steps of calls with one plan, over buffers that engines of other plans share.

    Args:
        plan: the settings of the rounds, with the longest lookahead.
        buffers: the buffers that the steps read and write.
        compile: compile the steps.

    Attributes:
        plan, buffers: as given.
        compile: whether steps are compiled.
        target, draft, state: from the buffers.
        steps: the prepared steps by lookahead.
        looks: whether the host checks between bursts of drafts if any row continues, see `burst_of`.
        uniforms: `[B, 2γ+1]`, the draws of a round: γ for the drafts, γ+1 for the verification.
        tails: each row's last two tokens.
        failed: whether preparing steps has failed, so that general rounds are used.
        used: a growing number that orders engines by their last use.
    """

    def __init__(self, plan: Plan, buffers: Buffers, compile: bool) -> None:
        self.buffers, self.compile = buffers, compile
        self.target, self.draft, self.state = buffers.target, buffers.draft, buffers.state
        device, target = self.state.device, buffers.target.held()
        assert target is not None
        vocabulary = max(vocabulary_size(target), head_tokens(target) or 0)
        self.plan = replace(
            plan,
            processors=tuple(
                Suppression(one, vocabulary, device) if type(one) in LISTS else one for one in plan.processors
            ),
        )
        # On an accelerator the check would wait for the device.
        self.looks = plan.stop.reads_probabilities and device.type == "cpu"
        # A numpy view, since writing a few numbers through it takes a tenth of the time.
        self._host_state = self.state.numpy().data if device.type == "cpu" else None
        self.uniforms = torch.zeros(len(self.state), 2 * plan.lookahead + 1, device=device, dtype=torch.float32)
        self.tails: list[list[int]] = []
        self.failed = False
        self.used = 0
        self.steps: dict[int, Steps] = {}
        self._tokens: tuple[DraftToken, DraftToken] | None = None

    def take_over(self, plan: Plan) -> None:
        """Make the rounds of a call whose plan has the key of this engine's."""
        for ours, processor in zip(self.plan.processors, plan.processors, strict=True):
            if isinstance(ours, Suppression):
                ours.take_over(processor)

    def fail(self) -> None:
        """Note that preparing failed, and free prepared steps. On a GPU, steps are then captured without compiling."""
        if self.compile and cuda_graphs.captures(self.state.device):
            self.compile = False
        else:
            self.failed = True
        self.discard_steps()

    def discard_steps(self) -> None:
        """Free prepared steps; a later round prepares them again."""
        self.steps.clear()
        self._tokens = None

    def is_ready(self, lookahead: int) -> bool:
        """Whether rounds of a lookahead are prepared."""
        return lookahead in self.steps

    def lengths(self, lookahead: int) -> range:
        """The lookaheads whose steps a round of up to `lookahead` needs: every length at which a burst can end."""
        burst = burst_of(lookahead) if self.looks else lookahead
        return range(burst, lookahead + 1, max(burst, 1))

    def load(self, tails: Sequence[Sequence[int]], lengths: Sequence[int], limits: Sequence[int]) -> None:
        """Copy the round's inputs to the device: last two tokens, lengths and the most tokens to draft, by row."""
        given = [(tail[0], tail[-1], n, limit) for tail, n, limit in zip(tails, lengths, limits, strict=True)]
        if self._host_state is None:
            self.state.copy_(torch.tensor(given, device="cpu"))
            return
        for row, values in enumerate(given):
            for column, value in enumerate(values):
                self._host_state[row, column] = value

    def prepare(self, lookahead: int) -> None:
        """Prepare the missing steps for rounds of up to `lookahead`. The state of a round must be loaded."""
        lengths = self.lengths(lookahead)
        missing = [length for length in lengths if length not in self.steps]
        with ordinary_tensors():
            for length in missing:
                drafts = self.draft is not None and 0 < length == lengths[0]
                self.steps[length] = Steps(
                    replace(self.plan, lookahead=length),
                    self.buffers,
                    self._draft_tokens() if drafts else None,
                    self.uniforms,
                    compile=self.compile,
                )
            # All compilations start before the first step runs and waits for the compiler.
            if self.compile:
                self.buffers.gather_pages()
            for length in missing:
                self.steps[length].run_once()

    def _draft_tokens(self) -> tuple[DraftToken, DraftToken]:
        """The steps that draft a token, which rounds of all lengths share."""
        if self._tokens is None:
            side, plan = self.draft, self.plan
            assert side is not None

            def step(*given: Tensor) -> tuple[tuple[Tensor, ...], ...]:
                return draft_token(side, plan, *given)

            draws = (self.uniforms[:, 0].clone(),) if plan.do_sample else ()
            slots = first_slots(self.state)
            with kernels_as_compiled(self.state.device, compile=self.compile):
                next_slots = step(*slots, *draws)[0]  # also allocates the cache
            tokens: tuple[DraftToken, DraftToken] = step, step
            if self.compile:
                first = CompiledStep(step, self.state.device, "first draft step of a round", self.buffers.lent)
                later = CompiledStep(step, self.state.device, "draft step", self.buffers.lent)
                first.compile(*slots, *draws)
                later.compile(*next_slots, *draws)
                tokens = first, later
            self._tokens = tokens  # set last, since compiling may be interrupted
        return self._tokens

    def run_draft(self, lengths: Sequence[int], limits: Sequence[int], lookahead: int) -> tuple[Drafts, int]:
        """Draft up to `lookahead` tokens for texts of these lengths, for each row at most its limit.

        Returns:
            The drafts, and their number: the lookahead of the steps that verify them.
        """
        burst, *longer = self.lengths(lookahead)
        self.load(self.tails, lengths, limits)
        drafts = self._burst(burst)
        for reached in longer:
            drafted = reached - burst
            _, goes_on = draft_lengths(self.plan, self.state[:, 3], drafts.tokens, drafts.before, drafts.after)
            if not any(on and limit > drafted for on, limit in zip(goes_on.tolist(), limits, strict=True)):
                break
            new = torch.cat(drafts.tokens[-burst:], dim=1).tolist()
            tails = [[*tail, *tokens][-2:] for tail, tokens in zip(self.tails, new, strict=True)]
            self.load(tails, [n + drafted for n in lengths], limits)
            drafts += self._burst(burst)
        if longer:
            self.load(self.tails, lengths, limits)
        return drafts, len(drafts.tokens)

    def blank_drafts(self, lengths: Sequence[int], limits: Sequence[int], lookahead: int) -> Drafts:
        """Placeholder drafts for a round in which the model drafts nothing; arguments as in `run_draft`."""
        self.load(self.tails, lengths, limits)
        self._draw()
        return self.steps[lookahead].blanks

    def _burst(self, count: int) -> Drafts:
        self._draw()
        return self.steps[count].run_draft()

    def _draw(self) -> None:
        if self.plan.do_sample:
            # Bursts read the first columns, verification those after them.
            torch.rand(self.uniforms.shape, out=self.uniforms, device=self.uniforms.device)


def with_copies(drafts: Drafts, copies: Sequence[Sequence[int]]) -> Drafts:
    """Replace each row's drafts by its copied tokens, if there are any."""
    device = drafts.tokens[0].device
    is_copied = torch.tensor([bool(copied) for copied in copies], device=device)
    tokens, probs = [], []
    for at, token in enumerate(drafts.tokens):
        copied = torch.tensor([[row[at] if at < len(row) else 0] for row in copies], device=device)
        tokens.append(torch.where(is_copied.unsqueeze(1), copied, token))
        if drafts.probs:
            one_hot = torch.zeros_like(drafts.probs[at]).scatter_(1, copied, 1.0)
            probs.append(torch.where(is_copied.unsqueeze(1), one_hot, drafts.probs[at]))
    never = ~is_copied
    return Drafts(
        tuple(tokens),
        tuple(probs),
        tuple(one & never for one in drafts.before),
        tuple(one & never for one in drafts.after),
    )


def burst_of(lookahead: int) -> int:
    """How many tokens to draft between two checks: `BURST`, or the whole lookahead if it is not a multiple of that."""
    return BURST if lookahead and lookahead % BURST == 0 else lookahead


def prepared_capacity(tokens: int, *models: PreTrainedModel) -> int:
    """The cache slots of a call that reaches `tokens` tokens, rounded up so that calls of other lengths share steps.

    If attention reads only the slots in use, these are `SHARED_CAPACITY` or the models' positions, and eight times as
    many for longer texts. Otherwise it reads all slots, so calls of more than 512 tokens are rounded up by at most a
    quarter.
    """
    if models and all(map(reads_slots_in_use, models)):
        positions = max(context_length(model) or SHARED_CAPACITY for model in models)
        capacity = min(SHARED_CAPACITY, positions + SPARE)
        while capacity < tokens:
            capacity *= 8
        return capacity
    step = max(LEAST_CAPACITY_STEP, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


def _draft(tokens: tuple[DraftToken, DraftToken], plan: Plan, state: Tensor, uniforms: Tensor) -> Drafts:
    """Draft γ tokens by the prepared `draft_token` of a round's first pass and of later ones."""
    read, drafts = first_slots(state), Drafts()
    for step in range(plan.lookahead):
        draws = (uniforms[:, step].clone(),) if plan.do_sample else ()
        (token, slots), probs, before, after = tokens[step > 0](*read, *draws)
        read = token, slots
        drafts += Drafts((token,), probs, before, after)
    return drafts


def _blank_drafts(plan: Plan, rows: int, device: torch.device) -> Drafts:
    token = torch.zeros(rows, 1, dtype=torch.long, device=device)
    share = 1.0 / max(plan.vocabulary, 1)
    probs = torch.full((rows, plan.vocabulary), share, device=device, dtype=torch.float32)
    never = torch.zeros(rows, dtype=torch.bool, device=device)
    before, after = plan.stop.before_append(probs), plan.stop.after_append(probs)
    count = plan.lookahead
    return Drafts(
        (token,) * count,
        (probs,) * count if plan.keep_probs else (),
        () if before is None else (never,) * count,
        () if after is None else (never,) * count,
    )
