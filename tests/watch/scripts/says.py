"""Says how it was started, and ends as it is told."""

import json
import os
import pickle
import sys

import beside


class Kept:
    pass


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
        }
    )
)
if "--loud" in sys.argv:
    raise ValueError("as it was told")
sys.exit(int(sys.argv[-1]))
