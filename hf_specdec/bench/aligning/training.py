"""Trains a draft on its target's answers with `Trainer`, for a number of steps or until a clock ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_specdec.bench.aligning.batches import IGNORED, Collator, answer_logits, shared_vocabulary
from hf_specdec.bench.aligning.clock import Clock
from hf_specdec.bench.aligning.encoding_keys import EncodingKeys
from hf_specdec.bench.aligning.losses import DIVERGENCES, cross_entropy, on_tokens
from hf_specdec.bench.aligning.packing import PACKED, Packs
from hf_specdec.bench.aligning.trimmed import TrimmedVocabulary
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Training, as_json, from_json
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import Settings
from hf_specdec.compat.transformers_private import use_one_gpu
from hf_specdec.models.processor import multiplies_bfloat16

_POINTS = 40  # of the loss curve
_EVALUATIONS = 4  # of the held-out loss, after the initial one; each with a checkpoint
_WARM_UP = 0.05  # of the steps
_EVALUATIONS_BY_CLOCK, _PATIENCE = 12, 3  # at most; evaluations in a row without a lower loss, which end training
_APART = 4  # times an evaluation's seconds, at least, between two evaluations
_STEPS_TO_WARM_UP = 40  # with a clock
_STEPS_OF_A_POINT = 50  # of the loss curve, with a clock
_NEVER = 10**9  # steps
_PASSES, _LEAST_STEPS = 5, 300
_LEAST_RATE, _MOST_RATE = 1e-4, 4e-3
_LARGE = 100_000_000  # trained parameters from which the lowest rate is used


def default_steps(texts: int, rows: int) -> int:
    """Steps of `rows` texts: five passes over all `texts`, and at least 300."""
    return max(_LEAST_STEPS, math.ceil(_PASSES * texts / rows))


def default_learning_rate(parameters: int) -> float:
    """The peak learning rate: 1e-4 from 100M trained parameters on, 4e-3 below 1M, a power law between them."""
    return min(_MOST_RATE, _LEAST_RATE * max(1.0, _LARGE / parameters) ** 0.8)


class AlignmentTrainer(Trainer):
    """A `Trainer` whose loss is the draft's distance from the target over the answers' tokens.

    Args:
        settings: its `loss`, `on_policy` and `seed` are used.
        pair: provides the target; its draft does not change.
        trimmed: the tokens of the draft's head; None for all.
        keys: those of the stored encodings; None without these.
        clock: sets the learning rate instead of the number of steps.
    """

    def __init__(
        self, *arguments: Any, settings: Settings, pair: LoadedPair, trimmed: TrimmedVocabulary | None = None,
        keys: EncodingKeys | None = None, clock: Clock | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(*arguments, **keywords)
        self.settings, self.pair, self.trimmed, self.keys, self.clock = settings, pair, trimmed, keys, clock
        self.collator = Collator(pair)
        self.tokens_read = 0
        self.agreed: list[Tensor] = []  # by position, where the draft's most likely token is the target's
        # `compute_loss` already averages over tokens.
        self.model_accepts_loss_kwargs = False

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """`Trainer`'s scheduler; with a clock, one that falls with the time left."""
        if (clock := self.clock) is None:
            return super().create_scheduler(num_training_steps, optimizer)

        def share(step: int) -> float:
            return min(1.0, (step + 1) / _STEPS_TO_WARM_UP) * max(0.0, 1 - clock.share)

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss over the answers' tokens; in on-policy steps, over tokens that the draft wrote."""
        if model.training:
            read = inputs["labels"] != IGNORED if "encoding" in inputs else inputs["attention_mask"]
            self.tokens_read += int(read.sum())
            if self._draft_writes():
                inputs = self._written_by(self.accelerator.unwrap_model(model), inputs)
        if self.keys is not None:
            self.keys.read(inputs)
        loss = self._losses(answer_logits(model, inputs, self.accelerator.unwrap_model(model)), inputs).mean()
        return (loss, {}) if return_outputs else loss

    def _losses(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        logits = logits[:, : shared_vocabulary(self.pair)]
        if self.settings.loss == "cross_entropy":
            return cross_entropy(logits.log_softmax(-1), inputs["labels"][inputs["labels"] != IGNORED])
        divergence = DIVERGENCES[self.settings.loss]
        if "target_tokens" in inputs:
            tokens = inputs["target_tokens"]
            tokens = tokens if self.trimmed is None else self.trimmed.columns(tokens)
            if not logits.requires_grad:
                self.agreed.append(logits.argmax(-1) == tokens[:, 0])
            return divergence(on_tokens(logits, tokens), inputs["target_log_probs"].to(logits.dtype))
        with torch.no_grad():
            target = answer_logits(self.pair.target, inputs)[:, : logits.shape[-1]].to(logits)
        return divergence(logits.log_softmax(-1), target.log_softmax(-1))

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """As `Trainer.evaluate`; also logs how often the most likely token is the target's."""
        self.agreed = []
        found = super().evaluate(*arguments, **keywords)
        if self.agreed:
            self.state.log_history[-1]["agreement"] = float(torch.cat(self.agreed).float().mean())
        self.agreed = []
        return found

    def _draft_writes(self) -> bool:
        """Whether the draft writes in this step; drawn by step number, so that all processes and resumed runs agree."""
        return Random(f"{self.settings.seed}/{self.state.global_step}").random() < self.settings.on_policy

    @torch.no_grad()
    def _written_by(self, draft: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with answers sampled from the draft, up to the length of the target's longest one."""
        prompts = self.collator.prompts(inputs)
        longest = int((inputs["labels"] != IGNORED).sum(-1).max())
        draft.eval()
        sequences = draft.generate(
            **prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, use_cache=True,
            pad_token_id=self.collator.pad,
        )  # fmt: skip
        draft.train()
        start = 1 if self.pair.encoder_decoder else prompts["input_ids"].shape[1]
        rows = []
        for ids, mask, row in zip(*prompts.values(), sequences[:, start:].tolist(), strict=True):
            rows.append({"prompt": ids[mask.bool()].tolist(), "answer": self.pair.up_to_eos(row)})
        return {name: tensor.to(inputs["input_ids"].device) for name, tensor in self.collator(rows).items()}


class _Bar(ProgressCallback):
    """A progress bar on stderr; losses are in the report."""

    def on_log(self, *arguments: Any, **keywords: Any) -> None:
        pass


class _ByClock(TrainerCallback):
    """Ends training when the time is over or the held-out loss no longer falls; shows the time left.

    Evaluations take at most a fifth of the time; otherwise, short trials would hardly train.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        spent = round(clock.spent)
        self.began = self.ended = clock.spent  # the last evaluation
        self.bar = tqdm(initial=spent, total=round(clock.limit), desc="training", unit="s", file=sys.stderr)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.bar.update(round(min(self.clock.spent, self.clock.limit)) - self.bar.n)
        apart = max(self.clock.limit / _EVALUATIONS_BY_CLOCK, _APART * (self.ended - self.began))
        if self.clock.spent - self.ended >= apart or self.clock.over:
            self.began = self.clock.spent
            control.should_evaluate = control.should_save = control.should_log = True
        control.should_training_stop = control.should_training_stop or self.clock.over

    def on_evaluate(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        losses = [item["eval_loss"] for item in state.log_history if "eval_loss" in item]
        self.ended = self.clock.spent
        self.bar.set_postfix(step=state.global_step, held_out=f"{losses[-1]:.3f}")
        control.should_training_stop = control.should_training_stop or min(losses[-_PATIENCE:]) > min(losses)

    def on_save(self, *arguments: Any, **keywords: Any) -> None:
        self.clock.save()


def train(
    settings: Settings, pair: LoadedPair, draft: PreTrainedModel, learned: Any, held_out: Any, folder: Path,
    shared: Processes, clock: Clock | None = None,
) -> Training:  # fmt: skip
    """Train `draft` and save it with its tokenizer as `folder`/draft; continues an interrupted training.

    If answers have stored distributions and the draft lists its `draft_tokens`, it is trained with a head of these
    tokens; this head and the embedding are not trained.

    Args:
        draft: a copy of the pair's draft, which is changed.
        learned, held_out: answers of the target, as `datasets.Dataset`s.
        folder: for this training only; created if missing.
        clock: how long to train, instead of `settings.steps`.

    Returns:
        The curves and costs; `seconds` counts from the last start.
    """
    finished, facts_file = folder / "draft", folder / "training.json"
    if not finished.exists():
        dtype = draft.dtype
        # Half-precision weights would lose small updates: they are kept in float32, and passes run in half precision.
        model = draft.float() if dtype in (torch.float16, torch.bfloat16) else draft
        # Without stored distributions, the loss needs all logits.
        trimmed = TrimmedVocabulary.of(model) if settings.top_k_targets else None
        keys = EncodingKeys(model) if trimmed is not None and "encoding" in learned.column_names else None
        packs = _packs(pair, model, learned) if trimmed is not None else None
        model = model if settings.lora_rank is None else _with_lora(model, settings.lora_rank)
        settings = _chosen(settings, model, len(learned), shared.count)
        trainer = AlignmentTrainer(
            model, _arguments(settings, folder, pair, dtype, by_clock=clock is not None, packed=packs is not None),
            data_collator=packs or Collator(pair), train_dataset=packs.dataset if packs else _with_lengths(learned),
            eval_dataset=_with_lengths(held_out), settings=settings, pair=pair, trimmed=trimmed, keys=keys, clock=clock,
        )  # fmt: skip
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(_Bar() if clock is None else _ByClock(clock))
        start = time.perf_counter()
        checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        trainer.train(resume_from_checkpoint=checkpoint)
        resumed = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
        facts = replace(
            _facts(trainer, settings, time.perf_counter() - start, resumed),
            prompts=len(learned),
            tokens=sum(map(len, learned["answer"])),
            rows=trainer.args.per_device_train_batch_size * (PACKED if packs else 1) * shared.count,
        )
        if shared.main:
            model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
            model = model if settings.lora_rank is None else model.merge_and_unload()
            if trimmed is not None:
                trimmed.restore()
            if keys is not None:
                keys.restore()
            facts_file.write_text(json.dumps(as_json(facts)))
            _save(model.to(dtype), pair, finished)
        shared.wait()
    found: Training = from_json(Training, json.loads(facts_file.read_text()))
    return found


def _packs(pair: LoadedPair, model: PreTrainedModel, learned: Any) -> Packs | None:
    """Packs of answers to the same prompts; None if there are none, or the model can't read them."""
    if pair.encoder_decoder:
        return None
    packs = Packs(pair, learned)
    return packs if packs.several and packs.suit(model) else None


def _with_lengths(rows: Any) -> Any:
    """Add a column of lengths: texts of similar length share a step, so that little of it is padding."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True)]
    return rows.add_column("length", lengths)


def _chosen(settings: Settings, model: Any, texts: int, processes: int) -> Settings:
    """The settings with default steps and learning rate if none are given."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    rate, steps = settings.learning_rate, settings.steps
    return replace(
        settings,
        steps=default_steps(texts, settings.batch_size * processes) if steps is None else steps,
        learning_rate=default_learning_rate(trained) if rate is None else rate,
    )


def _arguments(
    settings: Settings, folder: Path, pair: LoadedPair, dtype: torch.dtype, *, by_clock: bool, packed: bool
) -> TrainingArguments:
    assert pair.draft is not None and settings.steps is not None and settings.learning_rate is not None
    on_cpu = pair.draft.device.type == "cpu"
    steps = _NEVER if by_clock else settings.steps
    apart = max(1, steps // _EVALUATIONS)
    half = on_cpu and dtype == torch.float32 and multiplies_bfloat16()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=max(1, round(_WARM_UP * steps)),
        # Packs of one prompt alone would make steps of it.
        per_device_train_batch_size=max(2, settings.batch_size // PACKED) if packed else settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        bf16=half or dtype == torch.bfloat16,
        fp16=dtype == torch.float16 and not on_cpu,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        logging_strategy="steps",
        logging_steps=_STEPS_OF_A_POINT if by_clock else max(1, steps // _POINTS),
        eval_strategy="steps",
        eval_steps=apart,
        eval_on_start=True,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=apart,
        save_total_limit=1,
        load_best_model_at_end=by_clock,
        metric_for_best_model="eval_loss",
        train_sampling_strategy="group_by_length",
        seed=settings.seed,
        label_names=["labels"],
        remove_unused_columns=False,
        report_to="none",
    )
    # Trainer would split the batch over all GPUs of a process, but the target runs on one.
    if arguments.n_gpu > 1:
        use_one_gpu(arguments)
    return arguments


def _with_lora(draft: PreTrainedModel, rank: int) -> Any:
    import peft

    kind = peft.TaskType.SEQ_2_SEQ_LM if draft.config.is_encoder_decoder else peft.TaskType.CAUSAL_LM
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=kind)
    return peft.get_peft_model(draft, config)


def _facts(trainer: AlignmentTrainer, settings: Settings, seconds: float, resumed: int) -> Training:
    history = trainer.state.log_history
    model = trainer.accelerator.unwrap_model(trainer.model)
    curve, held_out, agreement = (
        tuple((item["step"], item[key]) for item in history if key in item)
        for key in ("loss", "eval_loss", "agreement")
    )
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert settings.steps is not None and settings.learning_rate is not None
    return Training(
        curve, held_out, seconds, resumed, trained, trainer.state.global_step, settings.learning_rate,
        tokens_read=trainer.tokens_read, agreement=agreement,
    )  # fmt: skip


def _save(draft: PreTrainedModel, pair: LoadedPair, folder: Path) -> None:
    """Save an ordinary checkpoint with its tokenizer, completely or not at all."""
    assert pair.draft_tokenizer is not None
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    draft.save_pretrained(partial)
    pair.draft_tokenizer.save_pretrained(partial)
    os.replace(partial, folder)
