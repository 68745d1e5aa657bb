"""Build-time tools: pin, verified tree, patches, built tree. Standard library only; nothing imports it at run time.

Importing this package imports none of its modules.
"""
