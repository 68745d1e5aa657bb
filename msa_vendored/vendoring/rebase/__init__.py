"""Move the patches from one pin to another: ``python -m msa_vendored.vendoring rebase``.

The patches become commits of a scratch repository outside the checkout, git rebases them, and what comes out is
exported, applied again strictly from zero and only then written into the checkout, all of it or nothing.

``target`` says what to move to; ``scratch`` is the repository; ``pick`` moves one patch and gives its verdict, with
``syntax`` and ``anchors``; ``workflow`` goes through the series; ``export`` and ``publish`` write; ``summary`` says
what changed upstream; ``proof`` runs what the build runs.
"""
