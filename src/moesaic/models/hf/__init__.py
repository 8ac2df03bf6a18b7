"""Hugging Face model directories: config.json, tensor names, weights read and written.

`config` and `names` say what a directory means and import without torch; `reader`, `writer` and
`convert` move the weights, one tensor at a time.
"""
