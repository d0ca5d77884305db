"""``python -m dsaccum.watch [FLAGS] -- SCRIPT.py ITS ARGUMENTS``, under any launcher.

Nothing else is here: this module's names make room for the script's.
"""

import sys

from dsaccum.watch.command import main

sys.exit(main())
