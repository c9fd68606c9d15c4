"""The built-in byte-level tokenizer in the files of Hugging Face's `tokenizers` and `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from muster.recipe.architecture import ASSISTANT_MARK, END_OF_DOCUMENT, END_OF_TURN, USER_MARK

MARKS = {
    END_OF_DOCUMENT: "<|endoftext|>",
    END_OF_TURN: "<|end_of_turn|>",
    USER_MARK: "<|user|>",
    ASSISTANT_MARK: "<|assistant|>",
}
# The same ids as data/chat.py makes: a turn that opens with neither role's mark is the system's.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{%- if message['role'] == 'user' -%}}{MARKS[USER_MARK]}"
    f"{{%- elif message['role'] == 'assistant' -%}}{MARKS[ASSISTANT_MARK]}{{%- endif -%}}"
    f"{{{{- message['content'] -}}}}{MARKS[END_OF_TURN]}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{MARKS[ASSISTANT_MARK]}{{%- endif -%}}"
)


def files(positions: int) -> dict[str, str]:
    """The files that `AutoTokenizer` reads, by name. `positions` is the length limit of the model, in tokens."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKS[END_OF_DOCUMENT],
        "additional_special_tokens": [MARKS[mark] for mark in (END_OF_TURN, USER_MARK, ASSISTANT_MARK)],
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    # A model that has learnt to chat ends with a turn, any other with the document.
    ends = {"eos_token_id": [END_OF_DOCUMENT, END_OF_TURN]}
    return {
        "tokenizer.json": _tokenizer().to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps(ends, indent=2) + "\n",
    }


def _tokenizer() -> Tokenizer:
    """A byte is the id of its own value, and nothing is merged."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(MARKS[mark], special=True, normalized=False) for mark in sorted(MARKS)])
    return tokenizer


def _letters() -> Iterator[str]:
    """The printable letter that stands for each byte in a `ByteLevel` vocabulary: its own where it has one, and else
    the next from U+0100 on (GPT-2's encoder.py, `bytes_to_unicode`)."""
    spare = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte)
        else:
            yield chr(spare)
            spare += 1
