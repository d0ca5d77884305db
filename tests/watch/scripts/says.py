"""Says how it was started, and ends as it is told."""

import dataclasses
import json
import os
import pickle
import sys

import beside


class Kept:
    pass


@dataclasses.dataclass
class Arguments:
    steps: int = 3


pickle.loads(pickle.dumps(Kept()))
print(
    json.dumps(
        {
            "name": __name__,
            "argv": sys.argv,
            "first_path": sys.path[0],
            "folder": os.getcwd(),
            "file": __file__,
            "beside": beside.WORD,
            "type": str(dataclasses.fields(Arguments)[0].type),
            "builtins": type(__builtins__).__name__,
        }
    )
)
if "--loud" in sys.argv:
    raise ValueError("as it was told")
sys.exit(int(sys.argv[-1]))
