"""Move the patches from one pin to another: ``python -m msa_vendored.vendoring rebase``.

The patches become commits of a scratch repository outside the checkout, git rebases them, and what comes out is
exported, applied again strictly from zero and only then written into the checkout, all of it or nothing.

``command`` reads the arguments; ``target`` and ``wheels`` say what to move to; ``scratch`` is the repository; ``pick``
moves one patch and gives its verdict, with ``syntax`` and ``anchors``; ``advance`` goes through the series; ``stops``
has the errors that ask for a decision; ``workflow`` and ``state`` start, go on and give up; ``export`` and ``landing``
write; ``summary`` says what changed upstream; ``proof`` runs what the build runs; ``report`` prints.
"""
