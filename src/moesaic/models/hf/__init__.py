"""Hugging Face model directories: config.json, tensor names, weights read and written.

`config`, `names` and `tokens` say what a directory means and import without torch. `reader` takes
weights out of one, `writer` makes one, `origin` and `convert` connect both with checkpoints; all of
them by way of one tensor at a time (`shards`).
"""
