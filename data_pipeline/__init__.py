"""Data: sources → tokenizer → shards → stream. The only importer of webdataset and sentencepiece.

`prepare.py` writes a dataset; `open_dataset`, `TrainStream` and `EvalStream` read it.
"""

from data_pipeline.dataset import Dataset, check_tokenizer, open_dataset
from data_pipeline.stream import EvalStream, TrainStream
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.windows import IGNORED_TARGET

__all__ = ["IGNORED_TARGET", "Dataset", "EvalStream", "Tokenizer", "TrainStream", "check_tokenizer", "open_dataset"]
