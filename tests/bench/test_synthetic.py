"""Synthetic pairs: the heads impose the acceptance rate, texts don't repeat, and every title says what the pair is."""

from dataclasses import replace

import pytest
import torch
from optimum.quanto import QTensor
from scipy.stats import binom
from transformers import AutoConfig, AutoModelForCausalLM

import hf_specdec
from hf_specdec.bench import results
from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.models.precision import quantized_layers
from hf_specdec.bench.models.synthetic import SHAPES, draft_shape
from hf_specdec.bench.reports.pictures import drawing
from hf_specdec.bench.running.memory import weight_bytes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import benchmark, run_task

CPU = torch.device("cpu")
TINY = ["tiny-llama", "tiny-qwen2", "tiny-opt"]
NEW_TOKENS = 200


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple:
    return synthetic.build(synthetic.parse(f"synthetic:{name}"), CPU, dtype, CPU, dtype, seed)


def speculate(target, draft, do_sample: bool = False) -> tuple[list[int], hf_specdec.SpeculationStats]:
    """The new tokens after a random prompt, and the statistics; greedy tokens have to be plain decoding's."""
    torch.manual_seed(0)
    ids = torch.randint(2, target.config.vocab_size, (1, 30))
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    if do_sample:
        kwargs["top_k"] = 0
    decoding = hf_specdec.SpeculativeDecoding(draft)
    out = target.generate(ids, custom_generate=decoding, **kwargs)
    assert do_sample or torch.equal(out, target.generate(ids, **kwargs))
    return out[0, 30:].tolist(), decoding.stats


def agrees(stats: hf_specdec.SpeculationStats, alpha: float) -> bool:
    """Whether what was seen lies in the central 99.99% of a binomial distribution of that mean."""
    reached = sum(min(item.drafted[0], item.accepted[0] + 1) for item in stats.rounds)
    assert reached > 100
    low, high = binom.interval(0.9999, reached, alpha)
    return bool(low <= stats.alpha * reached <= high)


@pytest.mark.parametrize(("shape", "dtype", "do_sample"), [
    *((shape, torch.float32, False) for shape in TINY), (TINY[0], torch.bfloat16, True),
    (TINY[0], torch.bfloat16, False),
])  # fmt: skip
def test_texts_do_not_repeat_and_acceptance_is_the_one_imposed(shape: str, dtype: torch.dtype, do_sample: bool) -> None:
    alphas = (0.9, 0.6)
    for alpha in alphas:
        target, draft, sentence = build(f"{shape}:alpha={alpha}", dtype)
        tokens, stats = speculate(target, draft, do_sample)
        assert len(set(tokens)) == NEW_TOKENS and agrees(stats, alpha)
        assert not agrees(stats, sum(alphas) - alpha)
        assert f"α = {alpha}" in sentence and shape in sentence


def test_without_the_permuted_head_texts_repeat() -> None:
    target, draft, _ = build("tiny-llama")
    with torch.no_grad():
        target.lm_head.weight.copy_(target.model.embed_tokens.weight)
    tokens, _ = speculate(target, draft)
    assert len(set(tokens)) < NEW_TOKENS / 2


def test_with_full_writes_of_the_layers_the_head_no_longer_decides() -> None:
    target, draft, _ = build("tiny-llama:alpha=1")
    assert speculate(target, draft)[1].alpha == 1
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight.mul_(100)
    assert speculate(target, draft)[1].alpha < 0.5


@pytest.mark.parametrize("vocabulary", [2, 3, 2048])
def test_one_cycle_through_the_whole_vocabulary(vocabulary: int) -> None:
    before = synthetic.cycle(vocabulary, seed=0).tolist()
    visited, token = set(), 0
    while token not in visited:
        visited.add(token)
        token = before[token]
    assert len(visited) == vocabulary and token == 0


def test_the_draft_is_wrong_on_its_share_and_nested_shares() -> None:
    before = synthetic.cycle(2048, seed=0)
    wrong = {alpha: (synthetic.misled(before, alpha, seed=0) != before) for alpha in (0, 0.6, 0.9, 1)}
    assert [int(mask.sum()) for mask in wrong.values()] == [2048, 819, 205, 0]
    assert not (wrong[0.9] & ~wrong[0.6]).any()
    assert sorted(synthetic.misled(before, 0.6, seed=0).tolist()) == list(range(2048))


def test_the_seed_alone_decides_which_tokens_follow() -> None:
    texts = [speculate(*build("tiny-llama", dtype, seed)[:2])[0] for dtype, seed in
             [(torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2)]]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]


def test_numbers_are_used_again_only_once_all_have_been_used(monkeypatch) -> None:
    distinct = {}
    for numbers in (synthetic._NUMBERS, 5001):
        monkeypatch.setattr(synthetic, "_NUMBERS", numbers)
        matrices = [p for p in build("tiny-llama")[0].model.layers.parameters() if p.ndim > 1]
        distinct[numbers] = len(torch.cat([p.detach().flatten() for p in matrices]).unique())
        # A writing matrix is scaled, so that each number may stand there twice.
        assert all(abs(p.std() / s - 1) < 0.05 for p in matrices for s in (0.1, 0.01) if (p.std() > 0.05) == (s > 0.05))
    assert distinct[5001] <= 2 * 5001 < distinct[2**20 + 1]


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build("tiny-llama")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("shape", "published"), [
    ("smollm-135m", 134_515_008), ("qwen2-0.5b", 494_032_768), ("tinyllama-1.1b", 1_100_048_384),
    ("llama-2-7b", 6_738_415_616), ("qwen2-7b", 7_615_616_512), ("opt-6.7b", 6_658_473_984),
    ("falcon-h1-0.5b", 521_411_104),
])  # fmt: skip
def test_parameters_of_the_real_shapes(shape: str, published: int) -> None:
    assert _parameters(SHAPES[shape]) == published


def test_a_draft_of_768x2_is_llama_68m() -> None:
    shape = draft_shape("tinyllama-1.1b", 768, 2)
    assert _parameters(shape) == 68_030_208
    assert (shape["intermediate_size"], shape["num_attention_heads"]) == (3072, 12)


def _parameters(shape) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).num_parameters()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.startswith("tiny-")])
def test_the_default_draft_reads_a_twentieth_of_the_bytes(shape: str) -> None:
    spec = synthetic.parse(f"synthetic:{shape}")
    read = [
        _parameters({**one, "tie_word_embeddings": True})
        for one in (SHAPES[shape], draft_shape(shape, spec.width, spec.layers))
    ]
    assert read[1] / read[0] == pytest.approx(0.05, rel=0.05)


def test_the_head_is_untied_and_everything_else_as_published() -> None:
    target, draft, _ = build("tiny-llama:draft=96x3")
    assert target.lm_head.weight.data_ptr() != target.model.embed_tokens.weight.data_ptr()
    assert target.num_parameters() == _parameters(SHAPES["tiny-llama"])
    assert (draft.config.hidden_size, len(draft.model.layers), draft.config.num_attention_heads) == (96, 3, 3)


@pytest.mark.parametrize(("name", "words"), [
    ("synthetic:gpt-5", "'synthetic:gpt-5' has no known shape; choose one of smollm-135m"),
    ("synthetic:tiny-opt:draft=64", "'draft=64' .* draft=WIDTHxLAYERS"),
    ("synthetic:tiny-opt:draft=65x2", "'draft=65x2' .* multiple of 32"),
    ("synthetic:tiny-opt:draft=64x0", "'draft=64x0' .* draft=WIDTHxLAYERS"),
    ("synthetic:tiny-opt:c=0.05", "'c=0.05' .* at least 0.7 and at most 1"),
    ("synthetic:smollm-135m:c=2", "'c=2' .* at most 1"),
    ("synthetic:tiny-opt:alpha=high", "'alpha=high' .* alpha=0 to 1"),
    ("synthetic:tiny-opt:alpha=1.5", "'alpha=1.5' .* alpha=0 to 1"),
    ("synthetic:tiny-opt:depth=3", "'depth=3' .* options are"),
])  # fmt: skip
def test_what_a_name_can_not_ask_for(name: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        load_pair(Settings(model_name=name))


@pytest.mark.parametrize("argument", [{"assistant_model": "draft"}, {"device_map": "auto"}])
def test_what_needs_stored_weights_is_refused(argument: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(argument))}: .* synthetic"):
        load_pair(Settings(model_name="synthetic:tiny-llama", **argument))


@pytest.mark.parametrize("argument", ["precision", "draft_precision"])
def test_weights_are_quantized_the_head_included(argument: str) -> None:
    settings = Settings(model_name="synthetic:tiny-llama", assisted_generation=True)
    wide, pair = load_pair(settings), load_pair(replace(settings, **{argument: "int8"}))
    assert pair.draft is not None and wide.draft is not None
    quantized, other = (pair.target, pair.draft) if argument == "precision" else (pair.draft, pair.target)
    assert isinstance(quantized.lm_head.weight, QTensor) and quantized_layers(other) == 0
    ids, twin = torch.arange(8)[None] + 3, wide.target if argument == "precision" else wide.draft
    assert weight_bytes(twin) / 4 < weight_bytes(quantized) < weight_bytes(twin) / 2
    difference = quantized(ids).logits - twin(ids).logits
    assert 0 < difference.norm() < 0.1 * twin(ids).logits.norm()


def test_dtypes_are_those_asked_for() -> None:
    name = "synthetic:tiny-llama"
    pair = load_pair(Settings(model_name=name, assisted_generation=True, draft_dtype="bfloat16"))
    assert [model.dtype for model in pair.models] == [torch.float32, torch.bfloat16]
    assert load_pair(Settings(model_name=name)).draft is None


def test_prompts_end_in_different_tokens_and_alike_at_every_length() -> None:
    pair = load_pair(Settings(model_name="synthetic:tiny-llama", assisted_generation=True))
    prompts = benchmark_prompts(pair, (40, 100), 8, 20)
    assert [len(prompt.token_ids) for prompt in prompts] == [40] * 8 + [100] * 8
    assert len({prompt.token_ids[-1] for prompt in prompts[:8]}) == 8
    assert [prompt.token_ids for prompt in prompts[:8]] == [prompt.token_ids[-40:] for prompt in prompts[8:]]


def test_a_trimmed_head_keeps_the_imposed_acceptance(tmp_path) -> None:
    """Its list holds what follows the prompts. Both drafts' steps are timed."""
    settings = Settings(
        model_name="synthetic:tiny-llama:alpha=0.7", assisted_generation=True, prompt_lengths=(40,),
        max_new_tokens=24, draft_vocabulary=512, output_dir=tmp_path,
    )  # fmt: skip
    run_task(settings)
    result = results.load(tmp_path / "benchmark-synthetic_tiny-llama_alpha_0.7-head_of_512-speculative-greedy.json.gz")
    drafts = [f"{settings.model_name} (draft 64x2)", f"{settings.model_name} (draft 64x2), head of 512 tokens"]
    ours = [method for method in result.methods if method.kind == "speculative"]
    assert [method.draft for method in ours] == drafts
    whole, trimmed = (
        [(call.outputs, call.kept, call.rounds) for call in result.calls if call.method == method.name]
        for method in ours
    )
    assert sorted(whole) == sorted(trimmed)
    assert {item.draft for item in result.passes if item.role == "draft"} == set(drafts)
    assert any("head of 512 tokens: it proposes only tokens that follow" in note for note in result.notes)
    with pytest.raises(BenchError, match="--draft_vocabulary: 64 tokens don't cover"):
        run_task(replace(settings, draft_vocabulary=64))
    with pytest.raises(BenchError, match="--draft_vocabulary: 4096 exceeds"):
        run_task(replace(settings, draft_vocabulary=4096))


def test_every_title_says_synthetic(tmp_path) -> None:
    settings = Settings(
        model_name="synthetic:tiny-llama:alpha=0.7", assisted_generation=True, prompt_lengths=(40,),
        max_new_tokens=8, output_dir=tmp_path,
    )  # fmt: skip
    run_task(settings)
    (path,) = tmp_path.glob("*.json.gz")
    (written,) = tmp_path.glob("*.md")
    text = written.read_text()
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert len(titles) > 4 and all(title.endswith("(synthetic pair, acceptance imposed)") for title in titles)
    assert "random weights in the shape of tiny-llama" in text and "α = 0.7" in text
    drawn: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "png", lambda figure: drawn.append(figure.get_suptitle()) or b"")
        results.document(results.load(path), "x", benchmark.render)
    assert drawn and all(title.endswith("(synthetic pair, acceptance imposed)") for title in drawn)
