"""Small tokenizers of every kind that models use, made on the spot."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "the cat sat on the mat",
    "hello world, hello there",
    "der Bär grüßt 你好 🙂 naïve",
    "a b c d 1 2 3\n\n",
]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte is a token, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("plain added", special=False), AddedToken("日本", special=False)])
    return tokenizer


def with_bos() -> Tokenizer:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    return tokenizer


def _llama_vocab() -> dict[str, int]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdehlortwy你", "▁the", "▁hello", "lo", "▁a", "th", "▁c"]
    return {piece: at for at, piece in enumerate(pieces)}


def llama() -> Tokenizer:
    """As Llama 2 and Mistral: spaces are ▁, bytes for what is missing, and the first space is dropped."""
    tokenizer = Tokenizer(models.BPE(_llama_vocab(), [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def gemma() -> Tokenizer:
    """As llama, but the first space stays."""
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and XLM-R: a unigram model, and no bytes."""
    pieces = [("<unk>", 0.0), *((piece, -float(at)) for at, piece in enumerate(_llama_vocab()) if at > 258)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return tokenizer


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "the", "cat", "##s", "##ing", "a", ",", ".", "'", "##'", "do", "n't"]
    tokenizer = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[UNK]", special=True)])
    return tokenizer
