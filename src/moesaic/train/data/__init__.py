"""Training data: text tokenised once, packed into samples, and shuffled by seed and sample index.

`TextData.open` returns the samples of a job. A batch is any list of global sample indices, so the
position in the data is one number, and layouts train on the same samples.
"""
