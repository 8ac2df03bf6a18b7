"""Text to batches: tokenised once, packed, shuffled by a function of seed and sample index.

`TextData.open` gives the samples of a job; a batch is any list of global sample indices, so the
position in the data is one number and no rank's share of the work changes what is trained on.
"""
