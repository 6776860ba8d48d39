"""`PreparedRounds`: rounds that run two prepared steps, drafting and verification, and copy once to the host.

The loop is `decoding.Decoder`'s, which also makes the rounds of calls that the steps do not support: with processors
that read the text, recorded scores, or other drafters. For these, only the models' passes are prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding import Decoder, Rounds
from hf_specdec.drafting.drafter import PreparedDrafting, last_tokens
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.transcript import Transcript
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.fingerprint import forms_of, has_custom_hooks, state_of, weights_of
from hf_specdec.models.rope_stages import has_fixed_rope
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.traits import context_length, tensor_parallel_group, vocabulary_size
from hf_specdec.models.trimmed_head import head_tokens
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.buffers import Buffers, ordinary_tensors
from hf_specdec.prepared.compiled_step import forget_codes, settle
from hf_specdec.prepared.engine import Engine, with_copies
from hf_specdec.prepared.engine_store import STORE, EngineGroup
from hf_specdec.prepared.freed_memory import return_freed_memory
from hf_specdec.prepared.lap_timer import LapTimer
from hf_specdec.prepared.own_builds import tell_going_without, tell_once
from hf_specdec.prepared.prepared_passes import RoundsOfPasses
from hf_specdec.prepared.round_steps import Plan
from hf_specdec.rules.round_statistics import Round, reached_overlap

# Tokens times weights. Passes over smaller prompts take hardly longer than returning their freed memory.
LARGE_PROMPT = 2**31


@dataclass(frozen=True)
class PreparedRounds:
    """Makes rounds on an engine.

    The runners of target and draft are used, uncompiled, for the prompt only; the draft's also for tokens of rounds
    without drafts.

    Args:
        general: makes the rounds after preparing has failed.
        drafting: how drafts are made.
        target: the target's runner.
        engine: used by this call alone.
    """

    general: Decoder
    drafting: PreparedDrafting
    target: StaticRunner
    engine: Engine
    mode = torch.no_grad

    def make_round(self, transcript: Transcript) -> Round:
        """Make one round with the prepared steps, or a general one if preparing has failed."""
        if self.engine.failed:
            return self.general.make_round(transcript)
        engine, first = self.engine, transcript.lengths[0] == transcript.prompt_length
        if first:
            engine.tails = transcript.sequences[:, -2:].tolist()
        known = self.target.read[0]  # tokens of the prompt in the caller's cache
        before, room = list(transcript.lengths), tuple(max(space - 1, 0) for space in transcript.room)
        looking = perf_counter()
        copies, by_model, lookahead = self._chosen(transcript, room)
        looked = perf_counter() - looking
        limits = [min(len(copy) or space * by_model, lookahead) for copy, space in zip(copies, room, strict=True)]
        is_ready = all(n in engine.steps for n in engine.lengths(lookahead))
        if not is_ready:
            engine.load(engine.tails, before, limits)  # before the clock starts, since preparing is not timed
            if not self._prepared(lookahead):
                return self.make_round(transcript)
        began, laps = perf_counter() - looked, LapTimer(transcript.device)
        caught_up = by_model and lookahead > 0 and self._catch_up(transcript)
        laps.mark()
        with ordinary_tensors():
            if by_model:
                drafts, lookahead = engine.run_draft(before, limits, lookahead)
            else:
                drafts = engine.blank_drafts(before, limits, lookahead)
            if any(copies):
                drafts = with_copies(drafts, copies)
            laps.mark()
            if first:
                self._read_prompt(transcript.sequences[:, known:])
            result = engine.steps[lookahead].run_verify(drafts).tolist()
        reading, drafting = laps.seconds()
        checked = perf_counter()
        decided = lookahead + 3
        rows = [[int(n) for n in row[:decided]] for row in result]
        new_tokens = [[*row[: row[-2]], row[-1]] for row in rows]
        kept = transcript.append(new_tokens)
        engine.tails = [(t + new[:n])[-2:] for t, new, n in zip(engine.tails, new_tokens, kept, strict=True)]
        self.target.read = [n - 1 for n in transcript.lengths]
        if by_model and lookahead:
            self._note_drafted(before, transcript.lengths, lookahead, copies)
        return Round(
            drafted=tuple(row[-3] for row in rows),
            accepted=tuple(row[-2] for row in rows),
            new_tokens=kept,
            overlap=tuple(
                reached_overlap(row[decided:], accepted, drafted)
                for row, (*_, drafted, accepted, _) in zip(result, rows, strict=True)
            ),
            draft_steps=lookahead if by_model else 0,
            width=lookahead + (transcript.prompt_length - known if first else 1),
            draft_seconds=looked + reading + drafting,
            verify_seconds=checked - began - looked - reading - drafting,
            seconds=perf_counter() - began,
            catch_up_seconds=reading if caught_up else 0.0,
            room=room,
            settled=is_ready,
        )

    def _prepared(self, lookahead: int) -> bool:
        """Prepare, or give up; return whether it is prepared."""
        try:
            self._prepare(lookahead)
        except Exception as error:  # compilers and captures fail in many ways, none of which should end a call
            self._give_up(error)
            return False
        return True

    def _prepare(self, lookahead: int) -> None:
        """Prepare; retry after a `NameError`, since a module called while inductor's thread traces can fail."""
        try:
            try:
                self.engine.prepare(lookahead)
            except NameError:
                settle()
                self.engine.prepare(lookahead)
        except BaseException:
            forget_codes()
            self.engine.discard_steps()  # an interrupted call leaves some of them unfinished
            raise

    def _give_up(self, error: Exception) -> None:
        """Continue with simpler rounds, in this call and in later ones, see `Engine.fail`."""
        how = "compile=True" if self.engine.compile else "CUDA graphs"
        tell_going_without(how, error)
        self.engine.fail()
        if self.engine.failed and self.drafting.runner is not None:
            self.drafting.resume(self.drafting.runner.read)
            self.drafting.rule.use_general()

    def _chosen(self, transcript: Transcript, room: Sequence[int]) -> tuple[Sequence[Sequence[int]], bool, int]:
        """Each row's copied tokens, whether the model drafts in any row, and the lookahead."""
        if self.drafting.choose is None:
            return [()] * len(room), True, self._lookahead(transcript)
        copies = self.drafting.choose(transcript.ids, transcript.lengths, room, self.engine.is_ready)
        lookahead = self._lookahead(transcript) if copies.modelled else copies.width
        return [copy[:lookahead] for copy in copies.tokens], bool(copies.modelled), lookahead

    def _lookahead(self, transcript: Transcript) -> int:
        """The stop rule's length, or a shorter prepared one if every row ends within it."""
        limit = self.drafting.rule.limit
        needed = min(limit, max(transcript.room) - 1)
        return min((n for n in self.engine.steps if needed <= n <= limit), default=limit)

    def _read_prompt(self, prompt: Tensor) -> None:
        """Let the target read prompts `[B, P]` without their last tokens, which the first step reads.

        An encoding comes with a prompt, so if it is still unread, a prompt of one token is read twice.
        """
        unread = prompt[:, : max(prompt.shape[1] - 1, int(self.target.lacks_encoding))]
        if unread.shape[1]:
            self._read(self.target, unread)

    def _catch_up(self, transcript: Transcript) -> bool:
        """Let the draft model read all unread tokens except the last two; return whether there were any.

        `draft_token` reads the last two itself. The prompt and the tokens of rounds without drafts are unread. All rows
        read the same number of tokens. A shorter row reads beyond its text, into slots that later passes overwrite.
        """
        runner, lengths = self.drafting.runner, transcript.lengths
        unread = max(n - 2 - read for n, read in zip(lengths, runner.read, strict=True))
        unread = max(unread, int(runner.lacks_encoding))  # which comes with a token
        if unread <= 0:
            return False
        ends = [max(n - 2, unread) for n in lengths]
        runner.rewind([end - unread for end in ends])
        tokens = last_tokens(transcript.ids, ends, unread).clamp(max=self.engine.plan.draft_vocabulary - 1)
        self._read(runner, tokens)
        return True

    def _read(self, runner: StaticRunner, tokens: Tensor) -> None:
        """Read tokens whose logits are not needed; after a large prompt, return freed memory to the system."""
        on_cpu, prompt = runner.positions.device.type == "cpu", not any(runner.read)
        runner.forward(tokens, 1)
        if prompt and on_cpu and tokens.numel() * runner.model.num_parameters() >= LARGE_PROMPT:
            return_freed_memory()

    def _note_drafted(
        self, before: Sequence[int], after: Sequence[int], lookahead: int, copies: Sequence[Sequence[int]]
    ) -> None:
        """Note what the draft model has read: the text before the round and its accepted drafts except the last.

        It has not read copied tokens.
        """
        rows = zip(before, after, copies, strict=True)
        self.drafting.runner.read = [min(old if copy else old + lookahead - 1, new - 1) for old, new, copy in rows]


@contextmanager
def prepared_rounds(decoder: Decoder, transcript: Transcript, *, compile: bool) -> Iterator[Rounds]:
    """Yield a call's prepared rounds; if there are none, general rounds with prepared passes or the decoder's own.

    Args:
        compile: compile what is prepared. Without it, rounds and passes are prepared on CUDA only, captured.
    """
    STORE.drop_unusable()
    captures, target, drafter = cuda_graphs.captures(transcript.device), decoder.target, decoder.drafter
    plan = plan_for(decoder, transcript) if compile or captures else None
    if plan is None and not ((compile or captures) and _prepares_passes(decoder, transcript, compile=compile)):
        yield decoder
        return
    assert isinstance(target, StaticRunner)
    drafting = None if plan is None else drafter.for_prepared_rounds()
    runners = drafter.runners() if drafting is None else [drafting.runner]
    draft = next((one for one in runners if drafting or _shares(target, one, transcript)), None)
    models = [runner.model for runner in (target, draft) if runner is not None]
    # Captured steps always read the memory over which they were captured.
    addresses = tuple(map(weights_of, models)) if captures else ()
    states = tuple(map(state_of, models)), forms_of(*models), addresses, target.layers_read
    forms = tuple((one.cache.capacity, one.cache.encoded) for one in (target, draft) if one is not None)
    key = (compile, len(target.read), forms, states)
    group = STORE.take(key, plan)
    if group is None:
        slots = transcript.capacity if transcript.device.type == "cpu" else target.cache.capacity
        STORE.make_room(sum(_cache_bytes(runner, slots) for runner in (target, draft) if runner), transcript.ids)
        with ordinary_tensors():
            group = EngineGroup(Buffers(target, draft), compile)
    try:
        if plan is None or drafting is None:
            with group.buffers.used_by(target, draft, transcript.capacity):
                yield _rounds_of_passes(decoder, group, target, draft)
            return
        engine = group.engine_for(plan)
        if engine.failed:
            yield decoder
            return
        with group.buffers.used_by(target, draft, transcript.capacity):
            drafting.rule.use_prepared(engine.is_ready)
            yield PreparedRounds(decoder, drafting, target, engine)
    finally:
        STORE.put(key, group)


def _prepares_passes(decoder: Decoder, transcript: Transcript, *, compile: bool) -> bool:
    """Whether the target's passes can be prepared; if they were to be compiled, a warning tells why not."""
    target = decoder.target
    if isinstance(target, StaticRunner) and not target.cache.grows:
        refusal = _refusal_of(target, transcript)
    else:
        refusal = (
            "they need a static cache, which the model does not support, or the call may exceed its context (lower "
            "max_new_tokens) or continues from a cache (past_key_values) that can't be taken over."
        )
    if refusal is not None and compile:
        tell_once(f"compile=True compiles no passes of this call: {refusal}")
    device = transcript.device
    return refusal is None and (device.type == "cpu" or cuda_graphs.captures(device))


def _rounds_of_passes(
    decoder: Decoder, group: EngineGroup, target: StaticRunner, draft: StaticRunner | None
) -> RoundsOfPasses:
    """General rounds whose models run in the group's prepared passes."""
    sides = (("target", group.buffers.target, target), ("draft", group.buffers.draft, draft))
    passes = []
    for name, side, runner in sides:
        if side is not None and runner is not None:
            passes.append((runner, group.passes_of(side, f"pass of the {name}")))
    return RoundsOfPasses(decoder, passes)


def _shares(target: StaticRunner, runner: object, transcript: Transcript) -> bool:
    """Whether a draft's passes can be prepared too, over a cache of the same size as the target's."""
    return (
        isinstance(runner, StaticRunner)
        and not runner.cache.grows
        and runner.positions.device == transcript.device
        and runner.cache.capacity == target.cache.capacity
        and _refusal_of(runner, transcript) is None
    )


def plan_for(decoder: Decoder, transcript: Transcript) -> Plan | None:
    """The plan for an engine to run this call, or None if only general rounds can."""
    target, drafting = decoder.target, decoder.drafter.for_prepared_rounds()
    if (
        drafting is None
        or not drafting.rule.serves_prepared_rounds
        or (drafting.choose is not None and transcript.device.type != "cpu")
        or not isinstance(target, StaticRunner)
        or target.layers_read
        or target.cache.grows
        or transcript.records
        or not decoder.processors.serve_prepared_rounds
        or _suppresses_all(decoder.processors, [target, *([drafting.runner] if drafting.runner else [])])
        or not (decoder.relaxation is None or decoder.relaxation.serves_prepared_rounds)
        or _refusal_of(target, transcript) is not None
    ):
        return None
    if drafting.runner is not None and (
        not isinstance(drafting.runner, StaticRunner)
        or drafting.runner.positions.device != transcript.device
        or not _within(drafting.max_positions, transcript)
        or transcript.prompt_length < 2
        or _refusal_of(drafting.runner, transcript) is not None
    ):
        return None
    return Plan(
        drafting.rule.longest,
        drafting.vocabulary,
        drafting.draft_vocabulary,
        keep_probs=drafting.keep_probs,
        stop=drafting.rule.while_drafting() or StopRule(0),
        do_sample=decoder.do_sample,
        processors=tuple(decoder.processors.processors),
        relaxation=decoder.relaxation,
        rule=decoder.rule,
        eos_tokens=tuple(sorted(transcript.eos_tokens)),
    )


def _suppresses_all(processors: HostProcessors, runners: Sequence[Any]) -> bool:
    """Whether a model may have no token left, such as one whose head is trimmed: prepared steps always choose one."""
    most = processors.suppressed
    sizes = [min(head_tokens(runner.model) or 1, vocabulary_size(runner.model)) for runner in runners if most]
    return any(most >= size for size in sizes)


def _refusal_of(runner: StaticRunner, transcript: Transcript) -> str | None:
    """A sentence on why a model's passes depend on more than the steps' inputs; None if they do not.

    The last prompt token must be visible: the first step reads it, and as padding it would see itself. Autocast's
    cached casts of weights end with it, and among processes that share a model only one draws and decides.
    """
    model = runner.model
    name = type(model).__name__
    if not _within(context_length(model), transcript):
        return f"it may exceed the context of {name}."
    if not bool(runner.visible[:, transcript.prompt_length - 1].all()):
        return "the last token of a prompt is masked. Pad on the left to compile them."
    if not has_fixed_rope(model):
        return f"the rotary frequencies of {name} depend on the text's length."
    if has_custom_hooks(model):
        return f"{name} has hooks, which compiled code would not call."
    if torch.is_autocast_enabled(model.device.type):
        return "it runs under autocast. Convert the model to the dtype instead."
    if tensor_parallel_group(model) is not None:
        return f"several processes hold {name} together."
    return None


def _within(bound: int | None, transcript: Transcript) -> bool:
    """Whether the call ends within a model's positions; prepared rounds clamp positions beyond."""
    return bound is None or transcript.max_length <= bound


def _cache_bytes(runner: StaticRunner, capacity: int) -> int:
    """Bytes of a runner's cache with `capacity` slots: keys and values of all layers, rows and heads.

    Those of an encoder's output count as further slots.
    """
    config = runner.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    encoded = 0 if runner.cache.encoded is None else runner.cache.encoded[1]
    slots = config.num_hidden_layers * len(runner.read) * (capacity + encoded)
    return int(2 * slots * heads * width * runner.model.dtype.itemsize)
