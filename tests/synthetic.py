"""A small dataset of made-up text for tests that train: written with the real tokenizer and shard writer."""

import hashlib
import random
from pathlib import Path

from data_pipeline.index import Index
from data_pipeline.shards import SplitWriter, TokenDocument
from data_pipeline.tokenizer import train_tokenizer


def sentences(seed: int, count: int) -> list[str]:
    """Text with some structure to learn: words of a small vocabulary in a few word orders."""
    rng = random.Random(seed)
    nouns, verbs = ["cat", "dog", "tree", "river", "stone", "cloud"], ["sees", "finds", "likes", "hears"]
    return [
        " ".join(f"the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}." for _ in range(rng.randint(3, 12)))
        for _ in range(count)
    ]


def write_dataset(folder: Path, *, vocab_size: int = 320, documents: int = 1200, streams: int = 8) -> Path:
    """Write a dataset with a training and a validation split, and return its folder."""
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(sentences(0, 500), vocab_size=vocab_size)
    model = folder / "tokenizer.model"
    model.write_bytes(tokenizer.model)
    splits = {}
    for number, split in enumerate(("train", "validation")):
        writer = SplitWriter(folder, split, streams=streams, shard_tokens=4096, dtype="uint16", eos_id=tokenizer.eos_id)
        for index, text in enumerate(sentences(number + 1, documents if split == "train" else documents // 10)):
            writer.write(TokenDocument(f"{split}-{index}", tokenizer.encode(text), len(text.split()), len(text.encode())))
        splits[split], used = writer.finish()
        assert split != "train" or used == streams, "too little text for so many streams"
    digest = hashlib.sha256(tokenizer.model).hexdigest()
    index = Index(splits, model.name, digest, tokenizer.vocab_size, tokenizer.eos_id, "uint16", streams)
    index.write(folder)
    return folder
