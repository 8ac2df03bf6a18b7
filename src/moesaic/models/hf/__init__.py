"""Hugging Face model directories: config.json, tensor names, and weights in both directions.

`config`, `names` and `special_tokens` interpret a directory without importing torch. `reader` reads
weights and `writer` writes a directory. `origin` and `convert` connect both with checkpoints.
`shards` keeps one tensor in memory at a time.
"""
