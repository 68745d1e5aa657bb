"""``python -m msa_vendored bench``: sparse attention for training beside its peers, in one run on one GPU.

Importing this package imports no torch. A peer that is not installed is listed as such; one that fails is shown with
its error, and the rest goes on.
"""
