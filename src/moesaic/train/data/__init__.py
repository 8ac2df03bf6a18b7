"""Training data: text tokenised once, packed into samples, and shuffled by seed and sample index.

`TextData.open` returns the samples of a job. A batch is any list of global sample indices, so the
position in the data is one number, and layouts train on the same samples.
"""

from moesaic.train.data.batch import Batch, PackedSamples, Samples, split_documents
from moesaic.train.data.text_data import TextData, check_text

__all__ = [
    "Batch",
    "PackedSamples",
    "Samples",
    "TextData",
    "check_text",
    "split_documents",
]
