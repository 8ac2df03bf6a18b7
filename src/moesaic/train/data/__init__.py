"""Text to batches: tokenised once, packed, shuffled by a function of seed and sample index.

`TextData.open` gives the samples of a job; a batch is any list of global sample indices, so the
position in the data is one number and no rank's share of the work changes what is trained on.
"""

from moesaic.train.data.batch import Batch, PackedSamples, Samples, documents_of
from moesaic.train.data.textdata import TextData, check_text

__all__ = [
    "Batch",
    "PackedSamples",
    "Samples",
    "TextData",
    "check_text",
    "documents_of",
]
