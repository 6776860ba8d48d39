"""Linear layers in oneDNN: the same products, used only where they are faster, and the same text."""

import pytest
import torch
from helpers.models import EOS, PAD, llama, noisy
from helpers.patches import noted
from torch.nn import functional

import hf_specdec
from hf_specdec.models import onednn_linears, processor, recorded_passes
from hf_specdec.models.onednn_linears import MKL_ELSEWHERE, MKL_ON_INTEL, OTHERS, OneDnnLinears, Range

FASTER_RANGE = onednn_linears.faster_range.__wrapped__
WEIGHT = (1024, 256)  # the smallest that is served for single tokens


@pytest.fixture(autouse=True)
def faster_range(monkeypatch) -> None:
    """The widest range, on whatever processor the tests run."""
    monkeypatch.setattr(onednn_linears, "faster_range", lambda: MKL_ELSEWHERE)


@pytest.fixture
def served(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that oneDNN got."""
    return noted(monkeypatch, onednn_linears, "_linear", lambda tokens, *_: tuple(tokens.shape))


@pytest.mark.parametrize("shape", [(1, 1, 256), (1, 5, 256), (4, 16, 256), (7, 256), (2, 300, 256)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_those_of_torch(shape: tuple[int, ...], biased: bool, served: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    tokens, weight, bias = torch.randn(shape), torch.randn(WEIGHT), torch.randn(WEIGHT[0]) if biased else None
    with torch.inference_mode(), OneDnnLinears():
        found = functional.linear(tokens, weight, bias)
    assert served == [shape]
    exact = functional.linear(tokens.double(), weight.double(), None if bias is None else bias.double())
    assert (found - exact).abs().max() < 1e-4 < (functional.linear(tokens, weight.roll(1, 0)) - exact).abs().max()


def test_only_large_products_of_float32_are_served(served: list[tuple[int, ...]]) -> None:
    tokens, weight = torch.randn(1, 2, 256), torch.nn.Parameter(torch.randn(WEIGHT))
    with torch.inference_mode(), OneDnnLinears():
        functional.linear(tokens, weight[:-1])
        functional.linear(tokens.double(), weight.double())
        functional.linear(tokens.bfloat16(), weight.bfloat16())
        functional.linear(tokens[:, :0], weight)
        functional.linear(tokens, weight, torch.randn(2 * len(weight))[::2])  # it would read neighbouring numbers
        torch.backends.mkldnn.enabled, before = False, torch.backends.mkldnn.enabled
        try:
            functional.linear(tokens, weight)
        finally:
            torch.backends.mkldnn.enabled = before
        assert served == []
        functional.linear(tokens, weight)
    assert served == [(1, 2, 256)]


@pytest.mark.parametrize(
    ("range_", "weight", "rows", "taken"),
    [
        (MKL_ELSEWHERE, (128, 128), (1, 255, 256, 2000), [256, 2000]),
        (OTHERS, WEIGHT, (1, 64, 65), [1, 64]),
        (MKL_ON_INTEL, (2048, 1024), (1, 3, 4, 15, 16), [4, 15]),
        (MKL_ON_INTEL, (2047, 1024), (1, 3, 4, 15, 16), []),
    ],
    ids=["a small layer for many rows", "few rows without MKL", "several tokens on Intel's", "no small layer there"],
)
def test_layers_are_served_where_they_are_faster(
    range_: Range, weight: tuple[int, int], rows: tuple[int, ...], taken: list[int], served, monkeypatch
) -> None:
    monkeypatch.setattr(onednn_linears, "faster_range", lambda: range_)
    with torch.inference_mode(), OneDnnLinears():
        for count in rows:
            functional.linear(torch.randn(count, weight[1]), torch.randn(weight))
    assert served == [(count, weight[1]) for count in taken]


@pytest.mark.parametrize(("entry", "mkl", "expected"), [
    ("vendor_id : GenuineIntel", True, MKL_ON_INTEL),
    ("vendor_id : GenuineIntel", False, OTHERS),
    ("vendor_id : AuthenticAMD", True, MKL_ELSEWHERE),
    ("vendor_id : AuthenticAMD", False, OTHERS),
])  # fmt: skip
@pytest.mark.parametrize("listed", [True, False])
def test_the_range_is_the_processor_s(entry: str, mkl: bool, expected: Range, listed: bool, monkeypatch) -> None:
    """Named in /proc/cpuinfo or, where there is no such file, by Python."""

    def read_text(path: object) -> str:
        if listed:
            return entry
        raise FileNotFoundError

    monkeypatch.setattr(processor.Path, "read_text", read_text)
    monkeypatch.setattr(processor.platform, "processor", lambda: entry)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert FASTER_RANGE() == expected


def test_models_whose_weights_are_not_served_get_no_mode() -> None:
    large = llama(vocab_size=8192)
    assert onednn_linears.onednn_linears(large.float()) is OneDnnLinears
    assert onednn_linears.onednn_linears(large.double()) is not OneDnnLinears
    assert onednn_linears.onednn_linears(llama().float()) is not OneDnnLinears


@pytest.mark.parametrize("rows", [1, 3])
def test_text_is_plain_generate_s_with_and_without_it(rows: int, served: list[tuple[int, ...]], monkeypatch) -> None:
    """In float32; eager and recorded passes of one runner, and of a torch that lacks the operation."""
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 2)
    monkeypatch.setattr(recorded_passes, "PYTHON_SHARE", 1e-6)  # passes are recorded however slow the machine is
    target = llama(vocab_size=8192).float()
    draft = noisy(target)
    prompt = torch.randint(EOS + 1, 8192, (rows, 6), generator=torch.Generator().manual_seed(3))
    given = {"input_ids": prompt, "max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD}
    plain = target.generate(**given)
    assert served == []
    asked = {"assistant_model": draft, "generation_strategy": "speculative"}
    with hf_specdec.enable(target):
        assert torch.equal(target.generate(**given, **asked), plain) and len(served) > 0
        assert recorded_passes.trials_of(target) > 0
        served.clear()
        assert torch.equal(target.generate(**given, **asked), plain)
    monkeypatch.setattr(onednn_linears, "linear_pointwise", lambda: None)
    other = llama(vocab_size=8192).float()
    served.clear()
    with hf_specdec.enable(other):
        assert torch.equal(other.generate(**given, **asked | {"assistant_model": noisy(other)}), plain)
    assert served == []


def test_no_mode_is_left_behind_where_a_pass_fails() -> None:
    target = llama(vocab_size=8192).float()
    prompt = torch.full((1, 4), EOS + 1)

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise RuntimeError("out of memory")

    target.model.layers[1].register_forward_pre_hook(fail)
    with hf_specdec.enable(target), pytest.raises(RuntimeError, match="out of memory"):
        target.generate(prompt, generation_strategy="speculative", drafter="none", max_new_tokens=4)
    assert torch._C._len_torch_function_stack() == 0
