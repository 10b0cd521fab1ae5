"""The subprocess: reads operator numbers, one a line; answers each with one JSON line a dtype and an empty line."""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch

from . import database


def main(dtypes: list[str], samples: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with answers
    warnings.simplefilter("ignore")
    operators = database.operators()
    torch.set_num_threads(1)
    torch.zeros(1, device="tpu")
    from ..eager import fallback
    from .check import Check, lowered

    fallback.set_mode("silent")
    answers.write("ready\n")
    for line in sys.stdin:
        op = operators[int(line)]
        answers.write(json.dumps({"operator": op.full_name, "lowered": lowered(op)}) + "\n")
        for name in dtypes:
            dtype = getattr(torch, name)
            if dtype not in op.dtypes:
                continue
            try:
                answers.write(json.dumps(Check(op, dtype, samples).run().data()) + "\n")
            except Exception as error:
                answers.write(json.dumps({"dtype": name, "passed": {}, "total": {"forward": 1}, "fallbacks": {},
                                          "failures": [f"samples: {type(error).__name__}: "
                                                       f"{' '.join(str(error).split())[:260]}"]}) + "\n")
        answers.write("\n")


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]))
