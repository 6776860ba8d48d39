"""What has to hold on a GPU; `make gpu-check` runs it on one, the ordinary suite on the CPU.

On a CPU `captures` says yes, so that what a GPU captures as CUDA graphs is just called.
"""

import gc
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from helpers.eagle_drafts import draft_for
from helpers.families import pair, prompts
from helpers.models import noisy
from helpers.own_drafters import llama_with_mtp, needs_own_drafters
from helpers.patches import noted, returned
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.bench.models import synthetic
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.engine_store import STORE
from hf_specdec.prepared.prepared_passes import PreparedPasses
from hf_specdec.prepared.prepared_rounds import PreparedRounds

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = {"max_new_tokens": 24, "do_sample": False}
ENGINES = {"eager": {}, "static": {"cache_implementation": "static"}, "compiled": {"compile": True}}
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
# Compiling takes minutes over all cases: on a CPU other tests do it.
COMPILED = pytest.param("compiled", marks=needs_gpu)
EVERY_ENGINE = ["eager", "static", COMPILED]


@pytest.fixture(autouse=True)
def prepared(fast_rounds: list[PreparedRounds]) -> Iterator[list[PreparedRounds]]:
    """Lists the prepared rounds; whatever falls back from them with a warning fails."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoding goes on without")
        yield fast_rounds
    hf_specdec.release()


def _pair(dtype: torch.dtype = torch.float64, family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    target, draft = pair(family, dtype=dtype)
    return target.to(DEVICE), draft.to(DEVICE)


def _prompts(rows: int, length: int = 11) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in prompts(rows, length).items()}


def _plain(target: PreTrainedModel, inputs: dict[str, Tensor], **settings: object) -> Tensor:
    return target.generate(**inputs, **{**GREEDY, **settings}, generation_strategy=None)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt-neox"])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tokens_are_those_of_plain_generate(
    rows: int, family: str, dtype: torch.dtype, engine: str, prepared: list[PreparedRounds]
) -> None:
    target, draft = _pair(dtype, family)
    inputs = _prompts(rows)
    plain = _plain(target, inputs)
    for settings in ({"num_assistant_tokens": 4}, {"num_assistant_tokens": "auto"}, {"drafter": "none"}):
        found = target.generate(**inputs, **GREEDY, assistant_model=draft, **settings, **ENGINES[engine])
        assert torch.equal(found, plain), settings
    assert bool(prepared) == (engine != "eager")


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("kind", [pytest.param("mtp", marks=needs_own_drafters), "eagle3", "penalty"])
@pytest.mark.parametrize("rows", [1, 3])
def test_general_rounds_run_prepared_passes(rows: int, kind: str, engine: str, tmp_path, monkeypatch) -> None:
    """Their tokens are plain ones, also at lengths that change from round to round and in a second call."""
    target, settings = _pair()[0], {}
    if kind == "mtp":
        target, settings = llama_with_mtp(monkeypatch, DEVICE), {"use_mtp": True}
    elif kind == "eagle3":
        settings = {"assistant_model": draft_for(tmp_path, target).to(DEVICE)}
    else:
        settings = {"assistant_model": noisy(target)}
    passes = returned(monkeypatch, PreparedPasses, "run")
    inputs = _prompts(rows)
    inputs["input_ids"] %= target.config.vocab_size
    both = {"eos_token_id": None, "repetition_penalty": 1.3 if kind == "penalty" else 1.0}
    plain = _plain(target, inputs, **both)
    for length in (3, "auto"):
        for _ in range(2):
            call = {**GREEDY, **both, **settings, **ENGINES[engine], "num_assistant_tokens": length}
            assert torch.equal(target.generate(**inputs, **call), plain)
    assert any(one is not None for one in passes) == (engine != "eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("end", range(40, 48) if torch.cuda.is_available() else [41])
def test_texts_of_every_length_modulo_8(end: int, dtype: torch.dtype) -> None:
    """Attention on CUDA loads masks 8 numbers at a time."""
    target, draft = _pair(dtype)
    target.set_attn_implementation("sdpa")
    for rows in (1, 2):
        inputs = _prompts(rows)
        out = target.generate(**inputs, max_length=end, do_sample=False, eos_token_id=None, assistant_model=draft)
        assert out.shape == (rows, end)
        if dtype == torch.float32:
            plain = _plain(target, inputs, max_new_tokens=None, max_length=end, eos_token_id=None)
            assert torch.equal(out, plain)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_sampled_tokens_are_distributed_as_the_target_s_own(engine: str) -> None:
    """Frequencies of the second token: total variation of 4,000 draws from 48 tokens stays below 0.1."""
    target, draft = _pair(torch.float32)
    ids = _prompts(1)["input_ids"].expand(1000, -1)
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "eos_token_id": None, "temperature": 0.7}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(0)
    counts = []
    for own in ({"generation_strategy": None}, {"assistant_model": draft, **ENGINES[engine]}):
        draws = torch.cat([target.generate(**inputs, **sampling, **own)[:, -1] for _ in range(4)])
        counts.append(torch.bincount(draws, minlength=target.config.vocab_size) / len(draws))
    assert float((counts[0] - counts[1]).abs().sum() / 2) < 0.1
    shuffled = counts[1].roll(1)
    assert float((counts[0] - shuffled).abs().sum() / 2) > 0.1, "the bound tells distributions apart"


def test_a_draft_on_the_cpu() -> None:
    target, draft = _pair()
    inputs, draft = _prompts(1), draft.to("cpu")
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), _plain(target, inputs))


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_several_threads_share_a_model(engine: str) -> None:
    target, draft = _pair()
    inputs = {rows: _prompts(rows) for rows in (1, 2, 3)}
    plain = {rows: _plain(target, given) for rows, given in inputs.items()}
    outputs: dict[int, Tensor] = {}

    def decode(rows: int) -> None:
        for _ in range(3):
            outputs[rows] = target.generate(**inputs[rows], **GREEDY, assistant_model=draft, **ENGINES[engine])

    threads = [threading.Thread(target=decode, args=(rows,)) for rows in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs.keys() == plain.keys()
    assert all(torch.equal(outputs[rows], plain[rows]) for rows in plain)


def test_a_capture_that_fails_is_told_and_decoding_goes_on(monkeypatch) -> None:
    target, draft = _pair()
    inputs = _prompts(2)

    def fails(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no graph today")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="no graph today"):
        warnings.simplefilter("default")
        patch.setattr(cuda_graphs, "prepare", fails)
        out = target.generate(**inputs, **GREEDY, assistant_model=draft, cache_implementation="static")
    assert torch.equal(out, _plain(target, inputs))


@needs_gpu
@pytest.mark.parametrize("engine", ["static", COMPILED])
def test_torch_s_own_graphs_leave_ours_alone(engine: str) -> None:
    """Compiling that captures graphs, as `generate` does with a static cache, frees the process's work space."""
    target, draft = _pair(torch.float32)
    inputs, options = _prompts(1), {**GREEDY, "assistant_model": draft, **ENGINES[engine]}
    plain = _plain(target, inputs)
    assert torch.equal(target.generate(**inputs, **options), plain)
    product = torch.compile(lambda a, b: (a @ b).relu() @ b, mode="reduce-overhead")
    given = torch.randn(64, 64, device=DEVICE)
    for _ in range(3):
        product(given, given)
    torch.cuda.empty_cache()
    assert torch.equal(target.generate(**inputs, **options), plain)


@pytest.mark.parametrize("engine", ["static", COMPILED])
def test_memory_is_given_back(engine: str, prepared: list[PreparedRounds]) -> None:
    """The first call also takes the work space of matrix products, which torch keeps for the process."""
    target, draft = _pair(torch.float32)
    inputs = _prompts(2)
    given_back = []
    for _ in range(2):
        target.generate(**inputs, **GREEDY, assistant_model=draft, **ENGINES[engine])
        assert STORE.of_all()
        prepared.clear()  # they hold the engine
        held = _allocated()
        hf_specdec.release(target)
        assert not STORE.of_all()
        given_back.append(_allocated())
    assert given_back[1] <= given_back[0]
    if DEVICE.type == "cuda":
        assert held > given_back[1], "an engine takes memory"


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", ["MANY", "SOME", "FEW", None])
@pytest.mark.parametrize("rows", [(40,), (64, 48), (96, 33, 7)])
@pytest.mark.parametrize("width", [64, 96, 512])
def test_products_over_few_tokens(rows: tuple[int, ...], width: int, tiles: str | None, dtype: torch.dtype) -> None:
    """Up to rounding those in float64; a layer without a bias beside others that have one, too."""
    from hf_specdec.prepared import gpu_products

    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)

    chosen = None if tiles is None else getattr(gpu_products, tiles)
    for tokens in (1, 5, 16):
        states, weights = draw(1, tokens, width), [draw(count, width) / width**0.5 for count in rows]
        for biases in ([None] * len(rows), [draw(rows[0]), *[None] * (len(rows) - 1)]):
            found = gpu_products.linears(states, weights, biases, chosen)
            for output, weight, bias in zip(found, weights, biases, strict=True):
                wanted = linear(states.double(), weight.double(), None if bias is None else bias.double())
                assert float((output.double() - wanted).norm() / wanted.norm()) < 4 * torch.finfo(dtype).eps


@needs_gpu
def test_half_precision_calls_the_kernel(monkeypatch) -> None:
    """A synthetic pair leaves no near ties, so that its tokens are the same however sums are rounded."""
    from hf_specdec.prepared import gpu_products

    layers = noted(monkeypatch, gpu_products, "linears", lambda states, weights, *_: len(weights))
    for shape in ("tiny-llama", "tiny-qwen2", "tiny-opt"):
        spec = synthetic.parse(f"synthetic:{shape}")
        target, draft, _ = synthetic.build(spec, DEVICE, torch.bfloat16, DEVICE, torch.bfloat16)
        ids = torch.arange(10, 30, device=DEVICE).unsqueeze(0)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = target.generate(**inputs, **GREEDY, assistant_model=draft, compile=True)
        assert torch.equal(found, _plain(target, inputs))
    assert set(layers) == {1, 2, 3}
