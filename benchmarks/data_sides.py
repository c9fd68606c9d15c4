"""The sides of data.py that are processes of their own: one preparation of a JSONL file. Not to be started by hand."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    side, corpus, tokenizer, work = sys.argv[1:]
    prepare = {"muster": muster, "datasets.map": datasets_map}[side]
    print(json.dumps(prepare(corpus, tokenizer, Path(work))))


def muster(corpus: str, tokenizer: str, work: Path) -> dict[str, Any]:
    """What the first rank of a job does before its first step."""
    from muster.recipe.data_config import Source
    from muster.trainer.data import load_tokenizer
    from muster.trainer.data.prepare import prepared

    began = time.perf_counter()
    source = Source(source=corpus, format="jsonl")
    store = prepared(source, load_tokenizer(tokenizer), work, lambda line: None)
    return {"tokens": store.meta.tokens, "seconds": time.perf_counter() - began}


def datasets_map(corpus: str, tokenizer: str, work: Path) -> dict[str, Any]:
    """As the fine-tuning examples of transformers prepare text: batched, in as many processes as there are cores, and
    no column that nobody trains on. Its result is the Arrow file in its cache."""
    import pyarrow.compute
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    from muster.worker.cores import usable_cores

    disable_progress_bars()
    began = time.perf_counter()
    encode = AutoTokenizer.from_pretrained(tokenizer)
    end = encode.eos_token_id
    texts = load_dataset("json", data_files=corpus, split="train", cache_dir=str(work))

    def encoded(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = encode(rows["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        for each in ids:
            each.append(end)
        return {"input_ids": ids}

    loaded = time.perf_counter()
    made = texts.map(encoded, batched=True, num_proc=usable_cores(), remove_columns=texts.column_names)
    done = time.perf_counter()
    tokens = pyarrow.compute.sum(pyarrow.compute.list_value_length(made.data.column("input_ids"))).as_py()
    return {"tokens": tokens, "seconds": done - began, "map_seconds": done - loaded}


if __name__ == "__main__":
    main()
