"""Write examples/tiny-model: a small random model as Hugging Face writes them, for examples/sft-folder.yaml.

    .venv/bin/python examples/make_model.py [--to FOLDER]

A Qwen3 of 0.8 M weights that nobody has trained, with bytes as tokens and ChatML's marks; real ones are used the same
way, by the address of their folder.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

TARGET = Path(__file__).with_name("tiny-model")
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=TARGET, metavar="FOLDER")
    write(parser.parse_args().to)


def write(target: Path) -> None:
    torch.manual_seed(17)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKS[2], "pad_token": MARKS[0]}
    (target / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    (target / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
