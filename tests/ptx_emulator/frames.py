"""Makes CuTe DSL find its source lines faster.

With line information on, the DSL asks ``inspect.getframeinfo`` for each operation that it emits, 13,396 times for the
main backward kernel, and each call looks its file up anew. The answer is the same for the same instruction of the same
code.
"""

from __future__ import annotations

import inspect
from types import CodeType, FrameType
from typing import Any


def remember_frames() -> None:
    """Let ``inspect.getframeinfo`` remember its answers, by code and instruction, in this process."""
    look_up = inspect.getframeinfo
    if look_up.__module__ == __name__:
        return
    # The code is kept, so that no other can get its id.
    known: dict[tuple[int, int, int], tuple[CodeType, inspect.Traceback]] = {}

    def getframeinfo(frame: Any, context: int = 1) -> inspect.Traceback:
        if not isinstance(frame, FrameType):
            return look_up(frame, context)
        key = (id(frame.f_code), frame.f_lasti, context)
        if key not in known:
            known[key] = (frame.f_code, look_up(frame, context))
        return known[key][1]

    inspect.getframeinfo = getframeinfo
