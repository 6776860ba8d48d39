"""A draft with another tokenizer: plain `generate`'s tokens whatever the tokenizers, and drafts that fit the text.

Distributions in sampling are those of `end_to_end/test_output_distributions.py`.
"""

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers import families, recurrent_families
from helpers.families import pair as family_pair
from helpers.identity import same_as_plain
from helpers.models import PAD, Passes, encoder_prompts, llama, noisy, prompts, t5
from helpers.pairwise import pairwise
from helpers.word_tokenizer import piece_tokenizer, word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_specdec import embedded, last_speculation
from hf_specdec.drafting import other_tokenizer
from hf_specdec.drafting.row_text import RowText
from hf_specdec.drafting.two_vocabularies import TwoVocabularies
from hf_specdec.models.cache_names import CACHE_NAME

pytestmark = pytest.mark.usefixtures("enabled")
SPECULATIVE = {"generation_strategy": "speculative", "num_assistant_tokens": 4}
GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": PAD}
LETTERS = "abcdefgh"
PAIRS = [a + b for a in LETTERS for b in LETTERS]
TEXT = (
    "Let us count: Igor has 65 kettles — no, 66! Ünder 3 Äpfeln, naïve café\n\n  indented 😀🎉 text, and 日本語 too.\n"
    "So in the end Igor has 62."
)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Writes words with a space before them, and what it does not know byte by byte."""
    words = [f"▁{word}" for word in TEXT.split() if word.isascii()]
    letters = sorted({*"▁", *TEXT.replace(" ", "")})
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [("<unk>", -9.0), ("<s>", -9.0), ("</s>", -9.0), *((piece, -9.0) for piece in bytes_of)]
    known = dict.fromkeys([*letters, *words, "▁Ig", "ind", "ented", "in", "de"])
    scores += [(piece, -2.0) for piece in known if piece not in "😀日"]
    core = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte-level": lambda: AutoTokenizer.from_pretrained(embedded.model_path("target")),
    "metaspace": metaspace_tokenizer,
    "bytes": ByT5Tokenizer,  # in Python, and silent about the first bytes of a character
}
BOTH_WAYS = [("byte-level", "metaspace"), ("metaspace", "byte-level"), ("bytes", "metaspace"), ("byte-level", "bytes")]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("ours", "theirs"), BOTH_WAYS)
def test_a_text_that_grows_is_encoded_as_a_whole_one(ours: str, theirs: str, seed: int) -> None:
    """However the target's tokens arrive, characters of several tokens and leading spaces included."""
    target, draft = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    tokens, row = target(TEXT, add_special_tokens=False)["input_ids"], RowText(TwoVocabularies(target, draft))
    numbers, start = random.Random(seed), 0
    while start < len(tokens):
        step, before = numbers.randrange(1, 6), list(row.tokens)
        same = row.extend(tokens[start : start + step])
        assert row.tokens[:same] == before[:same]
        assert "\ufffd" not in draft.decode(row.tokens), "a character is passed on whole"
        start += step
    assert draft.decode(row.tokens) == TEXT
    if ours != "bytes":  # whose words arrive in more parts than are looked back at
        assert row.tokens == draft(TEXT, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("ours", "theirs"), BOTH_WAYS)
def test_what_the_draft_writes_is_what_the_target_would_have_written(ours: str, theirs: str) -> None:
    """Whole words of the true continuation are the target's next tokens."""
    target, draft = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    tokens = target(TEXT, add_special_tokens=False)["input_ids"]
    whole = draft(TEXT, add_special_tokens=False)["input_ids"]
    words = [at for at, piece in enumerate(draft.convert_ids_to_tokens(whole)) if piece[0] in "Ġ▁ "]
    fitting = 0
    for end in range(1, len(tokens)):
        row = RowText(TwoVocabularies(target, draft))
        row.extend(tokens[:end])
        at = len(row.tokens)
        if row.tokens == whole[:at]:
            next_word = next((word for word in words if word > at), len(whole))
            drafted = row.translated(whole[at:next_word])
            assert drafted == tokens[end:][: len(drafted)]
            fitting += len(drafted)
    assert fitting > len(tokens)


def test_special_tokens_keep_their_role_or_are_left_out() -> None:
    target, draft = TOKENIZERS["byte-level"](), TOKENIZERS["metaspace"]()
    both = TwoVocabularies(target, draft, [target.eos_token_id], [draft.eos_token_id])
    row = RowText(both)
    user = target.convert_tokens_to_ids("<|user|>")
    row.extend([target.bos_token_id, user, *target("So", add_special_tokens=False)["input_ids"], target.eos_token_id])
    assert draft.convert_ids_to_tokens(row.tokens) == ["<s>", "▁So", "</s>"]
    ended = [*draft("in", add_special_tokens=False)["input_ids"], draft.eos_token_id, 70]
    assert row.translated(ended) == [*target(" in", add_special_tokens=False)["input_ids"], target.eos_token_id]


def strangers(kind: str) -> dict[str, Any]:
    """A target, a draft near it, and their tokenizers: the same words under other ids, or other pieces."""
    target = llama()
    if kind == "words":
        draft = llama(seed=7, vocab_size=50)
        ours, theirs = word_tokenizer(), word_tokenizer(50, order=-1)
        words = theirs.get_vocab()
        draft.load_state_dict({**noisy(target).state_dict(), **_rows_of(target, ours.get_vocab(), words)})
        return {"target": target, "draft": draft, "tokenizers": {"tokenizer": ours, "assistant_tokenizer": theirs}}
    longer = PAIRS[::2] if kind == "pieces" else [a + b + c for a in "abcd" for b in "efg" for c in "abcd"]
    theirs = piece_tokenizer([*LETTERS, *longer], "[P]", "[E]")
    tokenizers = {"tokenizer": piece_tokenizer([*LETTERS, *PAIRS][:62]), "assistant_tokenizer": theirs}
    return {"target": target, "draft": llama(seed=7, vocab_size=len(theirs)), "tokenizers": tokenizers}


def _rows_of(target: PreTrainedModel, ours: dict[str, int], theirs: dict[str, int]) -> dict[str, Tensor]:
    """The target's embeddings and head, reordered."""
    tables = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = torch.zeros(len(theirs), target.config.hidden_size, dtype=torch.float64)
        for word, token in theirs.items():
            table[token] = target.state_dict()[name][ours[word]]
        tables[name] = table
    return tables


STRATEGIES: dict[str, dict[str, Any]] = {
    "speculative": {},
    "bild": {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.1},
    "entropy": {"entropy_threshold": 0.3},
    "auto": {"num_assistant_tokens": "auto"},
    "hybrid": {"drafter": "hybrid"},
    "long": {"num_assistant_tokens": 30},
    "repetition": {"repetition_penalty": 1.3},
    "without a cache": {"use_cache": False},
}


@pytest.mark.parametrize("kind", ["words", "pieces", "longer pieces"])
def test_greedy_tokens_are_those_of_plain_generate(kind: str) -> None:
    """Rows are padded on the left and advance unevenly. Families are those of `test_identity.py`."""
    models, plain = strangers(kind), {}
    for strategy, rows in pairwise(tuple(STRATEGIES), (1, 4)):
        own = STRATEGIES[strategy]
        call = {**GREEDY, **{name: own[name] for name in own if name in ("repetition_penalty", "use_cache")}}
        settings = {"num_assistant_tokens": 4, **own, **models["tokenizers"]}
        case = rows, call.get("repetition_penalty")
        out = same_as_plain(models["target"], models["draft"], prompts(rows), call, plain.get(case), **settings)
        stats, plain[case] = out.speculation, out.sequences
        assert stats.drafted > 0
        if kind == "words" and strategy not in ("repetition", "auto"):
            assert stats.accepted > 0


def test_token_types_are_not_handed_on() -> None:
    """They are about the target's tokens; a draft that can't take them would have to fail."""
    target, _ = family_pair("gpt2")
    inputs, size = families.prompts(3), families.VOCABULARY
    inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    tokenizers = {"tokenizer": word_tokenizer(size), "assistant_tokenizer": word_tokenizer(size, -1)}
    for family in ("llama", "gpt2"):
        assert same_as_plain(target, family_pair(family)[1], inputs, GREEDY, **tokenizers).speculation.drafted


@pytest.mark.parametrize("rows", [1, 3])
def test_an_encoder_reads_the_source_in_the_draft_s_vocabulary(rows: int) -> None:
    """A draft that differs in nothing but its ids is accepted wholly; read in the target's ids, it is not."""
    target = t5()
    draft, ours, theirs = deepcopy(target), word_tokenizer(), word_tokenizer(order=-1)
    order = torch.tensor([ours.get_vocab()[word] for word, _ in sorted(theirs.get_vocab().items(), key=lambda i: i[1])])
    with torch.no_grad():
        for table in (draft.shared, draft.lm_head):
            table.weight.copy_(table.weight[order])
    call = {**encoder_prompts(rows), **GREEDY}
    expected, accepted = target.generate(**call), {}
    for name, tokenizers in {"both": {"tokenizer": ours, "assistant_tokenizer": theirs}, "neither": {}}.items():
        output = target.generate(**call, **SPECULATIVE, **tokenizers, assistant_model=draft)
        assert torch.equal(output, expected)
        accepted[name] = last_speculation(target).acceptance_rate
    assert accepted["both"] == 1.0 > accepted["neither"]


def chained(tokenizer: PreTrainedTokenizerFast, text: str, sharp: float = 40.0) -> PreTrainedModel:
    """A model that writes `text` over and over: after a piece comes the one that begins where that ends."""
    size = len(tokenizer)
    model = llama(vocab_size=size, hidden_size=64, num_hidden_layers=1)
    pieces = {token: piece for piece, token in tokenizer.get_vocab().items()}
    longest = {
        text.index(piece): token for token, piece in sorted(pieces.items(), key=lambda i: len(i[1])) if piece in text
    }
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, 64))
        model.lm_head.weight.zero_()
        for token, piece in pieces.items():
            if piece in text:
                after = (text.index(piece) + len(piece)) % len(text)
                model.lm_head.weight[longest[after], token] = sharp / 8
    return model


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_go_through_text_where_pieces_differ(do_sample: bool) -> None:
    """`abc` and `def` are drafted; `ab`, `cd` and `ef` are accepted, which the draft does not have."""
    ours, theirs = piece_tokenizer(["ab", "cd", "ef"]), piece_tokenizer([*"abcdef", "abc", "def"], "[P]", "[E]")
    target, draft = chained(ours, "abcdef"), chained(theirs, "abcdef")
    ids = torch.tensor([[2, 3, 4], [4, 2, 3], [3, 4, 2]])  # texts that end within the draft's pieces, too
    call = {"input_ids": ids, **GREEDY, "do_sample": do_sample}
    settings = {**SPECULATIVE, "tokenizer": ours, "assistant_tokenizer": theirs, "assistant_model": draft}
    output = target.generate(**call, **settings)
    assert torch.equal(output, target.generate(**call)), "even drawn tokens are certain"
    assert last_speculation(target).acceptance_rate == 1.0
    settings["assistant_tokenizer"] = piece_tokenizer([*"abcdef", "abc", "fed"], "[P]", "[E]")
    assert torch.equal(target.generate(**call, **settings), output)
    assert last_speculation(target).acceptance_rate < 0.8, "control: pieces that the draft did not mean"


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_a_text_longer_than_the_draft_s_context_gets_no_drafts(kind: str) -> None:
    """From the round on in which it is; the rounds before have drafts."""
    models = strangers(kind)
    target, draft = models["target"], models["draft"]
    draft.config.max_position_embeddings = 16
    for rows, length in ((1, 9), (2, 9), (2, 40)):
        with Passes(draft) as passes:
            out = same_as_plain(target, draft, prompts(rows, length), GREEDY, **models["tokenizers"])
        assert (passes.count > 0) == (length == 9) and out.speculation.rounds[-1].draft_steps == 0


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_a_prompt_of_special_tokens_only(kind: str) -> None:
    """The draft has nothing to go by until the target has said something; a row with a text has drafts at once."""
    models = strangers(kind)
    for ids in ([[PAD]], [[PAD, PAD]], [[PAD, PAD, PAD], [5, 6, 7]]):
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones_like(torch.tensor(ids))}
        out = same_as_plain(models["target"], models["draft"], inputs, GREEDY, **models["tokenizers"])
        first = out.speculation.rounds[0]
        assert (first.drafted[0] == 0) == (kind != "words"), "the words have a token for padding in common"
        assert len(ids) == 1 or first.drafted[1] > 0


@pytest.mark.parametrize(
    ("family", "rows", "kind"), pairwise(("OlmoHybrid", "Lfm2", "Mamba2"), (1, 3), ("words", "pieces", "bytes"))
)
def test_recurrent_drafts(family: str, rows: int, kind: str) -> None:
    """Their texts only grow, and are read anew where the target's have not: within a character."""
    target, size = llama(), 64
    tokenizers = {
        "words": (word_tokenizer(size), word_tokenizer(size, -1)),
        "pieces": (piece_tokenizer([*LETTERS, *PAIRS][:62]), piece_tokenizer([*LETTERS, *PAIRS[::-1]][:62])),
        "bytes": (byte_tokenizer(), piece_tokenizer([*LETTERS, *PAIRS[::-1]][:62])),
    }[kind]
    draft = recurrent_families.model(family, vocab_size=size)
    settings = {"tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}
    assert same_as_plain(target, draft, prompts(rows), GREEDY, **settings).speculation.drafted > 0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens, half of which are the first bytes of characters."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [sign for sign in signs if sign in LETTERS] + [sign for sign in signs if ord(sign) > 190][:54]
    core = Tokenizer(models.BPE({"<pad>": 0, "</s>": 1, **{sign: at for at, sign in enumerate(kept, 2)}}, []))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<pad>")


@pytest.mark.parametrize("family", ["llama", "Lfm2"])
def test_texts_grow_beyond_what_was_reserved_for_them(family: str, monkeypatch) -> None:
    """Also where rows read on into the columns after their text."""
    monkeypatch.setattr(other_tokenizer, "GROWTH", 1)
    models = strangers("pieces")
    draft = models["draft"]
    if family != "llama":
        draft = recurrent_families.model(family, vocab_size=draft.config.vocab_size)
    call = {**GREEDY, "max_new_tokens": 40}
    out = same_as_plain(models["target"], draft, prompts(3), call, **models["tokenizers"])
    assert sum(out.speculation.rounds[-2].drafted) > 0


def test_the_draft_stays_as_it_was_and_its_own_generate_is_not_called() -> None:
    """Head, embeddings and `generation_config` stay the very same."""
    models = strangers("words")
    target, draft = models["target"], models["draft"]
    draft.generation_config.repetition_penalty = 1.1

    def parts() -> tuple[Any, ...]:
        tensors = {name: tensor.tolist() for name, tensor in draft.state_dict().items()}
        heads = draft.get_output_embeddings(), draft.get_input_embeddings()
        return tensors, draft.generation_config.to_dict(), heads

    before, called, generate = parts(), [], GenerationMixin.generate
    with pytest.MonkeyPatch.context() as patch:  # ends before the plug-in is disabled, which looks for its wrapper
        patch.setattr(GenerationMixin, "generate", lambda self, **k: (called.append(self), generate(self, **k))[1])
        target.generate(**prompts(1), **GREEDY, assistant_model=draft, **SPECULATIVE, **models["tokenizers"])
    assert called == [target] and parts() == before and last_speculation(target).accepted > 0


@pytest.mark.parametrize("kind", ["words", "pieces"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_constraint_is_not_asked_about_a_draft_that_it_forbids(do_sample: bool, kind: str) -> None:
    models, inputs = strangers(kind), prompts(2)
    length = inputs["input_ids"].shape[1]

    def allowed(row: int, text: Tensor) -> list[int]:
        assert all(token % 2 == 0 for token in text[length:].tolist()), "asked about a text that it forbids"
        return list(range(2, 64, 2))

    call = {**inputs, **GREEDY, "do_sample": do_sample, "prefix_allowed_tokens_fn": allowed}
    settings = {**SPECULATIVE, **models["tokenizers"], "assistant_model": models["draft"]}
    output = models["target"].generate(**call, **settings)
    assert all(token % 2 == 0 for token in output[:, length:].flatten().tolist())
    if not do_sample:
        assert torch.equal(output, models["target"].generate(**call))


def test_a_conversation_over_a_cache() -> None:
    models = strangers("words")
    target, settings = models["target"], {**SPECULATIVE, **models["tokenizers"], "assistant_model": models["draft"]}
    texts = []
    for more in ({}, settings):
        text, cache = prompts(1)["input_ids"], DynamicCache(config=target.config)
        for turn in range(2):
            text = target.generate(text, **{CACHE_NAME: cache}, **GREEDY, **more)
            text = torch.cat([text, torch.tensor([[7, 8, 9 + turn]])], dim=1)
        texts.append(text)
    assert torch.equal(*texts)


def test_an_end_of_text_is_drafted_by_its_role() -> None:
    """`</s>` and `[E]` have nothing in common but that they end a text."""
    ours, theirs = piece_tokenizer(["ab", "cd"]), piece_tokenizer([*"abcd", "abc"], "[P]", "[E]")
    target, draft = chained(ours, "abcd"), chained(theirs, "abcd")
    with torch.no_grad():
        target.lm_head.weight[1, 3] = draft.lm_head.weight[1, 5] = 20.0  # a text ends after `cd`, and after `d`
    call = {"input_ids": torch.tensor([[2, 3, 2]]), "do_sample": False, "max_new_tokens": 9, "pad_token_id": PAD}
    settings = {**SPECULATIVE, "tokenizer": ours, "assistant_tokenizer": theirs, "assistant_model": draft}
    output = target.generate(**call, **settings, eos_token_id=1)
    assert output.tolist() == [[2, 3, 2, 3, 1]] and torch.equal(output, target.generate(**call, eos_token_id=1))
    rounds = last_speculation(target).rounds
    assert len(rounds) == 1 and rounds[0].accepted == (2,)
