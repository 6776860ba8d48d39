"""Objects around a model are unwrapped, by `enable` and as drafts; those that can't be are refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers.models import VOCABULARY, llama, noisy, prompts
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BartConfig,
    Blip2Config,
    Blip2ForConditionalGeneration,
    BlipConfig,
    BlipForConditionalGeneration,
    CsmConfig,
    CsmForConditionalGeneration,
    DPRConfig,
    LlamaForCausalLM,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    PreTrainedModel,
    RagConfig,
    RagTokenForGeneration,
)

import hf_specdec
from hf_specdec import last_speculation

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
Pair = tuple[PreTrainedModel, PreTrainedModel]


def with_adapters(model: PreTrainedModel) -> torch.nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).to(model.dtype).eval()


class Engine(torch.nn.Module):
    """Holds a `module`, and has a `generate` of its own that runs it, as DeepSpeed's engine for inference."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.generate(*args, **kwargs)


WRAPPERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "replicated": torch.nn.DataParallel,
    "in processes": DistributedDataParallel,
    "with adapters, compiled": lambda model: torch.compile(with_adapters(model), backend="eager"),
    "compiled, in processes": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "an engine": Engine,
    "prepared by accelerate": lambda model: Accelerator(cpu=True).prepare(model),
    "prepared in bfloat16": lambda model: Accelerator(cpu=True, mixed_precision="bf16").prepare(model),
}


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of a single process, which DDP wants."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(True)


@pytest.fixture
def pair() -> Pair:
    target = llama()
    return target, noisy(target)


@pytest.mark.parametrize(("role", "wrapper"), [
    *(("target", wrapper) for wrapper in WRAPPERS),
    *(("draft", wrapper) for wrapper in ("compiled", "with adapters, compiled", "an engine")),
])  # fmt: skip
def test_a_wrapped_model_speculates(pair: Pair, role: str, wrapper: str, one_process: None) -> None:
    models: dict[str, Any] = dict(zip(("target", "draft"), pair, strict=True))
    target = models["target"]
    models[role] = WRAPPERS[wrapper](models[role])
    call = {**prompts(2), **GREEDY}
    plain = target.generate(**call)
    with hf_specdec.enable(models["target"], assistant_model=models["draft"], generation_strategy="speculative"):
        ours = target.generate(**call)
    stats = last_speculation(models["target"])
    assert torch.equal(ours, plain) and stats is last_speculation(target) is not None
    assert 0 < stats.acceptance_rate < 1


def test_a_wrapper_disables_what_it_wraps(pair: Pair) -> None:
    target, draft = pair
    compiled = torch.compile(target, backend="eager")
    with hf_specdec.enable(compiled, assistant_model=draft, generation_strategy="speculative"):
        hf_specdec.disable(compiled)
        compiled.generate(**prompts(1), **GREEDY)
        assert last_speculation(compiled) is None


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
PICTURE, PLACES = 5, 4
OPT = {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32}
OPT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, **SPECIAL}
T5 = {"model_type": "t5", "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2}
T5 |= {"num_heads": 2, "decoder_start_token_id": 0, **SPECIAL}


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model.double().eval()


def blip(rows: int) -> tuple[PreTrainedModel, str, dict[str, Tensor]]:
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "encoder_hidden_size": 16, "intermediate_size": 32}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "sep_token_id": 1}
    config = BlipConfig(vision_config=VISION, text_config={**text, **SPECIAL})
    return BlipForConditionalGeneration(config), "text_decoder", {}


def blip2(rows: int, text: dict[str, Any]) -> tuple[PreTrainedModel, str, dict[str, Tensor]]:
    qformer = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    qformer |= {"num_attention_heads": 2, "encoder_hidden_size": 16}
    config = Blip2Config(
        vision_config=VISION, qformer_config=qformer, text_config=text, num_query_tokens=PLACES,
        image_token_index=PICTURE,
    )  # fmt: skip
    ids = torch.tensor([[*[PICTURE] * PLACES, 2, 7, 8, 9]]).repeat(rows, 1)
    ids = torch.cat([torch.zeros(rows, 1, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 1).long().repeat(rows, 1)
    mask[0, 0] = 1
    ids[0, 0] = 6
    return Blip2ForConditionalGeneration(config), "language_model", {"input_ids": ids, "attention_mask": mask}


HIDDEN: dict[str, Callable[[int], tuple[PreTrainedModel, str, dict[str, Tensor]]]] = {
    "BLIP": blip,
    "BLIP-2 with OPT": lambda rows: blip2(rows, OPT),
    "BLIP-2 with T5": lambda rows: blip2(rows, T5),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_model_whose_generate_runs_another_s(kind: str) -> None:
    """`enable` takes either; arguments of the call reach the other as well."""
    torch.manual_seed(0)
    target, name, inputs = HIDDEN[kind](2)
    _spread(target)
    inputs["pixel_values"] = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    part = getattr(target, name)
    plain = target.generate(**inputs, **GREEDY)
    with_draft = {"assistant_model": noisy(part), "num_assistant_tokens": 3}
    settings = {"drafter": "suffix"} if kind.endswith("T5") else with_draft
    for enabled in (target, part):
        with hf_specdec.enable(enabled, generation_strategy="speculative", **settings):
            assert torch.equal(target.generate(**inputs, **GREEDY), plain)
        assert (stats := last_speculation(target)) is last_speculation(part) is not None
        assert stats.accepted > 0
    with hf_specdec.enable(target):
        ours = target.generate(**inputs, **GREEDY, generation_strategy="speculative", **settings)
    assert torch.equal(ours, plain) and last_speculation(target) is not stats
    if kind.endswith("T5"):
        with (
            hf_specdec.enable(target, assistant_model=noisy(part), generation_strategy="speculative"),
            pytest.raises(ValueError, match="inputs_embeds: assistant_model=T5ForConditionalGeneration"),
        ):
            target.generate(**inputs, **GREEDY)


def test_a_draft_whose_generate_runs_another_s() -> None:
    """What it runs drafts, and the draft's own settings are that one's."""
    torch.manual_seed(0)
    target, _, inputs = blip2(1, OPT)
    _spread(target)
    inputs["pixel_values"] = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    draft = noisy(target)
    draft.language_model.generation_config.num_assistant_tokens = 2
    plain = target.generate(**inputs, **GREEDY)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        assert torch.equal(target.generate(**inputs, **GREEDY), plain)
    assert (stats := last_speculation(target)) is not None
    assert stats.accepted > 0 and max(max(r.drafted) for r in stats.rounds) == 2


def test_embeddings_without_their_tokens_are_refused(pair: Pair) -> None:
    """Control: with them, they are read, even if they are others."""
    target, draft = pair
    embeddings = target.get_input_embeddings()(prompts(1)["input_ids"])
    call = {**GREEDY, "inputs_embeds": embeddings}
    shifted = {**call, "input_ids": prompts(1)["input_ids"] + 1}
    plain = target.generate(**shifted)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        with pytest.raises(ValueError, match=r"inputs_embeds of the shape \[1, 9, 32\] .* pass the input_ids as well"):
            target.generate(**call)
        assert torch.equal(target.generate(**shifted), plain)


class Own(torch.nn.Module):
    """A module with a `generate` of its own, which runs that of its parts."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.thinker.generate(*args, **kwargs) or self.talker.generate(*args, **kwargs)


def rag() -> PreTrainedModel:
    sides = {
        f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    bart = BartConfig(vocab_size=8, d_model=8, **sides)
    question = DPRConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    return RagTokenForGeneration(RagConfig(question_encoder=question.to_dict(), generator=bart.to_dict()))


def musicgen() -> PreTrainedModel:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 8}
    return MusicgenForCausalLM(MusicgenDecoderConfig(**sizes, pad_token_id=7, bos_token_id=7))


NEVER: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "no language model": (lambda: torch.nn.Linear(2, 2), "model=Linear has no generate: pass a model that does"),
    "no head": (lambda: llama().model, "model=LlamaModel has no generate"),
    "a loop of its own": (
        rag,
        "model=RagTokenForGeneration has a generate that does not run transformers': pass a model",
    ),
    "a loop of its own in generate": (musicgen, "model=MusicgenForCausalLM has a generate that does not run"),
    "several": (
        lambda: Own(thinker=llama(), talker=llama()),
        "model=Own has a generate that runs those of several models: .* of model.thinker, model.talker, or leave",
    ),
}


@pytest.mark.parametrize("kind", NEVER)
def test_defaults_that_would_never_take_effect_are_refused(pair: Pair, kind: str) -> None:
    make, message = NEVER[kind]
    with pytest.raises(ValueError, match=message):
        hf_specdec.enable(make(), assistant_model=pair[1], generation_strategy="speculative")


class Careful(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


class Explicit(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return LlamaForCausalLM.generate(self, *args, **kwargs)


@pytest.mark.parametrize("kind", [Careful, Explicit])
def test_an_override_that_goes_on_to_transformers_is_none_of_them(pair: Pair, kind: type[PreTrainedModel]) -> None:
    """Control: as a part of another model as well."""
    target = kind(pair[0].config).double().eval()
    target.load_state_dict(pair[0].state_dict())
    for enabled in (target, Own(thinker=target)):
        before = last_speculation(target)
        with hf_specdec.enable(enabled, assistant_model=pair[1], generation_strategy="speculative"):
            target.generate(**prompts(1), **GREEDY)
        assert last_speculation(enabled) is last_speculation(target) is not before


def test_a_decoding_loop_of_the_model_s_own_is_not_replaced(pair: Pair) -> None:
    """It would be, without a word: the frames that it puts together are made in it."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "num_codebooks": 2, "vocab_size": 8}
    depth = {**sizes, "backbone_hidden_size": 8}
    with torch.device("meta"):
        target = CsmForConditionalGeneration(CsmConfig(**sizes, text_vocab_size=8, depth_decoder_config=depth))
    target = target.to_empty(device="cpu").eval()
    message = "model=CsmForConditionalGeneration decodes in its own loop, _sample"
    with (
        hf_specdec.enable(target, assistant_model=pair[1], generation_strategy="speculative"),
        pytest.raises(ValueError, match=message),
    ):
        target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
